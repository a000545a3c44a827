"""Images that imagematrix did not build: they exist, and no label says which hosts they fit."""

from __future__ import annotations

from imagematrix.common.image_reference import DIGEST, split
from imagematrix.common.text import word
from imagematrix.errors import UnknownImageError

__all__ = ["unlabelled"]

LATEST = "latest"  # the version of an image without one, for engines and registries
SHORT = 12  # digits of a digest that stand for it


def unlabelled(name: str) -> UnknownImageError:
    """Return the error for an image without labels of its own; the remedy reads its needs from its bytes."""
    image, version = split(name)
    short = image.rpartition("/")[2]
    if version and DIGEST.fullmatch(version):
        version = version.partition(":")[2][:SHORT]
    known = f"{image}:{version or LATEST}"
    file = f"{short}-{version or LATEST}.json"
    adopt = f"`imagematrix adopt {word(name)} --as {word(known)} -o {word(file)}`"
    return UnknownImageError(
        f"{name} has no labels of its own that say which hosts it fits",
        remedy=f"{adopt} reads it from the image's files; then pass --catalog {word(file)}",
    )
