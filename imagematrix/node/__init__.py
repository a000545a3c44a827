"""What a node is: the Host, from /proc, /sys, NVML or a saved document."""
