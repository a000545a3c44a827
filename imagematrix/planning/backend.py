"""What a build needs of engines and registries, as narrow protocols, and the data that passes between."""

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
    """An image of ours that is already in a store; one that is `lost` should be there, and is not."""

    reference: str
    cell: str
    input_digest: str
    development: bool = False
    lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What a build takes its files from: the folder it copies from, and where the images come from.

    `images` say where an image comes from that the builder would not find by its name alone, or would find in
    another state: by the name that the Dockerfile has, "docker-image://" with a reference, or "oci-layout://"
    with a folder and a digest. `args` are build arguments; `secrets` and `ssh` are what it may use, in the
    words of buildx.
    """

    context: Path
    platform: str
    images: Mapping[str, str] = field(default_factory=dict)
    args: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()

    def pinned(self, dockerfile: str) -> str:
        """Return `dockerfile` with the references of those images that come from a registry or the engine.

        BuildKit leaves the history of a base as it is where a FROM names it, and changes its times where a
        named context replaces it: the same inputs would give two images.
        """
        images = self.images.items()
        named = {name: where.removeprefix(IMAGE) for name, where in images if where.startswith(IMAGE)}
        return replaced(dockerfile, named)

    @property
    def contexts(self) -> dict[str, str]:
        """The other images, as named contexts of `docker buildx build --build-context`."""
        return {name: where for name, where in self.images.items() if not where.startswith(IMAGE)}


class Later(Mapping[str, str]):
    """A mapping that `make` gives when it is looked at for the first time."""

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
    """One image to make: the Dockerfile's text, what it takes its files from, its reference and labels.

    The labels may be such that are worked out only when they are looked at, which then takes its time.
    `replaces` is the reference of the image in the store that is to go then. One that is `afresh` takes
    nothing from an earlier build; one that is `apart` shares no bytes on disk with another.
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
        """What the image's manifest is to say of it, as its labels do."""
        return {key: self.labels[key] for key in labels.ANNOTATED if key in self.labels}


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """An image that was made, and the OCI layout that holds it; None if only the engine's store does.

    Without a layout its timestamps are not rewritten, so the same inputs give another digest next time.
    `base_layers` are the digests of those layers that the engine has as those of its base. `attested` is the
    digest of an index in the layout that has the image with its attestations, if any.
    """

    digest: str
    layout: Path | None = None
    base_layers: frozenset[str] = frozenset()
    attested: str | None = None


class Builder(Protocol):
    """What makes images. Every method raises EngineError if it cannot be reached."""

    @property
    def reproducible(self) -> bool:
        """Whether it sets back timestamps, so that the same inputs give the same image."""
        ...

    @property
    def local(self) -> bool:
        """Whether it finds the images of the engine by their names."""
        ...

    def pinned(self, reference: str, digest: str) -> str | None:
        """Return where a base image comes from if it is to have `digest`; None if its name finds it."""
        ...

    def held(self, reference: str, digest: str) -> str | None:
        """Return where a base image comes from as `pinned` does; here, by a name that nobody moves."""
        ...

    def export(self, dockerfile: str, sources: Sources) -> dict[str, str]:
        """Build `dockerfile` and return the text files that its last stage has, by name; raise BuildError."""
        ...

    def base_layers(self, base: str, sources: Sources) -> tuple[Path, ...]:
        """Return the files of the layers that images will have which begin with `base`; raise BuildError.

        Images made later find them there. A builder without layouts has none.
        """
        ...

    def make(self, order: Order, log: TextIO, step: Callable[[str], None]) -> AbstractContextManager[Made]:
        """Build an image without naming it yet; raise BuildError. On leaving, what was not stored may go.

        `log` takes all that the build says, `step` the instruction it is at.
        """
        ...

    def parts(self, made: Made) -> tuple[Part, ...]:
        """Return the layers of an image that was made, the lowest first.

        Their sizes are those of a registry, or uncompressed ones where there is no layout.
        """
        ...

    def stop(self) -> None:
        """End every build that runs; those raise StoppedError."""
        ...


class Store(Protocol):
    """Where images are kept. Every method raises EngineError if it cannot be reached."""

    def present(self, image: str, version: str) -> list[Present]:
        """Return the images of `image`:`version` that the store has."""
        ...

    def components(self, reference: str) -> Mapping[str, str]:
        """Return what an image that is present was made of; nothing where it does not say."""
        ...

    def source(self, reference: str, *, local: bool) -> str | None:
        """Return where a builder finds an image of the store, one with the engine's if `local`; or None."""
        ...

    def store(self, order: Order, made: Made) -> str:
        """Put what was made into the store under its reference; return the digest it has there.

        Raises TagMovedError if something else has that reference.
        """
        ...

    def adopt(self, reference: str) -> str:
        """Take an image that the local engine has, as it is; return the digest it has in the store."""
        ...
