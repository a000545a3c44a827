"""Bills of materials: what is in an image, in SPDX."""
