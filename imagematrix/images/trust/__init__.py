"""Signatures of images, and the policies that require them."""
