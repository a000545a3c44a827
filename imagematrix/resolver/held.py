"""The names of images that an engine on this node holds: Docker's and Podman's, or containerd's."""

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
        """Names of images from the resolver."""

        @property
        def prefix(self) -> str:
            """What all of them begin with, before the repository."""

        def held(self) -> Iterator[tuple[str, frozenset[str]]]:
            """Yield the names, with the digests of their images; raise EngineError if they cannot be read."""

        def remove(self, name: str) -> None:
            """Remove a name; containers that use its image go on. Raises EngineError if it stays."""


__all__ = ["Containerd", "Docker"]

TIMEOUT_S = 60


class Docker:
    """The names at the address of the resolver, in the engine that docker's clients use."""

    def __init__(self, address: str) -> None:
        self.prefix = f"{address}/"
        self._client = engine.client()

    def held(self) -> Iterator[tuple[str, frozenset[str]]]:
        """Yield the names, with the digests of their images."""
        with engine.errors():
            for image in self._client.api.images():
                for name in image.get("RepoTags") or ():
                    if name.startswith(self.prefix):
                        yield name, engine.digests_of(self._client, name)

    def remove(self, name: str) -> None:
        """Remove a name by force: a container that uses it would stop that, though only a name goes."""
        with engine.errors():
            self._client.api.remove_image(name, force=True, noprune=True)


@dataclass(frozen=True, slots=True)
class Containerd:
    """The names in a registry that the resolver is the mirror of, in a namespace of containerd.

    It asks containerd's own client, ctr, which finds containerd by CONTAINERD_ADDRESS.
    """

    registry: str
    namespace: str

    @property
    def prefix(self) -> str:
        """What the names begin with."""
        return f"{self.registry}/"

    def held(self) -> Iterator[tuple[str, frozenset[str]]]:
        """Yield the names with a tag, with the digests of their images."""
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
            raise EngineError(done.stderr.strip() or "ctr failed", remedy="is containerd running?")
        return done.stdout
