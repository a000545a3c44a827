"""The reserve of a store: room on its disk that nothing but the removal of images takes.

Removing an image needs a lock, which is a file: on a full disk there would be no way to free space.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from imagematrix.images.local_store.folder import FULL
from imagematrix.images.local_store.stored_layers import StoredLayers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from imagematrix.images.local_store.folder import ImageStore

    T = TypeVar("T")

PART = "reserve"  # of a store
FILES = 4  # each is a file's worth of inodes, of which a lock and what is done with it need up to three
SIZE = 1 << 16  # bytes of each: at least one block, on parallel file systems too


def fill_reserve(store: ImageStore) -> None:
    """Make what the reserve lacks, as far as the disk has room."""
    folder = Path(store.path, PART)
    with contextlib.suppress(OSError):
        folder.mkdir(exist_ok=True)
        for path in (folder / str(number) for number in range(FILES)):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size < SIZE:  # it was made when the disk was full
                    path.unlink()
            try:
                with path.open("xb") as file:
                    file.write(os.urandom(SIZE))  # a file system that compresses gives zeros no room
            except FileExistsError:
                continue
            except OSError:
                path.unlink()
                raise


def call_with_reserve(store: ImageStore, action: Callable[[], T]) -> T:
    """Return what `action` returns; while the disk is too full for it, layers or the reserve make room.

    Raises what `action` raises, such as OSError if nothing is left of both.
    """
    while True:
        try:
            return action()
        except OSError as error:
            if error.errno not in FULL or not (StoredLayers(store).remove_oldest() or _spend_file(store)):
                raise


def _spend_file(store: ImageStore) -> bool:
    """Remove a file of the reserve; return whether there was one."""
    for number in range(FILES):
        with contextlib.suppress(OSError):
            Path(store.path, PART, str(number)).unlink()
            return True
    return False
