"""The audit: what an image's bytes contain."""
