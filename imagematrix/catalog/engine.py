"""The Catalog of what a Docker engine holds, read from the labels of its images in one request."""

from __future__ import annotations

from imagematrix import engine
from imagematrix.catalog import labels
from imagematrix.catalog.catalog import Catalog, split
from imagematrix.errors import UnknownImageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.catalog.catalog import Variant

__all__ = ["catalog", "catalogs"]

# Podman writes a short name in full: with docker.io where it came through Docker's API, with localhost where
# it is from an archive or from a build of podman's own. It finds both by the short name.
FULL = ("docker.io/library/", "docker.io/", "localhost/")


def catalog(name: str) -> Catalog:
    """Return the catalog of `name` (IMAGE:VERSION, or IMAGE where it has one version) in the local engine.

    Raises UnknownImageError where the engine has no variant of it, EngineError where no engine answers.
    """
    image, version = split(name)
    found = [item for item in catalogs(image) if version in (None, item.version)]
    if not found:
        there = ", ".join(f"{item.image}:{item.version}" for item in catalogs())
        raise UnknownImageError(
            f"the engine has no variant of {name}",
            remedy=f"it has {there}" if there else "build some with `imagematrix build`",
        )
    if len(found) > 1:
        versions = ", ".join(f"{image}:{item.version}" for item in found)
        raise UnknownImageError(f"{image} is there in several versions", remedy=f"say which: {versions}")
    return found[0]


def catalogs(image: str | None = None) -> list[Catalog]:
    """Return the catalogs of all images in the engine, or of one image, sorted by name and version."""
    wanted = labels.IMAGE if image is None else f"{labels.IMAGE}={image}"
    groups: dict[tuple[str, str], dict[str, tuple[Variant, tuple[str, ...]]]] = {}
    for item in engine.images(wanted):
        for name, version, variant, prefer in _variants(item):
            groups.setdefault((name, version), {})[variant.reference] = variant, prefer
    return [
        Catalog(
            image=name,
            version=version,
            variants=tuple(found[reference][0] for reference in sorted(found)),
            prefer=labels.agreed(f"{name}:{version}", (prefer for _, prefer in found.values())),
        )
        for (name, version), found in sorted(groups.items())
    ]


def _variants(item: object) -> Iterator[tuple[str, str, Variant, tuple[str, ...]]]:
    """Yield the variant that one element of the engine's list is, and what it prefers.

    None where it has no tag of its own.
    """
    if not isinstance(item, dict) or not isinstance(item.get("Labels"), dict):
        return
    own = item["Labels"]
    if not all(
        isinstance(own.get(key), str) for key in (labels.IMAGE, labels.VERSION, labels.CELL, labels.INPUT)
    ):
        return
    image, version = own[labels.IMAGE], own[labels.VERSION]
    reference = f"{image}:{labels.tag(version, own[labels.CELL], own[labels.INPUT])}"
    if reference in _names(item.get("RepoTags")):
        digest = _digest(item, image)
        variant = labels.read(own, reference=reference, digest=digest, size=item.get("Size"))
        yield image, version, variant, labels.prefer(own, reference)


def _digest(item: dict[str, object], image: str) -> str | None:
    """Return the manifest digest, or the image ID where the store keeps no manifests."""
    for name in _names(item.get("RepoDigests")):
        if name.startswith(f"{image}@"):
            return name.removeprefix(f"{image}@")
    return str(item.get("Id"))


def _names(listed: object) -> list[str]:
    """Return the names in an engine's answer, those that podman wrote in full also as they were given."""
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    return names + [name.removeprefix(full) for name in names for full in FULL if name.startswith(full)]
