"""Write a Launch as an OCI bundle, which runc and crun start without an engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NAMESPACES = ("pid", "ipc", "uts", "mount", "network")
MOUNTS: tuple[tuple[str, str, list[str]], ...] = (
    ("/proc", "proc", []),
    ("/sys", "sysfs", ["ro", "nosuid", "nodev", "noexec"]),
    ("/dev", "tmpfs", ["nosuid", "mode=755"]),
    ("/dev/shm", "tmpfs", ["nosuid", "nodev", "noexec", "mode=1777"]),  # noqa: S108 - the container's own
)


def write(folder: Path, root: Path, launch: dict[str, Any]) -> None:
    """Write the bundle of a Launch document for the file system `root`, with only its device nodes."""
    devices = [_device(path) for path in launch["devices"]]
    allowed = [
        {"allow": True, "access": "rwm", **{key: one[key] for key in ("type", "major", "minor")}}
        for one in devices
    ]
    config = {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": launch["command"],
            "env": [PATH, *(f"{name}={value}" for name, value in launch["environment"].items())],
            "cwd": "/",
            "noNewPrivileges": True,
        },
        "root": {"path": str(root), "readonly": True},
        "mounts": [
            {"destination": place, "type": kind, "source": kind, "options": options}
            for place, kind, options in MOUNTS
        ],
        "annotations": launch["labels"],
        "linux": {
            "namespaces": [{"type": kind} for kind in NAMESPACES],
            "devices": devices,
            "resources": {"devices": [{"allow": False, "access": "rwm"}, *allowed]},
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _device(path: str) -> dict[str, Any]:
    number = Path(path).stat().st_rdev
    return {
        "path": path,
        "type": "c",
        "major": os.major(number),
        "minor": os.minor(number),
        "fileMode": 0o666,
        "uid": 0,
        "gid": 0,
    }
