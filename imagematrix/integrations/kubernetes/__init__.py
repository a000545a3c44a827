"""Kubernetes: labels and classes of nodes, needs of images, manifests and policies, without a cluster."""
