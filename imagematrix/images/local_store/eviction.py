"""Room in a store: what is free, and the layers and images that make room for another one."""

from __future__ import annotations

import os
import pwd
from contextlib import ExitStack
from pathlib import Path

from imagematrix.errors import UsageError
from imagematrix.images.local_store import disk_reserve
from imagematrix.images.local_store.folder_writer import remove_tree
from imagematrix.images.local_store.locks import hold_lock
from imagematrix.images.local_store.stored_layers import StoredLayers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from imagematrix.images.local_store.folder import ImageStore, StoredImage


class StoreRoom:
    """The room in a store with a limit of `max_size` bytes, None for none; `evicted` gets what goes."""

    def __init__(
        self, store: ImageStore, max_size: int | None, evicted: Callable[[StoredImage], object]
    ) -> None:
        self._store = store
        self._layers = StoredLayers(store)
        self._max_size = max_size
        self._evicted = evicted

    def require_space(self, size: int) -> None:
        """Raise UsageError if the disk has no room for some bytes, also without the layers that are kept."""
        free = _count_free_bytes(self._store)
        if free < size <= free + self._layers.size:
            while (free := _count_free_bytes(self._store)) < size and self._layers.remove_oldest():
                pass
        if free < size:
            raise UsageError(
                f"{self._store} has {free} bytes left, and the image needs {size} more",
                remedy=self._store.pruning,
            )

    def make_space(self, size: int, kept: str | None = None) -> None:
        """Remove layers, then images until one of a `size` fits; raise UsageError.

        The images started least recently go first. Those that containers run from stay, those that this user
        cannot remove, and the one with the digest `kept`.
        """
        if self._max_size is None:
            return
        if size > self._max_size:
            raise UsageError(f"the image needs {size} bytes, and {self._store} may have {self._max_size}")
        images = sorted(
            self._store.list_intact_images(), key=lambda image: self._store.get_last_start(image.digest)
        )
        total = sum(image.size for image in images)
        if total + size <= self._max_size:
            while total + self._layers.size + size > self._max_size and self._layers.remove_oldest():
                pass
            return
        self._layers.remove_all()
        for image in images:
            if total + size <= self._max_size:
                return
            if image.digest != kept and remove_stored_image(self._store, image.digest):
                total -= image.size
                self._evicted(image)
        if kept is None and total + size > self._max_size:
            raise UsageError(
                f"the image needs {size} bytes, and {self._store} may have {self._max_size}, of which images "
                f"that are in use or belong to others take {total}",
                remedy="try again when their containers have ended, or let their owners remove them",
            )


def get_lock_path(store: ImageStore, digest: str) -> Path:
    """Return the lock of an image, which whoever changes it has to hold."""
    return Path(store.path, "locks", Path(store.get_folder(digest)).name)


def find_other_owner(store: ImageStore, digest: str) -> str | None:
    """Return who owns a folder of an image that this user cannot empty, None if it can be removed."""
    place = store.get_folder(digest)
    try:
        owner = os.lstat(place).st_uid  # of all its folders, which one process has made
    except FileNotFoundError:
        return None
    may_change = os.R_OK | os.W_OK | os.X_OK
    if owner == os.geteuid() or all(
        os.access(folder, may_change, effective_ids=True) for folder in _list_folders(place)
    ):
        return None
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return f"user {owner}"


def remove_stored_image(store: ImageStore, digest: str) -> bool:
    """Remove an image, unless a container runs from it, another process fetches it, or it is another user's.

    Returns whether it is gone. A full disk is no obstacle while the store has its reserve. Raises OSError.
    """
    place = Path(store.get_folder(digest))
    gone = Path(store.path, "new", f"{place.name}.{os.urandom(8).hex()}")
    with ExitStack() as stack:
        lock = get_lock_path(store, digest)
        held = disk_reserve.call_with_reserve(store, lambda: stack.enter_context(hold_lock(lock, wait=False)))
        if not held or store.find_leases(digest) or find_other_owner(store, digest):
            return False
        try:
            disk_reserve.call_with_reserve(store, lambda: place.rename(gone))
        except FileNotFoundError:
            return True
        # A lease is made before its image is looked for: one that came since then may have found it.
        if store.find_leases(digest):
            gone.rename(place)
            return False
        disk_reserve.call_with_reserve(store, lambda: remove_tree(gone))
    store.remove_start_notes(digest)
    disk_reserve.fill_reserve(store)
    return True


def _count_free_bytes(store: ImageStore) -> int:
    state = os.statvfs(store.path)
    return state.f_bavail * state.f_frsize


def _list_folders(path: str) -> Iterator[Path]:
    """Yield a folder and all those in it, each before what is in it."""
    yield Path(path)
    for folder, names, _ in os.walk(path):
        yield from (inside for name in names if not (inside := Path(folder, name)).is_symlink())
