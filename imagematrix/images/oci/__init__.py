"""Image layouts, layers and registries, according to the OCI specifications."""
