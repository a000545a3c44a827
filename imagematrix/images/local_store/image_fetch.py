"""Bringing an image into a store: its layers, merged into a squashfs or a folder, which then appears at once.

Layers are received, checked and read side by side. For a folder, what is in their files is written meanwhile,
under numbers in a folder of this command; files get their names when all layers are what the image names.

The layers stay as they came, for images that share them, while nothing else needs the room.

One process fetches an image, on whatever machine; others wait for it. What it writes has names that no other
command takes for an image, until the last step, a rename. If it is killed, the next one removes what it left,
except for downloads, which go on from where they were.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import io
import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from imagematrix.errors import UsageError
from imagematrix.images.engine.pull import PullProgress, ignore_progress
from imagematrix.images.local_store import disk_reserve
from imagematrix.images.local_store.eviction import StoreRoom, get_lock_path
from imagematrix.images.local_store.folder import (
    DOCUMENT,
    FOLDER,
    FULL,
    ROOTS,
    SQUASHFS,
    StoredImage,
    StoredName,
    put_name,
)
from imagematrix.images.local_store.folder_writer import WrittenContents, remove_tree, write_folder
from imagematrix.images.local_store.locks import hold_lock, remove_dead_files
from imagematrix.images.local_store.merged_image import GivenUpError, LayerFile, MergedImage
from imagematrix.images.local_store.squashfs_writer import require_mksquashfs, write_squashfs
from imagematrix.images.local_store.stored_layers import StoredLayers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from imagematrix.images.local_store.folder import ImageStore
    from imagematrix.images.local_store.holder import Holder
    from imagematrix.images.local_store.origins import ImageOrigin, ImageParts

TERMS = ("prefer", "defaults", "default_order")  # of a catalog, which all its variants share
PARTS = ("images", "catalogs", "leases", "layers", "locks", "new", "partial")
STALE_S = 14 * 24 * 3600  # seconds after which the downloads of an image that nobody asks for are removed


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEntry:
    """What a catalog says of an image: its names, the documents of its variant and of the catalog.

    `part`: this is only a part of the version's catalog, so it does not replace what the store has.
    """

    references: tuple[str, ...]
    variant: Mapping[str, Any]
    catalog: Mapping[str, Any]
    part: bool = False

    @property
    def name(self) -> StoredName:
        """What a store keeps of it with the image."""
        return StoredName(
            references=self.references,
            image=self.catalog["image"],
            version=self.catalog["version"],
            variant=self.variant,
            terms={key: self.catalog[key] for key in TERMS if key in self.catalog},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """How to keep an image: `unpacked` or as a squashfs; `max_size` are the bytes that a store may have.

    `added` returns a layer, a tar, to put on top, for the image's configuration. A store has images with the
    same layer on top, or without any, because it knows them by their digests only.
    """

    unpacked: bool = False
    max_size: int | None = None
    added: Callable[[Mapping[str, Any]], bytes] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchWatcher:
    """What is called during a fetch.

    `before_pull` is called if the store lacks the image. `on_progress` gets how far the download is,
    `on_wait` the process that is waited for if another one fetches the image, `on_eviction` each image that
    was removed to make room.
    """

    before_pull: Callable[[], object] = lambda: None
    on_progress: Callable[[PullProgress], object] = ignore_progress
    on_wait: Callable[[Holder], object] = lambda _: None
    on_eviction: Callable[[StoredImage], object] = lambda _: None


DEFAULT, NOBODY = FetchOptions(), FetchWatcher()


def fetch_image(
    store: ImageStore,
    source: Callable[[], contextlib.AbstractContextManager[ImageOrigin]],
    digest: str,
    published: CatalogEntry,
    how: FetchOptions = DEFAULT,
    watcher: FetchWatcher = NOBODY,
) -> StoredImage:
    """Return the image with a `digest` in a store, fetched from a `source` unless the store has it.

    An image that is there under another name has both from then on. Images that were started least recently
    make room for it, if there is a limit. Raises UsageError if the store cannot be used, its disk is full, or
    squashfs-tools are missing; EngineError if they fail, and what the source raises: UnknownImageError,
    AuditError, EngineError.
    """

    def find_present() -> StoredImage | None:
        with contextlib.suppress(UsageError):  # a damaged one is replaced
            image = store.find(digest)
            return None if image and how.unpacked and image.kind != FOLDER else image
        return None

    if image := find_present():
        with contextlib.suppress(OSError):  # such as a read-only store
            _keep_catalog(store, published)
            _keep_names(image, [published.name], store.get_folder(digest))
        return image
    if not how.unpacked:
        require_mksquashfs()
    watcher.before_pull()
    with store.convert_errors(), contextlib.ExitStack() as stack:
        for name in PARTS:
            Path(store.path, name).mkdir(parents=True, exist_ok=True)
        disk_reserve.fill_reserve(store)
        disk_reserve.call_with_reserve(store, lambda: _keep_catalog(store, published))
        lock = get_lock_path(store, digest)
        held = hold_lock(lock, watcher.on_wait, lambda: find_present() is not None)
        if disk_reserve.call_with_reserve(store, lambda: stack.enter_context(held)):
            remove_dead_files(lock.parent)
            _remove_leftovers(store, lock.name)
            origin = stack.enter_context(source())
            room = StoreRoom(store, how.max_size, watcher.on_eviction)
            fetch = _Fetch(store, digest, watcher.on_progress, room)
            fetch.run(origin, published, find_present, how)
    image = store.find(digest)
    if image is None:
        raise UsageError(f"{digest} was removed from {store} just after it had come", remedy="try again")
    # Another process may have fetched it by another name, for a user to whose images this one cannot add any.
    with contextlib.suppress(OSError):
        _keep_names(image, [published.name], store.get_folder(digest))
    return image


class _Fetch:
    """The fetch of one image, while this process has its lock."""

    def __init__(
        self, store: ImageStore, digest: str, on_progress: Callable[[PullProgress], object], room: StoreRoom
    ) -> None:
        self._store = store
        self._digest = digest
        self._on_progress = on_progress
        self._room = room
        self._cache = StoredLayers(store)
        self._name = Path(store.get_folder(digest)).name
        self._given_up = threading.Event()
        self._lock = threading.Lock()
        self._layers = self._downloaded = self._received = 0

    def run(
        self,
        source: ImageOrigin,
        published: CatalogEntry,
        find_present: Callable[[], StoredImage | None],
        how: FetchOptions,
    ) -> None:
        """Fetch the image, unless another process brings it meanwhile that was thought to be dead."""
        partial = Path(self._store.path, "partial", self._name)
        partial.mkdir(exist_ok=True)
        if partial.is_symlink():  # where other users may write
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(partial))
        os.utime(partial)  # for `_remove_leftovers`
        parts = source.read_parts(self._digest)
        self._layers = len({*parts.layers})
        bring = functools.partial(self._bring, source, parts, partial, published, find_present, how)
        with self._cache.link_layers(parts, partial) if source.is_remote else contextlib.nullcontext():
            try:
                bring()
            except OSError as error:  # such as for a quota, of which the file system says nothing before
                if error.errno not in FULL or not self._cache.remove_all():
                    raise
                self._given_up.clear()
                self._downloaded = self._received = 0
                bring()
        if source.is_remote:
            self._cache.keep_layers(parts, partial)
        _remove_trees(partial)
        self._cache.remove_unused()
        self._room.make_space(0, kept=self._digest)

    def _bring(
        self,
        source: ImageOrigin,
        parts: ImageParts,
        partial: Path,
        published: CatalogEntry,
        find_present: Callable[[], StoredImage | None],
        how: FetchOptions,
    ) -> None:
        """Write the image with its layers in the folder `partial`, and put it into its place."""
        expected = parts.size + parts.size // 4  # a squashfs is a little larger than the compressed layers
        self._room.make_space(expected)
        self._room.require_space(source.count_missing_bytes(parts, partial) + expected)
        layers = [*source.fetch_layers(parts, partial, self._note_received, self._note_downloaded)]
        if how.added:
            tar = how.added(parts.config)
            tar_digest = f"sha256:{hashlib.sha256(tar).hexdigest()}"
            layers.append(
                LayerFile(
                    open=lambda: io.BytesIO(tar), name="what is added", digest=tar_digest, tar=tar_digest
                )
            )
        new = Path(self._store.path, "new", f"{self._name}.{os.urandom(8).hex()}")
        written = Path(f"{new}.layers")
        new.mkdir()
        try:
            contents = WrittenContents(written, self._room.require_space) if how.unpacked else None
            image = MergedImage(layers, contents=contents, given_up=self._given_up)
            stored = self._write_image(new, image, published, parts, unpacked=how.unpacked)
            document = new / DOCUMENT
            document.write_text(json.dumps(stored.to_json(), indent=1) + "\n")
            with contextlib.suppress(UsageError):  # a damaged one is replaced
                if earlier := self._store.find(self._digest):
                    _keep_names(stored, earlier.names, new)
            _sync_path(document)
            _sync_path(new)
            if not find_present():
                self._put_in_place(new)
        finally:
            _remove_trees(new, written)

    def _put_in_place(self, new: Path) -> None:
        """Rename a complete image, in place of a damaged one or one of the other kind."""
        place = Path(self._store.get_folder(self._digest))
        gone = Path(f"{new}.gone")
        try:
            if place.exists():
                self._require_unused()
                place.rename(gone)
                # A lease is made before its image is looked for: one that came since then may have found it.
                self._require_unused()
            _rename_folder(new, place)
        except BaseException:
            if gone.exists() and not place.exists():
                gone.rename(place)
            raise
        _sync_path(place.parent)
        _remove_trees(gone)

    def _write_image(
        self, new: Path, image: MergedImage, published: CatalogEntry, parts: ImageParts, *, unpacked: bool
    ) -> StoredImage:
        """Write the files of an image into the folder `new`."""
        kind = FOLDER if unpacked else SQUASHFS
        root = new / ROOTS[kind]
        checksum = None
        if unpacked:
            write_folder(root, image.list_members())
            _sync_file_system(root)
            size = image.size
        else:
            write_squashfs(root, image.list_members(), image.latest)
            _sync_path(root)
            with root.open("rb") as file:
                checksum = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
            size = root.stat().st_size
        return StoredImage(
            digest=self._digest,
            kind=kind,
            root=str(root),
            size=size,
            checksum=checksum,
            config=parts.config,
            names=(published.name,),
        )

    def _require_unused(self) -> None:
        if user := self._store.find_leases(self._digest).get(self._digest):
            raise UsageError(
                f"{self._digest} in {self._store} cannot be replaced: {user} runs from it",
                remedy="try again when it has ended",
            )

    def _note_received(self, size: int) -> None:
        if self._given_up.is_set():
            raise GivenUpError
        with self._lock:
            self._received += size
            self._report_progress()

    def _note_downloaded(self) -> None:
        with self._lock:
            self._downloaded += 1
            self._report_progress()

    def _report_progress(self) -> None:
        progress = PullProgress(layers=self._layers, downloaded=self._downloaded, received=self._received)
        self._on_progress(progress)


def _keep_catalog(store: ImageStore, published: CatalogEntry) -> None:
    """Keep the catalog for selections from the store, unless it is there.

    What starts variants only, such as a step on several nodes, has a catalog without warm images. Those that
    the store knows stay: a version never loses one.
    """
    catalog = published.catalog
    if published.part:
        return
    with contextlib.suppress(UsageError):  # a damaged one is replaced
        known = store.load_catalog(catalog["image"], catalog["version"])
        if known and "warm" in known:
            catalog = {"warm": known["warm"], **catalog}
        if known == catalog:
            return
    store.put_catalog(catalog)


def _keep_names(image: StoredImage, names: Iterable[StoredName], place: str | Path) -> None:
    """Keep names of an image in its folder, except for those of catalogs of which it has one."""
    known = {(known_name.image, known_name.version) for known_name in image.names}
    for name in names:
        if (name.image, name.version) not in known:
            put_name(place, name)


def _remove_leftovers(store: ImageStore, locked_name: str) -> None:
    """Remove what dead processes left: images that never became whole, and downloads that nobody continues.

    Each is removed only with the lock of its image; this process has the one with the `locked_name`.
    """
    for path in [*Path(store.path, "new").iterdir(), *Path(store.path, "partial").iterdir()]:
        name = path.name.partition(".")[0]
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if path.parent.name == "partial" and time.time() - path.stat().st_mtime < STALE_S:
                continue
            if name == locked_name or stack.enter_context(
                hold_lock(Path(store.path, "locks", name), wait=False)
            ):
                remove_tree(path)


def _remove_trees(*paths: Path) -> None:
    """Remove folders that may exist; a later command sweeps what cannot be removed now."""
    for path in paths:
        with contextlib.suppress(OSError):
            remove_tree(path)


def _rename_folder(path: Path, to: Path) -> None:
    """Rename a folder; raise OSError, but not if only the answer to the request was lost."""
    try:
        path.rename(to)
    except OSError:
        if path.exists() or not to.exists():
            raise


def _sync_file_system(path: Path) -> None:
    """Wait until the file system of `path` has all on its disk; raise OSError if that failed.

    sync(2) would wait for the disks of everybody else, and tell of no error.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    finally:
        os.close(descriptor)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
