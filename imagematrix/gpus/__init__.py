"""Sets of GPUs: choices among them, what `--gpus` says, and what the environment names."""
