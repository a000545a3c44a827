"""Slurm: tasks in containers, by the image's name, and the lines about a node in Slurm's configuration."""
