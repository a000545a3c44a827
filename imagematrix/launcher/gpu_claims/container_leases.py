"""The GPUs of containers without a daemon, also when the process that held their locks is dead.

The process that started a container, its keeper, holds the locks of its GPUs, and frees them. A file in the
lock folder says besides which process the container's first is: when the locks of a GPU are free, but that
process lives, its keeper was killed.

Any user can write such a file. So it counts only if it belongs to the user of the process that it names: for
GPUs of others, it says no more than a process of the same user does that has them open.
"""

from __future__ import annotations

import json
import os

from imagematrix.common.json_documents import Fields
from imagematrix.common.record import Record, replace
from imagematrix.errors import UsageError
from imagematrix.images.local_store.holder import Holder, parse_holder
from imagematrix.launcher.gpu_claims.processes import describe_process, find_mount_namespace
from imagematrix.launcher.gpu_claims.usage import has_overlap, merge_usages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from imagematrix.launcher.gpu_claims.locks import Locks
    from imagematrix.launcher.gpu_claims.usage import Usage

PREFIX = "container-"
ContainerLeases = list[tuple["ContainerLease", "Holder"]]


class ContainerLease(Record):
    """The GPUs of a container by their `keys`, whole, or with `vram_mib` a share of each.

    With `common`, containers of the same batch job have them together. `share` is the lock of a share.
    """

    keys: tuple[str, ...]
    common: bool = False
    vram_mib: int | None = None
    share: str | None = None

    def is_excluding(self, keys: Sequence[str], *, common: bool = False) -> bool:
        """Whether nothing else may have these keys of a GPU, or with `common`, the whole GPU with it."""
        is_shareable = self.common if common else self.vram_mib is not None
        return not is_shareable and has_overlap(self.keys, keys)

    def is_held(self, holders: Container[str], shares: Usage) -> bool:
        """Whether its keeper lives: it is among the `holders` of locks, or its share is among `shares`."""
        if self.share is None:
            return any(key in holders for key in self.keys)
        return any(
            self.share in consumer.owner_ids for consumers in shares.values() for consumer in consumers
        )


def hold_container_lease(locks: Locks, lease: ContainerLease, holder: Holder) -> tuple[str, tuple[int, ...]]:
    """Write the lease of a container whose first process is `holder`; return its name, and what holds it."""
    name = f"{PREFIX}{os.urandom(8).hex()}"
    gpus = {
        "keys": list(lease.keys),
        "common": lease.common,
        "vram_mib": lease.vram_mib,
        "share": lease.share,
    }
    return name, locks.hold(name, json.dumps({"holder": holder.to_bytes().decode(), "gpus": gpus}))


def find_live_leases(locks: Locks) -> ContainerLeases:
    """Return the leases of containers that live, each with the container's first process.

    Files of containers that have ended are removed, as far as this user may and sees it.
    """
    leases = []
    for name in locks.list_names():
        file = locks.inspect_lock(name) if name.startswith(PREFIX) else None
        if file is None:
            continue
        lease, holder = _parse_lease(file.text)
        # Of a container on another machine or in another PID namespace, only its keeper is known to live.
        is_kept = file.is_held and holder is not None and not holder.is_here
        if lease and holder and (is_kept or holder.is_alive(file.quiet_s, owner=file.owner)):
            leases.append((lease, holder))
        elif not file.is_held and not (holder and holder.is_out_of_sight):
            locks.remove(name)
    return leases


def find_share_namespaces(leases: ContainerLeases) -> dict[str, frozenset[str]]:
    """Return the mount namespaces of containers by the locks of their shares."""
    return {
        lease.share: find_mount_namespace(holder.pid)
        for lease, holder in leases
        if lease.share and holder.is_here
    }


def compute_lease_usage(leases: Iterable[tuple[ContainerLease, Holder]]) -> Usage:
    """Return the usage by the containers with these leases."""
    usages = []
    for lease, holder in leases:
        process = describe_process(holder.pid, kind="lease")
        consumer = replace(
            process,
            name=str(holder) if holder.process.is_hidden else process.name,
            vram_mib=lease.vram_mib,
            owner_ids=frozenset({lease.share} if lease.share else ()) | find_mount_namespace(holder.pid),
        )
        usages.append(dict.fromkeys(lease.keys, (consumer,)))
    return merge_usages(*usages)


def _parse_lease(text: str) -> tuple[ContainerLease | None, Holder | None]:
    """Return the content of a file, with None for what is damaged."""
    try:
        fields = Fields(json.loads(text), "lease")
        gpus = fields.get_object_or_empty("gpus")
        vram_mib = gpus.get_integer_or_none("vram_mib")
        lease = ContainerLease(
            keys=gpus.get_texts("keys"),
            common=gpus.get_boolean("common"),
            vram_mib=vram_mib if vram_mib is not None and vram_mib > 0 else None,
            share=gpus.get_text_or_none("share"),
        )
        return lease, parse_holder(fields.get_text("holder"))
    except (ValueError, RecursionError, UsageError):
        return None, None
