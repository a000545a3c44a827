"""Vendors' tables, the Host, and which of its GPUs are meant.

`vendors` has tables of what vendors guarantee, and pure functions on them. `host` probes a node or reads a
saved one. `gpu_request` chooses among the GPUs of a Host, by options and by the environment.
"""
