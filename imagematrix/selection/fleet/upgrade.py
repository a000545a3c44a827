"""What a driver upgrade would change for a fleet, before it is rolled out."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.common.record import describe_fields, replace
from imagematrix.common.suggestions import suggest_nearest
from imagematrix.errors import UsageError
from imagematrix.hardware.vendors import cuda, versions
from imagematrix.selection.fleet.hardware_kinds import get_miss

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from imagematrix.hardware.host.host import Host
    from imagematrix.selection.fleet.hardware_kinds import Answer, HardwareKind
    from imagematrix.selection.miss import Miss

AHEAD = 200  # branches after the newest known one, some four years of them


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
    """Hosts that get `new` instead of `old`, or instead of nothing if `old` is None, by name."""

    old: str | None
    new: str
    hosts: tuple[str, ...]

    to_json = describe_fields  # an element of an upgrade's `changed` or `gained`


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """The effects on hosts with driver `old` of an upgrade to `new`.

    `hosts` is their number. `lost` have an image now and would have none, `changed` would get another,
    `gained` have none now and would get one; `unchanged` is the number of the others.
    """

    old: str
    new: str
    hosts: int
    lost: tuple[Loss, ...]
    changed: tuple[Change, ...]
    gained: tuple[Change, ...]
    unchanged: int

    to_json = describe_fields  # an element of the Coverage document's `upgrades`


def parse_upgrades(texts: Iterable[str]) -> dict[str, str]:
    """Return the new driver by the old one, from texts such as "535.261.03=580.95.05"."""
    replacements: dict[str, str] = {}
    for text in texts:
        old, _, new = text.partition("=")
        _require_version(old)
        _require_version(new)
        if replacements.setdefault(old, new) != new:
            raise UsageError(f"driver {old} has two replacements: {replacements[old]} and {new}")
    return replacements


def compute_upgrades(
    kinds: Collection[HardwareKind], explain: Callable[[Host], Answer], drivers: Mapping[str, str]
) -> tuple[Upgrade, ...]:
    """Return the changes for hosts in `kinds` after each upgrade; `drivers` maps old drivers to new ones.

    Raises UsageError if no host has an old one: a typo in the version would make a rollout look harmless.
    """
    return tuple(_compute_upgrade(kinds, explain, old, new) for old, new in sorted(drivers.items()))


def _compute_upgrade(
    kinds: Collection[HardwareKind], explain: Callable[[Host], Answer], old: str, new: str
) -> Upgrade:
    _require_version(new)
    current = dict.fromkeys(kind.sample.driver.version for kind in kinds if kind.sample.driver)
    if old not in current:
        available = f"the fleet has {', '.join(sorted(current, key=versions.make_sort_key)) or 'no driver'}"
        raise UsageError(f"no host has driver {old}", remedy=suggest_nearest(old, current) or available)
    _require_plausible(old, new)
    losses: dict[tuple[str, Miss], list[str]] = {}
    changes: dict[tuple[str | None, str], list[str]] = {}
    unchanged = hosts = 0
    for kind in kinds:
        driver = kind.sample.driver
        if driver is None or driver.version != old:
            continue
        hosts += len(kind.hosts)
        # An installed driver has both parts, so that the user-mode one follows the kernel's.
        user_mode = driver.user_mode and new
        answer = explain(replace(kind.sample, driver=replace(driver, version=new, user_mode=user_mode)))
        old_variant, new_variant, miss = kind.selected, getattr(answer, "selected", None), get_miss(answer)
        if new_variant == old_variant:
            unchanged += len(kind.hosts)
        elif new_variant is not None:
            changes.setdefault((old_variant, new_variant), []).extend(kind.hosts)
        elif old_variant is not None and miss is not None:
            losses.setdefault((old_variant, miss), []).extend(kind.hosts)
    lost = [
        Loss(old=old_variant, hosts=tuple(sorted(names)), miss=miss)
        for (old_variant, miss), names in losses.items()
    ]
    changed = [
        Change(old=old_variant, new=new_variant, hosts=tuple(sorted(names)))
        for (old_variant, new_variant), names in changes.items()
    ]
    changed.sort(key=_make_sort_key)
    return Upgrade(
        old=old,
        new=new,
        hosts=hosts,
        lost=tuple(sorted(lost, key=_make_sort_key)),
        changed=tuple(change for change in changed if change.old is not None),
        gained=tuple(change for change in changed if change.old is None),
        unchanged=unchanged,
    )


def _require_version(version: str) -> None:
    if not versions.DRIVER.fullmatch(version):
        raise UsageError(
            f"invalid driver version {version!r}", remedy="use OLD=NEW, such as 535.261.03=580.95.05"
        )


def _require_plausible(old: str, new: str) -> None:
    """Raise UsageError if `new` looks like a typo; drivers that are newer than all tables are none."""
    newest = max(row.branch for row in cuda.load_releases().values() if row.branch)
    if versions.get_branch(new) > newest + AHEAD or versions.is_tegra(new) is not versions.is_tegra(old):
        raise UsageError(
            f"{new} cannot follow driver {old}",
            remedy=f"check the version: the newest known branch is {newest}, and this release of imagematrix "
            f"accepts up to {newest + AHEAD}",
        )


def _make_sort_key(group: Loss | Change) -> tuple[int, tuple[str, ...]]:
    return -len(group.hosts), group.hosts
