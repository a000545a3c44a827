"""The tree of an image's files as its containers see it: all layers, merged.

Layers are merged as overlayfs does, because engines unpack each layer into a folder of its own. Within a
layer, a path through a link goes to the link's target. Between layers, two folders at the same path are
merged; anything else hides what lower layers have at its path. A folder also hides a link to a folder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from imagematrix.errors import AuditError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

HOPS = 40  # links that the kernel follows before it gives up (path_resolution(7))

F = TypeVar("F")  # the entry of a file: a regular file or a special one
F_co = TypeVar("F_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder. Whoever needs more of it than that it is there derives a class."""


@dataclass(frozen=True, slots=True)
class Symlink:
    """A symbolic link."""

    target: str


@dataclass(frozen=True, slots=True)
class Hardlink:
    """A hard link: another name for the file at the path `target`."""

    target: str


FOLDER = Folder()


class TreeLayer(Protocol[F_co]):
    """A layer: its entries by path, the paths that it removes, and the folders that it empties."""

    @property
    def digest(self) -> str:
        """The digest, for messages."""

    @property
    def entries(self) -> Mapping[str, Folder | Symlink | Hardlink | F_co]:
        """The entries by absolute path; the path of the root is a slash."""

    @property
    def removed(self) -> frozenset[str]:
        """The paths that it removes from lower layers."""

    @property
    def emptied(self) -> frozenset[str]:
        """The folders of which it removes everything that lower layers have in them."""


@dataclass(slots=True)
class _Directory:
    """A folder. `removed` are the names that its layer removes from it; `emptied`: the layer removes all.

    `entry` is the folder's own, None if no layer has one.
    """

    inner: dict[str, Any] = field(default_factory=dict)  # of _Directory, Symlink, or a file's entry
    removed: set[str] = field(default_factory=set)
    emptied: bool = False
    entry: Folder | None = None

    def cover(self, upper: _Directory) -> None:
        """Merge the same folder of the next layer into this one."""
        waiting = [(self, upper)]
        while waiting:
            below, above = waiting.pop()
            below.entry = above.entry or below.entry
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


class ImageTree(Generic[F]):
    """The merged files of `layers`, the lowest first. Raises AuditError if no engine would unpack them."""

    def __init__(self, layers: Iterable[TreeLayer[F]]) -> None:
        self._root = _Directory()
        for layer in layers:
            self._apply_layer(layer)

    def list_files(self) -> Iterator[tuple[str, F]]:
        """Yield the path and the entry of every file, sorted by path. Names of one file share an entry."""
        return ((path, node) for path, node in self._walk() if not isinstance(node, _Directory | Symlink))

    def list_links(self) -> Iterator[tuple[str, Symlink]]:
        """Yield the path and the entry of each symbolic link, sorted by path."""
        return ((path, node) for path, node in self._walk() if isinstance(node, Symlink))

    def list_folders(self) -> Iterator[tuple[str, Folder | None]]:
        """Yield the path and the entry of each folder, sorted: the root, "", is the first.

        The entry is None if no layer has one, only something in the folder.
        """
        return ((path, node.entry) for path, node in self._walk() if isinstance(node, _Directory))

    def _walk(self) -> Iterator[tuple[str, Any]]:
        waiting: list[tuple[str, Any]] = [("", self._root)]
        while waiting:
            path, node = waiting.pop()
            yield path, node
            if isinstance(node, _Directory):
                ordered = sorted(node.inner.items(), reverse=True)
                waiting += [(f"{path}/{name}", inner) for name, inner in ordered]

    def find(self, path: str) -> tuple[str, F] | None:
        """Follow all links in a path; return the file's own path and the file, or None if it is no file."""
        names, node = _walk_path(self._root, path)
        if node is None or isinstance(node, _Directory | Symlink):
            return None
        return f"/{'/'.join(names)}", node

    def list_names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none if it does not exist."""
        _, node = _walk_path(self._root, folder)
        return sorted(node.inner) if isinstance(node, _Directory) else []

    def _apply_layer(self, layer: TreeLayer[F]) -> None:
        upper = _Directory()
        for path in layer.emptied:
            _make_folder(upper, path, layer.digest).emptied = True
        upper.emptied = False  # overlayfs ignores an opaque root
        for path in layer.removed:
            parent, _, name = path.rpartition("/")
            _make_folder(upper, parent, layer.digest).removed.add(name)
        for path, entry in layer.entries.items():
            parent, _, name = path.rpartition("/")
            folder = _make_folder(upper, parent, layer.digest)
            if isinstance(entry, Folder):
                if not name:
                    upper.entry = entry
                    continue
                here = folder.inner.get(name)
                if not isinstance(here, _Directory):
                    here = folder.inner[name] = _Directory()
                here.entry = entry
            elif isinstance(entry, Hardlink):
                folder.inner[name] = self._find_link_target(upper, entry, path, layer.digest)
            else:
                folder.inner[name] = entry
        self._root.cover(upper)

    def _find_link_target(self, upper: _Directory, entry: Hardlink, path: str, digest: str) -> F | Symlink:
        parent, _, name = entry.target.rpartition("/")
        for root in (upper, self._root):
            _, folder = _walk_path(root, parent)
            node = folder.inner.get(name) if isinstance(folder, _Directory) else None
            if node is not None and not isinstance(node, _Directory):
                linked: F | Symlink = node
                return linked
        raise AuditError(f"layer {digest} links {path} to {entry.target}, which is not a file")


def _walk_path(root: _Directory, path: str, *, make: bool = False) -> tuple[list[str], Any]:
    """Follow a path; return the names in the resolved path, and the entry there, or None if there is none.

    With `make`, create a folder there if there is nothing, and all its parents.
    """
    names: list[str] = []
    passed: list[Any] = [root]
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
        if make and isinstance(here, _Directory) and node is None:
            node = here.inner[name] = _Directory()
        if node is None or isinstance(node, Symlink):
            return names, None
        names.append(name)
        passed.append(node)
    return names, passed[-1]


def _make_folder(root: _Directory, path: str, digest: str) -> _Directory:
    """Return the folder at a path, creating it if needed.

    Raises AuditError if a file is there, or links in a loop. Engines refuse such a layer, whose digest is
    `digest`: containerd by mkparent() in archive/tar.go, Docker when it creates what is in the folder.
    """
    here: Any = root
    for name in path.split("/")[1:]:
        here = here.inner.get(name)
        if not isinstance(here, _Directory):
            break
    else:  # there, and through no link: so it is for nearly every entry of a layer
        directory: _Directory = here
        return directory
    _, node = _walk_path(root, path, make=True)
    if not isinstance(node, _Directory):
        raise AuditError(f"layer {digest} has entries in {path}, which is no folder")
    return node
