"""The labels of an image: its catalog entry, and the components of its identity."""

from __future__ import annotations

import json

from imagematrix import documents
from imagematrix.catalog.catalog import Variant, own_axes, preference
from imagematrix.errors import UsageError
from imagematrix.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

__all__ = [
    "ANNOTATED",
    "CELL",
    "CONTENT",
    "DEFAULTS",
    "DEVELOPMENT",
    "IMAGE",
    "INPUT",
    "INPUTS",
    "PREFER",
    "SIZE",
    "VARIANT",
    "VERSION",
    "Terms",
    "agreed",
    "components",
    "content",
    "inherited",
    "read",
    "size",
    "tag",
    "terms",
    "write",
]

IMAGE = "io.imagematrix.image"  # the image's name, without a version
VERSION = "io.imagematrix.version"  # the image's version
CELL = "io.imagematrix.cell"  # the name of the cell, as in the tag
CONTENT = "io.imagematrix.content"  # the digest of the rest of the image's configuration
INPUT = "io.imagematrix.input"  # the input digest
INPUTS = "io.imagematrix.inputs"  # the components of the input digest, as JSON
PREFER = "io.imagematrix.prefer"  # `prefer` of the matrix, separated by commas; absent if not set
DEFAULTS = "io.imagematrix.defaults"  # `defaults` of the matrix, as JSON; absent if not set
DEVELOPMENT = "io.imagematrix.development"  # `true` if the image may be replaced; absent otherwise
SIZE = "io.imagematrix.size"  # the size of the layers in the registry, in bytes; only in an index
VARIANT = "io.imagematrix.variant"  # the catalog entry as JSON, without reference, digest and size

# Also annotations of manifests, so that a registry needs no second request for the labels.
ANNOTATED = (VERSION, CELL, INPUT, INPUTS, PREFER, DEFAULTS, VARIANT)
OF_THE_STORE = ("reference", "digest", "size")
SHORT = 12  # digits of the input digest in a tag


class Terms(Record):
    """The preferences and defaults that all images of a version state; see Catalog."""

    prefer: tuple[str, ...] = ()
    defaults: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return " ".join([",".join(self.prefer) or "the usual order", *map("=".join, self.defaults)])


def tag(version: str, cell: str, input_digest: str) -> str:
    """Return the tag of a variant: version, cell and shortened input digest."""
    return f"{version}-{cell}-{input_digest.removeprefix('sha256:')[:SHORT]}"


def write(variant: Variant) -> str:
    """Return the label of `variant`."""
    data = {key: value for key, value in variant.to_json().items() if key not in OF_THE_STORE}
    return json.dumps(data, separators=(",", ":"))


def read(labels: Mapping[str, str], *, reference: str, digest: str | None, size: int | None) -> Variant:
    """Return the variant that an image's labels describe; raise UsageError if they are damaged."""
    data = _object(labels, VARIANT, reference)
    return Variant.from_json(data | {"reference": reference, "digest": digest, "size": size}, reference)


def size(annotations: Mapping[str, str]) -> int | None:
    """Return the size in an annotation, in bytes, or None."""
    text = annotations.get(SIZE, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < len(str(2**63)) else None


def components(labels: Mapping[str, str]) -> dict[str, str] | None:
    """Return the components of an image's identity, or None if its labels have none."""
    try:
        data = json.loads(labels[INPUTS])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return {str(name): str(value) for name, value in data.items()} if isinstance(data, dict) else None


def terms(labels: Mapping[str, str], reference: str) -> Terms:
    """Return the terms that an image's labels state; raise UsageError if they are damaged or unknown."""
    text = labels.get(PREFER)
    names = str(text).split(",") if text else []
    defaults = _object(labels, DEFAULTS, reference) if DEFAULTS in labels else {}
    fields = documents.Fields({PREFER: names, DEFAULTS: defaults}, reference)
    return Terms(prefer=preference(fields, PREFER), defaults=own_axes(fields, DEFAULTS))


def agreed(name: str, stated: Iterable[Terms]) -> Terms:
    """Return the terms that all variants of `name` state; raise UsageError if they differ."""
    first, *others = sorted(set(stated), key=lambda terms: (terms.prefer, terms.defaults)) or [Terms()]
    if others:
        differing = " and ".join(map(str, (first, *others)))
        raise UsageError(
            f"the variants of {name} differ in their preferences: {differing}",
            remedy="rebuild all of them",
        )
    return first


def _object(labels: Mapping[str, str], label: str, reference: str) -> dict[str, object]:
    try:
        data = json.loads(labels[label])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{reference}: the label {label} is not JSON") from error
    if not isinstance(data, dict):
        raise UsageError(f"{reference}: the label {label} is not an object")
    return data


def inherited(config: Mapping[str, Any]) -> bool:
    """Whether an image inherited its labels from an image that it was built on, by its configuration.

    False for images of the classic image store, whose labels have no content digest.
    """
    label = ((config.get("config") or {}).get("Labels") or {}).get(CONTENT)
    return label is not None and label != content(config)


def content(config: Mapping[str, Any]) -> str:
    """Return the digest of an image's configuration, including its layers but without the label CONTENT.

    An image built on this one inherits the label, but its configuration differs.
    """
    import hashlib

    inner = dict(config.get("config") or {})
    inner["Labels"] = {key: value for key, value in (inner.get("Labels") or {}).items() if key != CONTENT}
    text = json.dumps({**config, "config": inner}, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
