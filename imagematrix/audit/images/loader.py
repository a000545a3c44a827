"""The dynamic loader of an image, which finds libraries in the merged files of its layers."""

from __future__ import annotations

from imagematrix.hardware.ld_cache import CACHE, LoaderCache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.audit.images.layer import PlainFile
    from imagematrix.images.oci.tree import ImageTree

# Folders of the dynamic loader, ld.so(8), for 64-bit x86 and ARM.
DEFAULTS = (
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
)


class Loader:
    """The dynamic loader of an image, by glibc's rules (ld.so(8)).

    Its containers have `library_path` as LD_LIBRARY_PATH.
    """

    def __init__(self, tree: ImageTree[PlainFile], library_path: str = "") -> None:
        self._tree = tree
        self._library_path = [folder for folder in library_path.replace(";", ":").split(":") if folder]
        cache = tree.find(CACHE)
        self._cache = LoaderCache((cache[1].text if cache else None) or b"")

    def find(
        self, name: str, *, runpath: Iterable[str] = (), rpath: Iterable[str] = (), origin: str = "/"
    ) -> tuple[str, PlainFile] | None:
        """Return the path of the file that is loaded for a name, and the file, or None if there is none.

        `runpath` and `rpath` are those of the file that needs it, which is in the folder `origin`.
        """
        before, after = (
            [folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for folder in folders]
            for folders in (rpath, runpath)
        )
        if after:
            before = []  # the loader ignores an RPATH if there is a RUNPATH
        searched = [f"{folder}/{name}" for folder in (*before, *self._library_path, *after)]
        cached = [*self._cache.list_paths(name)][:1]
        for path in (*searched, *cached, *(f"{folder}/{name}" for folder in DEFAULTS)):
            if entry := self._tree.find(path):
                return entry
        return None
