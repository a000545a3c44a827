"""Prepared claims of this node. The CDI specs on disk are the only source of truth.

A prepared claim has a CDI spec, which engines read, and a grant in the lock folder, by which launches on this
node see that its GPUs are taken. The grant counts while the spec exists. Of both, the spec is written first
and removed first: a process that is killed leaves a spec without a grant, or a grant that does not count.
"""

from __future__ import annotations

from imagematrix.hardware.gpu_request.choice import Choice, make_label
from imagematrix.images.engine import endpoint
from imagematrix.images.engine.containers import PassedDevices
from imagematrix.integrations.cdi import write_spec
from imagematrix.integrations.kubernetes.dra import cdi
from imagematrix.integrations.kubernetes.dra.resource_claims import ClaimError
from imagematrix.launcher.docker.devices import list_device_nodes
from imagematrix.launcher.gpu_claims import grants
from imagematrix.launcher.gpu_claims.containers import find_gpu_keys
from imagematrix.launcher.gpu_claims.gpu_claim import ClaimRequest, LockFolder, claim_gpus
from imagematrix.launcher.gpu_claims.locks import Locks, locate_locks
from imagematrix.launcher.gpu_claims.usage import find_consumers, has_overlap, list_lock_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path
    from typing import Any

    from imagematrix.hardware.host.host import Gpu, Host
    from imagematrix.integrations.kubernetes.dra.resource_claims import ClaimReference
    from imagematrix.launcher.gpu_claims.usage import Usage

KIND = " (claim)"  # after the name of a claim, where it is a user of a GPU


class ClaimLedger:
    """The prepared claims of this node; `cdi_root` is the folder of CDI specs."""

    def __init__(self, cdi_root: Path) -> None:
        self._root = cdi_root

    def restore(self, gpus: tuple[Gpu, ...]) -> Iterator[str]:
        """Complete what a killed process left unfinished; yield a message for each spec that is damaged.

        A spec without a grant gets one, because a container may use its GPUs already, and a grant without a
        spec is removed. Raises ProbeError if the lock folder cannot be used, and OSError.
        """
        cdi.remove_drafts(self._root)
        with _open_locks() as locks:
            grants.remove_stale_grants(locks, str(self._root.absolute()))
            for uid, path in cdi.list_prepared_claims(self._root):
                try:
                    paths = cdi.list_device_nodes(cdi.read_spec(path) or {})
                except ValueError as error:
                    yield f"{path}: {error}: it is replaced or removed with its claim"
                    continue
                keys = find_gpu_keys(PassedDevices(paths=tuple(paths)), gpus)
                grant = grants.find_grant(locks, uid)
                # A GPU whose MIG devices are not known now is taken as a whole.
                if grant is None or not (_has_devices(keys, grant.keys) and _has_devices(grant.keys, keys)):
                    self._write_grant(locks, uid, grant.name if grant else f"{uid}{KIND}", tuple(keys))

    def prepare(
        self,
        reference: ClaimReference,
        host: Host,
        requests: Mapping[str, tuple[Gpu, ...]],
        survey: Callable[[], Usage],
    ) -> bool:
        """Prepare a claim: for each of its `requests`, GPUs of the host; return whether it was not so before.

        `survey` returns the usage of these GPUs. Raises GpusBusyError if another claim or anything else uses
        one of them, ClaimError if one does not work or the spec cannot be written, and what `survey` and the
        lock folder raise. A claim that is prepared keeps its GPUs, also where its spec changes: its pods run.
        """
        uid, names = reference.uid, frozenset(requests)
        path = cdi.get_spec_path(self._root, uid)
        document = cdi.make_claim_spec(
            {
                cdi.make_device_name(uid, name, names): list_device_nodes(host, gpus)
                for name, gpus in requests.items()
            }
        )
        gpus = tuple(gpu for request_gpus in requests.values() for gpu in request_gpus)
        keys = tuple(key for gpu in gpus for key in list_lock_names(gpu))
        with _open_locks() as locks:
            grant = grants.find_grant(locks, uid)
            if grant and grant.is_live and frozenset(grant.keys) == frozenset(keys):
                if cdi.read_spec(path) == document:
                    return False
                # Its pods may run, so the grant is held meanwhile.
                _write_claim_spec(path, document)
                return True
            for gpu in gpus:
                if not gpu.usable:
                    raise ClaimError(f"{make_label(gpu)} cannot be used: {gpu.state}")
            # Of an allocation before this one.
            self._remove(locks, uid)
            choice = Choice(gpus=gpus, count=len(gpus))
            with claim_gpus(
                ClaimRequest(choices=[choice]),
                lambda _: survey(),
                folder=LockFolder(path=locks.path, group=endpoint.get_socket_group()),
            ):
                _write_claim_spec(path, document)
                try:
                    self._write_grant(locks, uid, f"{reference}{KIND}", keys)
                except BaseException:
                    path.unlink(missing_ok=True)
                    raise
        return True

    def unprepare(self, uid: str) -> bool:
        """Undo what `prepare` did for a claim; return whether there was anything. Raises ClaimError."""
        with _open_locks() as locks:
            return self._remove(locks, uid)

    def list_claims(self) -> frozenset[str]:
        """Return the UIDs of the prepared claims."""
        return frozenset(uid for uid, _ in cdi.list_prepared_claims(self._root))

    def _write_grant(self, locks: Locks, uid: str, name: str, keys: tuple[str, ...]) -> None:
        path = str(cdi.get_spec_path(self._root, uid).absolute())
        grants.write_grant(locks, grants.GpuGrant(container=uid, bundle=path, name=name, keys=keys))

    def _remove(self, locks: Locks, uid: str) -> bool:
        path = cdi.get_spec_path(self._root, uid)
        try:
            path.unlink()
        except FileNotFoundError:
            existed = False
        except OSError as error:
            raise ClaimError(f"{path} cannot be removed: {error.strerror}") from error
        else:
            existed = True
        grants.remove_grant(locks, uid)
        return existed


def find_used_units(units: Mapping[str, Gpu], usage: Usage, claims: frozenset[str]) -> dict[str, str]:
    """Return the units that anything but a prepared claim uses, each with its users.

    `claims` are the UIDs of the prepared claims. Processes on a unit of a claim may be those of its pods.
    """
    by_unit = {name: find_consumers(usage, list_lock_names(unit)) for name, unit in units.items()}
    return {
        name: ", ".join(map(str, consumers))
        for name, consumers in by_unit.items()
        if consumers and not any(consumer.owner_ids & claims for consumer in consumers)
    }


def _write_claim_spec(path: Path, document: Mapping[str, Any]) -> None:
    """Write the spec of a claim; raise ClaimError."""
    try:
        write_spec(path, document)
    except OSError as error:
        raise ClaimError(f"{path} cannot be written: {error.strerror}") from error


def _has_devices(keys: Iterable[str], wanted: Iterable[str]) -> bool:
    """Whether each of the `wanted` keys is of a device that one of `keys` is of, too."""
    present = tuple(keys)
    return all(has_overlap([key], present) for key in wanted)


def _open_locks() -> Locks:
    return Locks(locate_locks(), endpoint.get_socket_group())
