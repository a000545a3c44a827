"""Pruning an engine: which of its variants a node no longer needs, and their removal."""

from __future__ import annotations

import contextlib
import datetime as dt
from dataclasses import dataclass, replace
from functools import partial

from imagematrix.build.retire.retention import format_reasons
from imagematrix.common.image_reference import names_registry, shorten_name
from imagematrix.common.suggestions import suggest_nearest
from imagematrix.errors import EngineError, UnknownImageError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.images.catalog.engine import FULL, get_repository_digest
from imagematrix.images.catalog.warm_image import get_warm_version, parse_warm_label
from imagematrix.images.engine import containers, images, transport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from typing import Any

    from imagematrix.build.retire.retention import Retention, RetentionDecision
    from imagematrix.images.engine.transport import Transport

SCHEMA = "imagematrix.pruned/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneCandidate:
    """An image in the engine or in a store that is a variant, with all its names.

    `images` are the names of the image without tags, as it is known in the engine; `tag` is the one that its
    labels imply. `others` are names that somebody else has given it. `size` is in bytes, with layers that
    other images have too. `why` are the reasons why it stays, `hosts` those that it is kept for.
    """

    id: str
    images: tuple[str, ...]
    version: str
    tag: str
    names: tuple[str, ...]
    others: tuple[str, ...]
    size: int
    why: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    @property
    def is_kept(self) -> bool:
        """Whether it stays."""
        return bool(self.why or self.hosts)

    @property
    def reasons(self) -> str:
        """Why it stays, in one line."""
        return format_reasons(self.why, self.hosts)

    def to_json(self) -> dict[str, object]:
        """Return one element of the document's `images`."""
        return {
            "id": self.id,
            "names": list(self.names),
            "version": self.version,
            "status": "kept" if self.is_kept else "removed",
            "why": list(self.why),
            "hosts": list(self.hosts),
            "size": self.size,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """The variants in an engine or a store: which stay and which go. `unserved` hosts get none of them."""

    images: tuple[PruneCandidate, ...]
    unserved: tuple[str, ...]

    @property
    def removals(self) -> tuple[PruneCandidate, ...]:
        """The images that go."""
        return tuple(image for image in self.images if not image.is_kept)

    def to_json(self) -> dict[str, object]:
        """Return the document, without `dry_run`."""
        return {
            "schema": SCHEMA,
            "images": [image.to_json() for image in self.images],
            "unserved": list(self.unserved),
        }


def survey_engine(
    retention: Retention,
    *,
    only: Collection[str] = (),
    newer_s: int | None = None,
    now: dt.datetime,
    engine_transport: Transport | None = None,
) -> Pruning:
    """Return which variants and warm images of an engine are to be removed.

    An image stays if `retention` keeps its version, if a container uses it, running or not, if it has a name
    that is not that of a variant or a version, if it was built on a variant, or if it got its last name less
    than `newer_s` seconds ago. `only` are the names of the images to consider; by default all are.

    Raises UnknownImageError if the engine has none of the images in `only`, and EngineError.
    """
    with transport.connect(engine_transport) as engine:
        parsed = [
            variant
            for label in (labels.VARIANT, labels.WARM)
            for entry in images.list_labelled(label, transport=engine)
            if (variant := _parse_candidate(entry, engine))
        ]
        # A variant that was built on a warm image has both labels.
        variants = {candidate.id: (candidate, image) for candidate, image in parsed}.values()
        candidates = select_candidates([candidate for candidate, _ in variants], only, "the engine")
        inspected = {candidate.id: image for candidate, image in variants}
        used = containers.list_images_in_use(engine)
    decisions, unserved = decide_retention(candidates, retention, partial(_make_catalog, inspected))
    judged = []
    for candidate in candidates:
        image = inspected[candidate.id]
        names = {candidate.id, *images.read_digests(image), *candidate.names, *candidate.others}
        names |= {f"{name}:{candidate.tag}" for name in candidate.images}
        users = sorted({used[name] for name in names & used.keys()})
        of_versions = [decisions[name, candidate.version] for name in candidate.images]
        why = [
            *dict.fromkeys(reason for decision in of_versions for reason in decision.reasons),
            *(f"container {name}" for name in users[:1]),
            *(f"also named {name}" for name in candidate.others[:1]),
        ]
        if labels.has_inherited(image):
            why.append("built on the variant of its name")
        if newer_s is not None and (age := _describe_age(image, newer_s, now)):
            why.append(age)
        hosts = sorted({host for decision in of_versions for host in decision.hosts})
        judged.append(replace(candidate, why=tuple(why), hosts=tuple(hosts)))
    return Pruning(images=sort_candidates(judged), unserved=unserved)


def select_candidates(
    candidates: list[PruneCandidate], only: Collection[str], where: str
) -> list[PruneCandidate]:
    """Return the candidates with one of the names `only`, or all without names.

    Raises UnknownImageError, which says `where` it is missing, if no candidate has one of the names.
    """
    for name in only:
        if not any(name in candidate.images for candidate in candidates):
            names = sorted({name for candidate in candidates for name in candidate.images})
            remedy = suggest_nearest(name, names) or (f"it has {', '.join(names)}" if names else None)
            raise UnknownImageError(f"{where} has no variant of {name}", remedy=remedy)
    return [candidate for candidate in candidates if not only or not {*only}.isdisjoint(candidate.images)]


def sort_candidates(candidates: Iterable[PruneCandidate]) -> tuple[PruneCandidate, ...]:
    """Return candidates by name, tag and ID."""
    return tuple(sorted(candidates, key=lambda candidate: (candidate.images, candidate.tag, candidate.id)))


def apply_pruning(
    plan: Pruning,
    resurvey: Callable[[], Pruning],
    on_removed: Callable[[PruneCandidate], object],
    remove: Callable[[PruneCandidate], object] | None = None,
) -> None:
    """Remove what was planned, and call `on_removed` after each image.

    `resurvey` surveys everything once more. `remove` removes an image, by default from the engine. Raises
    EngineError if the survey gives something else, and if the engine refuses, as it does while a container
    uses an image; and what `remove` raises.
    """
    if resurvey().removals != plan.removals:
        raise EngineError("the images changed meanwhile: nothing was removed", remedy="run this again")
    with contextlib.ExitStack() as stack:
        client = None if remove else stack.enter_context(contextlib.closing(transport.open_client()))
        for image in plan.removals:
            if remove:
                remove(image)
            if client:
                for name in image.names:
                    images.remove_image(name, client)
            on_removed(image)


def _parse_candidate(entry: object, over: Transport) -> tuple[PruneCandidate, Mapping[str, Any]] | None:
    """Return the variant or the warm image that an entry of the engine's list is, and what is told of it.

    None if it is none, or has no name of a variant or a version.
    """
    if not isinstance(entry, dict):
        return None
    image_labels = labels.get_labels({"Config": {"Labels": entry.get("Labels")}})
    # Docker 26 with the containerd image store also lists names with a digest among the tags.
    names = dict.fromkeys([*_parse_names(entry.get("RepoTags")), *_parse_names(entry.get("RepoDigests"))])
    tagged = [name for name in names if "@" not in name]
    version_and_tag = _read_tag(image_labels) or _find_warm_tag(image_labels, tagged)
    if version_and_tag is None:
        return None
    version, tag = version_and_tag
    # What was built on a variant of a classic image store has all its labels and no content digest, which
    # would show it: unless it also has the variant's tag, only the name of its repository tells.
    is_variant = bool(image_labels.get(labels.CONTENT)) or any(_get_tag(name) == tag for name in tagged)
    last = str(image_labels.get(labels.IMAGE)).rpartition("/")[2]
    others = [
        name
        for name in names
        if not (is_variant or _strip_name(name).rpartition("/")[2] == last)
        or ("@" not in name and not _is_variant_name(name, version, tag))
    ]
    foreign = {_strip_name(name) for name in others}
    our_names = [name for name in tagged if name not in others]
    our_names += [name for name in names if "@" in name and _strip_name(name) not in foreign]
    if not our_names:
        return None
    image = images.inspect_image(str(entry.get("Id")), over)
    if image is None:  # removed meanwhile
        return None
    candidate = PruneCandidate(
        id=str(entry["Id"]),
        images=tuple(sorted({_strip_name(name) for name in our_names})),
        version=version,
        tag=tag,
        names=tuple(our_names),
        others=tuple(others),
        size=int(entry.get("Size") or 0),
    )
    return candidate, image


def _read_tag(image_labels: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the version and the tag of the variant that labels describe; None if they describe none."""
    parts = [image_labels.get(key) for key in (labels.VERSION, labels.CELL, labels.INPUT)]
    if not all(isinstance(part, str) and part for part in parts):
        return None
    return str(parts[0]), labels.make_tag(*map(str, parts))


def _find_warm_tag(image_labels: Mapping[str, Any], names: Iterable[str]) -> tuple[str, str] | None:
    """Return the version and the tag by which one of the names is that of a warm image; None if none is."""
    label = parse_warm_label(image_labels.get(labels.WARM))
    for name in names if label else ():
        if label and (version := get_warm_version(label, _get_tag(name))):
            return version, _get_tag(name)
    return None


def _parse_names(names: object) -> list[str]:
    listed = [str(name) for name in names] if isinstance(names, list) else []
    return [name for name in listed if "<none>" not in name]


def _strip_name(name: str) -> str:
    """Return the name of an image without tag and digest, and without what podman puts before short names."""
    image = name.partition("@")[0] if "@" in name else name.rpartition(":")[0]
    for full in FULL:
        image = image.removeprefix(full)
    return shorten_name(image)


def _is_variant_name(name: str, version: str, tag: str) -> bool:
    """Whether a name is that of the variant, or that of its version, under which a node pulled it."""
    return _get_tag(name) == tag or (_get_tag(name) == version and names_registry(_strip_name(name)))


def _get_tag(name: str) -> str:
    return name.rpartition(":")[2]


def decide_retention(
    candidates: Iterable[PruneCandidate],
    retention: Retention,
    make_catalog: Callable[[str, str, list[PruneCandidate]], Catalog],
) -> tuple[dict[tuple[str, str], RetentionDecision], tuple[str, ...]]:
    """Return the decisions by image and version, and the hosts that get no variant of any image.

    `make_catalog` returns the catalog of an image's version with these candidates.
    """
    groups: dict[str, dict[str, list[PruneCandidate]]] = {}
    for candidate in candidates:
        for name in candidate.images:
            groups.setdefault(name, {}).setdefault(candidate.version, []).append(candidate)
    decisions: dict[tuple[str, str], RetentionDecision] = {}
    unserved = {*retention.hosts}
    for name, versions in groups.items():
        catalogs = (
            {version: make_catalog(name, version, images) for version, images in versions.items()}
            if retention.hosts
            else {}
        )
        hosts, unserved_by_image = retention.assign_hosts(catalogs)
        unserved &= {*unserved_by_image}
        for version, decision in retention.decide(versions).items():
            decisions[name, version] = replace(decision, hosts=hosts.get(version, ()))
    return decisions, tuple(sorted(unserved))


def _make_catalog(
    inspected: Mapping[str, Mapping[str, Any]], name: str, version: str, candidates: list[PruneCandidate]
) -> Catalog:
    """Return the variants and the warm images that an engine has of a version.

    A node that started a warm image need not have its variant.
    """
    variants, warm_images = {}, {}
    for candidate in candidates:
        image = inspected[candidate.id]
        image_labels = labels.get_labels(image)
        reference, digest = f"{name}:{candidate.tag}", get_repository_digest(image, name)
        if labels.VARIANT in image_labels:
            variants[reference] = labels.read_variant(
                image_labels, reference=reference, digest=digest, size=candidate.size
            )
        elif label := parse_warm_label(image_labels.get(labels.WARM)):
            warm_images[reference] = label.make_image(reference, digest, candidate.size)
    return Catalog(
        image=name, version=version, variants=tuple(variants.values()), warm=tuple(warm_images.values())
    )


def _describe_age(image: Mapping[str, Any], newer_s: int, now: dt.datetime) -> str | None:
    """Return that an image is too young to be removed, or of unknown age; None if it is old enough.

    The time of its creation says nothing, because builds set it to the epoch.
    """
    text = str((image.get("Metadata") or {}).get("LastTagTime") or "")
    try:
        tagged_at = dt.datetime.fromisoformat(text)
    except ValueError:
        return "unknown age"
    if tagged_at.year == 1 or tagged_at.tzinfo is None:  # podman and old engines know no such time
        return "unknown age"
    return "younger" if (now - tagged_at).total_seconds() < newer_s else None
