"""Copying a version to another registry: images by digest, then signatures, then its index."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor

from imagematrix.build.publish.publish import IndexSelection, publish
from imagematrix.build.publish.sign import add_referrer, add_signatures, read_referrers_tag
from imagematrix.common.single_flight import SingleFlight
from imagematrix.common.temp_folder import make_scratch_folder
from imagematrix.common.text import quote_word
from imagematrix.errors import (
    EngineError,
    ImagematrixError,
    SignatureError,
    TagMovedError,
    UnknownImageError,
    UsageError,
)
from imagematrix.images.catalog import image_index, labels
from imagematrix.images.catalog.signature_guard import make_guard
from imagematrix.images.catalog.warm_image import make_warm_tag
from imagematrix.images.oci.decompression import HashedStream
from imagematrix.images.oci.manifest import INDEX, Descriptor, ImageIndex, ImageManifest, parse_manifest
from imagematrix.images.trust.signature import TRIED, make_signature_tag

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from imagematrix.build.publish.publish import Published
    from imagematrix.images.catalog.image_index import IndexEntry
    from imagematrix.images.catalog.signature_guard import Guard
    from imagematrix.images.oci.manifest import Manifest
    from imagematrix.images.oci.registry import Registry
    from imagematrix.images.trust.policy import SignaturePolicy

PARALLEL_IMAGES = 4  # images, each with one blob at a time
PIECE = 1 << 20  # bytes
DEEPEST = 2  # indexes in indexes: that of an image with its attestations is one


def copy_version(
    source: Registry,
    target: Registry,
    version: str,
    aliases: Sequence[str] = (),
    *,
    policies: Sequence[SignaturePolicy] = (),
    sign: Callable[[Sequence[str]], object] | None = None,
    on_step: Callable[[str], object] = lambda _: None,
) -> Published:
    """Copy a published version to another repository, and publish it there, with the `aliases`.

    Its images, warm ones too, keep their digests; so does its index, if the repositories have the same name
    in their registries and the target had no other images of the version. Signatures go with what they sign,
    before the version has its tag; `sign` adds others, as it does for `publish`. `on_step` is told of each
    image that was not there. The version has to satisfy the `policies` in both places.

    No node needs a warm image, so one that cannot be copied fails nothing: `on_step` is told why it is left
    out. The target may have made one for the same hardware: that one stands, as the first does in `publish`.

    Raises UnknownImageError if the source lacks the version or a part of it, TagMovedError if the target has
    something else under a tag, SignatureError, and EngineError if a registry refuses or is not reached.
    """
    entries, warm_images = _read_published(source, version, policies)
    target_guard = make_guard(target, policies)
    with make_scratch_folder() as folder:
        copier = _VersionCopier(source, target, folder)
        with ThreadPoolExecutor(max_workers=PARALLEL_IMAGES) as pool:
            tags = {entry.tag: entry.digest for entry in entries}
            for tag, is_new in zip(tags, pool.map(copier.copy_image, tags, tags.values()), strict=True):
                if is_new:
                    on_step(f"copied {tag}")
            copied_warm = _copy_warm_images(copier, pool, warm_images, on_step)

        def copy_and_sign(digests: Sequence[str]) -> None:
            for digest in digests:
                copier.copy_signatures(digest, target_guard)
            if sign:
                sign(digests)
            if target_guard and (index := target.find_manifest(digests[0])):
                entries_there = image_index.parse_index(index.raw, version)
                _require_signed_copy(target_guard, version, index.digest, entries_there)

        selection = IndexSelection(
            tags=[entry.tag for entry in entries],
            find_needed=lambda _: [entry.annotations[labels.CELL] for entry in entries],
            plain_pull={
                f"{entry.platform.get('os')}/{entry.platform.get('architecture')}": entry.annotations[
                    labels.CELL
                ]
                for entry in entries
                if not entry.hidden
            },
            warm=copied_warm,
        )
        return publish(target, version, aliases, selection=selection, sign=copy_and_sign)


def _read_published(
    source: Registry, version: str, policies: Sequence[SignaturePolicy]
) -> tuple[list[IndexEntry], dict[str, IndexEntry]]:
    """Return the variants of a published version, as policies allow it, and its warm images by tag."""
    name = f"{source.name}:{version}"
    index = source.find_manifest(version)
    if index is None:
        remedy = f"see `imagematrix ls {quote_word(source.name)}`"
        raise UnknownImageError(f"the registry has no published version {name}", remedy=remedy)
    published = image_index.read_published(index, source.name, version)
    entries = [entry for entry in published if entry.ours]
    if not entries:
        raise UnknownImageError(f"{name} has no variants", remedy="publish it first")
    for entry in entries:
        if entry.annotations[labels.VERSION] != version:
            raise UsageError(f"{name} has {entry.tag}, which is an image of another version")
    if guard := make_guard(source, policies):
        guard.require_signed_index(version, index.digest, entries)
    warm_images = {
        make_warm_tag(version, label.base, label.key): entry
        for entry in published
        if (label := entry.read_warm_label())
    }
    return entries, warm_images


def _require_signed_copy(guard: Guard, version: str, digest: str, entries: Sequence[IndexEntry]) -> None:
    """Raise SignatureError unless the index of a copy is signed as its target requires."""
    try:
        guard.require_signed_index(version, digest, entries)
    except SignatureError as error:
        remedy = error.remedy or "signatures name their registry: sign the copy with `--sign KEY`"
        raise SignatureError(str(error), remedy=remedy) from error


def _copy_warm_images(
    copier: _VersionCopier,
    pool: ThreadPoolExecutor,
    warm_images: Mapping[str, IndexEntry],
    on_step: Callable[[str], object],
) -> list[IndexEntry]:
    """Copy warm images, which are given by tag; return those that the target now has under their tags."""
    copied = []
    copies = {tag: pool.submit(copier.copy_image, tag, entry.digest) for tag, entry in warm_images.items()}
    for tag, copy in copies.items():
        try:
            if copy.result():
                on_step(f"copied {tag}")
        except ImagematrixError as error:
            on_step(f"{tag} left out: {error}")
        else:
            copied.append(warm_images[tag])
    return copied


class _VersionCopier:
    """Copies from one repository to another, each blob once, by way of `folder`; thread-safe."""

    def __init__(self, source: Registry, target: Registry, folder: Path) -> None:
        self._source = source
        self._target = target
        self._folder = folder
        self._blobs: SingleFlight[str, None] = SingleFlight()

    def copy_image(self, tag: str, digest: str) -> bool:
        """Copy an image, with its attestations, to a tag; return whether it was not there."""
        manifest = self._source.find_manifest(tag)
        # A tag may lead elsewhere by now; what the index of the version names is what is copied.
        if manifest is None or digest not in (
            manifest.digest,
            image_index.get_attested_digest(manifest, tag),
        ):
            manifest = self._read_manifest(digest)
        present = self._target.digest(tag)
        if present not in (None, manifest.digest):
            raise TagMovedError(
                f"{self._target.name}:{tag} exists as {present}, not as {manifest.digest}",
                remedy="a tag never moves; delete that image from the registry, or raise the version",
            )
        if present is None:
            self._push(tag, manifest)
        return present is None

    def copy_signatures(self, digest: str, guard: Guard | None) -> None:
        """Copy the signatures of a manifest, in both forms that cosign reads, and what else refers to it.

        Those that the target lacks for its `guard` get the first places, and the others the last ones.

        What is listed and gone is left out: no copy needs it, and no build brings it back.
        """
        tag = make_signature_tag(digest)
        manifest = self._source.find_manifest(tag)
        document = parse_manifest(manifest.raw, tag, Descriptor) if manifest else None
        if isinstance(document, ImageManifest) and document.layers:
            layers = document.layers[:TRIED]
            for layer in layers:
                self._copy_blob(layer)
            # Anybody may have put them there: those of the target are verified first.
            add_signatures(self._target, digest, layers, first=False)
            if guard and (missing := guard.find_missing_signatures(digest, self._source)):
                add_signatures(self._target, digest, missing, first=True)
        listed = (str(entry["digest"]) for entry in read_referrers_tag(self._source, digest))
        for name in self._source.list_referrers(digest) or listed:
            if referrer := self._source.find_manifest(name):
                self._copy_content(referrer, 0)
                add_referrer(self._target, digest, referrer.raw, referrer.media_type)

    def _read_manifest(self, digest: str) -> Manifest:
        manifest = self._source.find_manifest(digest)
        if manifest is None:
            remedy = "`imagematrix build --push` builds it again"
            raise UnknownImageError(f"the registry lost {self._source.name}@{digest}", remedy=remedy)
        return manifest

    def _push(self, tag: str, manifest: Manifest, depth: int = 0) -> None:
        """Push a manifest once everything in it is there."""
        self._copy_content(manifest, depth)
        self._target.push_manifest(tag, manifest.raw, manifest.media_type or INDEX)

    def _copy_content(self, manifest: Manifest, depth: int) -> None:
        document = parse_manifest(manifest.raw, f"{self._source.name}@{manifest.digest}", Descriptor)
        if isinstance(document, ImageIndex):
            if depth == DEEPEST:
                raise UsageError(f"{self._source.name}@{manifest.digest}: indexes in indexes in indexes")
            for entry in document.entries:
                self._push(entry.digest, self._read_manifest(entry.digest), depth + 1)
            return
        for blob in (document.config, *(document.layers or ())):
            if blob and not blob.foreign:
                self._copy_blob(blob)

    def _copy_blob(self, blob: Descriptor) -> None:
        digest = blob.digest

        def copy() -> None:
            if self._target.has_blob(digest):
                return
            with tempfile.TemporaryFile(dir=self._folder) as file:
                with self._source.open(digest) as stream:
                    hashed = HashedStream(stream)
                    # One byte more than it has: a registry that sends without end must not fill the disk.
                    remaining = blob.size + 1
                    while remaining and (piece := hashed.read(min(remaining, PIECE))):
                        remaining -= file.write(piece)
                if digest != hashed.digest:
                    raise EngineError(f"{self._source.name}@{digest} has other content than its digest says")
                file.seek(0)
                self._target.push_blob(digest, file)

        self._blobs(digest, copy)
