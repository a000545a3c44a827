"""A read-only registry on a node that answers the tag of a version with the variant that fits the node."""
