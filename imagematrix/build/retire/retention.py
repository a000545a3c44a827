"""Retention: which versions of an image stay in a registry or an engine, and why."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from imagematrix.common.text import shorten_words
from imagematrix.hardware.vendors.versions import make_natural_key
from imagematrix.selection.selector import Selector

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from typing import Any

    from imagematrix.hardware.host.host import Host
    from imagematrix.images.catalog.catalog import Catalog

SHOWN = 3  # hosts named in a reason


@dataclass(slots=True, kw_only=True)
class RetentionDecision:
    """Why a version stays; without a reason it goes. `hosts` are those that it is kept for, sorted."""

    reasons: list[str] = field(default_factory=list)
    hosts: tuple[str, ...] = ()

    @property
    def why(self) -> str:
        """The reasons, in one line."""
        return format_reasons(self.reasons, self.hosts)

    @property
    def kept(self) -> bool:
        """Whether the version stays."""
        return bool(self.reasons or self.hosts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The versions to keep: the newest `keep`, those in `protect`, and the newest that serves each host.

    `hosts` are by name. The newest version is the last in natural order of the names.
    """

    keep: int = 0
    protect: frozenset[str] = frozenset()
    hosts: Mapping[str, Host] = field(default_factory=dict)

    def decide(self, versions: Iterable[str]) -> dict[str, RetentionDecision]:
        """Return the fates of versions by what `keep` and `protect` say, the oldest version first."""
        ordered = sort_versions(versions)
        newest = set(ordered[max(len(ordered) - self.keep, 0) :])
        fates = {version: RetentionDecision() for version in ordered}
        for version, fate in fates.items():
            if version in newest:
                fate.reasons.append(f"newest {self.keep}" if self.keep > 1 else "newest")
            if version in self.protect:
                fate.reasons.append("protected")
        return fates

    def serve(
        self,
        fates: Mapping[str, RetentionDecision],
        catalogs: Mapping[str, Catalog],
        lost: Collection[str] = (),
    ) -> tuple[str, ...]:
        """Give each version the hosts that it is the newest to serve; return the hosts that none serves.

        `lost` are the references of variants whose images are gone: what would choose one is not served.
        """
        left = dict(self.hosts)
        for version in reversed(sort_versions(catalogs)):
            if not left:
                break
            selector = Selector(catalogs[version], keep=len(left))
            served = [name for name, host in left.items() if _is_served(selector, host, lost)]
            fates[version].hosts = tuple(sorted(served))
            for name in served:
                del left[name]
        return tuple(sorted(left))


def sort_versions(versions: Iterable[str]) -> list[str]:
    """Return versions in natural order of their names, the newest last."""
    return sorted(versions, key=_age_key)


def make_newer_counter(versions: Iterable[str]) -> Callable[[str], int]:
    """Return a function that counts how many of the versions are newer than another one."""
    ages = sorted(map(_age_key, versions))
    return lambda version: len(ages) - bisect_right(ages, _age_key(version))


def _age_key(version: str) -> tuple[tuple[Any, ...], str]:
    return make_natural_key(version), version


def _is_served(selector: Selector, host: Host, lost: Collection[str]) -> bool:
    """Whether a host gets an image, or may choose one of several that differ in the image's own axes."""
    found = selector.explain(host)
    chosen = {found.selected} if found.selected else found.fits
    return bool(chosen) and chosen.isdisjoint(lost)


def format_reasons(reasons: Sequence[str], hosts: Sequence[str]) -> str:
    """Return in one line why something is kept: the reasons, and the hosts that it is kept for."""
    return ", ".join([*reasons, *([f"serves {shorten_words(hosts, SHOWN)}"] if hosts else [])])
