"""Publishing a version: an image index of all its variants, to which entries are only ever added."""

from __future__ import annotations

from dataclasses import dataclass, replace

from imagematrix.build.publish import default_platform as plain
from imagematrix.build.stores.registry import CompletenessCheck, find_attestations, survey_version
from imagematrix.common.image_reference import TAG
from imagematrix.common.text import quote_word, shorten_lines
from imagematrix.errors import EngineError, TagMovedError, UnknownImageError, UsageError
from imagematrix.images.catalog import image_index, labels
from imagematrix.images.catalog.registry import read_entry
from imagematrix.images.oci.compression import has_zstd
from imagematrix.images.oci.manifest import INDEX, INDEXES, LIMIT, compute_digest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from imagematrix.build.publish.default_platform import PlatformDefault
    from imagematrix.build.stores.registry import VersionSurvey
    from imagematrix.images.catalog.image_index import IndexEntry
    from imagematrix.images.oci.registry import Registry

TRIES = 5
SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A published index: its digest, the number of its variants, and how many of them are new.

    `plain` are its answers to plain pulls. `dropped` are the references of images that the registry lost and
    that were removed from the index. `stuck` are the incomplete images among them that cannot be deleted, so
    builds still treat them as pushed. `others` are the tags of images that are left out because the version
    has another image for their cells, `unneeded` those of images that are left out because no host chooses
    them.
    """

    digest: str
    variants: int
    new: int
    plain: tuple[PlatformDefault, ...] = ()
    dropped: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    unneeded: tuple[str, ...] = ()


def publish(  # noqa: PLR0913 - the version and the command's options
    registry: Registry,
    version: str,
    aliases: Sequence[str] = (),
    *,
    named: Mapping[str, str] | None = None,
    versions: Collection[str] = (),
    chosen: Collection[str] = (),
    repair: bool = False,
    needed: Callable[[Sequence[IndexEntry]], Collection[str]] | None = None,
    sign: Callable[[Sequence[str]], object] | None = None,
) -> Published:
    """Write the index of all variants of a version that the registry has, and tag it with the version.

    Entries stay in an index, except, with `repair`, those whose images the registry lost: the manifest, or a
    blob, in which case the rest of the image is deleted so that builds make it again. The `aliases` are tags
    that are moved to the index; only they ever move. The matrix names the cells, by platform, that answer a
    plain pull (`named`), and the `versions` of the image. If a cell has several images with different inputs,
    the one with a `chosen` tag is taken. Only cells that are `needed`, of those that the variants are of, are
    added. `sign` signs the manifests with these digests: the index, and each variant in it.

    Raises UnknownImageError if there is no variant, or if the registry lost one. Raises TagMovedError if two
    variants of one cell have different inputs and none is chosen, if the version's tag has something else
    than its index, or if an alias is the tag of an image or the name of a version.
    """
    name = f"{registry.name}:{version}"
    for alias in aliases:
        _require_movable(registry, alias, {version, *versions})
    complete = CompletenessCheck(registry) if repair else None
    first: frozenset[str] | None = None
    dropped: set[str] = set()
    stuck: set[str] = set()
    for _ in range(TRIES):
        surveyed = survey_version(registry, version, complete)
        dropped |= _find_lost(name, surveyed, repair=repair)
        stuck |= {
            f"{registry.name}:{entry.tag}@{entry.digest}"
            for entry in surveyed.damaged
            if not registry.withdraw(entry.tag, entry.digest)
        }
        variants, others = _choose_variants(name, surveyed, chosen)
        before = {entry.digest: entry for entry in surveyed.alive}
        cells = needed(variants) if needed else [entry.annotations[labels.CELL] for entry in variants]
        unneeded = [
            entry
            for entry in variants
            if entry.annotations[labels.CELL] not in cells and entry.digest not in before
        ]
        variants = [entry for entry in variants if entry not in unneeded]
        first = frozenset(before) if first is None else first
        described = {entry.digest: _strip_annotations(entry) for entry in variants}
        new = [one for digest, one in described.items() if digest not in before]
        attested = {
            attestation.digest: attestation
            for entry in new
            for attestation in find_attestations(registry, entry.tag)
        }
        whole = described | before | attested
        answers = plain.choose_defaults(
            name, (whole[digest] for digest in described), plain.find_defaults(surveyed.entries), named or {}
        )
        raw = image_index.write_index(_set_platforms(whole.values(), answers), registry.name, version)
        if len(raw) > LIMIT:
            remedy = "spread the cells over several images"
            raise UsageError(
                f"{name}: an index of {len(described)} variants is too large for a registry", remedy=remedy
            )
        if sign:
            # Before the tag: no node that requires signatures finds a version without them.
            own = compute_digest(raw)
            registry.push_manifest(own, raw, INDEX)
            sign([own, *described])
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
                variants=len(described),
                new=len(described.keys() - first),
                plain=tuple(_add_layer_needs(registry, answer) for answer in answers),
                dropped=tuple(sorted(dropped)),
                stuck=tuple(sorted(stuck)),
                others=tuple(sorted(others)),
                unneeded=tuple(sorted(entry.tag for entry in unneeded)),
            )
        if registry.digest(version) == (published.digest if published else None):
            registry.push_manifest(version, raw, INDEX)
    raise EngineError(
        f"another process keeps publishing {name}",
        remedy="nothing is lost; publish again later",
    )


def _add_layer_needs(registry: Registry, answer: PlatformDefault) -> PlatformDefault:
    """Return an answer to plain pulls with what its layers need of an engine."""
    manifest = registry.manifest(answer.variant.digest) if answer.variant and answer.variant.digest else None
    return replace(answer, zstd=manifest is not None and has_zstd(manifest.raw))


def _require_movable(registry: Registry, alias: str, versions: Collection[str]) -> None:
    """Raise UsageError if an alias is not a valid tag, TagMovedError if its tag never moves.

    That of a version never does, even of one that is only pushed, or that only the matrix names.
    """
    if not TAG.fullmatch(alias):
        raise UsageError(f"--alias: {alias!r} is not a valid tag", remedy="such as latest or stable")
    name = f"{registry.name}:{alias}"
    remedy = "choose another alias"
    manifest = registry.manifest(alias)
    if manifest and manifest.media_type not in INDEXES:
        raise TagMovedError(f"{name} is an image, not an alias", remedy=remedy)
    entries = (
        [entry for entry in image_index.parse_index(manifest.raw, name) if entry.ours] if manifest else []
    )
    pushed = (tag for tag in registry.tags() if tag.startswith(f"{alias}-"))
    if (
        alias in versions
        or any(entry.annotations[labels.VERSION] == alias for entry in entries)
        or any((entry := read_entry(registry, tag)) and entry.ours and entry.tag == tag for tag in pushed)
    ):
        raise TagMovedError(f"{name} is a version, and versions never move", remedy=remedy)
    if manifest and not entries:
        found = f"{name} is {manifest.digest}, an index of another tool, not an alias"
        raise TagMovedError(found, remedy=f"{remedy}, or delete the tag")


def _find_lost(name: str, surveyed: VersionSurvey, *, repair: bool) -> set[str]:
    """Return the references of lost images of a version; raise UnknownImageError without `repair`."""
    image = name.rpartition(":")[0]
    published = [entry for entry in surveyed.entries if entry.digest in surveyed.lost]
    lost = {entry.digest: entry for entry in (*surveyed.damaged, *published)}.values()
    references = sorted(
        f"{image}:{entry.tag}@{entry.digest}" if entry.ours else f"{image}@{entry.digest}" for entry in lost
    )
    if lost and not repair:
        raise UnknownImageError(
            f"the registry lost images of {name}:",
            *shorten_lines(references, SHOWN),
            remedy="`imagematrix build --push` builds them again; "
            f"`imagematrix publish --repair {quote_word(name)}` removes the rest",
        )
    return set(references)


def _choose_variants(
    name: str, surveyed: VersionSurvey, chosen: Collection[str]
) -> tuple[list[IndexEntry], list[str]]:
    """Return the variants of a version, one for each cell, and the tags of excluded images."""
    unknown = set(chosen) - {entry.tag for entry in (*surveyed.variants, *surveyed.others)}
    if unknown:
        remedy = "pass a tag that is in the registry"
        raise UnknownImageError(f"{name} has no variant {', '.join(sorted(unknown))}", remedy=remedy)
    late = sorted(entry.tag for entry in surveyed.others if entry.tag in chosen)
    if late:
        raise TagMovedError(
            f"{name} was published with another image for the cell of {', '.join(late)}",
            remedy="a version never changes; raise the version",
        )
    cells: dict[str, list[IndexEntry]] = {}
    for entry in surveyed.variants:
        cells.setdefault(entry.annotations[labels.CELL], []).append(entry)
    kept, others = [], [entry.tag for entry in surveyed.others]
    for entries in cells.values():
        wanted = [entry for entry in entries if entry.tag in chosen] or entries
        if len({entry.annotations[labels.INPUT] for entry in wanted}) > 1:
            raise TagMovedError(
                f"{name} has several images for one cell: {' and '.join(entry.tag for entry in wanted)}",
                remedy=(
                    f"`imagematrix publish {quote_word(name)} --choose TAG` chooses one, or raise the version"
                ),
            )
        kept += wanted
        others += [entry.tag for entry in entries if entry not in wanted]
    if not kept:
        raise UnknownImageError(f"the registry has no variant of {name}", remedy="`imagematrix build --push`")
    return kept, others


def _strip_annotations(variant: IndexEntry) -> IndexEntry:
    """Return an entry for an index, without annotations that only builds need."""
    annotations = {key: value for key, value in variant.annotations.items() if key != labels.INPUTS}
    return replace(variant, annotations=annotations)


def _set_platforms(entries: Collection[IndexEntry], answers: Sequence[PlatformDefault]) -> list[IndexEntry]:
    """Return the entries with their platforms: a plain one for those that answer a plain pull."""
    plain_ones = {one.variant.digest: one.platform for one in answers if one.variant}
    return [
        replace(entry, platform=image_index.make_platform(plain_ones.get(entry.digest)))
        if entry.ours
        else entry
        for entry in entries
    ]
