"""What a build needs from engines and registries, as narrow protocols with their data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from imagematrix.build.dockerfile.dockerfile import replace_images
from imagematrix.errors import BuildError
from imagematrix.images.oci.compression import DEFAULT, Compression
from imagematrix.images.oci.layout import LayoutImage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from typing import Any, TextIO

    from imagematrix.images.oci.parts import SizedLayer

IMAGE = "docker-image://"


class StoppedError(BuildError):
    """A build was stopped before it ended: by the user, or because another failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVariant:
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

    def pin_references(self, dockerfile: str) -> str:
        """Return `dockerfile` with the references of images that come from a registry or the engine.

        BuildKit keeps the history of a base that a FROM names, but changes its times if a named context
        replaces it: the same inputs would give two images.
        """
        images = self.images.items()
        references = {name: where.removeprefix(IMAGE) for name, where in images if where.startswith(IMAGE)}
        return replace_images(dockerfile, references)

    def restore_names(self, text: str) -> str:
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
class SharedPrefix:
    """The first steps of a Dockerfile, which several images share and which are built once, before the rest.

    Images that share a prefix have one `name` for it. `needs` are the names of the prefixes that are built
    before it; a build request lists these first. If it is `exported`, its layers are layers of images.
    """

    name: str
    dockerfile: str
    needs: frozenset[str] = frozenset()
    exported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """A request to build one image: the Dockerfile's text, its sources, its reference and labels.

    If the builder writes layouts, there are no labels before the image is built and audited: then they are
    written once, and state what its bytes prove. Without layouts they are claims, given to the build.
    `sibling_references` are those of all images that the build stores. `shared_prefixes` are parts of the
    Dockerfile to build before it. `compression` is that of the layers that a builder adds to a layout;
    without layouts, the engine compresses what it pushes. `no_cache` uses nothing of earlier builds;
    `unshared` shares no bytes on disk with another build.
    """

    reference: str
    dockerfile: str
    sources: BuildSources
    labels: Mapping[str, str] = field(default_factory=dict)
    sibling_references: frozenset[str] = frozenset()
    shared_prefixes: tuple[SharedPrefix, ...] = ()
    compression: Compression = DEFAULT
    no_cache: bool = False
    unshared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltImage:
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

    @property
    def source(self) -> str | None:
        """The source of the image for a build that takes it from its layout."""
        return f"oci-layout://{self.layout}@{self.digest}" if self.layout else None

    @property
    def layout_image(self) -> LayoutImage:
        """The image in its layout, which it has."""
        assert self.layout is not None  # noqa: S101 - for the type checker
        return LayoutImage(self.layout, self.digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImageInfo:
    """An image in a store: its digest, those of its uncompressed layers, and its configuration.

    The configuration may be what an engine tells of it.
    """

    digest: str
    layers: tuple[str, ...]
    configuration: Mapping[str, Any]


class Builder(Protocol):
    """A builder of images. Every method raises EngineError if it cannot be reached."""

    @property
    def local(self) -> bool:
        """Whether it finds the images of the engine by their names."""
        ...

    @property
    def parallel_exports(self) -> int:
        """How many images it exports at a time, what they share before them; 1 if it exports none."""
        ...

    def pin_by_digest(self, reference: str, digest: str) -> str | None:
        """Return the source of a base image with `digest`; None if its name is enough."""
        ...

    def pin_by_immovable_name(self, reference: str, digest: str) -> str | None:
        """Return the source of a base image as `pin_by_digest` does, but by a name that cannot move."""
        ...

    def export(
        self, dockerfile: str, sources: BuildSources, prefixes: Sequence[SharedPrefix] = ()
    ) -> dict[str, str]:
        """Build `dockerfile` and return the text files in its last stage, by name; raise BuildError.

        `prefixes` are parts of it to build before.
        """
        ...

    def export_base_layers(
        self, base: str, sources: BuildSources, sibling_references: Collection[str]
    ) -> tuple[Path, ...]:
        """Return the layer files of `base` as images built on it have them; raise BuildError.

        Later builds reuse them: those of the images with `sibling_references`. A builder without layouts has
        none.
        """
        ...

    def add_early_labels(self, order: BuildRequest, promise: Callable[[], Mapping[str, str]]) -> BuildRequest:
        """Return the request to `make`: with the promised labels, if none can be added after the build.

        `promise` may wait for a build of the compiler; raise BuildError as it does.
        """
        ...

    def make(
        self, order: BuildRequest, log: TextIO, on_step: Callable[[str], None]
    ) -> AbstractContextManager[BuiltImage]:
        """Build an image without naming it yet; raise BuildError. On exit, images not stored may be removed.

        Images in layouts get no labels yet; see `image_rewriter.label_image`. Other images are not built
        again to compare them, which `no_cache` asks for.
        `log` receives the output of the build, `on_step` is called with the current instruction.
        """
        ...

    def list_parts(self, image: BuiltImage) -> tuple[SizedLayer, ...]:
        """Return the layers of a built image, the lowest first.

        Their sizes are those in a registry, or uncompressed ones without a layout.
        """
        ...

    def stop(self) -> None:
        """Stop all running builds, which raise StoppedError."""
        ...


class Store(Protocol):
    """A store of images. Every method raises EngineError if it cannot be reached."""

    def keeps_layers(self, image: BuiltImage) -> bool:
        """Whether it keeps the compressed layers of an image, so that a registry gets them as they are."""
        ...

    def list_variants(self, image: str, version: str) -> list[StoredVariant]:
        """Return the images of `image`:`version` that the store has."""
        ...

    def find_earlier_versions(self, image: str, cells: Mapping[str, str]) -> Mapping[str, str]:
        """Return the references of images of any version that were built from the inputs of `cells`, by cell.

        `cells` are the input digests by cell. A store that cannot give an image another version without its
        layers has none.
        """
        ...

    def load_without_layers(self, reference: str, folder: Path) -> BuiltImage:
        """Return an image of `find_earlier_versions` in a new layout in `folder`, without its layers."""
        ...

    def get_components(self, reference: str) -> Mapping[str, str]:
        """Return the components of a present image's identity; empty if its labels have none."""
        ...

    def inspect_image(self, reference: str) -> StoredImageInfo:
        """Return an image that is present."""
        ...

    def list_layers(self, reference: str) -> frozenset[str]:
        """Return the digests of the uncompressed layers of an image; none if there is no such image."""
        ...

    def has_base(self, source: str, layers: Sequence[str], sibling_references: Iterable[str]) -> bool:
        """Whether images can be stored without the bytes of the `layers` of their base.

        `source` is where builds find the base; `sibling_references` are the references of the images.
        """
        ...

    def find_source(self, reference: str, *, local: bool) -> str | None:
        """Return the source of a stored image for a builder, `local` to the engine or not; or None."""
        ...

    def store(self, order: BuildRequest, made: BuiltImage) -> str:
        """Store a built image under its reference; return its digest in the store.

        Development images of the same cell are removed. Raises TagMovedError if another image has that
        reference.
        """
        ...

    def adopt(self, reference: str) -> str:
        """Take over an image of the local engine unchanged; return its digest in the store."""
        ...
