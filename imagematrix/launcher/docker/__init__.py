"""Start of the selected variant, with device nodes and nothing else."""
