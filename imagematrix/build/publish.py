"""Publishing a version: an image index of all its variants, which is only ever added to."""

from __future__ import annotations

from dataclasses import dataclass, replace

from imagematrix.build.remote import attestations, entries
from imagematrix.catalog import index, labels
from imagematrix.errors import EngineError, TagMovedError, UnknownImageError
from imagematrix.facts import marches
from imagematrix.registry import INDEX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.catalog.index import Entry
    from imagematrix.registry import Registry

__all__ = ["Published", "publish"]

TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """An index that is there now: its digest, how many variants it has, and how many of them are new."""

    digest: str
    variants: int
    new: int


def publish(registry: Registry, image: str, version: str, aliases: Sequence[str] = ()) -> Published:
    """Write the index of all variants of `image`:`version` that the registry has, under its version.

    What an index had stays in it. The `aliases` are tags that then stand for the same index; only they move.
    Raises UnknownImageError where there is no variant, TagMovedError where two variants of one cell are made
    of different things.
    """
    for _ in range(TRIES):
        before = registry.manifest(version)
        known = index.parse(before.raw, f"{image}:{version}") if before else ()
        found = entries(registry, image, version)
        if not found:
            raise UnknownImageError(
                f"the registry has no variant of {image}:{version}", remedy="`imagematrix build --push`"
            )
        _frozen(image, version, found)
        own = {entry.digest: _described(entry) for entry in found}
        kept = {entry.digest: entry for entry in known}
        new = own.keys() - kept.keys()
        said = [one for digest in sorted(new) for one in attestations(registry, _tag(own[digest], version))]
        raw = index.write((own | kept | {one.digest: one for one in said}).values())
        if before is None or before.raw != raw:
            registry.push_manifest(version, raw, INDEX)
        # Somebody else may publish at the same time: only what is read back is published.
        after = registry.manifest(version)
        if after and own.keys() <= {entry.digest for entry in index.parse(after.raw, f"{image}:{version}")}:
            for alias in aliases:
                registry.push_manifest(alias, after.raw, INDEX)
            return Published(digest=after.digest, variants=len(own), new=len(new))
    raise EngineError(f"{image}:{version} is published by somebody else again and again; try later")


def _tag(entry: Entry, version: str) -> str:
    return labels.tag(version, entry.annotations[labels.CELL], entry.annotations[labels.INPUT])


def _frozen(image: str, version: str, found: Sequence[Entry]) -> None:
    cells: dict[str, str] = {}
    for entry in found:
        cell, made_of = entry.annotations[labels.CELL], entry.annotations[labels.INPUT]
        if cells.setdefault(cell, made_of) != made_of:
            tags = [labels.tag(version, cell, other) for other in (cells[cell], made_of)]
            raise TagMovedError(
                f"{image}:{version} has two images for {cell}: {' and '.join(tags)}",
                remedy="take the wrong one out of the registry, or raise the version",
            )


def _described(entry: Entry) -> Entry:
    """Return an entry as an index has it: without what only a build wants, and with the CPU variant."""
    annotations = {key: value for key, value in entry.annotations.items() if key != labels.INPUTS}
    variant = labels.read(annotations, reference="variant", digest=None, size=None)
    level = marches.level(variant.cpu_flags) if entry.platform.get("architecture") == "amd64" else None
    platform = dict(entry.platform) | ({"variant": level.removeprefix("x86-64-")} if level else {})
    return replace(entry, annotations=annotations, platform=platform)
