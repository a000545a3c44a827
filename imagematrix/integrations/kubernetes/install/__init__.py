"""The manifests of an installation, with certificates; `chart` has the same as a Helm chart."""
