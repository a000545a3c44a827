"""Sets of GPUs: what `--gpus` says, and what the environment names."""
