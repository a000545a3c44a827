"""Which images exist: the Catalog, and the sources it comes from."""
