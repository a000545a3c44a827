"""What a build needs from engines and registries, as narrow protocols with their data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from imagematrix.catalog import labels
from imagematrix.errors import BuildError
from imagematrix.render.dockerfile import replaced

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import TextIO

    from imagematrix.oci.parts import Part

__all__ = ["Builder", "Later", "Made", "Order", "Present", "Sources", "StoppedError", "Store"]

IMAGE = "docker-image://"


class StoppedError(BuildError):
    """A build was stopped before it ended: by the user, or because another failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """A variant in a store; if `lost`, it should be there but is missing."""

    reference: str
    cell: str
    input_digest: str
    development: bool = False
    lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The inputs of a build: the folder it copies from, and the sources of its images.

    `images` maps names in the Dockerfile to the sources of images that the builder would not find by name, or
    would find in another state: "docker-image://" with a reference, or "oci-layout://" with a folder and a
    digest. `args` are build arguments. `secrets` and `ssh` list what the build may use, in the syntax of
    buildx.
    """

    context: Path
    platform: str
    images: Mapping[str, str] = field(default_factory=dict)
    args: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()

    def pinned(self, dockerfile: str) -> str:
        """Return `dockerfile` with the references of images that come from a registry or the engine.

        BuildKit keeps the history of a base that a FROM names, but changes its times if a named context
        replaces it: the same inputs would give two images.
        """
        images = self.images.items()
        named = {name: where.removeprefix(IMAGE) for name, where in images if where.startswith(IMAGE)}
        return replaced(dockerfile, named)

    @property
    def contexts(self) -> dict[str, str]:
        """The other images, as named contexts of `docker buildx build --build-context`."""
        return {name: where for name, where in self.images.items() if not where.startswith(IMAGE)}


class Later(Mapping[str, str]):
    """A mapping that `make` computes on first access."""

    def __init__(self, make: Callable[[], Mapping[str, str]]) -> None:
        self._made = cache(make)

    def __getitem__(self, key: str) -> str:
        return self._made()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._made())

    def __len__(self) -> int:
        return len(self._made())


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One image to make: the Dockerfile's text, its sources, its reference and labels.

    The labels may be computed on first access, which takes time. `replaces` is the reference of an image in
    the store to remove afterwards. `afresh` uses no cache of earlier builds; `apart` shares no bytes on disk
    with another build.
    """

    reference: str
    dockerfile: str
    sources: Sources
    labels: Mapping[str, str]
    replaces: str | None = None
    afresh: bool = False
    apart: bool = False

    @property
    def annotations(self) -> dict[str, str]:
        """The labels that are also annotations of the manifest."""
        return {key: self.labels[key] for key in labels.ANNOTATED if key in self.labels}


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A built image, and the OCI layout that holds it; None if it is only in the engine's store.

    Without a layout its timestamps are not rewritten, so the same inputs give another digest next time.
    `base_layers` are the digests of layers that the engine has from the base. `attested` is the digest of an
    index in the layout with the image and its attestations, if any.
    """

    digest: str
    layout: Path | None = None
    base_layers: frozenset[str] = frozenset()
    attested: str | None = None


class Builder(Protocol):
    """A builder of images. Every method raises EngineError if it cannot be reached."""

    @property
    def reproducible(self) -> bool:
        """Whether it rewrites timestamps, so that the same inputs give the same image."""
        ...

    @property
    def local(self) -> bool:
        """Whether it finds the images of the engine by their names."""
        ...

    def pinned(self, reference: str, digest: str) -> str | None:
        """Return the source of a base image with `digest`; None if its name is enough."""
        ...

    def held(self, reference: str, digest: str) -> str | None:
        """Return the source of a base image as `pinned` does, but by a name that cannot move."""
        ...

    def export(self, dockerfile: str, sources: Sources) -> dict[str, str]:
        """Build `dockerfile` and return the text files in its last stage, by name; raise BuildError."""
        ...

    def base_layers(self, base: str, sources: Sources) -> tuple[Path, ...]:
        """Return the layer files of `base` as images built on it have them; raise BuildError.

        Later builds reuse them. A builder without layouts has none.
        """
        ...

    def make(self, order: Order, log: TextIO, step: Callable[[str], None]) -> AbstractContextManager[Made]:
        """Build an image without naming it yet; raise BuildError. On exit, images not stored may be removed.

        `log` receives the output of the build, `step` is called with the current instruction.
        """
        ...

    def parts(self, made: Made) -> tuple[Part, ...]:
        """Return the layers of a built image, the lowest first.

        Their sizes are those in a registry, or uncompressed ones without a layout.
        """
        ...

    def stop(self) -> None:
        """Stop all running builds, which raise StoppedError."""
        ...


class Store(Protocol):
    """A store of images. Every method raises EngineError if it cannot be reached."""

    def present(self, image: str, version: str) -> list[Present]:
        """Return the images of `image`:`version` that the store has."""
        ...

    def components(self, reference: str) -> Mapping[str, str]:
        """Return the components of a present image's identity; empty if its labels have none."""
        ...

    def source(self, reference: str, *, local: bool) -> str | None:
        """Return the source of a stored image for a builder, `local` to the engine or not; or None."""
        ...

    def store(self, order: Order, made: Made) -> str:
        """Store a built image under its reference; return its digest in the store.

        Raises TagMovedError if another image has that reference.
        """
        ...

    def adopt(self, reference: str) -> str:
        """Take over an image of the local engine unchanged; return its digest in the store."""
        ...
