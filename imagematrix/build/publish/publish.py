"""Publishing a version: an image index of all its variants, to which entries are only ever added."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from imagematrix.build.publish import default_platform
from imagematrix.build.publish.sign import is_signed
from imagematrix.build.stores.registry import CompletenessCheck, find_attestations, survey_version
from imagematrix.common.image_reference import is_tag
from imagematrix.common.text import quote_word, shorten_lines
from imagematrix.errors import EngineError, TagMovedError, UnknownImageError, UsageError
from imagematrix.images.catalog import image_index, labels
from imagematrix.images.catalog.registry import read_entry
from imagematrix.images.oci.compression import has_zstd
from imagematrix.images.oci.manifest import INDEX, INDEXES, LIMIT, compute_digest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

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
    them. `lost_signature` is whether it has none, and the index in whose place it is has one. `unsigned` are
    the tags of variants that name something else than the variant, alone or with attestations, which is not
    signed with the others.
    """

    digest: str
    variants: int
    new: int
    plain: tuple[PlatformDefault, ...] = ()
    dropped: tuple[str, ...] = ()
    stuck: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    unneeded: tuple[str, ...] = ()
    lost_signature: bool = False
    unsigned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class IndexSelection:
    """Which variants of a version its index gets, and which of them answer plain pulls.

    If a cell has several images with different inputs, the one with a tag of `tags` is taken. `find_needed`
    returns the cells that hosts need of those that these entries are of; without it, all are needed.
    `plain_pull` are the cells, by platform, that the matrix names for plain pulls. `warm` are entries of warm
    images, of which those of variants in the index are added.
    """

    tags: Collection[str] = ()
    find_needed: Callable[[Sequence[IndexEntry]], Collection[str]] | None = None
    plain_pull: Mapping[str, str] = field(default_factory=dict)
    warm: Sequence[IndexEntry] = ()


EVERYTHING = IndexSelection()


