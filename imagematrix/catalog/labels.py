"""The labels of an image: its catalog entry, and what its identity is made of."""

from __future__ import annotations

import json

from imagematrix import documents
from imagematrix.catalog.catalog import Variant, preference
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = [
    "ANNOTATED",
    "CELL",
    "DEVELOPMENT",
    "IMAGE",
    "INPUT",
    "INPUTS",
    "PREFER",
    "SIZE",
    "VARIANT",
    "VERSION",
    "agreed",
    "components",
    "prefer",
    "read",
    "size",
    "tag",
    "write",
]

IMAGE = "io.imagematrix.image"
VERSION = "io.imagematrix.version"
CELL = "io.imagematrix.cell"
INPUT = "io.imagematrix.input"  # the input digest
INPUTS = "io.imagematrix.inputs"  # its components, as JSON
PREFER = "io.imagematrix.prefer"  # criteria with commas between them; absent where there are none
DEVELOPMENT = "io.imagematrix.development"  # "true" where the image may be replaced; absent elsewhere
SIZE = "io.imagematrix.size"  # of the layers as a registry has them, in bytes; an annotation of an index
VARIANT = "io.imagematrix.variant"  # the catalog entry, less what only the store knows

# What a manifest has as annotations, too: a registry then tells it without another request for the labels.
ANNOTATED = (VERSION, CELL, INPUT, INPUTS, PREFER, VARIANT)
OF_THE_STORE = ("reference", "digest", "size")
SHORT = 12  # digits of the input digest in a tag


def tag(version: str, cell: str, input_digest: str) -> str:
    """Return the tag of a variant: version, cell and input digest, each readable in it."""
    return f"{version}-{cell}-{input_digest.removeprefix('sha256:')[:SHORT]}"


def write(variant: Variant) -> str:
    """Return the label that carries `variant`."""
    data = {key: value for key, value in variant.to_json().items() if key not in OF_THE_STORE}
    return json.dumps(data, separators=(",", ":"))


def read(labels: Mapping[str, str], *, reference: str, digest: str | None, size: int | None) -> Variant:
    """Return the variant that an image's labels describe; raise UsageError where they are damaged."""
    try:
        data = json.loads(labels[VARIANT])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{reference}: the label {VARIANT} is no JSON") from error
    if not isinstance(data, dict):
        raise UsageError(f"{reference}: the label {VARIANT} is no object")
    return Variant.from_json(data | {"reference": reference, "digest": digest, "size": size}, reference)


def size(annotations: Mapping[str, str]) -> int | None:
    """Return the size that an annotation gives, in bytes; None where it gives none."""
    text = annotations.get(SIZE, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < len(str(2**63)) else None


def components(labels: Mapping[str, str]) -> dict[str, str] | None:
    """Return what an image was made of, by its labels; None where they don't tell."""
    try:
        data = json.loads(labels[INPUTS])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return {str(name): str(value) for name, value in data.items()} if isinstance(data, dict) else None


def prefer(labels: Mapping[str, str], reference: str) -> tuple[str, ...]:
    """Return the criteria that an image's labels prefer; raise UsageError where one is unknown."""
    text = labels.get(PREFER)
    names = str(text).split(",") if text else []
    return preference(documents.Fields({PREFER: names}, reference), PREFER)


def agreed(name: str, preferences: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the preference that all the variants of `name` state; raise UsageError where they differ."""
    first, *others = sorted(set(preferences)) or [()]
    if others:
        stated = " and ".join(",".join(names) or "the usual order" for names in (first, *others))
        raise UsageError(f"the variants of {name} prefer different things: {stated}", remedy="build all anew")
    return first
