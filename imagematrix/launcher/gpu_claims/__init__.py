"""The usage of this node's GPUs, and claims on unused GPUs."""
