"""Slurm: tasks in containers, by the image's name, and what Slurm is told of a node."""
