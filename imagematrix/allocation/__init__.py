"""Who uses the GPUs of this node, and claims on those that nobody uses."""
