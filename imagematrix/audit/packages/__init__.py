"""Packages in an image, of distributions and of Python, and what an image says of itself."""
