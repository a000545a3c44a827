"""Where images are kept: engines and registries, and how a version is published."""
