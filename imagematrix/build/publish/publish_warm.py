"""Publishing warm images: a staged layer of caches, on a variant of a published version.

Who made the caches ran users' code, so nothing that is staged is believed. One blob of it is used, the
layer, and every byte of that is checked. Manifest and configuration are written anew from those of the
variant in the published version. What the staged label says besides is a claim, for whoever publishes to
approve.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass

from imagematrix.build.publish.sign import is_signed
from imagematrix.build.publish.staged_source import open_staged
from imagematrix.build.publish.warm_audit import audit_warm_layer
from imagematrix.common import json_documents, record
from imagematrix.common.image_reference import DIGEST
from imagematrix.common.text import quote_word
from imagematrix.errors import AuditError, TagMovedError, UnknownImageError, UsageError
from imagematrix.images.catalog import image_index, labels
from imagematrix.images.catalog.signature_guard import make_guard
from imagematrix.images.catalog.warm_image import IMAGE_USER, OPAQUE, PROVED, ROOT_USER, make_warm_tag
from imagematrix.images.catalog.warm_up import read_warm_up
from imagematrix.images.oci.compression import DEFAULT_LEVELS, Compression
from imagematrix.images.oci.decompression import GZIP, ZSTD
from imagematrix.images.oci.manifest import (
    CONFIG,
    IMAGE,
    Descriptor,
    ImageManifest,
    compute_digest,
    parse_manifest,
)
from imagematrix.images.warm.layer import check_layer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import Any, BinaryIO

    from imagematrix.build.publish.staged_source import StagedSource
    from imagematrix.images.catalog.image_index import IndexEntry
    from imagematrix.images.catalog.warm_image import WarmLabel
    from imagematrix.images.catalog.warm_up import WarmUp
    from imagematrix.images.oci.byte_stream import ByteStream
    from imagematrix.images.oci.registry import Registry
    from imagematrix.images.trust.policy import SignaturePolicy
    from imagematrix.images.warm.layer import WarmLayer

MADE_BY = "warm-up by imagematrix"  # in the history of the image
# Media types of layers that engines with the classic image store push, by those of OCI.
OCI_LAYERS = {
    "application/vnd.docker.image.rootfs.diff.tar.gzip": "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd": "application/vnd.oci.image.layer.v1.tar+zstd",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmDraft:
    """A warm image that is checked and not published yet; `source` is the image whose layer it has.

    `base` is the variant's reference. The bytes of `layer` are in the file `path`. `size` is that of all
    layers in the registry. `is_present`: the repository has the image under its tag.
    """

    source: str
    reference: str
    base: str
    label: WarmLabel
    layer: WarmLayer
    path: Path
    config: bytes
    manifest: bytes
    size: int
    is_present: bool

    @property
    def digest(self) -> str:
        """The digest of its manifest."""
        return compute_digest(self.manifest)

    def make_entry(self) -> IndexEntry:
        """Return its entry in the index of its version."""
        return image_index.IndexEntry(
            digest=self.digest,
            size=len(self.manifest),
            media_type=IMAGE,
            annotations={labels.WARM: _write_label(self.label), labels.SIZE: str(self.size)},
            platform=image_index.make_platform(None),
        )

    def to_json(self) -> dict[str, object]:
        """Return one element of the Published document's `warm`."""
        return {
            "reference": self.reference,
            "digest": self.digest,
            "base": self.label.base,
            "match": self.label.match.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _StagedImage:
    """What a warm-up has pushed: its label, which is a claim, and the descriptor of its layer."""

    label: WarmLabel
    layer: Descriptor


@dataclass(frozen=True, slots=True, kw_only=True)
class _BaseImage:
    """A published variant: its manifest, its configuration, and the warm-up that its label states."""

    manifest: ImageManifest
    config: Mapping[str, Any]
    warm_up: WarmUp


class WarmPublisher:
    """Drafts and pushes warm images of a published `version` in a repository; files are kept in `folder`.

    The version has to satisfy the `policies`. Raises UnknownImageError if it is not published, and
    SignatureError.
    """

    def __init__(
        self, registry: Registry, version: str, folder: Path, policies: Sequence[SignaturePolicy] = ()
    ) -> None:
        self._registry = registry
        self._version = version
        self._folder = folder
        self._name = f"{registry.name}:{version}"
        index = registry.find_manifest(version)
        self.variants = [
            entry for entry in image_index.read_published(index, registry.name, version) if entry.ours
        ]
        if index is None or not self.variants:
            raise UnknownImageError(
                f"{self._name} has no published variants",
                remedy=f"`imagematrix publish {quote_word(self._name)}` publishes them",
            )
        self._index = index.digest
        if guard := make_guard(registry, policies):
            guard.require_signed_index(version, index.digest, self.variants)

    def require_unsigned(self) -> None:
        """Raise UsageError if the version is signed, as it is where a policy requires it.

        Its new index would have no signature, and nodes that require one would refuse all of the version.
        """
        if is_signed(self._registry, self._index):
            message = f"{self._name} is signed, and with a warm image it would not be"
            raise UsageError(message, remedy="add --sign KEY, with the private key that signs this version")

    def make_draft(self, source: str) -> WarmDraft:
        """Return the warm image with the layer of the staged image `source`; see `open_staged`.

        If the repository has a warm image with its key, that one is drafted: the first one stands. Raises
        UsageError or AuditError if anything in the staged image is not allowed, UnknownImageError if its
        variant is not in the version, TagMovedError if its tag has something else.
        """
        with open_staged(source) as (staging, staged_tag):
            staged = _read_staged_image(staging, staged_tag)
            if staged is None:
                raise UnknownImageError(
                    f"{source} is not there", remedy="name what `imagematrix warm IMAGE` printed"
                )
            tag = make_warm_tag(self._version, staged.label.base, staged.label.key)
            if self._registry.digest(tag) is None:
                return self._make_draft(source, staging, staged, tag, is_present=False)
        standing = self._find_standing(tag, staged.label.key)
        name = f"{self._registry.name}:{tag}"
        draft = self._make_draft(name, self._registry, standing, tag, is_present=True)
        if self._registry.digest(tag) != draft.digest:
            raise TagMovedError(
                f"{name} exists, and is not as it is published", remedy=_suggest_removal(name)
            )
        return draft

    def push_image(self, draft: WarmDraft, sign: Callable[[Sequence[str]], object] | None = None) -> None:
        """Push a warm image, sign it, and tag it unless its tag exists; raise TagMovedError."""
        if not draft.is_present:
            with draft.path.open("rb") as file:
                self._push_blob(draft.layer.digest, file)
            self._push_blob(compute_digest(draft.config), io.BytesIO(draft.config))
            self._registry.push_manifest(draft.digest, draft.manifest, IMAGE)
        if sign:
            # Before the tag and the index: no node that requires signatures finds an image without one.
            sign([draft.digest])
        tag = draft.reference.rpartition(":")[2]
        if self._registry.digest(tag) is None:
            self._registry.push_manifest(tag, draft.manifest, IMAGE)
        if self._registry.digest(tag) != draft.digest:
            message = f"{draft.reference} was published by another process at the same time"
            raise TagMovedError(message, remedy="the first one stands; the same command takes that one")

    def _make_draft(
        self, source: str, repository: StagedSource, staged: _StagedImage, tag: str, *, is_present: bool
    ) -> WarmDraft:
        label = staged.label
        base = self._find_base(source, label)
        image = self._read_base(base)
        _require_stated_warm_up(source, label, image.warm_up)
        _require_proof(source, label)
        path = self._folder / staged.layer.digest.removeprefix("sha256:")
        with path.open("wb") as file, repository.open(staged.layer.digest) as stream:
            layer = check_layer(_SavedStream(stream, file), staged.layer.digest, image.warm_up.max_size)
        variant = labels.read_variant(base.annotations, reference=base.tag, digest=base.digest, size=None)
        try:
            audit_warm_layer(layer, path, variant, image.warm_up, label.match)
        except AuditError as error:
            raise AuditError(f"{source} is refused: {error}", remedy=error.remedy) from error
        claimed = dict(label.tools)
        label = record.replace(label, tools=tuple((tool, claimed.get(tool)) for tool in layer.tools))
        config = _write_config(image.config, label, layer)
        layers = [*map(_describe_layer, image.manifest.layers or ()), _describe_new_layer(layer, path)]
        return WarmDraft(
            source=source,
            reference=f"{self._registry.name}:{tag}",
            base=f"{self._registry.name}:{base.tag}",
            label=label,
            layer=layer,
            path=path,
            config=config,
            manifest=_write_manifest(image.manifest, config, layers),
            size=sum(described.size for described in image.manifest.layers or ()) + layer.size,
            is_present=is_present,
        )

    def _find_standing(self, tag: str, key: str) -> _StagedImage:
        """Return the warm image with a tag; raise TagMovedError if it is anything but one with this key."""
        name = f"{self._registry.name}:{tag}"
        try:
            standing = _read_staged_image(self._registry, tag, most_layers=None)
        except (AuditError, UsageError) as error:
            message = f"{name} exists, and is no warm image: {error}"
            raise TagMovedError(message, remedy=_suggest_removal(name)) from error
        if standing is None or standing.label.key != key:
            found = standing.label.key if standing else "nothing"
            raise TagMovedError(
                f"{name} exists with the key {found}, not {key}", remedy=_suggest_removal(name)
            )
        return standing

    def _find_base(self, source: str, label: WarmLabel) -> IndexEntry:
        for variant in self.variants:
            if variant.digest == label.base:
                return variant
        raise UnknownImageError(
            f"{source} belongs to {label.base}, which is no variant of {self._name}",
            remedy="name the version whose variant was warmed up, which the label names by its digest",
        )

    def _read_base(self, base: IndexEntry) -> _BaseImage:
        """Return the published image of a variant; raise UsageError if it is damaged or has no warm-up."""
        where = f"{self._registry.name}:{base.tag}"
        manifest = self._registry.find_manifest(base.digest)
        if manifest is None:
            raise UnknownImageError(f"the registry lost {where}")
        image = parse_manifest(manifest.raw, where, Descriptor)
        if not isinstance(image, ImageManifest) or image.config is None or not image.layers:
            raise UsageError(f"{where} is not the manifest of an image")
        raw = self._registry.fetch_small_blob(image.config.digest)
        fields = json_documents.Fields(json_documents.parse_json(raw, where), where)
        own = fields.get_object_or_empty("config").get_text_map("Labels")
        diff_ids = fields.get_object_or_empty("rootfs").get_texts("diff_ids")
        if len(diff_ids) != len(image.layers):
            raise UsageError(f"{where} has {len(image.layers)} layers and {len(diff_ids)} digests of tars")
        warm_up = read_warm_up(own, where)
        if warm_up is None:
            remedy = "state `warm_up` in matrix.yaml, and raise the version"
            raise UsageError(f"{where} has no warm-up, so no caches belong to it", remedy=remedy)
        return _BaseImage(manifest=image, config=fields.data, warm_up=warm_up)

    def _push_blob(self, digest: str, file: BinaryIO) -> None:
        if not self._registry.has_blob(digest):
            self._registry.push_blob(digest, file)


class _SavedStream:
    """A stream that writes to `file` what is read from it."""

    def __init__(self, stream: ByteStream, file: BinaryIO) -> None:
        self._stream = stream
        self._file = file

    def read(self, size: int = -1, /) -> bytes:
        piece = self._stream.read(size)
        self._file.write(piece)
        return piece


def _read_staged_image(
    repository: StagedSource, tag: str, most_layers: int | None = 1
) -> _StagedImage | None:
    """Return what is under a tag or a digest; None if there is nothing.

    Raises UsageError if it is no warm image, or has more than `most_layers` layers. The last layer is taken.
    """
    manifest = repository.find_manifest(tag)
    if manifest is None:
        return None
    where = f"{repository.name}@{tag}" if DIGEST.fullmatch(tag) else f"{repository.name}:{tag}"
    image = parse_manifest(manifest.raw, where, Descriptor)
    if not isinstance(image, ImageManifest) or image.config is None or not image.layers:
        raise UsageError(f"{where} is no image with a layer of caches")
    if most_layers is not None and len(image.layers) > most_layers:
        raise UsageError(f"{where} has {len(image.layers)} layers; expected the layer of caches alone")
    label = labels.read_warm_label(repository.fetch_small_blob(image.config.digest), where)
    if label is None:
        raise UsageError(f"{where} is no warm image: it has no label {labels.WARM}")
    return _StagedImage(label=label, layer=image.layers[-1])


def _require_stated_warm_up(source: str, label: WarmLabel, warm_up: WarmUp) -> None:
    """Raise AuditError if a label claims another warm-up than its variant states."""
    claimed = tuple((warm_input.name, warm_input.path) for warm_input in label.inputs)
    if label.command != warm_up.command or claimed != warm_up.inputs:
        raise AuditError(f"{source} claims a command or inputs that are not those of its variant's warm-up")


def _require_proof(source: str, label: WarmLabel) -> None:
    """Raise AuditError if a label claims no proof as the image's user, or promises more than a cache can."""
    if label.content != OPAQUE:
        raise AuditError(f"{source} claims the content {label.content[:80]!r}; expected {OPAQUE!r}")
    proofs = dict(label.proofs)
    # Without a daemon, every process is root, whatever user the image has.
    if proofs.get(IMAGE_USER, proofs.get(ROOT_USER)) != PROVED:
        remedy = "warm up again with `imagematrix warm IMAGE`, which keeps only what is proved"
        raise AuditError(f"{source} claims no proof that the image's user finds its caches", remedy=remedy)


def _write_label(label: WarmLabel) -> str:
    return json.dumps(label.to_json(), sort_keys=True, separators=(",", ":"))


def _write_config(base: Mapping[str, Any], label: WarmLabel, layer: WarmLayer) -> bytes:
    """Return the configuration of a warm image: its base's, with the layer, and its own label only."""
    settings = {**base.get("config", {})}
    settings["Labels"] = labels.drop_own(settings.get("Labels") or {}) | {labels.WARM: _write_label(label)}
    document = {
        **base,
        "config": settings,
        "rootfs": {"type": "layers", "diff_ids": [*base["rootfs"]["diff_ids"], layer.diff_id]},
        "history": [*(base.get("history") or ()), {"created": label.date, "created_by": MADE_BY}],
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _write_manifest(base: ImageManifest, config: bytes, layers: Sequence[Mapping[str, object]]) -> bytes:
    annotations = labels.drop_own(base.annotations)
    document = {
        "schemaVersion": 2,
        "mediaType": IMAGE,
        "config": {"mediaType": CONFIG, "digest": compute_digest(config), "size": len(config)},
        "layers": list(layers),
        **({"annotations": annotations} if annotations else {}),
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _describe_layer(layer: Descriptor) -> dict[str, object]:
    """Return the descriptor of a layer of the base, as OCI names its media type."""
    media_type = OCI_LAYERS.get(layer.media_type, layer.media_type)
    annotations = {"annotations": dict(layer.annotations)} if layer.annotations else {}
    return {"mediaType": media_type, "digest": layer.digest, "size": layer.size, **annotations}


def _describe_new_layer(layer: WarmLayer, path: Path) -> dict[str, object]:
    """Return the descriptor of a layer in a file; raise AuditError if it is not compressed as layers are."""
    with path.open("rb") as file:
        head = file.read(len(ZSTD))
    kinds = [kind for magic, kind in ((GZIP, "gzip"), (ZSTD, "zstd")) if head.startswith(magic)]
    if not kinds:
        raise AuditError(f"the layer {layer.digest} is compressed neither with gzip nor with zstd")
    compression = Compression(type=kinds[0], level=DEFAULT_LEVELS[kinds[0]])
    return {"mediaType": compression.media_type, "digest": layer.digest, "size": layer.size}


def _suggest_removal(name: str) -> str:
    return f"a tag never moves; delete {name} from the registry, or raise the version"
