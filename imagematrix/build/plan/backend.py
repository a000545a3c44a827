"""What a build needs from engines and registries, as narrow protocols with their data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from imagematrix.build.dockerfile.dockerfile import replaced
from imagematrix.errors import BuildError
from imagematrix.images.oci.compression import DEFAULT, Compression

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import TextIO

    from imagematrix.images.oci.parts import SizedLayer

__all__ = ["BuildSources", "Builder", "KeptImage", "Made", "Order", "Present", "StoppedError", "Store"]

IMAGE = "docker-image://"


class StoppedError(BuildError):
    """A build was stopped before it ended: by the user, or because another failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """A variant in a store, with its `labels`; if `lost`, it should be there but is missing."""

    reference: str
    cell: str
    input_digest: str
    development: bool = False
    lost: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSources:
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

    def named(self, text: str) -> str:
        """Return a builder's output with the names of images as the Dockerfile has them."""
        for name, where in self.images.items():
            source = where.removeprefix(IMAGE)
            if where.startswith(IMAGE) and not source.startswith(name):
                text = text.replace(f"docker.io/library/{source}", name).replace(source, name)
        return text

    @property
    def contexts(self) -> dict[str, str]:
        """The other images, as named contexts of `docker buildx build --build-context`."""
        return {name: where for name, where in self.images.items() if not where.startswith(IMAGE)}


@dataclass(frozen=True, slots=True)
class Beginning:
    """The beginning of a Dockerfile that other images share, built before the rest.

    `name` is the same for all of them. `needs` are the names of all others that have to be built before, and
    an order lists these before it. If it is `exported`, its layers are those of images.
    """

    name: str
    dockerfile: str
    needs: frozenset[str] = frozenset()
    exported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One image to make: the Dockerfile's text, its sources, its reference and labels.

    If the builder writes layouts, there are no labels before the image is built and audited: then they are
    written once, and state what its bytes prove. Without layouts they are claims, given to the build.
    `together` are the references of all images that the build stores. `first` are parts of the Dockerfile to
    build before it. `compression` is that of the layers that a builder adds to a layout; without layouts, the
    engine compresses what it pushes. `no_cache` uses nothing of earlier builds; `unshared` shares no bytes on
    disk with another build.
    """

    reference: str
    dockerfile: str
    sources: BuildSources
    labels: Mapping[str, str] = field(default_factory=dict)
    together: frozenset[str] = frozenset()
    first: tuple[Beginning, ...] = ()
    compression: Compression = DEFAULT
    no_cache: bool = False
    unshared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A built image, and the OCI layout that holds it; None if it is only in the engine's store.

    Without a layout its timestamps are not rewritten, so the same inputs give another digest next time.
    `stored_layers` are the digests of layers that the engine has from other images. `attested` is the digest
    of an index in the layout with the image and its attestations, if any. If a cache was `imported`, results
    of its steps may be from there.
    """

    digest: str
    layout: Path | None = None
    stored_layers: frozenset[str] = frozenset()
    attested: str | None = None
    imported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptImage:
    """An image in a store: its digest, those of its uncompressed layers, and its label CONTENT."""

    digest: str
    layers: tuple[str, ...]
    content: str | None


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

    def export(
        self, dockerfile: str, sources: BuildSources, first: Sequence[Beginning] = ()
    ) -> dict[str, str]:
        """Build `dockerfile` and return the text files in its last stage, by name; raise BuildError.

        `first` are parts of it to build before.
        """
        ...

    def base_layers(self, base: str, sources: BuildSources, together: Collection[str]) -> tuple[Path, ...]:
        """Return the layer files of `base` as images built on it have them; raise BuildError.

        Later builds reuse them: those of the images with the references `together`. A builder without layouts
        has none.
        """
        ...

    def make(self, order: Order, log: TextIO, step: Callable[[str], None]) -> AbstractContextManager[Made]:
        """Build an image without naming it yet; raise BuildError. On exit, images not stored may be removed.

        Images in layouts get no labels yet; see `rewrite.labelled`.
        `log` receives the output of the build, `step` is called with the current instruction.
        """
        ...

    def parts(self, made: Made) -> tuple[SizedLayer, ...]:
        """Return the layers of a built image, the lowest first.

        Their sizes are those in a registry, or uncompressed ones without a layout.
        """
        ...

    def stop(self) -> None:
        """Stop all running builds, which raise StoppedError."""
        ...


class Store(Protocol):
    """A store of images. Every method raises EngineError if it cannot be reached."""

    @property
    def keeps_layers(self) -> bool:
        """Whether it keeps compressed layers, so that a registry gets them as they were built."""
        ...

    def present(self, image: str, version: str) -> list[Present]:
        """Return the images of `image`:`version` that the store has."""
        ...

    def earlier(self, image: str, cells: Mapping[str, str]) -> Mapping[str, str]:
        """Return the references of images of any version that were built from the inputs of `cells`, by cell.

        `cells` are the input digests by cell. A store that cannot give an image another version without its
        layers has none.
        """
        ...

    def without_layers(self, reference: str, folder: Path) -> Made:
        """Return an image that `earlier` returned, in a new layout in `folder` without its layers."""
        ...

    def components(self, reference: str) -> Mapping[str, str]:
        """Return the components of a present image's identity; empty if its labels have none."""
        ...

    def stored(self, reference: str) -> KeptImage:
        """Return an image that is present."""
        ...

    def layers_of(self, reference: str) -> frozenset[str]:
        """Return the digests of the uncompressed layers of an image; none if there is no such image."""
        ...

    def has_base(self, source: str, layers: Sequence[str], together: Iterable[str]) -> bool:
        """Whether images can be stored without the bytes of the `layers` of their base.

        `source` is where builds find the base; `together` are the references of the images.
        """
        ...

    def source(self, reference: str, *, local: bool) -> str | None:
        """Return the source of a stored image for a builder, `local` to the engine or not; or None."""
        ...

    def store(self, order: Order, made: Made) -> str:
        """Store a built image under its reference; return its digest in the store.

        Development images of the same cell are removed. Raises TagMovedError if another image has that
        reference.
        """
        ...

    def adopt(self, reference: str) -> str:
        """Take over an image of the local engine unchanged; return its digest in the store."""
        ...
