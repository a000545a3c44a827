"""Nodes: their labels, Hosts from labels, classes, and counts of GPUs."""
