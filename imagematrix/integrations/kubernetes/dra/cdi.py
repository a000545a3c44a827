"""The CDI specs of prepared claims: a file for each claim.

Names of files are those that CDI's library gives to the specs of claims (GenerateTransientSpecName).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from imagematrix.integrations import cdi
from imagematrix.integrations.kubernetes.dra.resource_claims import UID

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

FOLDER = Path("/var/run/cdi")
KIND = "imagematrix.io/claim"
PREFIX, SUFFIX = f"{KIND.replace('/', '-')}_", ".json"
LIMIT = 1 << 20  # bytes
NODE = re.compile(r"/dev/[\w/-]+", re.ASCII)


def get_spec_path(folder: Path, uid: str) -> Path:
    """Return the file with the spec of a claim."""
    return folder / f"{PREFIX}{uid}{SUFFIX}"


def make_device_name(uid: str, request: str, requests: frozenset[str]) -> str:
    """Return the name of the CDI device for a request of a claim: if it is the only one, the claim's UID."""
    return f"{uid}_{request}" if len(requests) > 1 else uid


def make_device_id(uid: str, request: str, requests: frozenset[str]) -> str:
    """Return the name of such a device with its kind, as kubelet passes it to the engine."""
    return f"{KIND}={make_device_name(uid, request, requests)}"


def make_claim_spec(devices: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return the spec with these devices: the paths of device nodes by name."""
    return cdi.make_spec(KIND, devices)


def read_spec(path: Path) -> dict[str, Any] | None:
    """Return the spec in a file; None if there is none, or the file is damaged."""
    try:
        with path.open("rb") as stream:
            document = json.loads(stream.read(LIMIT))
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def list_device_nodes(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the device nodes in a spec of ours; raise ValueError if it is another."""
    try:
        paths = [
            node["path"] for device in document["devices"] for node in device["containerEdits"]["deviceNodes"]
        ]
        if document["kind"] == KIND and all(NODE.fullmatch(path) for path in paths):
            return tuple(dict.fromkeys(paths))
    except (KeyError, TypeError):
        pass
    raise ValueError("not a CDI spec of a claim")


def list_prepared_claims(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the UID of each claim that has a file, and the file."""
    for path in sorted(folder.glob(f"{PREFIX}*{SUFFIX}")):
        uid = path.name.removeprefix(PREFIX).removesuffix(SUFFIX)
        if UID.fullmatch(uid):
            yield uid, path


def remove_drafts(folder: Path) -> None:
    """Remove the drafts of a process that was killed; raise OSError."""
    for path in folder.glob(f".*{PREFIX}*{SUFFIX}{cdi.DRAFT}"):
        path.unlink(missing_ok=True)
