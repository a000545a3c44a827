"""Image layouts, layers and registries, as the OCI specifications have them."""
