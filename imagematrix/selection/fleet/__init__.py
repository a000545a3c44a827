"""Whole fleets: which images of a catalog their nodes get."""
