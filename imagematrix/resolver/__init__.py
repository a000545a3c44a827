"""A read-only registry on a node, which answers a version's tag with the variant that fits this node."""
