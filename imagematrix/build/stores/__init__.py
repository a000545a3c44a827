"""The stores of images, engines and registries."""