def publish(
    registry: Registry,
    version: str,
    aliases: Sequence[str] = (),
    *,
    selection: IndexSelection = EVERYTHING,
    versions: Collection[str] = (),
    repair: bool = False,
    sign: Callable[[Sequence[str]], object] | None = None,
) -> Published:
    """Write the index of the selected variants that the registry has, and tag it with the version.

    Entries stay in an index, except, with `repair`, those whose images the registry lost: the manifest, or a
    blob, in which case the rest of the image is deleted so that builds make it again. The `aliases` are tags
    that are moved to the index; only they ever move. `versions` are those of the image that the matrix names.
    `sign` signs the manifests with these digests: the index, each variant and warm image in it, and what the
    tag of a variant names if that is an index of the variant with its attestations.

    Raises UnknownImageError if there is no variant, or if the registry lost one. Raises TagMovedError if two
    variants of one cell have different inputs and none is selected, if the version's tag has something else
    than its index, or if an alias is the tag of an image or the name of a version.
    """
    name = f"{registry.name}:{version}"
    for alias in aliases:
        _require_movable(registry, alias, {version, *versions})
    complete = CompletenessCheck(registry) if repair else None
    first: frozenset[str] | None = None
    dropped: set[str] = set()
    stuck: set[str] = set()
    unsigned: list[str] = []
    replaced: str | None = None  # the index that others have published
    for _ in range(TRIES):
        survey = survey_version(registry, version, complete)
        dropped |= _find_lost(name, survey, repair=repair)
        stuck |= {
            f"{registry.name}:{entry.tag}@{entry.digest}"
            for entry in survey.damaged
            # The tag of an image with attestations names their index, without which nothing has the tag.
            if not registry.withdraw(entry.tag, registry.digest(entry.tag) or entry.digest)
        }
        first = frozenset(entry.digest for entry in survey.alive) if first is None else first
        draft = _draft_index(registry, version, survey, selection)
        if sign:
            # Before the tag: no node that requires signatures finds a version without them.
            digest = compute_digest(draft.raw)
            registry.push_manifest(digest, draft.raw, INDEX)
            digests = [variant.digest for variant in draft.variants]
            attested, unsigned = _find_attested_indexes(registry, draft.variants)
            sign([digest, *digests, *draft.warm, *attested])

        # Another client may publish an older list of images at the same time, so the index counts as
        # published only after it was read back.
        published = survey.published
        if published and published.raw == draft.raw:
            for alias in aliases:
                registry.push_manifest(alias, draft.raw, INDEX)
            if aliases and registry.digest(version) != published.digest:
                continue  # another client published meanwhile, so the aliases may be outdated
            return Published(
                digest=published.digest,
                variants=len(draft.variants),
                new=len({variant.digest for variant in draft.variants} - first),
                plain=tuple(_mark_zstd(registry, default) for default in draft.defaults),
                dropped=tuple(sorted(dropped)),
                stuck=tuple(sorted(stuck)),
                others=tuple(sorted(draft.others)),
                unneeded=tuple(sorted(draft.unneeded)),
                lost_signature=replaced is not None
                and is_signed(registry, replaced)
                and not is_signed(registry, published.digest),
                unsigned=tuple(sorted(unsigned)),
            )
        if registry.digest(version) == (published.digest if published else None):
            registry.push_manifest(version, draft.raw, INDEX)
            replaced = published.digest if published else None
    raise EngineError(
        f"another process keeps publishing {name}",
        remedy="nothing is lost; publish again later",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _IndexDraft:
    """An index that is not tagged yet, as `raw` bytes.

    `warm` are the digests of its warm images; `defaults` answer plain pulls.
    `others` and `unneeded` are the tags of images that it leaves out, as in Published.
    """

    raw: bytes
    variants: tuple[IndexEntry, ...]
    warm: tuple[str, ...]
    defaults: list[PlatformDefault]
    others: list[str]
    unneeded: list[str]


def _draft_index(
    registry: Registry, version: str, survey: VersionSurvey, selection: IndexSelection
) -> _IndexDraft:
    """Return the index of a version: the entries that it has, and the selected variants that are new."""
    name = f"{registry.name}:{version}"
    chosen, others = _choose_variants(name, survey, selection.tags)
    before = {entry.digest: entry for entry in survey.alive}
    needed = selection.find_needed(chosen) if selection.find_needed else None
    unneeded = [
        entry
        for entry in chosen
        if needed is not None and entry.annotations[labels.CELL] not in needed and entry.digest not in before
    ]

    # Annotations that only builds need are left out.
    variants: dict[str, IndexEntry] = {}
    for entry in chosen:
        if entry not in unneeded:
            annotations = {key: value for key, value in entry.annotations.items() if key != labels.INPUTS}
            variants[entry.digest] = replace(entry, annotations=annotations)
    attestations = {
        attestation.digest: attestation
        for digest, variant in variants.items()
        if digest not in before
        for attestation in find_attestations(registry, variant.tag)
    }

    # Only the entries that answer plain pulls get a platform that engines have.
    warm_images = {entry.digest: entry for entry in selection.warm if entry.subject in variants | before}
    entries = warm_images | variants | before | attestations
    published_defaults = default_platform.find_defaults(survey.entries)
    defaults = default_platform.choose_defaults(
        name, (entries[digest] for digest in variants), published_defaults, selection.plain_pull
    )
    platforms = {default.variant.digest: default.platform for default in defaults if default.variant}
    placed = [
        replace(entry, platform=image_index.make_platform(platforms.get(entry.digest)))
        if entry.ours
        else entry
        for entry in entries.values()
    ]
    raw = image_index.write_index(placed, registry.name, version)
    if len(raw) > LIMIT:
        remedy = "spread the cells over several images"
        message = f"{name}: an index of {len(variants)} variants is too large for a registry"
        raise UsageError(message, remedy=remedy)
    return _IndexDraft(
        raw=raw,
        variants=tuple(variants.values()),
        warm=tuple(digest for digest, entry in entries.items() if entry.warm),
        defaults=defaults,
        others=others,
        unneeded=[entry.tag for entry in unneeded],
    )


def _find_attested_indexes(registry: Registry, variants: Iterable[IndexEntry]) -> tuple[list[str], list[str]]:
    """Return the digests of the indexes that tags of `variants` name, each of a variant and attestations.

    Also returns the tags that name anything else: engines could choose that by its platform, with the same
    signature.
    """
    found, others = [], []
    for variant in variants:
        if registry.digest(variant.tag) in (variant.digest, None):
            continue
        named = registry.find_manifest(variant.tag)
        if named and image_index.is_attested_image(named, variant.tag, variant.digest):
            found.append(named.digest)
        else:
            others.append(variant.tag)
    return found, others


def _mark_zstd(registry: Registry, default: PlatformDefault) -> PlatformDefault:
    """Return a default with whether its layers are compressed with zstd, as engines may need to know."""
    digest = default.variant.digest if default.variant else None
    manifest = registry.find_manifest(digest) if digest else None
    return replace(default, zstd=manifest is not None and has_zstd(manifest.raw))


def _require_movable(registry: Registry, alias: str, versions: Collection[str]) -> None:
    """Raise UsageError if an alias is not a valid tag, TagMovedError if its tag never moves.

    That of a version never does, even of one that is only pushed, or that only the matrix names.
    """
    if not is_tag(alias):
        raise UsageError(f"--alias: {alias!r} is not a valid tag", remedy="such as latest or stable")
    name = f"{registry.name}:{alias}"
    remedy = "choose another alias"
    manifest = registry.find_manifest(alias)
    if manifest and manifest.media_type not in INDEXES:
        raise TagMovedError(f"{name} is an image, not an alias", remedy=remedy)
    entries = (
        [entry for entry in image_index.parse_index(manifest.raw, name) if entry.ours] if manifest else []
    )
    pushed = (tag for tag in registry.list_tags() if tag.startswith(f"{alias}-"))
    if (
        alias in versions
        or any(entry.annotations[labels.VERSION] == alias for entry in entries)
        or any((entry := read_entry(registry, tag)) and entry.ours and entry.tag == tag for tag in pushed)
    ):
        raise TagMovedError(f"{name} is a version, and versions never move", remedy=remedy)
    if manifest and not entries:
        message = f"{name} is {manifest.digest}, an index of another tool, not an alias"
        raise TagMovedError(message, remedy=f"{remedy}, or delete the tag")


def _find_lost(name: str, survey: VersionSurvey, *, repair: bool) -> set[str]:
    """Return the references of lost images of a version; raise UnknownImageError without `repair`."""
    image = name.rpartition(":")[0]
    published = [entry for entry in survey.entries if entry.digest in survey.lost]
    lost = {entry.digest: entry for entry in (*survey.damaged, *published)}.values()
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
    name: str, survey: VersionSurvey, tags: Collection[str]
) -> tuple[list[IndexEntry], list[str]]:
    """Return the variants of a version, one for each cell, and the tags of excluded images."""
    unknown = set(tags) - {entry.tag for entry in (*survey.variants, *survey.superseded)}
    if unknown:
        remedy = "pass a tag that is in the registry"
        raise UnknownImageError(f"{name} has no variant {', '.join(sorted(unknown))}", remedy=remedy)
    late = sorted(entry.tag for entry in survey.superseded if entry.tag in tags)
    if late:
        raise TagMovedError(
            f"{name} was published with another image for the cell of {', '.join(late)}",
            remedy="a version never changes; raise the version",
        )
    cells: dict[str, list[IndexEntry]] = {}
    for entry in survey.variants:
        cells.setdefault(entry.annotations[labels.CELL], []).append(entry)
    variants, others = [], [entry.tag for entry in survey.superseded]
    for entries in cells.values():
        selected = [entry for entry in entries if entry.tag in tags] or entries
        if len({entry.annotations[labels.INPUT] for entry in selected}) > 1:
            raise TagMovedError(
                f"{name} has several images for one cell: {' and '.join(entry.tag for entry in selected)}",
                remedy=(
                    f"`imagematrix publish {quote_word(name)} --choose TAG` chooses one, or raise the version"
                ),
            )
        variants += selected
        others += [entry.tag for entry in entries if entry not in selected]
    if not variants:
        raise UnknownImageError(
            f"the registry has no variant of {name}", remedy="run `imagematrix build --push`"
        )
    return variants, others
