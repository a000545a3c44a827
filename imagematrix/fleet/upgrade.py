"""What another driver would change for a fleet, told before it is rolled out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from imagematrix.errors import UsageError
from imagematrix.facts import gpus as products
from imagematrix.facts import versions
from imagematrix.fleet.unserved import Miss
from imagematrix.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.fleet.kinds import Judge, Kind
    from imagematrix.probe.host import Gpu, Host

__all__ = ["Change", "Loss", "Upgrade", "parse", "upgrade"]

VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){1,3}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Hosts that get `old` now and would get nothing; `hosts` are their names, sorted."""

    old: str
    hosts: tuple[str, ...]
    miss: Miss

    def to_json(self) -> dict[str, object]:
        """Return one element of an upgrade's `lost`."""
        return {"old": self.old, "hosts": list(self.hosts), **self.miss.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Hosts that get `new` where they got `old`, or nothing where `old` is None. `hosts` are their names."""

    old: str | None
    new: str
    hosts: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Return one element of an upgrade's `changed` or `gained`."""
        return {"old": self.old, "new": self.new, "hosts": list(self.hosts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """What becomes of the hosts with driver `old` when they get driver `new`.

    `hosts` is how many they are. `lost` have an image now and would have none, `changed` would get another,
    `gained` have none now and would get one. For the other `unchanged` ones nothing changes.
    """

    old: str
    new: str
    hosts: int
    lost: tuple[Loss, ...]
    changed: tuple[Change, ...]
    gained: tuple[Change, ...]
    unchanged: int

    def to_json(self) -> dict[str, object]:
        """Return one element of the Coverage document's `upgrades`."""
        return {
            "old": self.old,
            "new": self.new,
            "hosts": self.hosts,
            "lost": [loss.to_json() for loss in self.lost],
            "changed": [change.to_json() for change in self.changed],
            "gained": [change.to_json() for change in self.gained],
            "unchanged": self.unchanged,
        }


def parse(texts: Iterable[str]) -> dict[str, str]:
    """Return the new driver for each old one of texts such as "535.261.03=580.95.05"."""
    found: dict[str, str] = {}
    for text in texts:
        old, _, new = text.partition("=")
        _check(old)
        _check(new)
        if found.setdefault(old, new) != new:
            raise UsageError(f"driver {old} has two that shall take its place: {found[old]} and {new}")
    return found


def upgrade(kinds: Iterable[Kind], judge: Judge, old: str, new: str) -> Upgrade:
    """Return what becomes of those of `kinds` that have driver `old` when they get driver `new`.

    A GPU that the new driver no longer supports counts as one without a kernel module.
    """
    _check(new)
    losses: dict[tuple[str, Miss], list[str]] = {}
    changes: dict[tuple[str | None, str], list[str]] = {}
    unchanged = hosts = 0
    for kind in kinds:
        driver = kind.sample.driver
        if driver is None or driver.version != old:
            continue
        hosts += len(kind.hosts)
        was, answer = kind.selected, judge.answer(_upgraded(kind.sample, old, new))
        becomes = getattr(answer, "selected", None)
        if becomes == was:
            unchanged += len(kind.hosts)
        elif becomes is not None:
            changes.setdefault((was, becomes), []).extend(kind.hosts)
        elif was is not None:
            losses.setdefault((was, _dropped(kind, old, new) or judge.miss(answer)), []).extend(kind.hosts)
    lost = [Loss(old=was, hosts=tuple(sorted(names)), miss=reason) for (was, reason), names in losses.items()]
    moved = [
        Change(old=was, new=becomes, hosts=tuple(sorted(names))) for (was, becomes), names in changes.items()
    ]
    moved.sort(key=_most_hosts)
    return Upgrade(
        old=old,
        new=new,
        hosts=hosts,
        lost=tuple(sorted(lost, key=_most_hosts)),
        changed=tuple(change for change in moved if change.old is not None),
        gained=tuple(change for change in moved if change.old is None),
        unchanged=unchanged,
    )


def _check(version: str) -> None:
    if not VERSION.fullmatch(version):
        raise UsageError(
            f"{version!r} is no driver version", remedy="write OLD=NEW, such as 535.261.03=580.95.05"
        )


def _most_hosts(some: Loss | Change) -> tuple[int, tuple[str, ...]]:
    return -len(some.hosts), some.hosts


def _upgraded(host: Host, old: str, new: str) -> Host:
    driver = host.driver and replace(host.driver, version=new)
    gpus = tuple(replace(gpu, state="no-module") if _leaves(gpu, old, new) else gpu for gpu in host.gpus)
    return replace(host, driver=driver, gpus=gpus)


def _dropped(kind: Kind, old: str, new: str) -> Miss | None:
    """Return the miss that is due to GPUs which the new driver leaves without support, if there are any."""
    chosen = getattr(kind.answer, "chosen_gpus", ())
    dropped = [gpu for gpu in chosen if _leaves(gpu, old, new)]
    if not dropped:
        return None
    labels = ", ".join(dict.fromkeys(gpu.name or gpu.label for gpu in dropped))
    last = min(filter(None, map(_last_branch, dropped)))
    return Miss(
        nearest=None,
        why=f"driver {new} does not support {labels}: branch {last} is the last that does",
        fix=f"leave these hosts at branch {last} or older",
    )


def _leaves(gpu: Gpu, old: str, new: str) -> bool:
    """Whether the step from one driver to the other leaves a GPU behind."""
    last = _last_branch(gpu)
    return last is not None and versions.branch(old) <= last < versions.branch(new)


def _last_branch(gpu: Gpu) -> int | None:
    return _last_branch_of(gpu.pci_device_id) if gpu.pci_device_id else None


@lru_cache(maxsize=1024)
def _last_branch_of(pci_device_id: str) -> int | None:
    product = products.product(pci_device_id)
    return product.last_branch if product else None
