"""Publishing a version: an image index of all its variants, to which entries are only ever added."""

from __future__ import annotations

from dataclasses import dataclass, replace

from imagematrix.catalog import index, labels
from imagematrix.errors import EngineError, TagMovedError, UnknownImageError, UsageError
from imagematrix.oci.registry import DOCKER_LIST, INDEX
from imagematrix.oci.transfer import LIMIT
from imagematrix.reference import TAG
from imagematrix.stores import plain_pull as plain
from imagematrix.stores.registry import Complete, attestations, survey

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from imagematrix.catalog.index import Entry
    from imagematrix.oci.registry import Registry
    from imagematrix.stores.plain_pull import Plain
    from imagematrix.stores.registry import Survey

__all__ = ["Published", "publish"]

TRIES = 5
SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published index: its digest, the number of its variants, and how many of them are new.

    `plain` are its answers to plain pulls. `dropped` are the references of images that the registry lost and
    that were removed from the index. `stuck` are the incomplete images among them that cannot be deleted, so
    builds still treat them as pushed. `others` are the tags of images that are left out because the version
    has another image for their cells.
    """

    digest: str
    variants: int
    new: int
    plain: tuple[Plain, ...] = ()
    dropped: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def publish(
    registry: Registry,
    version: str,
    aliases: Sequence[str] = (),
    *,
    named: Mapping[str, str] | None = None,
    chosen: Collection[str] = (),
    repair: bool = False,
) -> Published:
    """Write the index of all variants of a version that the registry has, and tag it with the version.

    Entries stay in an index, except, with `repair`, those whose images the registry lost: the manifest, or a
    blob, in which case the rest of the image is deleted so that builds make it again. The `aliases` are tags
    that are moved to the index; only they ever move. `named` are the cells, by platform, that answer a plain
    pull. If a cell has several images with different inputs, the one with a `chosen` tag is taken.

    Raises UnknownImageError if there is no variant, or if the registry lost one. Raises TagMovedError if two
    variants of one cell have different inputs and none is chosen, or if an alias is the tag of an image or
    of another version.
    """
    name = f"{registry.name}:{version}"
    for alias in aliases:
        _movable(registry, alias)
    complete = Complete(registry) if repair else None
    first: frozenset[str] | None = None
    dropped: set[str] = set()
    stuck: set[str] = set()
    for _ in range(TRIES):
        surveyed = survey(registry, version, complete)
        dropped |= _lost(name, surveyed, repair=repair)
        stuck |= {
            f"{registry.name}:{one.tag}@{one.digest}"
            for one in surveyed.damaged
            if not registry.withdraw(one.tag, one.digest)
        }
        variants, others = _settled(name, surveyed, chosen)
        before = {entry.digest: entry for entry in surveyed.alive}
        first = frozenset(before) if first is None else first
        own = {entry.digest: _described(entry) for entry in variants}
        new = [entry for digest, entry in own.items() if digest not in before]
        attested = {one.digest: one for entry in new for one in attestations(registry, entry.tag)}
        whole = own | before | attested
        answers = plain.answers(
            name, (whole[digest] for digest in own), plain.kept(surveyed.entries), named or {}
        )
        raw = index.write(_placed(whole.values(), answers))
        if len(raw) > LIMIT:
            remedy = "spread the cells over several images"
            raise UsageError(
                f"{name}: an index of {len(own)} variants is too large for a registry", remedy=remedy
            )
        # Another client may publish an older list of images at the same time, so the index counts as
        # published only after it was read back.
        published = surveyed.published
        if published and published.raw == raw:
            for alias in aliases:
                registry.push_manifest(alias, raw, INDEX)
            if aliases and registry.digest(version) != published.digest:
                continue  # another client published meanwhile, so the aliases may be outdated
            return Published(
                digest=published.digest,
                variants=len(own),
                new=len(own.keys() - first),
                plain=tuple(answers),
                dropped=tuple(sorted(dropped)),
                stuck=tuple(sorted(stuck)),
                others=tuple(sorted(others)),
            )
        if registry.digest(version) == (published.digest if published else None):
            registry.push_manifest(version, raw, INDEX)
    raise EngineError(
        f"another process keeps publishing {name}",
        remedy="nothing is lost; publish again later",
    )


def _movable(registry: Registry, alias: str) -> None:
    """Raise UsageError if an alias is not a valid tag, TagMovedError if its tag never moves."""
    if not TAG.fullmatch(alias):
        raise UsageError(f"--alias: {alias!r} is not a valid tag", remedy="such as latest or stable")
    manifest = registry.manifest(alias)
    if manifest is None:
        return
    name = f"{registry.name}:{alias}"
    if manifest.media_type not in (INDEX, DOCKER_LIST):
        raise TagMovedError(f"{name} is an image, not an alias", remedy="choose another alias")
    if any(own.annotations.get(labels.VERSION) == alias for own in index.parse(manifest.raw, name)):
        raise TagMovedError(f"{name} is a version, and versions never move", remedy="choose another alias")


def _lost(name: str, surveyed: Survey, *, repair: bool) -> set[str]:
    """Return the references of lost images of a version; raise UnknownImageError without `repair`."""
    image = name.rpartition(":")[0]
    published = [one for one in surveyed.entries if one.digest in surveyed.lost]
    lost = {one.digest: one for one in (*surveyed.damaged, *published)}.values()
    references = sorted(
        f"{image}:{one.tag}@{one.digest}" if one.ours else f"{image}@{one.digest}" for one in lost
    )
    if lost and not repair:
        shown = "".join(f"\n    {reference}" for reference in references[:SHOWN])
        more = f"\n    and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
        raise UnknownImageError(
            f"the registry lost images of {name}:{shown}{more}",
            remedy="`imagematrix build --push` builds them again; `publish --repair` removes the rest",
        )
    return set(references)


def _settled(name: str, surveyed: Survey, chosen: Collection[str]) -> tuple[list[Entry], list[str]]:
    """Return the variants of a version, one for each cell, and the tags of excluded images."""
    unknown = set(chosen) - {one.tag for one in (*surveyed.variants, *surveyed.others)}
    if unknown:
        remedy = "pass a tag that is in the registry"
        raise UnknownImageError(f"{name} has no variant {', '.join(sorted(unknown))}", remedy=remedy)
    late = sorted(one.tag for one in surveyed.others if one.tag in chosen)
    if late:
        raise TagMovedError(
            f"{name} was published with another image for the cell of {', '.join(late)}",
            remedy="a version never changes; raise the version",
        )
    cells: dict[str, list[Entry]] = {}
    for entry in surveyed.variants:
        cells.setdefault(entry.annotations[labels.CELL], []).append(entry)
    kept, others = [], [one.tag for one in surveyed.others]
    for entries in cells.values():
        wanted = [one for one in entries if one.tag in chosen] or entries
        if len({one.annotations[labels.INPUT] for one in wanted}) > 1:
            raise TagMovedError(
                f"{name} has several images for one cell: {' and '.join(one.tag for one in wanted)}",
                remedy=f"`imagematrix publish {name} --choose TAG` chooses one, or raise the version",
            )
        kept += wanted
        others += [one.tag for one in entries if one not in wanted]
    if not kept:
        raise UnknownImageError(f"the registry has no variant of {name}", remedy="`imagematrix build --push`")
    return kept, others


def _described(entry: Entry) -> Entry:
    """Return an entry for an index, without annotations that only builds need."""
    annotations = {key: value for key, value in entry.annotations.items() if key != labels.INPUTS}
    return replace(entry, annotations=annotations)


def _placed(entries: Collection[Entry], answers: Sequence[Plain]) -> list[Entry]:
    """Return the entries with their platforms: a plain one for those that answer a plain pull."""
    plain_ones = {one.variant.digest: one.platform for one in answers if one.variant}
    return [
        replace(one, platform=index.platform(plain_ones.get(one.digest))) if one.ours else one
        for one in entries
    ]
