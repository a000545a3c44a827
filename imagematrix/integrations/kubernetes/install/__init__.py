"""The manifests of an installation, with certificates, and a Helm chart of them."""
