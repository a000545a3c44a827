"""Layers of a store's images as they came, so that an image that shares some receives only the others.

A layer is kept as long as an image in the store has it and nothing else needs the room. While an image is
fetched, its layers are moved to where their downloads would be, and are compared with their digests like
those. So a damaged layer is removed by the first command that reads it, and the next one receives it anew.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from imagematrix.common.image_reference import DIGEST
from imagematrix.common.json_documents import Fields
from imagematrix.errors import UsageError
from imagematrix.images.local_store.origins import get_layer_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.images.local_store.folder import ImageStore, StoredImage
    from imagematrix.images.local_store.origins import ImageParts

PART = "layers"  # of a store


class LayerCache:
    """The layers in a store, each in a file that has the digest of its tar as its name.

    The configuration of an image names that digest too. What cannot be kept or removed stays as it is.
    """

    def __init__(self, store: ImageStore) -> None:
        self._folder = Path(store.path, PART)

    @property
    def size(self) -> int:
        """The bytes of all layers."""
        return sum(state.st_size for _, state in self._list_files())

    def take_layers(self, parts: ImageParts, folder: Path) -> None:
        """Move the layers of an image that are here to a folder of downloads."""
        for kept, download, size in self._pair_files(parts, folder):
            with contextlib.suppress(OSError):
                state = kept.lstat()
                # Where users share a store, it may be of another one, which this one cannot go on with.
                if (
                    stat.S_ISREG(state.st_mode)
                    and state.st_size == size
                    and os.access(kept, os.R_OK | os.W_OK)
                ):
                    kept.rename(download)

    def keep_layers(self, parts: ImageParts, folder: Path) -> None:
        """Move the layers of an image here, from the folder where they were downloaded and checked."""
        for kept, download, _ in self._pair_files(parts, folder):
            with contextlib.suppress(OSError):
                download.rename(kept)

    def remove_unused(self, images: Iterable[StoredImage]) -> None:
        """Remove the layers that none of the store's images has."""
        used = {tar for image in images for tar in _list_tars(image)}
        for path, _ in self._list_files():
            if f"sha256:{path.name}" not in used:
                _remove_file(path)

    def remove_oldest(self) -> bool:
        """Remove the layer that came first; return whether one could be removed."""
        files = sorted(self._list_files(), key=lambda file: file[1].st_mtime)
        return any(_remove_file(path) for path, _ in files)

    def _pair_files(self, parts: ImageParts, folder: Path) -> Iterator[tuple[Path, Path, int]]:
        """Yield the file of each layer here, that of its download, and the size of both."""
        for layer, size, tar in zip(parts.layers, parts.sizes, parts.tars, strict=True):
            if tar and DIGEST.fullmatch(tar):
                yield self._folder / tar.removeprefix("sha256:"), get_layer_path(folder, layer), size

    def _list_files(self) -> Iterator[tuple[Path, os.stat_result]]:
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    yield path, path.lstat()


def _list_tars(image: StoredImage) -> tuple[str, ...]:
    try:
        return Fields(image.config, image.digest).get_object_or_empty("rootfs").get_texts("diff_ids")
    except UsageError:  # an archive's, or a damaged one
        return ()


def _remove_file(path: Path) -> bool:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True
