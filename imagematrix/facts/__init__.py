"""What vendors guarantee: CUDA releases, GPU products, what -march means. Data and pure rules, no I/O."""
