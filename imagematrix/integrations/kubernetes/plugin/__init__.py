"""A device plugin for kubelet: it offers a node's GPUs, and gives containers device nodes, nothing else."""
