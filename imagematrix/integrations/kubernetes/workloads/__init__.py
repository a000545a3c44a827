"""Workloads: manifests with the image of each class, and needs of images as conditions on nodes."""
