"""The paths of kubelet's sockets on a node.

See https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins.
"""

from __future__ import annotations

__all__ = ["DEVICE_PLUGINS", "FOLDER", "POD_RESOURCES", "SOCKET"]

FOLDER = "/var/lib/kubelet"
DEVICE_PLUGINS, POD_RESOURCES = "device-plugins", "pod-resources"  # folders in it
SOCKET = "kubelet.sock"  # kubelet's own socket in each folder
