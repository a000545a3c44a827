"""Caches of compiled code in images: which tools keep them, and what a layer of them may have."""
