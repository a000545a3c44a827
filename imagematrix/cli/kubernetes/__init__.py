"""What a Kubernetes cluster needs to know of nodes and images."""

from __future__ import annotations

__all__ = ["COMMANDS"]

COMMANDS = ("labels", "classes", "needs", "render", "webhook", "device-plugin", "gpus")
