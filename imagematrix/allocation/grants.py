"""Grants: GPUs that a runtime gave to a container of which the engine does not know it.

The engine lists the devices that it passes itself. What the runtime of Swarm's tasks adds is in none of its
answers, so it is recorded here: in the folder of the locks, in a file for each container that counts while
the container's bundle is there. Its parent removes the bundle when the container ends, and when its creation
fails. Only root's files count, and this user's own: another user could
withhold a GPU for ever by naming a folder that stays.
"""
# With os alone, this is cheap.

from __future__ import annotations

import json
import os

from imagematrix.allocation.shares import parse_mib
from imagematrix.allocation.usage import Consumer, combined
from imagematrix.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.allocation.locks import Locks
    from imagematrix.allocation.usage import Usage

__all__ = ["Grant", "grants", "remove", "sweep", "write"]

PREFIX = "grant-"  # of the files
ROOT = 0


class Grant(Record):
    """GPUs of one container: `keys` are theirs, `vram_mib` is the share of each, None for the whole.

    `container` is the container's id, `bundle` its bundle's folder, `name` how messages refer to it.
    """

    container: str
    bundle: str
    name: str
    keys: tuple[str, ...]
    vram_mib: int | None = None

    @property
    def live(self) -> bool:
        """Whether the container may still be there."""
        try:
            os.lstat(self.bundle)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # not for this user to see
            return True
        return True


def write(locks: Locks, grant: Grant) -> None:
    """Record a grant, in place of an earlier one of the container."""
    document = {
        "bundle": grant.bundle,
        "name": grant.name,
        "keys": list(grant.keys),
        "vram_mib": grant.vram_mib,
    }
    remove(locks, grant.container)
    locks.write(f"{PREFIX}{grant.container}", json.dumps(document))


def remove(locks: Locks, container: str) -> None:
    """Remove the grant of a container, if there is one."""
    locks.remove(f"{PREFIX}{container}")


def sweep(locks: Locks) -> None:
    """Remove the grants of containers that are gone, where this user may."""
    for grant in _grants(locks):
        if not grant.live:
            remove(locks, grant.container)


def grants(locks: Locks) -> Usage:
    """Return the usage of GPUs by grants, each as the container that has it."""
    return combined(
        *(dict.fromkeys(grant.keys, (_consumer(grant),)) for grant in _grants(locks) if grant.live)
    )


def _grants(locks: Locks) -> Iterator[Grant]:
    for name in locks.names():
        if name.startswith(PREFIX) and (text := locks.text_of(name, (ROOT, os.geteuid()))) is not None:
            yield from _parse(name.removeprefix(PREFIX), text)


def _parse(container: str, text: str) -> Iterable[Grant]:
    try:
        document = json.loads(text)
        keys = tuple(map(str, document["keys"]))
        vram_mib = parse_mib(str(document["vram_mib"]))
        yield Grant(
            container=container,
            bundle=str(document["bundle"]),
            name=str(document["name"]),
            keys=keys,
            vram_mib=vram_mib,
        )
    except (ValueError, KeyError, TypeError, RecursionError):  # written by another release
        return


def _consumer(grant: Grant) -> Consumer:
    return Consumer(
        kind="container", name=grant.name, vram_mib=grant.vram_mib, marks=frozenset({grant.container})
    )
