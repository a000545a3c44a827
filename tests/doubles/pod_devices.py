"""Which device nodes a pod can open, and which devices of a node are counted."""

import json
import re

N1 = {"kubernetes.io/hostname": "n1"}
CONTROL = {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"}
# A container may make device nodes; whether it can open them is up to the devices cgroup.
MAKE = "mknod /{0} c {1} && head -c0 /{0}"


def seen(report):
    """Return the names of the GPUs' device nodes that a pod can open, and those of other devices."""
    names = set(re.findall("^node /dev/(.*)$", report, re.MULTILINE))
    return names - CONTROL, names & CONTROL


def counted(cluster, kinds="nodes,pods"):
    """Return the output of `kubernetes gpus`: the resources of n1, and the pending requests."""
    listed = cluster.kubectl("get", kinds, "-A", "-o", "json").stdout
    usage = json.loads(
        cluster.imagematrix("kubernetes", "gpus", "--nodes", "-", "--json", input=listed).stdout
    )
    (node,) = [one for one in usage["nodes"] if one["name"] == "n1"]
    numbers = ("capacity", "allocatable", "requested", "free")
    return {one["resource"]: [one[name] for name in numbers] for one in node["resources"]}, usage["pending"]
