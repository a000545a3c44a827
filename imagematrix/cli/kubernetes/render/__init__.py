"""Write manifests that run the image of each class, by digest, on the nodes of that class."""

from __future__ import annotations

COMMANDS = (
    *("job", "deployment", "daemonset", "jobset", "leaderworkerset"),
    *("prepull", "flavors", "policy", "compatibility", "install", "chart"),
)
