"""Dockerfiles to images: identity, plan, engine, scheduling."""
