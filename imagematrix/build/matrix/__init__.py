"""matrix.yaml: reading it, expanding it to cells, and dropping cells that cannot work."""
