"""Many nodes at once: what a catalog has for a fleet."""
