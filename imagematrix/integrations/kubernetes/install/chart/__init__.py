"""A Helm chart of an installation, made from the same manifests as `render install`."""
