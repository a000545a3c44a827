"""Retention: which versions of an image stay in a registry or an engine, and why."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from imagematrix.common.text import shorten_words
from imagematrix.hardware.vendors.versions import make_natural_key
from imagematrix.selection.selector import Selector
from imagematrix.selection.warm import may_be_started

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
    def is_kept(self) -> bool:
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
        """Return the decisions on versions by what `keep` and `protect` say, the oldest version first."""
        ordered = sort_versions(versions)
        newest = set(ordered[max(len(ordered) - self.keep, 0) :])
        decisions = {version: RetentionDecision() for version in ordered}
        for version, decision in decisions.items():
            if version in newest:
                decision.reasons.append(f"newest {self.keep}" if self.keep > 1 else "newest")
            if version in self.protect:
                decision.reasons.append("protected")
        return decisions

    def assign_hosts(
        self, catalogs: Mapping[str, Catalog], lost: Collection[str] = ()
    ) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
        """Return the hosts that each version is the newest to serve, and the hosts that none serves.

        A host is served if it gets an image, or may choose one of several that differ in the image's own
        axes. `lost` are the references of variants whose images are gone: what would choose one is not
        served. Where a catalog has a warm image without its variant, whose facts are then unknown, that
        serves the hosts for which its match may hold.
        """
        hosts: dict[str, tuple[str, ...]] = {}
        remaining = dict(self.hosts)
        for version in reversed(sort_versions(catalogs)):
            if not remaining:
                break
            catalog = catalogs[version]
            selector = Selector(catalog, keep=len(remaining))
            bases = {variant.digest for variant in catalog.variants}
            alone = [image for image in catalog.warm if image.base not in bases]
            served = []
            for name, host in remaining.items():
                selection = selector.explain(host)
                chosen = {selection.selected} if selection.selected else selection.fits
                has_variant = chosen and chosen.isdisjoint(lost)
                if has_variant or any(may_be_started(image, host) for image in alone):
                    served.append(name)
            hosts[version] = tuple(sorted(served))
            for name in served:
                del remaining[name]
        return hosts, tuple(sorted(remaining))


def sort_versions(versions: Iterable[str]) -> list[str]:
    """Return versions in natural order of their names, the newest last."""
    return sorted(versions, key=_make_age_key)


def make_newer_counter(versions: Iterable[str]) -> Callable[[str], int]:
    """Return a function that counts how many of the versions are newer than another one."""
    ages = sorted(map(_make_age_key, versions))
    return lambda version: len(ages) - bisect_right(ages, _make_age_key(version))


def _make_age_key(version: str) -> tuple[tuple[Any, ...], str]:
    return make_natural_key(version), version


def format_reasons(reasons: Sequence[str], hosts: Sequence[str]) -> str:
    """Return in one line why something is kept: the reasons, and the hosts that it is kept for."""
    return ", ".join([*reasons, *([f"serves {shorten_words(hosts, SHOWN)}"] if hosts else [])])
