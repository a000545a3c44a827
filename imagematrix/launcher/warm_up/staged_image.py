"""What a warm-up leaves for `imagematrix publish --warm`: an image of one layer, in a folder or a registry.

It has no layer of the variant, and none of its labels, so nothing selects or starts it.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from imagematrix.common.image_reference import Reference
from imagematrix.common.temp_folder import get_disk_folder
from imagematrix.common.text import quote_word
from imagematrix.errors import ImagematrixError, TagMovedError, UsageError
from imagematrix.images.catalog.labels import WARM, read_warm_label
from imagematrix.images.oci.layout import INDEX_FILE, MARK, NAME, VERSION, get_blob_path
from imagematrix.images.oci.manifest import (
    CONFIG,
    IMAGE,
    INDEX,
    Descriptor,
    ImageManifest,
    compute_digest,
    parse_manifest,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from imagematrix.images.catalog.warm_image import WarmLabel
    from imagematrix.images.oci.compression import Compression
    from imagematrix.images.oci.registry import Registry
    from imagematrix.images.warm.layer import WarmLayer
EMPTY = b"{}"  # a blob that many registries have already


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWarmUp:
    """What is kept of a warm-up: the digest of its manifest, and its label."""

    digest: str
    label: WarmLabel


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvedImage:
    """The manifest and the configuration, with `label`, of a proved `layer`, whose bytes are in `path`."""

    manifest: bytes
    config: bytes
    label: WarmLabel
    layer: WarmLayer
    path: Path

    @property
    def digest(self) -> str:
        """The digest of the manifest."""
        return compute_digest(self.manifest)


def make_staged_image(
    layer: WarmLayer, path: Path, label: WarmLabel, compression: Compression, platform: str
) -> ProvedImage:
    """Return the image of a layer in the file `path`, with its label; `platform` is such as linux/amd64."""
    system, architecture, *variant = platform.split("/")
    config = _encode_document(
        {
            "created": label.date,
            "os": system,
            "architecture": architecture,
            **({"variant": variant[0]} if variant else {}),
            "config": {"Labels": {WARM: json.dumps(label.to_json(), separators=(",", ":"))}},
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id]},
            "history": [{"created": label.date, "created_by": "warm-up by imagematrix"}],
        }
    )
    manifest = _encode_document(
        {
            "schemaVersion": 2,
            "mediaType": IMAGE,
            "config": {"mediaType": CONFIG, "digest": compute_digest(config), "size": len(config)},
            "layers": [{"mediaType": compression.media_type, "digest": layer.digest, "size": layer.size}],
        }
    )
    return ProvedImage(manifest=manifest, config=config, label=label, layer=layer, path=path)


def require_other_repository(staging: str, image: str) -> None:
    """Raise UsageError if a staging repository is that of the image, where its final tag would be taken."""
    parsed = [Reference.parse(name) for name in (staging, image)]
    if len({(reference.registry, reference.repository) for reference in parsed}) == 1:
        remedy = f"name another one, such as --staging {quote_word(f'{staging}-staging')}"
        raise UsageError(f"--staging {staging} is the repository of the image itself", remedy=remedy)


def require_push(registry: Registry) -> None:
    """Push a small blob, so that a missing right is found before a warm-up and not after it; EngineError."""
    registry.push_blob(compute_digest(EMPTY), io.BytesIO(EMPTY))


@contextlib.contextmanager
def make_new_folder(folder: Path) -> Iterator[None]:
    """Make the folder of a layout, if it is not there; remove it if the context fails before it is written.

    Raises UsageError if something is there, or nothing can be written there.
    """
    try:
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UsageError(f"{folder} exists, and is no empty folder", remedy="name a new folder")
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        remedy = "name a folder in which you can write"
        raise UsageError(f"{folder} cannot be written: {error.strerror}", remedy=remedy) from error
    try:
        yield
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def write_staged_layout(image: ProvedImage, tag: str, folder: Path) -> None:
    """Write an image to the new or empty `folder` as an OCI layout.

    Raises UsageError if another process has written one there meanwhile, and OSError. What was written is
    removed if this does not come to its end.
    """
    blobs = get_blob_path(folder, "").parent
    try:
        blobs.mkdir(parents=True)  # only one process can
    except FileExistsError as error:
        raise UsageError(f"{folder} is not empty any more", remedy="name a new folder") from error
    try:
        _write_layout(image, tag, folder)
    except BaseException:
        for name in (MARK, INDEX_FILE):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(blobs, ignore_errors=True)
        raise


@contextlib.contextmanager
def leave_on_error(image: ProvedImage, tag: str, on_left: Callable[[Path], object]) -> Iterator[None]:
    """Write an image to a new folder where large files belong if the context fails.

    It took long to prove, and what fails in the context may work later. `on_left` gets the folder.
    """
    try:
        yield
    except (ImagematrixError, OSError):
        with contextlib.suppress(OSError):  # the other error is the one to tell
            folder = Path(tempfile.mkdtemp(prefix="imagematrix-warm-", dir=get_disk_folder()))
            try:
                write_staged_layout(image, tag, folder)
            except BaseException:
                folder.rmdir()
                raise
            on_left(folder)
        raise


def _write_layout(image: ProvedImage, tag: str, folder: Path) -> None:
    get_blob_path(folder, "").mkdir()
    for raw in (image.manifest, image.config):
        get_blob_path(folder, compute_digest(raw)).write_bytes(raw)
    shutil.copyfile(image.path, get_blob_path(folder, image.layer.digest))
    entry = {
        "mediaType": IMAGE,
        "digest": image.digest,
        "size": len(image.manifest),
        "annotations": {NAME: tag},
    }
    index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]}
    (folder / INDEX_FILE).write_bytes(_encode_document(index))
    (folder / MARK).write_bytes(VERSION)  # last: without it, this is no layout


def find_staged_image(registry: Registry, tag: str, key: str) -> KeptWarmUp | None:
    """Return the image with a tag in a staging repository; None if there is none.

    Raises TagMovedError if the tag is of something else than the warm-up with this `key`.
    """
    manifest = registry.find_manifest(tag)
    if manifest is None:
        return None
    name = f"{registry.name}:{tag}"
    label = _read_label(registry, manifest.raw, name)
    if label is None or label.key != key:
        remedy = "remove that tag, or name another staging repository"
        raise TagMovedError(f"{name} exists and is no image of this warm-up, {key}", remedy=remedy)
    return KeptWarmUp(digest=manifest.digest, label=label)


def push_staged_image(registry: Registry, image: ProvedImage, tag: str, key: str) -> KeptWarmUp:
    """Push an image under a tag unless it exists, and return the tag's image.

    Of two that push the same warm-up at the same time, both return the one that stands. Raises what
    `find_staged_image` does.
    """
    with image.path.open("rb") as layer:
        if not registry.has_blob(image.layer.digest):
            registry.push_blob(image.layer.digest, layer)
    registry.push_blob(compute_digest(image.config), io.BytesIO(image.config))
    if found := find_staged_image(registry, tag, key):
        return found
    registry.push_manifest(tag, image.manifest, IMAGE)
    return find_staged_image(registry, tag, key) or KeptWarmUp(digest=image.digest, label=image.label)


def _read_label(registry: Registry, raw: bytes, name: str) -> WarmLabel | None:
    """Return the label of an image in a staging repository; None if it is no such image."""
    try:
        manifest = parse_manifest(raw, name, Descriptor)
        if not isinstance(manifest, ImageManifest) or manifest.config is None:
            return None
        return read_warm_label(registry.fetch_small_blob(manifest.config.digest), name)
    except UsageError:
        return None


def _encode_document(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
