"""The labels of an image: its catalog entry, and the components of its identity."""

from __future__ import annotations

import json
from operator import attrgetter

from imagematrix.common import json_documents
from imagematrix.common.record import Record
from imagematrix.errors import UsageError
from imagematrix.images.catalog.catalog import Variant, read_default_order, read_own_axes, read_preference

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from imagematrix.images.catalog.catalog import DefaultOrder
    from imagematrix.images.catalog.warm_image import WarmLabel

IMAGE = "io.imagematrix.image"  # the image's name, without a version
VERSION = "io.imagematrix.version"  # the image's version
CELL = "io.imagematrix.cell"  # the name of the cell, as in the tag
CONTENT = "io.imagematrix.content"  # the digest of what a container gets of the image, except for this label
INPUT = "io.imagematrix.input"  # the input digest
INPUTS = "io.imagematrix.inputs"  # the components of the input digest, as JSON
PREFER = "io.imagematrix.prefer"  # `prefer` of the matrix, separated by commas; absent if not set
DEFAULTS = "io.imagematrix.defaults"  # `defaults` of the matrix, as JSON; absent if not set
DEFAULT_ORDER = "io.imagematrix.default_order"  # `defaults` with several values, as JSON; absent without any
DEVELOPMENT = "io.imagematrix.development"  # `true` if the image may be replaced; absent otherwise
OPTIONAL = "io.imagematrix.optional"  # `optional_device_code` of the matrix, as JSON; absent if not set
SIZE = "io.imagematrix.size"  # the size of the layers in the registry, in bytes; only in an index
VARIANT = "io.imagematrix.variant"  # the catalog entry as JSON, without reference, digest and size
WARM = "io.imagematrix.warm"  # what a warm image says of itself, as JSON; only of a warm image
WARM_UP = "io.imagematrix.warm_up"  # `warm_up` of the matrix, as JSON; absent if not set

# Also annotations of manifests, so that a registry needs no second request for the labels.
ANNOTATED = (VERSION, CELL, INPUT, INPUTS, PREFER, DEFAULTS, DEFAULT_ORDER, VARIANT)
# Those that not every image has. The classic image store cannot remove one that an image inherits from its
# base, so there it is empty; readers take an empty one as absent.
OCCASIONAL = (CONTENT, PREFER, DEFAULTS, DEFAULT_ORDER, DEVELOPMENT, OPTIONAL, WARM_UP)
OF_THE_STORE = ("reference", "digest", "size")
# Settings of an image that a container gets, by their names in an image's configuration.
SETTINGS = (
    "Cmd",
    "Entrypoint",
    "Env",
    "ExposedPorts",
    "Healthcheck",
    "StopSignal",
    "User",
    "Volumes",
    "WorkingDir",
)
EMPTY: tuple[object, ...] = (None, "", [], {})
SHORT = 12  # digits of the input digest in a tag


class Terms(Record):
    """The preferences and defaults that all images of a version state; see Catalog."""

    prefer: tuple[str, ...] = ()
    defaults: tuple[tuple[str, str], ...] = ()
    default_order: DefaultOrder = ()

    def __str__(self) -> str:
        ordered = {axis: ",".join(values) for axis, values in self.default_order}
        defaults = [f"{axis}={ordered.get(axis, value)}" for axis, value in self.defaults]
        return " ".join([",".join(self.prefer) or "the usual order", *defaults])


def make_tag(version: str, cell: str, input_digest: str) -> str:
    """Return the tag of a variant: version, cell and shortened input digest."""
    return f"{version}-{cell}-{input_digest.removeprefix('sha256:')[:SHORT]}"


def get_version(tag: str) -> str:
    """Return the version in a tag: the part before its first dash."""
    return tag.partition("-")[0]


def get_cell(tag: str) -> str:
    """Return the cell in a tag: the part between its first dash and its last."""
    return tag.partition("-")[2].rpartition("-")[0]


