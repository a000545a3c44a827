"""Removing versions: which stay, and what goes from a registry, an engine or a store."""
