"""Removing device code from files that cannot run on the given GPUs."""
