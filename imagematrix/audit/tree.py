"""The files of an image as a container of it sees them: its layers upon each other.

They are put together as layer.md of the OCI image specification has it, and as containerd does it: what a
layer takes away goes first, a file in a folder that is a link goes where the link leads, two folders become
one, and what a layer has at a path otherwise hides what was there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from imagematrix.audit.layer import Folder, Hardlink, Plain, Symlink
from imagematrix.errors import AuditError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.audit.layer import Layer

__all__ = ["Tree"]

HOPS = 40  # links that the kernel follows before it gives up (path_resolution(7))


@dataclass(slots=True)
class _Directory:
    inner: dict[str, _Directory | Symlink | Plain] = field(default_factory=dict)


class Tree:
    """What `layers` have together, the lowest first; raise AuditError where no engine would unpack them."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        self._root = _Directory()
        for layer in layers:
            self._apply(layer)

    def files(self) -> Iterator[tuple[str, Plain]]:
        """Yield path and file of all there are, sorted by path."""
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
        """Return the file that a path leads to, by all links, and its own path; None where it is none."""
        names, node = self._walk(path)
        return (f"/{'/'.join(names)}", node) if isinstance(node, Plain) else None

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none where it is none."""
        _, node = self._walk(folder)
        return sorted(node.inner) if isinstance(node, _Directory) else []

    def _walk(
        self, path: str, *, make: bool = False
    ) -> tuple[list[str], _Directory | Symlink | Plain | None]:
        """Return the names on the way to what a path leads to, without links, and what that is.

        None where it is nothing; with `make` it is a folder then, and so is all on the way.
        """
        names: list[str] = []
        passed: list[_Directory | Symlink | Plain] = [self._root]
        ahead = path.split("/")[::-1]
        hops = 0
        while ahead:
            name = ahead.pop()
            if name == "..":
                names, passed = names[:-1], passed[:-1] or [self._root]
            if name in ("", ".", ".."):
                continue
            here = passed[-1]
            node = here.inner.get(name) if isinstance(here, _Directory) else None
            if isinstance(node, Symlink) and hops < HOPS:
                hops += 1
                if node.target.startswith("/"):
                    names, passed = [], [self._root]
                ahead += node.target.split("/")[::-1]
                continue
            if make and isinstance(here, _Directory) and not isinstance(node, _Directory):
                node = here.inner[name] = _Directory()
            if node is None or isinstance(node, Symlink):
                return names, None
            names.append(name)
            passed.append(node)
        return names, passed[-1]

    def _directory(self, path: str, *, make: bool = False) -> _Directory | None:
        _, node = self._walk(path, make=make)
        return node if isinstance(node, _Directory) else None

    def _apply(self, layer: Layer) -> None:
        for path in layer.emptied:
            if folder := self._directory(path):
                folder.inner.clear()
        for path in layer.removed:
            parent, _, name = path.rpartition("/")
            if folder := self._directory(parent):
                folder.inner.pop(name, None)
        for path, entry in layer.entries.items():
            parent, _, name = path.rpartition("/")
            folder = self._directory(parent, make=True) or self._root
            if isinstance(entry, Folder):
                if not isinstance(folder.inner.get(name), _Directory):
                    folder.inner[name] = _Directory()
            elif isinstance(entry, Hardlink):
                folder.inner[name] = self._linked(entry, path, layer.digest)
            else:
                folder.inner[name] = entry

    def _linked(self, entry: Hardlink, path: str, digest: str) -> Plain | Symlink:
        parent, _, name = entry.target.rpartition("/")
        folder = self._directory(parent)
        node = folder.inner.get(name) if folder else None
        if not isinstance(node, Plain | Symlink):
            raise AuditError(f"layer {digest} links {path} to {entry.target}, which is not a file")
        return node
