"""Images that imagematrix did not build: they exist, and no label says which hosts they fit."""

from __future__ import annotations

from imagematrix.common.image_reference import DIGEST, split_version
from imagematrix.common.text import quote_word
from imagematrix.errors import UnknownImageError

LATEST = "latest"  # the version of an image without one, for engines and registries
SHORT = 12  # digits of a digest that stand for it


def make_unlabelled_error(name: str) -> UnknownImageError:
    """Return the error for an image without labels of its own; the remedy reads its needs from its bytes."""
    image, version = split_version(name)
    short = image.rpartition("/")[2]
    if version and DIGEST.fullmatch(version):
        version = version.partition(":")[2][:SHORT]
    known = f"{image}:{version or LATEST}"
    file = f"{short}-{version or LATEST}.json"
    adopt = f"`imagematrix adopt {quote_word(name)} --as {quote_word(known)} -o {quote_word(file)}`"
    return UnknownImageError(
        f"{name} has no labels of its own that say which hosts it fits",
        remedy=f"{adopt} reads it from the image's files; then pass --catalog {quote_word(file)}",
    )
