"""Vendors' guarantees: CUDA releases, GPU products, the meaning of -march. Data and pure rules, no I/O."""
