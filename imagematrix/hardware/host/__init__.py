"""The description of a node: the Host, from /proc, /sys, NVML or a saved document."""
