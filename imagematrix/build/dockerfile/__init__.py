"""Rendering cells to Dockerfiles."""
