"""Label the nodes of a Kubernetes cluster, choose images for its pods, and offer its GPUs."""

from __future__ import annotations

COMMANDS = (
    "labels",
    "classes",
    "needs",
    "render",
    "explain",
    "webhook",
    "device-plugin",
    "dra-driver",
    "gpus",
)
