"""The Docker engine as a store of images: listing, loading, tagging and pushing them."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from functools import cached_property
from typing import Any, Self

from imagematrix.build.matrix.feasibility import ARCHES
from imagematrix.build.plan.protocols import IMAGE, BuiltImage, StoredImageInfo
from imagematrix.build.stores import bases
from imagematrix.build.stores.names import Tagger, TemporaryNames, find_variant
from imagematrix.common.image_reference import split_version
from imagematrix.errors import EngineError, TagMovedError, UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.engine import get_repository_digest
from imagematrix.images.engine import images, system, transport
from imagematrix.images.oci import layout
from imagematrix.images.oci.archive import ImageArchive
from imagematrix.images.oci.compression import GZIP_REMEDY
from imagematrix.images.oci.manifest import Descriptor, ImageIndex, ImageManifest, parse_manifest
from imagematrix.images.oci.parts import SizedLayer, read_history_layers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import docker

    from imagematrix.build.plan.protocols import BuildRequest, StoredVariant
    from imagematrix.images.engine.transport import Transport

BASE = "imagematrix-base"  # names in the engine of bases that no registry has, for builds of other tools
SMALL = 1 << 20  # bytes of layers
TRIES = 3
PAUSE = 0.3  # seconds, doubled from one try to the next
# Transient errors of a push, as the two image stores report them. If a manifest is rejected because a blob is
# missing, the containerd image store reports only the status.
TRANSIENT = re.compile(
    r"\b(408|429|50[0234]) [A-Z]|PUT request to \S+/manifests/\S+: 400 |manifest blob unknown|: unknown error"
)


class EngineStore:
    """The Store of the Docker engine at `endpoint.address`. Use it as a context manager.

    From an OCI layout it loads only layers that the engine lacks.
    """

    def __init__(self) -> None:
        # An unreachable engine is reported immediately; docker-py is loaded later.
        self._connection = None if transport.is_responding() else transport.open_client()
        self._tagger: Tagger | None = None
        self._temporary: TemporaryNames | None = None
        self._connecting = threading.RLock()  # of the three
        self._components: dict[str, Mapping[str, str]] = {}
        self._ids: dict[str, str] = {}  # of the images that are present
        self._loaded: set[str] = set()  # layers
        self._loading: set[str] = set()  # layers
        self._changed = threading.Condition()  # of the two
        self._sending = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._temporary:
            with (
                contextlib.suppress(EngineError),
                transport.convert_errors(),
            ):  # the next build removes the rest
                self._temporary.close()
        if self._connection:
            self._connection.close()

    @property
    def _client(self) -> docker.DockerClient:
        with self._connecting:
            self._connection = self._connection or transport.open_client()
            return self._connection

    @cached_property
    def _transport(self) -> Transport:
        # A plan needs no more than these reads, and is ready before docker-py would be loaded.
        return transport.open_local_socket(transport.TIMEOUT) or transport.DockerPy(self._client)

    @cached_property
    def _info(self) -> dict[str, Any]:
        return system.get_info(self._transport)

    @property
    def _temporary_names(self) -> TemporaryNames:
        with self._connecting:
            self._temporary = self._temporary or TemporaryNames(self._client, str(self._info.get("ID")))
            return self._temporary

    @property
    def version(self) -> str | None:
        """The version of Docker, None if the engine is another."""
        return system.get_docker_version(self._transport)

    @property
    def platform(self) -> str | None:
        """The platform of its machine, such as linux/amd64; None if it is none that images are built for."""
        arch = self._info.get("Architecture")
        return next((platform for platform, machine in ARCHES.items() if machine == arch), None)

    @property
    def has_manifests(self) -> bool:
        """Whether it has the containerd image store, which keeps images exactly as a registry does."""
        return ["driver-type", "io.containerd.snapshotter.v1"] in (self._info.get("DriverStatus") or [])

    def keeps_layers(self, image: BuiltImage) -> bool:  # noqa: ARG002
        """Whether it keeps the compressed layers of an image; the classic store unpacks them."""
        return self.has_manifests

    def list_all_layers(self) -> frozenset[str]:
        """Return the digests of the uncompressed layers of all its images."""
        entries = images.list_labelled(transport=self._transport)
        return frozenset().union(*(self.list_layers(entry["Id"]) for entry in entries))

    def list_layers(self, reference: str) -> frozenset[str]:
        """Return the digests of the uncompressed layers of an image; none if there is no such image."""
        image = images.inspect_image(reference, self._transport) or {}
        return frozenset((image.get("RootFS") or {}).get("Layers") or ())

    def has_base(self, source: str, layers: Sequence[str], sibling_references: Iterable[str]) -> bool:  # noqa: ARG002
        """Whether images can be stored without the bytes of the layers of their base: if it is held."""
        return self.find_pinned_digest(source) is not None

    def list_parts(self, reference: str) -> tuple[SizedLayer, ...] | None:
        """Return the layers of an image, the lowest first, with their uncompressed sizes.

        If the engine does not report the size of each layer, they count as one. Returns None if there is no
        such image.
        """
        image = images.inspect_image(reference, self._transport)
        history = images.get_history(reference, self._transport) if image else None
        if image is None or history is None:
            return None
        layers = read_history_layers((image.get("RootFS") or {}).get("Layers") or (), history)
        whole = SizedLayer(digest=str(image["Id"]), size=int(image["Size"]))
        return (whole,) if layers is None else layers

    def require(self) -> None:
        """Raise EngineError if the engine no longer answers."""
        with transport.convert_errors():
            self._client.ping()

    def get_digest(self, reference: str) -> str | None:
        """Return the digest of the image with this name in the engine; None if there is none."""
        image = images.inspect_image(reference, self._transport)
        return get_repository_digest(image, split_version(reference)[0]) if image else None

    def resolve(self, reference: str) -> str:
        """Return the digest of a base image: in the engine, or else in its registry.

        Raises UsageError if neither has it, or if it brings inputs from elsewhere into builds.
        """
        return self._resolve_in_engine(reference) or self._resolve_in_registry(reference)

    def resolve_newest(self, reference: str) -> str:
        """Return the digest of a base image in its registry; in the engine if its registry has no such image.

        Raises UsageError as `resolve` does, and EngineError if the registry does not answer.
        """
        try:
            return self._resolve_in_registry(reference)
        except EngineError as error:
            if self.get_digest(reference) is None:
                raise
            remedy = f"try again, or delete {reference} from the lock to use the engine's image"
            raise EngineError(str(error), remedy=remedy) from error
        except UsageError:
            digest = self._resolve_in_engine(reference)
            if digest is None:
                raise
            return digest

    def _resolve_in_engine(self, reference: str) -> str | None:
        """Return the digest of a base image in the engine, as `get_digest` does; raise UsageError."""
        image = images.inspect_image(reference, self._transport)
        if image is None:
            return None
        bases.require_in_engine(image, reference)
        return get_repository_digest(image, split_version(reference)[0])

    def _resolve_in_registry(self, reference: str) -> str:
        """Return the digest of a base image in its registry; raise UsageError or EngineError."""
        digest = bases.resolve_in_registry(self._client, reference)
        bases.require_in_registry(reference, digest)
        return digest

    def is_index(self, reference: str, digest: str) -> bool:
        """Whether a base image with `digest` is an index of images for several platforms.

        Raises UsageError or EngineError if neither the engine nor the registry of the image can tell.
        """
        image = self._find_id(reference, digest) if self.has_manifests else None
        if image is None:
            return bases.is_index_in_registry(self._client, f"{reference.partition('@')[0]}@{digest}")
        with self.save(image) as exported:
            manifest = ImageArchive(exported, reference, lambda *_: None).read_document(digest)
        return isinstance(parse_manifest(manifest, reference, Descriptor), ImageIndex)

    def is_published(self, reference: str) -> bool:
        """Whether the engine can find this image in its registry."""
        try:
            bases.resolve_in_registry(self._client, reference)
        except (EngineError, UsageError):
            return False
        return True

    def list_variants(self, image: str, version: str) -> list[StoredVariant]:
        """Return the images of `image`:`version` that it has.

        Raises AuditError if the name of one now stands for an image that was built on it.
        """
        conditions = (f"{labels.IMAGE}={image}", f"{labels.VERSION}={version}")
        variants = []
        for entry in images.list_labelled(*conditions, transport=self._transport):
            for variant in find_variant(self._transport, entry, image):
                self._components[variant.reference] = labels.read_components(entry["Labels"]) or {}
                self._ids[variant.reference] = str(entry["Id"])
                variants.append(variant)
        return variants

    def find_earlier_versions(self, image: str, cells: Mapping[str, str]) -> dict[str, str]:
        """Return the references of images of any version that were built from the inputs of `cells`, by cell.

        The classic image store has none: it needs every layer in an archive to load.
        """
        if not self.has_manifests:
            return {}
        entries = images.list_labelled(f"{labels.IMAGE}={image}", labels.CONTENT, transport=self._transport)
        variants = [variant for entry in entries for variant in find_variant(self._transport, entry, image)]
        return {
            variant.cell: variant.reference
            for variant in reversed(variants)  # of several, the first one listed
            if cells.get(variant.cell) == variant.input_digest and not variant.development
        }

    def load_without_layers(self, reference: str, folder: Path) -> BuiltImage:
        """Return an image of `find_earlier_versions` in a new layout in `folder`, without its layers."""
        digest = self.get_image_id(reference)
        with self.save(digest) as exported:
            archive = ImageArchive(exported, reference, lambda *_: None)
            manifest = archive.read_document(digest)
            image = parse_manifest(manifest, reference, Descriptor)
            assert isinstance(image, ImageManifest) and image.config  # noqa: S101, PT018 - it was stored as one
            layout.write_without_layers(folder, manifest, archive.read_document(image.config.digest))
        layers = layout.LayoutImage(folder, digest).layers
        return BuiltImage(digest=digest, layout=folder, stored_layers=frozenset(layers))

    def get_components(self, reference: str) -> Mapping[str, str]:
        """Return the components of the identity of an image that is present."""
        return self._components.get(reference, {})

    def inspect_image(self, reference: str) -> StoredImageInfo:
        """Return an image that is present."""
        image = images.require_image(reference, self._transport)
        return StoredImageInfo(
            digest=str(image["Id"]),
            layers=tuple((image.get("RootFS") or {}).get("Layers") or ()),
            configuration=image,
        )

    def find_source(self, reference: str, *, local: bool) -> str | None:
        """Return the source of a present image for builds on this engine; None for other builders."""
        if not local or reference not in self._ids:
            return None
        source = self.pin_by_digest(reference, self._ids[reference])
        if source is None:
            raise TagMovedError(f"{reference} is now another image, not {self._ids[reference]}")
        return source

    def pin_by_digest(self, reference: str, digest: str) -> str | None:
        """Return the source of the image named `reference` for a build, if it has `digest`.

        It gets a temporary name until this process exits, because `docker tag` may move any other name.
        """
        image = self._find_id(reference, digest)
        with transport.convert_errors():
            return image and self._temporary_names.pin_by_digest(image, digest)

    def _find_id(self, reference: str, digest: str) -> str | None:
        """Return the ID of the image with this name, or None if it has another digest."""
        image = images.inspect_image(reference, self._transport)
        if image is None or digest not in (
            image["Id"],
            get_repository_digest(image, split_version(reference)[0]),
        ):
            return None
        bases.require_in_engine(image, reference)  # the digest may be from an older lock
        return str(image["Id"])

    def pin_permanently(self, reference: str, digest: str) -> str:
        """Return the source of the image named `reference` for builds after this process; raise UsageError.

        It names the digest, for a registry if one has the image. Otherwise the engine's image gets another
        name, which has the digest: BuildKit finds an image that was never pulled by its name only.
        """
        if "@" in reference or self.is_published(f"{reference}@{digest}"):
            return f"{IMAGE}{reference.partition('@')[0]}@{digest}"
        image = self._find_id(reference, digest)
        if image is None:
            raise UsageError(f"{reference} is now another image in the engine", remedy="export again")
        tag = digest.removeprefix("sha256:")
        with transport.convert_errors():
            self._client.api.tag(image, BASE, tag)
        return f"{IMAGE}{BASE}:{tag}"

    def find_pinned_digest(self, source: str) -> str | None:
        """Return the digest of the image that `pin_by_digest` gave this source; None if it gave none."""
        return self._temporary.find_pinned_digest(source) if self._temporary else None

    def store(self, order: BuildRequest, made: BuiltImage) -> str:
        """Tag an image; if it is in a layout, first load what the engine lacks.

        If another build has since tagged an image of the same inputs, that image is kept. Raises
        TagMovedError if it has tagged one of other inputs.
        """
        with transport.convert_errors(), self.load_image(order, made) as image:
            with self._connecting:
                tagger = self._tagger = self._tagger or Tagger(self._client)
            existing = tagger.tag_image(order, image)
        self._ids[order.reference] = existing or made.digest
        return existing or made.digest

    def tag_image(self, order: BuildRequest, made: BuiltImage) -> None:
        """Tag an image of the engine that only its registry stores."""
        repository, _, tag = order.reference.rpartition(":")
        with transport.convert_errors():
            self._client.api.tag(made.digest, repository, tag)

    @contextlib.contextmanager
    def load_image(self, order: BuildRequest, made: BuiltImage) -> Iterator[str]:
        """Yield the ID of an image in the engine, loaded under a temporary name if it is in a layout."""
        if made.layout is None:
            yield made.digest
            return
        image = made.layout_image
        expected = image.digest if self.has_manifests else image.config
        with self._temporary_names.reserve_loading_name(expected) as name:
            with self._hold_layers(image.layers) as new:
                # The classic store needs every layer in the archive.
                missing = [layer for layer in new if layer not in made.stored_layers]
                if not self.has_manifests or not self._try_load(image, order.reference, name, missing):
                    self._try_load(image, order.reference, name, image.layers)
            actual = self.get_image_id(name)
            if actual != expected:
                raise EngineError(f"{order.reference} was stored as {actual}, but {expected} was built")
            yield expected

    @contextlib.contextmanager
    def _hold_layers(self, layers: Sequence[str]) -> Iterator[list[str]]:
        """Yield the `layers` that are not loaded yet, once no other image is loading one of them.

        containerd would unpack a layer once for each concurrent load.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._loading.isdisjoint(layers))
            new = [layer for layer in layers if layer not in self._loaded]
            self._loading.update(new)
        try:
            yield new
            with self._changed:
                self._loaded.update(new)
        finally:
            with self._changed:
                self._loading.difference_update(new)
                self._changed.notify_all()

    def _try_load(self, image: layout.LayoutImage, reference: str, name: str, layers: Sequence[str]) -> bool:
        """Load an image by sending `layers`; return False if the engine lacks another layer."""
        import docker

        large = sum(image.get_blob_path(layer).stat().st_size for layer in layers) > SMALL
        with contextlib.ExitStack() as sent:
            # containerd reads one archive at a time; another one is retried seconds later. Unpacking then
            # runs in parallel, which pays off for large layers.
            sent.enter_context(self._sending)

            def stream_archive() -> Iterator[bytes]:
                yield from image.stream_archive(name, layers)
                if large:
                    sent.close()

            archive = stream_archive()
            try:
                answers = self._client.api.load_image(archive)
                errors = [answer["error"] for answer in answers if "error" in answer]
            except docker.errors.APIError as error:
                errors = [str(error.explanation or error)]
        if errors and "not found" in errors[0] and len(layers) < len(image.layers):
            return False
        if errors:
            raise EngineError(f"the Docker engine rejected {reference}: {errors[0]}")
        return True

    def adopt(self, reference: str) -> str:
        """Return the digest of a present image."""
        return str(self.get_digest(reference))

    def get_image_id(self, reference: str) -> str:
        """Return the ID of the image with this name."""
        return str(images.require_image(reference, self._transport)["Id"])

    def save(self, image: str) -> images.ExportedImage:
        """Return an image, as `docker save` writes it."""
        return images.ExportedImage(image)

    def push(self, reference: str) -> None:
        """Push an image to the registry in its name, with docker's own credentials.

        Docker does not retry transient errors of the registry, such as one while another client pushes the
        same blob (see oci.Registry.push_manifest). So the push is repeated; it continues where it stopped.
        """
        repository, _, tag = reference.rpartition(":")
        for attempt in range(1, TRIES + 1):
            with transport.convert_errors():
                answers = self._client.api.push(repository, tag=tag, stream=True, decode=True)
                error = next((str(answer["error"]) for answer in answers if "error" in answer), None)
            if not error:
                return
            if attempt == TRIES or not TRANSIENT.search(error):
                zstd = self.get_components(reference).get("compression", "").startswith("zstd")
                remedy = GZIP_REMEDY if zstd and "manifest" in error else None
                raise EngineError(f"{reference} was not pushed: {error}", remedy=remedy)
            time.sleep(PAUSE * 2 ** (attempt - 1))
