"""Sets of GPUs: choices among them, the values of `--gpus`, and the GPUs that the environment names."""
