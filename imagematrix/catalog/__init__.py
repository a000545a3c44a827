"""What images exist: the Catalog, from a file or from an engine's labels."""
