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

    `plain` are its answers to a plain pull. `dropped` are the references of images that the registry lost and
    that were removed from the index, and `stuck` those among them that it has in part and does not let us
    delete, so that builds take them for pushed. `others` are the tags of images that are left out, because
    the version has another image of their cells.
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
    blob of it, in which case what is left of the image is deleted, so that builds make it again. The
    `aliases` are tags that are moved to the index; only they ever move. `named` are the cells, by platform,
    that answer a plain pull. Of several images of a cell with different inputs, that of the `chosen` tag is
    taken.

    Raises UnknownImageError where there is no variant, or where the registry lost one. Raises TagMovedError
    where two variants of one cell have different inputs and none is chosen, or where an alias is the tag of
    an image or of another version.
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
            if not registry.take_back(one.tag, one.digest)
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
        # Another client may publish at the same time, from an older list of images: so the index counts as
        # published only once it is found to be the registry's.
        published = surveyed.published
        if published and published.raw == raw:
            for alias in aliases:
                registry.push_manifest(alias, raw, INDEX)
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
        f"{name} is being published by another process over and over",
        remedy="nothing is lost; publish it again later",
    )


def _movable(registry: Registry, alias: str) -> None:
    """Raise UsageError where an alias is not a tag, TagMovedError where its tag never moves."""
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
    gone = {one.digest: one for one in (*surveyed.damaged, *published)}.values()
    references = sorted(
        f"{image}:{one.tag}@{one.digest}" if one.ours else f"{image}@{one.digest}" for one in gone
    )
    if gone and not repair:
        shown = "".join(f"\n    {reference}" for reference in references[:SHOWN])
        more = f"\n    and {len(gone) - SHOWN} more" if len(gone) > SHOWN else ""
        raise UnknownImageError(
            f"the registry lost images that {name} names:{shown}{more}",
            remedy="`imagematrix build --push` makes them again; `publish --repair` removes the remains",
        )
    return set(references)


def _settled(name: str, surveyed: Survey, chosen: Collection[str]) -> tuple[list[Entry], list[str]]:
    """Return the variants of a version, one for each cell, and the tags of images that are left out."""
    unknown = set(chosen) - {one.tag for one in (*surveyed.variants, *surveyed.others)}
    if unknown:
        remedy = "give its tag as it is in the registry"
        raise UnknownImageError(f"{name} has no variant {', '.join(sorted(unknown))}", remedy=remedy)
    late = sorted(one.tag for one in surveyed.others if one.tag in chosen)
    if late:
        raise TagMovedError(
            f"{name} was published with another image for the cell of {', '.join(late)}",
            remedy="a version never changes: raise it",
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
    """Return an entry as an index has it: without what only builds need."""
    annotations = {key: value for key, value in entry.annotations.items() if key != labels.INPUTS}
    return replace(entry, annotations=annotations)


def _placed(entries: Collection[Entry], answers: Sequence[Plain]) -> list[Entry]:
    """Return the entries with their platforms: a plain one for those that answer a plain pull."""
    plain_ones = {one.variant.digest: one.platform for one in answers if one.variant}
    return [
        replace(one, platform=index.platform(plain_ones.get(one.digest))) if one.ours else one
        for one in entries
    ]
