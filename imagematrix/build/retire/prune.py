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
from imagematrix.images.catalog.engine import FULL
from imagematrix.images.engine import containers, images, transport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
    from typing import Any

    import docker

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
    def kept(self) -> bool:
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
            "status": "kept" if self.kept else "removed",
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
    def removed(self) -> tuple[PruneCandidate, ...]:
        """The images that go."""
        return tuple(image for image in self.images if not image.kept)

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
    over: Transport | None = None,
) -> Pruning:
    """Return which variants of an engine are to be removed.

    An image stays if `retention` keeps its version, if a container uses it, running or not, if it has a name
    that is not that of a variant or a version, if it was built on a variant, or if it got its last name less
    than `newer_s` seconds ago. `only` are the names of the images to consider; by default all are.

    Raises UnknownImageError if the engine has none of the images in `only`, and EngineError.
    """
    with transport.connect(over) as engine:
        every = [
            held
            for entry in images.list_labelled(labels.VARIANT, transport=engine)
            if (held := _parse_candidate(entry, engine))
        ]
        found = [one for one, _ in every if not only or not {*only}.isdisjoint(one.images)]
        for name in only:
            if not any(name in one.images for one in found):
                names = sorted({name for one, _ in every for name in one.images})
                remedy = suggest_nearest(name, names) or (f"it has {', '.join(names)}" if names else None)
                raise UnknownImageError(f"the engine has no variant of {name}", remedy=remedy)
        inspected = {one.id: image for one, image in every}
        used = containers.list_images_in_use(engine)
    fates, unserved = decide_retention(found, retention, partial(_catalog, inspected))
    result = []
    for one in found:
        image = inspected[one.id]
        own = [fates[name, one.version] for name in one.images]
        why = [
            *dict.fromkeys(reason for fate in own for reason in fate.reasons),
            *(f"container {name}" for name in _find_users(one, image, used)),
            *(f"also named {name}" for name in one.others[:1]),
        ]
        if labels.has_inherited(image):
            why.append("built on the variant of its name")
        if newer_s is not None and (age := _describe_youth(image, newer_s, now)):
            why.append(age)
        hosts = sorted({host for fate in own for host in fate.hosts})
        result.append(replace(one, why=tuple(why), hosts=tuple(hosts)))
    result.sort(key=lambda one: (one.images, one.tag, one.id))
    return Pruning(images=tuple(result), unserved=unserved)


def apply_pruning(
    shown: Pruning,
    again: Callable[[], Pruning],
    done: Callable[[PruneCandidate], object],
    remove: Callable[[PruneCandidate], object] | None = None,
) -> None:
    """Remove what was shown; `done` is called after each image, and `again` surveys everything once more.

    `remove` removes an image, by default from the engine. Raises EngineError if the survey gives something
    else, and if the engine refuses, as it does while a container uses an image; and what `remove` raises.
    """
    if again().removed != shown.removed:
        raise EngineError("the images changed meanwhile: nothing was removed", remedy="run this again")
    with contextlib.ExitStack() as stack:
        if remove is None:
            remove = partial(_remove, stack.enter_context(contextlib.closing(transport.open_client())))
        for image in shown.removed:
            remove(image)
            done(image)


def _remove(client: docker.DockerClient, image: PruneCandidate) -> None:
    for name in image.names:
        images.remove_image(name, client)


def _parse_candidate(entry: object, over: Transport) -> tuple[PruneCandidate, Mapping[str, Any]] | None:
    """Return the variant that an entry of the engine's list is, with what the engine tells of it.

    None if it is none, or has no name of a variant or a version.
    """
    if not isinstance(entry, dict):
        return None
    given = labels.get_labels({"Config": {"Labels": entry.get("Labels")}})
    parts = [given.get(key) for key in (labels.VERSION, labels.CELL, labels.INPUT)]
    if not all(isinstance(part, str) and part for part in parts):
        return None
    version, tag = str(parts[0]), labels.make_tag(*map(str, parts))
    # Docker 26 with the containerd image store also lists names with a digest among the tags.
    every = dict.fromkeys([*_parse_names(entry.get("RepoTags")), *_parse_names(entry.get("RepoDigests"))])
    tagged = [name for name in every if "@" not in name]
    own = [name for name in tagged if _is_variant_name(name, version, tag)]
    others = [name for name in tagged if name not in own]
    foreign = {_strip_name(name) for name in others}
    own += [name for name in every if "@" in name and _strip_name(name) not in foreign]
    if not own:
        return None
    image = images.inspect_image(str(entry.get("Id")), over)
    if image is None:  # removed meanwhile
        return None
    held = PruneCandidate(
        id=str(entry["Id"]),
        images=tuple(sorted({_strip_name(name) for name in own})),
        version=version,
        tag=tag,
        names=tuple(own),
        others=tuple(others),
        size=int(entry.get("Size") or 0),
    )
    return held, image


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
    given = name.rpartition(":")[2]
    return given == tag or (given == version and names_registry(_strip_name(name)))


def decide_retention(
    found: Iterable[PruneCandidate],
    retention: Retention,
    catalog: Callable[[str, str, list[PruneCandidate]], Catalog],
) -> tuple[dict[tuple[str, str], RetentionDecision], tuple[str, ...]]:
    """Return the fates by image and version, and the hosts that get no variant of any image.

    `catalog` returns the catalog of an image's version with what is held of it.
    """
    groups: dict[str, dict[str, list[PruneCandidate]]] = {}
    for one in found:
        for name in one.images:
            groups.setdefault(name, {}).setdefault(one.version, []).append(one)
    fates: dict[tuple[str, str], RetentionDecision] = {}
    unserved = {*retention.hosts}
    for name, versions in groups.items():
        decided = retention.decide(versions)
        if retention.hosts:
            catalogs = {version: catalog(name, version, held) for version, held in versions.items()}
            unserved &= {*retention.serve(decided, catalogs)}
        fates |= {(name, version): fate for version, fate in decided.items()}
    return fates, tuple(sorted(unserved))


def _catalog(
    inspected: Mapping[str, Mapping[str, Any]], name: str, version: str, held: list[PruneCandidate]
) -> Catalog:
    variants = {
        reference: labels.read_variant(
            labels.get_labels(inspected[one.id]), reference=reference, digest=None, size=one.size
        )
        for one in held
        if (reference := f"{name}:{one.tag}")
    }
    return Catalog(image=name, version=version, variants=tuple(variants.values()))


def _find_users(one: PruneCandidate, image: Mapping[str, Any], used: Mapping[str, str]) -> Iterator[str]:
    """Yield the name of a container that uses an image, if there is one."""
    known = {one.id, *images.read_digests(image), *one.names, *one.others}
    known |= {f"{name}:{one.tag}" for name in one.images}
    users = sorted({used[key] for key in known & used.keys()})
    yield from users[:1]


def _describe_youth(image: Mapping[str, Any], newer_s: int, now: dt.datetime) -> str | None:
    """Return that an image is too young to be removed, or of unknown age; None if it is old enough.

    The time of its creation says nothing, because builds set it to the epoch.
    """
    text = str((image.get("Metadata") or {}).get("LastTagTime") or "")
    try:
        named = dt.datetime.fromisoformat(text)
    except ValueError:
        return "unknown age"
    if named.year == 1 or named.tzinfo is None:  # podman and old engines know no such time
        return "unknown age"
    return "younger" if (now - named).total_seconds() < newer_s else None
