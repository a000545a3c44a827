"""A device plugin of kubelet: it offers GPUs to a cluster and gives containers device nodes, nothing else."""