def select_annotations(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels that are also annotations of a manifest."""
    return {key: labels[key] for key in ANNOTATED if key in labels}


def drop_own(labels: Mapping[str, str]) -> dict[str, str]:
    """Return labels or annotations without those of imagematrix, which are true of one image only."""
    return {key: text for key, text in labels.items() if not key.startswith("io.imagematrix.")}


def is_named(labels: Mapping[str, str], reference: str) -> bool:
    """Whether a reference has the tag of the variant that an image's labels describe."""
    parts = [labels.get(key) for key in (VERSION, CELL, INPUT)]
    return all(parts) and reference.rpartition(":")[2] == make_tag(*map(str, parts))


def write_variant(variant: Variant) -> str:
    """Return the label of `variant`."""
    data = {key: value for key, value in variant.to_json().items() if key not in OF_THE_STORE}
    return json.dumps(data, separators=(",", ":"))


def read_variant(
    labels: Mapping[str, str], *, reference: str, digest: str | None, size: int | None
) -> Variant:
    """Return the variant that an image's labels describe; raise UsageError if they are damaged."""
    data = _parse_object(labels, VARIANT, reference)
    return Variant.from_json(data | {"reference": reference, "digest": digest, "size": size}, reference)


def read_size(annotations: Mapping[str, str]) -> int | None:
    """Return the size in an annotation, in bytes, or None."""
    text = annotations.get(SIZE, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < len(str(2**63)) else None


def read_components(labels: Mapping[str, str]) -> dict[str, str] | None:
    """Return the components of an image's identity, or None if its labels have none."""
    try:
        data = json.loads(labels[INPUTS])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return {str(name): str(value) for name, value in data.items()} if isinstance(data, dict) else None


def read_optional(labels: Mapping[str, str]) -> tuple[str, ...]:
    """Return the globs of optional device code that an image's labels state."""
    try:
        data = json.loads(labels[OPTIONAL])
    except (KeyError, TypeError, ValueError, RecursionError):
        return ()
    return tuple(glob for glob in data if isinstance(glob, str)) if isinstance(data, list) else ()


def read_terms(labels: Mapping[str, str], reference: str) -> Terms:
    """Return the terms that an image's labels state; raise UsageError if they are damaged or unknown."""
    text = labels.get(PREFER)
    names = str(text).split(",") if text else []
    stated = {
        label: _parse_object(labels, label, reference)
        for label in (DEFAULTS, DEFAULT_ORDER)
        if labels.get(label)
    }
    fields = json_documents.Fields({PREFER: names, **stated}, reference)
    defaults = read_own_axes(fields, DEFAULTS)
    return Terms(
        prefer=read_preference(fields, PREFER),
        defaults=defaults,
        default_order=read_default_order(fields, DEFAULT_ORDER, defaults),
    )


def require_equal_terms(name: str, stated: Iterable[Terms]) -> Terms:
    """Return the terms that all variants of `name` state; raise UsageError if they differ."""
    first, *rest = sorted(set(stated), key=attrgetter("prefer", "defaults", "default_order")) or [Terms()]
    if rest:
        differing = " and ".join(map(str, (first, *rest)))
        raise UsageError(
            f"the variants of {name} differ in their preferences: {differing}",
            remedy="rebuild all of them",
        )
    return first


def _parse_object(labels: Mapping[str, str], label: str, reference: str) -> dict[str, object]:
    try:
        data = json_documents.parse_json(labels[label], f"{reference}: the label {label}")
    except (KeyError, TypeError) as error:
        raise UsageError(f"{reference}: the label {label} is not JSON") from error
    if not isinstance(data, dict):
        raise UsageError(f"{reference}: the label {label} is not an object")
    return data


def get_labels(image: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the labels of an image, from its configuration or from what an engine tells of it."""
    return _get_mapping(_get_config(image).get("Labels"))


def list_volumes(image: Mapping[str, Any]) -> list[str]:
    """Return the paths of an image's volumes, from its configuration or from what an engine tells of it."""
    return sorted(_get_mapping(_get_config(image).get("Volumes")))


def read_config_labels(raw: bytes, where: str) -> Mapping[str, str]:
    """Return the labels in an image's configuration; none if they are inherited from another image."""
    image = json_documents.Fields(json_documents.parse_json(raw, where), where)
    return {} if has_inherited(image.data) else image.get_object_or_empty("config").get_text_map("Labels")


def read_warm_label(raw: bytes, where: str) -> WarmLabel | None:
    """Return the label of a warm image in its configuration; None if it has none, or has inherited it.

    Raises UsageError, which names `where`, if it is damaged or newer.
    """
    from imagematrix.images.catalog.warm_image import WarmLabel

    text = read_config_labels(raw, where).get(WARM)
    if text is None:
        return None
    described = f"{where}: the label {WARM}"
    return WarmLabel.from_json(json_documents.parse_json(text, described), described)


def has_inherited(image: Mapping[str, Any]) -> bool:
    """Whether an image inherited its labels from an image that it was built on.

    `image` is its configuration, or what an engine tells of it. False for images of the classic image store,
    whose labels have no content digest.
    """
    label = get_labels(image).get(CONTENT)
    return bool(label) and label != hash_content(image)


def hash_content(image: Mapping[str, Any]) -> str:
    """Return the digest of what a container gets of an image: platform, layers and settings.

    The label CONTENT does not count. An image built on this one inherits the label, but differs in the rest.
    `image` is its configuration or what an engine tells of it, which leaves out other parts.
    """
    other_labels = {key: value for key, value in get_labels(image).items() if key != CONTENT}
    return _hash_document(_describe_content(image) | {"labels": other_labels})


def hash_unlabelled_content(image: Mapping[str, Any]) -> str:
    """Return the digest of what a container gets of an image without its labels; see `hash_content`."""
    return _hash_document(_describe_content(image))


def _describe_content(image: Mapping[str, Any]) -> dict[str, object]:
    inner = _get_config(image)
    rootfs = _get_mapping(image.get("rootfs")).get("diff_ids") or _get_mapping(image.get("RootFS")).get(
        "Layers"
    )
    return {
        "platform": [
            image.get(key) or image.get(key.title()) or "" for key in ("os", "architecture", "variant")
        ],
        "layers": rootfs or [],
        # An engine tells settings that the image does not have as empty ones.
        "settings": {key: value for key in SETTINGS if (value := inner.get(key)) not in EMPTY},
    }


def _hash_document(data: Mapping[str, object]) -> str:
    from imagematrix.images.oci.manifest import compute_digest

    return compute_digest(json.dumps(data, sort_keys=True, separators=(",", ":")).encode())


def _get_config(image: Mapping[str, Any]) -> Mapping[str, Any]:
    return _get_mapping(image.get("config")) or _get_mapping(image.get("Config"))


def _get_mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
