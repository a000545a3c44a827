"""The files of an image as its containers see them: all its layers, merged.

Layers are merged as overlayfs does, because engines unpack each layer into a folder of its own. Within a
layer, a path through a link goes to the link's target. Between layers, two folders at the same path are
merged; anything else hides what lower layers have at its path. A folder also hides a link to a folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from imagematrix.audit.layer import Folder, Hardlink, Plain, Symlink
from imagematrix.errors import AuditError
from imagematrix.loader_cache import CACHE, LoaderCache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.audit.layer import Layer

__all__ = ["ImageTree", "Loader"]

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
HOPS = 40  # links that the kernel follows before it gives up (path_resolution(7))


@dataclass(slots=True)
class _Directory:
    """A folder. `removed` are the names that its layer removes from it; `emptied`: the layer removes all."""

    inner: dict[str, _Directory | Symlink | Plain] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    emptied: bool = False

    def cover(self, upper: _Directory) -> None:
        """Merge the same folder of the next layer into this one."""
        waiting = [(self, upper)]
        while waiting:
            below, above = waiting.pop()
            if above.emptied:
                below.inner.clear()
            for name in above.removed:
                below.inner.pop(name, None)
            for name, node in above.inner.items():
                here = below.inner.get(name)
                if isinstance(here, _Directory) and isinstance(node, _Directory):
                    waiting.append((here, node))
                else:
                    below.inner[name] = node


class ImageTree:
    """The merged files of `layers`, the lowest first. Raises AuditError if no engine would unpack them."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self._root = _Directory()
        for layer in layers:
            self._apply(layer)

    def files(self) -> Iterator[tuple[str, Plain]]:
        """Yield the path and the entry of every file, sorted by path."""
        return ((path, node) for path, node in self._all() if isinstance(node, Plain))

    def links(self) -> Iterator[str]:
        """Yield the path of each symbolic link, sorted."""
        return (path for path, node in self._all() if isinstance(node, Symlink))

    def _all(self) -> Iterator[tuple[str, Symlink | Plain]]:
        waiting: list[tuple[str, _Directory | Symlink | Plain]] = [("", self._root)]
        while waiting:
            path, node = waiting.pop()
            if isinstance(node, _Directory):
                ordered = sorted(node.inner.items(), reverse=True)
                waiting += [(f"{path}/{name}", inner) for name, inner in ordered]
            else:
                yield path, node

    def find(self, path: str) -> tuple[str, Plain] | None:
        """Follow all links in a path; return the file's own path and the file, or None if it is no file."""
        names, node = self._walk(path)
        return (f"/{'/'.join(names)}", node) if isinstance(node, Plain) else None

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none if it does not exist."""
        _, node = self._walk(folder)
        return sorted(node.inner) if isinstance(node, _Directory) else []

    def _walk(self, path: str) -> tuple[list[str], _Directory | Symlink | Plain | None]:
        return _walked(self._root, path)

    def _apply(self, layer: Layer) -> None:
        upper = _Directory()
        for path in layer.emptied:
            _made(upper, path).emptied = True
        upper.emptied = False  # overlayfs ignores an opaque root
        for path in layer.removed:
            parent, _, name = path.rpartition("/")
            _made(upper, parent).removed.add(name)
        for path, entry in layer.entries.items():
            parent, _, name = path.rpartition("/")
            folder = _made(upper, parent)
            if isinstance(entry, Folder):
                if not isinstance(folder.inner.get(name), _Directory):
                    folder.inner[name] = _Directory()
            elif isinstance(entry, Hardlink):
                folder.inner[name] = self._linked(upper, entry, path, layer.digest)
            else:
                folder.inner[name] = entry
        self._root.cover(upper)

    def _linked(self, upper: _Directory, entry: Hardlink, path: str, digest: str) -> Plain | Symlink:
        parent, _, name = entry.target.rpartition("/")
        for root in (upper, self._root):
            _, folder = _walked(root, parent)
            node = folder.inner.get(name) if isinstance(folder, _Directory) else None
            if isinstance(node, Plain | Symlink):
                return node
        raise AuditError(f"layer {digest} links {path} to {entry.target}, which is not a file")


def _walked(
    root: _Directory, path: str, *, make: bool = False
) -> tuple[list[str], _Directory | Symlink | Plain | None]:
    """Follow a path; return the names in the resolved path, and the entry there, or None if there is none.

    With `make`, create a folder there if none exists, and all its parents.
    """
    names: list[str] = []
    passed: list[_Directory | Symlink | Plain] = [root]
    ahead = path.split("/")[::-1]
    hops = 0
    while ahead:
        name = ahead.pop()
        if name == "..":
            names, passed = names[:-1], passed[:-1] or [root]  # the parent of the root is the root
        if name in ("", ".", ".."):
            continue
        here = passed[-1]
        node = here.inner.get(name) if isinstance(here, _Directory) else None
        if isinstance(node, Symlink) and hops < HOPS:
            hops += 1
            if node.target.startswith("/"):
                names, passed = [], [root]
            ahead += node.target.split("/")[::-1]
            continue
        if make and isinstance(here, _Directory) and not isinstance(node, _Directory):
            node = here.inner[name] = _Directory()
        if node is None or isinstance(node, Symlink):
            return names, None
        names.append(name)
        passed.append(node)
    return names, passed[-1]


def _made(root: _Directory, path: str) -> _Directory:
    """Return the folder at a path, creating it if needed."""
    _, node = _walked(root, path, make=True)
    return node if isinstance(node, _Directory) else root


class Loader:
    """The dynamic loader of an image, by glibc's rules (ld.so(8)).

    Its containers have `library_path` as LD_LIBRARY_PATH.
    """

    def __init__(self, tree: ImageTree, library_path: str = "") -> None:
        self._tree = tree
        self._given = [folder for folder in library_path.replace(";", ":").split(":") if folder]
        cache = tree.find(CACHE)
        self._cache = LoaderCache((cache[1].text if cache else None) or b"")

    def find(
        self, name: str, *, runpath: Iterable[str] = (), rpath: Iterable[str] = (), origin: str = "/"
    ) -> tuple[str, Plain] | None:
        """Return the path of the file that is loaded for a name, and the file, or None if there is none.

        `runpath` and `rpath` are those of the file that needs it, which is in the folder `origin`.
        """
        first, later = (
            [folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for folder in own]
            for own in (rpath, runpath)
        )
        # The loader ignores an RPATH if there is a RUNPATH.
        searched = [f"{folder}/{name}" for folder in (*([] if later else first), *self._given, *later)]
        cached = [*self._cache.paths(name)][:1]
        for path in (*searched, *cached, *(f"{folder}/{name}" for folder in DEFAULTS)):
            if entry := self._tree.find(path):
                return entry
        return None
