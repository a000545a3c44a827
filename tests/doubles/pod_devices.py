"""Which device nodes a pod can open."""

import re

N1 = {"kubernetes.io/hostname": "n1"}
CONTROL = {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"}
# A container may make device nodes; whether it can open them is up to the devices cgroup.
MAKE = "mknod /{0} c {1} && head -c0 /{0}"


def seen(report):
    """Return the names of the GPUs' device nodes that a pod can open, and those of other devices."""
    names = set(re.findall("^node /dev/(.*)$", report, re.MULTILINE))
    return names - CONTROL, names & CONTROL
