"""The names of images in an engine on this node: Docker, Podman or containerd."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from imagematrix import engine
from imagematrix.errors import EngineError
from imagematrix.reference import DIGEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Protocol

    class Names(Protocol):
        """The names of the images in an engine that came through the resolver."""

        @property
        def prefix(self) -> str:
            """The common beginning of all names, before the repository."""

        def held(self) -> Iterator[tuple[str, frozenset[str]]]:
            """Yield each name and the digests of its image; raise EngineError if they cannot be read."""

        def remove(self, name: str) -> None:
            """Remove a name; containers of its image keep running. Raises EngineError if that fails."""


__all__ = ["Containerd", "Docker"]

TIMEOUT_S = 60


class Docker:
    """The names that begin with the resolver's address, in the engine that docker's clients use."""

    def __init__(self, address: str) -> None:
        self.prefix = f"{address}/"
        self._client = engine.client()

    def held(self) -> Iterator[tuple[str, frozenset[str]]]:
        """Yield each name and the digests of its image."""
        with engine.errors():
            for image in self._client.api.images():
                for name in image.get("RepoTags") or ():
                    if name.startswith(self.prefix):
                        yield name, engine.digests_of(self._client, name)

    def remove(self, name: str) -> None:
        """Remove only the name, by force: otherwise Docker refuses if a container uses it."""
        with engine.errors():
            self._client.api.remove_image(name, force=True, noprune=True)


@dataclass(frozen=True, slots=True)
class Containerd:
    """The names in a `namespace` of containerd from a `registry` that the resolver mirrors.

    It uses containerd's client ctr, which finds containerd by CONTAINERD_ADDRESS.
    """

    registry: str
    namespace: str

    @property
    def prefix(self) -> str:
        """The common beginning of the names."""
        return f"{self.registry}/"

    def held(self) -> Iterator[tuple[str, frozenset[str]]]:
        """Yield each name with a tag, and the digests of its image."""
        for line in self._ctr("list").splitlines():
            name, *rest = line.split()
            digests = frozenset(word for word in rest if DIGEST.fullmatch(word))
            if name.startswith(self.prefix) and digests and "@" not in name:
                yield name, digests

    def remove(self, name: str) -> None:
        """Remove a name."""
        self._ctr("remove", name)

    def _ctr(self, *words: str) -> str:
        command = ["ctr", "--namespace", self.namespace, "images", *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        except FileNotFoundError:
            raise EngineError("ctr not found", remedy="install containerd's client") from None
        except subprocess.TimeoutExpired:
            raise EngineError(f"containerd did not answer in {TIMEOUT_S} s") from None
        if done.returncode:
            raise EngineError(done.stderr.strip() or "ctr failed", remedy="check that containerd is running")
        return done.stdout
