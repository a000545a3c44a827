"""matrix.yaml: reading it, expanding it to cells, dropping those that cannot work."""
