"""Specs of the Container Device Interface: devices that are device nodes and nothing else.

See https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md. 0.5.0 is the first version in
which the name of a device may begin with a digit.
"""

from __future__ import annotations

import json
import re

from imagematrix.common import files

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

VERSION = "0.5.0"
PERMISSIONS = "rw"
MODE = 0o644
NAME = re.compile("[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?")  # of a device
DRAFT = ".draft"  # engines read all files that end in .json, whatever their names begin with


def make_spec(kind: str, devices: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return the spec of a kind with these devices: the paths of device nodes by name."""
    return {
        "cdiVersion": VERSION,
        "kind": kind,
        "devices": [
            {
                "name": name,
                "containerEdits": {
                    "deviceNodes": [{"path": path, "permissions": PERMISSIONS} for path in paths]
                },
            }
            for name, paths in devices.items()
        ],
    }


def dump_spec(document: Mapping[str, Any]) -> str:
    """Return the text of a spec."""
    return json.dumps(document, indent=2) + "\n"


def write_spec(path: Path, document: Mapping[str, Any]) -> None:
    """Write a spec so that engines see all of it or nothing; raise OSError."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    files.replace_file(path, dump_spec(document).encode(), MODE, suffix=DRAFT)
