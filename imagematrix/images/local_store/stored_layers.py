"""Layers of a store's images as they came, so that an image that shares some receives only the others.

A layer is kept as long as an image in the store has it and nothing else needs the room. A command that
fetches an image makes a link to each of its layers where the download would be, which is then compared with
its digest as a download is. A damaged layer is removed, and the next command receives it anew.
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
    from collections.abc import Iterator

    from imagematrix.images.local_store.folder import ImageStore, StoredImage
    from imagematrix.images.local_store.origins import ImageParts

PART = "layers"  # of a store


class StoredLayers:
    """The layers in a store, each in a file that has the digest of its tar as its name.

    The configuration of an image names that digest too. What cannot be kept or removed stays as it is.
    """

    def __init__(self, store: ImageStore) -> None:
        self._store = store
        self._folder = Path(store.path, PART)

    @property
    def size(self) -> int:
        """The bytes of all layers."""
        return sum(state.st_size for _, state in self._list_files())

    @contextlib.contextmanager
    def link_layers(self, parts: ImageParts, folder: Path) -> Iterator[None]:
        """Link the layers of an image that are here into a folder of downloads, while it is fetched.

        If that fails, the links are removed. A layer without its link was found to be damaged.
        """
        linked = []
        for kept, download, size in self._pair_files(parts, folder):
            with contextlib.suppress(OSError):
                state = kept.lstat()
                # Where users share a store, it may be of another one, which this one cannot go on with.
                usable = stat.S_ISREG(state.st_mode) and os.access(kept, os.R_OK | os.W_OK)
                if usable and state.st_size == size:
                    link = download.with_suffix(".link")  # a part of the layer stays if there can be no links
                    link.unlink(missing_ok=True)
                    link.hardlink_to(kept)
                    link.rename(download)
                    link.unlink(missing_ok=True)  # a killed command had linked it already
                    linked.append((kept, download))
        try:
            yield
        except BaseException:
            for kept, download in linked:
                with contextlib.suppress(OSError):
                    if not download.exists():
                        kept.unlink()
                    elif download.stat().st_nlink > 1:
                        download.unlink()
            raise

    def keep_layers(self, parts: ImageParts, folder: Path) -> None:
        """Move the layers of an image here, from the folder where they were downloaded and checked."""
        for kept, download, _ in self._pair_files(parts, folder):
            with contextlib.suppress(OSError):
                download.rename(kept)

    def remove_unused(self) -> None:
        """Remove the layers that none of the store's images has."""
        files = [*self._list_files()]  # before the images: what another command keeps now is not among them
        used = {tar for image in self._store.list_intact_images() for tar in _list_tars(image)}
        for path, _ in files:
            if f"sha256:{path.name}" not in used:
                _remove_file(path)

    def remove_oldest(self) -> bool:
        """Remove the layer that came first, of those that no command reads now if there are any.

        Returns whether one could be removed.
        """
        files = sorted(self._list_files(), key=lambda file: (file[1].st_nlink > 1, file[1].st_mtime))
        return any(_remove_file(path) for path, _ in files)

    def remove_all(self) -> bool:
        """Remove all layers; return whether there was one that could be removed."""
        return sum(_remove_file(path) for path, _ in [*self._list_files()]) > 0

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
