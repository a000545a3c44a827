"""The stores of images, engines and registries, and publishing a version."""
