"""Grants: GPUs that a container got without the engine's knowledge.

The engine lists only the devices that it passes itself, and not those that the runtime of Swarm's tasks adds.
So these are recorded here: in the lock folder, in a file for each container. The file counts while the
container's bundle exists. The bundle is removed when the container ends, or when its creation fails. A claim
of Kubernetes has a grant too: its CDI spec, which is removed with the claim, stands for the bundle. Only
files of root and of this user count: another user could block a GPU forever by naming a folder that stays.
"""
# os is imported faster than pathlib.

from __future__ import annotations

import json
import os

from imagematrix.common.record import Record
from imagematrix.launcher.gpu_claims.shares import parse_mib
from imagematrix.launcher.gpu_claims.usage import Consumer, merge_usages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.launcher.gpu_claims.locks import Locks
    from imagematrix.launcher.gpu_claims.usage import Usage

PREFIX = "grant-"  # of the files
ROOT = 0


class GpuGrant(Record):
    """The GPUs of one container by their `keys`; `vram_mib` is the share of each, None for the whole GPU.

    `container` is the container's id, `bundle` the folder of its bundle, `name` its name in messages.
    """

    container: str
    bundle: str
    name: str
    keys: tuple[str, ...]
    vram_mib: int | None = None

    @property
    def is_live(self) -> bool:
        """Whether the container may still exist."""
        try:
            os.lstat(self.bundle)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # this user may not see it
            return True
        return True


def write_grant(locks: Locks, grant: GpuGrant) -> None:
    """Record a grant, replacing an earlier one of the same container."""
    document = {
        "bundle": grant.bundle,
        "name": grant.name,
        "keys": list(grant.keys),
        "vram_mib": grant.vram_mib,
    }
    # A file in the lock folder appears complete and is never changed (`Locks._create_file`), so an old one
    # goes first.
    remove_grant(locks, grant.container)
    locks.write(f"{PREFIX}{grant.container}", json.dumps(document))


def remove_grant(locks: Locks, container: str) -> None:
    """Remove the grant of a container, if there is one."""
    locks.remove(f"{PREFIX}{container}")


def remove_stale_grants(locks: Locks, folder: str = "/") -> None:
    """Remove the grants of containers that no longer exist, as far as this user may.

    Only those count whose bundle was in `folder`: this process may not see others.
    """
    for grant in _read_grants(locks):
        if grant.bundle.startswith(f"{folder.rstrip('/')}/") and not grant.is_live:
            remove_grant(locks, grant.container)


def find_grant(locks: Locks, container: str) -> GpuGrant | None:
    """Return the grant of a container if there is one, whether or not it is live."""
    text = locks.read_text(f"{PREFIX}{container}", (ROOT, os.geteuid()))
    if text is None:
        return None
    try:
        document = json.loads(text)
        keys = tuple(map(str, document["keys"]))
        vram_mib = parse_mib(str(document["vram_mib"]))
        return GpuGrant(
            container=container,
            bundle=str(document["bundle"]),
            name=str(document["name"]),
            keys=keys,
            vram_mib=vram_mib,
        )
    except (ValueError, KeyError, TypeError, RecursionError):  # damaged, or of another program
        return None


def compute_grant_usage(locks: Locks) -> Usage:
    """Return the usage of GPUs by grants; the consumer is the container that has the grant."""
    usages = []
    for grant in _read_grants(locks):
        if grant.is_live:
            owner_ids = frozenset({grant.container})
            consumer = Consumer(
                kind="container", name=grant.name, vram_mib=grant.vram_mib, owner_ids=owner_ids
            )
            usages.append(dict.fromkeys(grant.keys, (consumer,)))
    return merge_usages(*usages)


def _read_grants(locks: Locks) -> Iterator[GpuGrant]:
    for name in locks.list_names():
        if name.startswith(PREFIX) and (grant := find_grant(locks, name.removeprefix(PREFIX))):
            yield grant
