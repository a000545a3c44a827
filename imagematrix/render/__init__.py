"""Cells to Dockerfiles."""
