"""A DRA driver for kubelet: it publishes a node's GPUs, and gives claims device nodes, nothing else."""
