"""The Docker engine as a store of images: listing, loading, tagging and pushing them."""

from __future__ import annotations

import contextlib
import io
import re
import threading
import time
from functools import cached_property
from typing import Any, Self

from imagematrix import engine
from imagematrix.catalog import labels
from imagematrix.errors import EngineError, TagMovedError, UsageError
from imagematrix.oci import layout
from imagematrix.oci.parts import Part, of_history
from imagematrix.planning.backend import Present
from imagematrix.reference import familiar, split
from imagematrix.stores.held import Held

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import BinaryIO

    import docker

    from imagematrix.planning.backend import Made, Order

__all__ = ["Engine"]

SMALL = 1 << 20  # bytes of layers
KEPT = (404, 409)  # statuses of a removal whose image is gone or in use
TRIES = 3
PAUSE = 0.3  # seconds, doubled from one try to the next
# Transient errors of a push, as the two image stores report them. If a manifest is rejected because a blob is
# missing, the containerd image store reports only the status.
TRANSIENT = re.compile(
    r"\b(408|429|50[0234]) [A-Z]|PUT request to \S+/manifests/\S+: 400 |manifest blob unknown|: unknown error"
)


class _Stream(io.RawIOBase):
    """Chunks of bytes as a readable file."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        self._left = self._left or next(self._pieces, b"")
        piece, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)


class Engine:
    """The Store of the Docker engine at `endpoint.address`. Use it as a context manager.

    From an OCI layout it loads only layers that the engine lacks.
    """

    def __init__(self) -> None:
        # An unreachable engine is reported immediately; docker-py is loaded later.
        if not engine.responds():
            self._client  # noqa: B018 - raises EngineError
        self._components: dict[str, Mapping[str, str]] = {}
        self._ids: dict[str, str] = {}  # of the images that are present
        self._loaded: set[str] = set()  # layers
        self._loading: set[str] = set()  # layers
        self._changed = threading.Condition()  # of the two
        self._sending = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if "_client" in self.__dict__:
            if "_held" in self.__dict__:
                with contextlib.suppress(EngineError), engine.errors():  # the next build removes the rest
                    self._held.close()
            self._client.close()

    @cached_property
    def _client(self) -> docker.DockerClient:
        return engine.client()

    @cached_property
    def _info(self) -> dict[str, Any]:
        with engine.errors():
            return dict(self._client.info())

    @cached_property
    def _held(self) -> Held:
        return Held(self._client, str(self._info.get("ID")))

    @property
    def version(self) -> str:
        """The version of Docker."""
        return str(self._info.get("ServerVersion", "0"))

    @property
    def has_manifests(self) -> bool:
        """Whether it has the containerd image store, which keeps images exactly as a registry does."""
        return ["driver-type", "io.containerd.snapshotter.v1"] in (self._info.get("DriverStatus") or [])

    def layers(self) -> frozenset[str]:
        """Return the digests of the uncompressed layers of all its images."""
        with engine.errors():
            images = [self._client.api.inspect_image(one["Id"]) for one in self._client.api.images()]
        return frozenset(layer for one in images for layer in (one.get("RootFS") or {}).get("Layers") or ())

    def parts(self, reference: str) -> tuple[Part, ...] | None:
        """Return the layers of an image, the lowest first, with their uncompressed sizes.

        If the engine does not report the size of each layer, they count as one. Returns None if there is no
        such image.
        """
        import docker

        with engine.errors():
            try:
                image = self._client.api.inspect_image(reference)
                history = self._client.api.history(reference)
            except docker.errors.NotFound:
                return None
        layers = of_history((image.get("RootFS") or {}).get("Layers") or (), history)
        whole = Part(digest=str(image["Id"]), size=int(image["Size"]))
        return (whole,) if layers is None else layers

    def require(self) -> None:
        """Raise EngineError if the engine no longer answers."""
        with engine.errors():
            self._client.ping()

    def digest(self, reference: str) -> str | None:
        """Return the digest of the image with this name in the engine; None if there is none."""
        import docker

        with engine.errors():
            try:
                image = self._client.api.inspect_image(reference)
            except docker.errors.ImageNotFound:
                return None
        return self._digest(image, reference)

    @staticmethod
    def _digest(image: Mapping[str, Any], reference: str) -> str:
        repository = familiar(split(reference)[0])
        for name in image.get("RepoDigests") or ():
            if name.startswith(f"{repository}@"):
                return str(name).rpartition("@")[2]
        return str(image["Id"])

    def resolve(self, reference: str) -> str:
        """Return the digest of a base image: in the engine, or else in its registry.

        Raises UsageError if neither has it.
        """
        return self.digest(reference) or self._newest(reference)

    def newest(self, reference: str) -> str:
        """Return the digest of a base image in its registry, or else in the engine."""
        try:
            return self._newest(reference)
        except (EngineError, UsageError):
            digest = self.digest(reference)
            if digest is None:
                raise
            return digest

    def is_published(self, reference: str) -> bool:
        """Whether the engine can find this image in its registry."""
        try:
            self._newest(reference)
        except (EngineError, UsageError):
            return False
        return True

    def _newest(self, reference: str) -> str:
        import docker

        with engine.errors():
            try:
                return str(self._client.api.inspect_distribution(reference)["Descriptor"]["digest"])
            except docker.errors.APIError as error:
                message = f"the base image {reference} is neither in the engine nor in its registry"
                remedy = f"run `docker pull {reference}`, or import it under that name"
                kind = EngineError if error.is_server_error() else UsageError
                raise kind(f"{message}: {error.explanation}", remedy=remedy) from error

    def present(self, image: str, version: str) -> list[Present]:
        """Return the images of `image`:`version` that it has."""
        wanted = [f"{labels.IMAGE}={image}", f"{labels.VERSION}={version}"]
        with engine.errors():
            images = self._client.api.images(filters={"label": wanted})
        return [item for entry in images for item in self._present(entry, image)]

    def _present(self, entry: dict[str, Any], image: str) -> Iterator[Present]:
        own = entry.get("Labels") or {}
        components = labels.components(own)
        if components is None or not {labels.VERSION, labels.CELL, labels.INPUT} <= own.keys():
            return
        # Images that users build on a variant inherit its labels, but not the tag derived from them.
        reference = f"{image}:{labels.tag(own[labels.VERSION], own[labels.CELL], own[labels.INPUT])}"
        if familiar(reference) in (entry.get("RepoTags") or ()):
            self._components[reference] = components
            self._ids[reference] = str(entry["Id"])
            yield Present(
                reference=reference,
                cell=own[labels.CELL],
                input_digest=own[labels.INPUT],
                development=own.get(labels.DEVELOPMENT) == "true",
            )

    def components(self, reference: str) -> Mapping[str, str]:
        """Return the components of the identity of an image that is present."""
        return self._components.get(reference, {})

    def source(self, reference: str, *, local: bool) -> str | None:
        """Return the source of a present image for builds on this engine; None for other builders."""
        if not local or reference not in self._ids:
            return None
        held = self.hold(reference, self._ids[reference])
        if held is None:
            raise TagMovedError(f"{reference} is now another image, not {self._ids[reference]}")
        return held

    def hold(self, reference: str, digest: str) -> str | None:
        """Return the source of the image named `reference` for a build, if it has `digest`.

        It gets a temporary name until this process exits, because `docker tag` may move any other name.
        """
        import docker

        with engine.errors():
            try:
                image = self._client.api.inspect_image(reference)
            except docker.errors.ImageNotFound:
                return None
            if digest not in (image["Id"], self._digest(image, reference)):
                return None
            return self._held.hold(image["Id"], digest)

    def holds(self, place: str) -> bool:
        """Whether this is a source that `hold` returned."""
        return "_held" in self.__dict__ and place in self._held

    def store(self, order: Order, made: Made) -> str:
        """Tag an image; if it is in a layout, first load what the engine lacks."""
        with engine.errors():
            if made.layout:
                self._load(layout.Image(made.layout, made.digest), made.base_layers, order.reference)
            else:
                repository, _, tag = order.reference.rpartition(":")
                self._client.api.tag(made.digest, repository, tag)
            if order.replaces:
                self._remove(order.replaces, order.reference)
        self._ids[order.reference] = made.digest
        return made.digest

    def _remove(self, old: str, new: str) -> None:
        """Remove the name `old`, and its image unless it is in use."""
        import docker

        api = self._client.api
        try:
            image = str(api.inspect_image(old)["Id"])
        except docker.errors.ImageNotFound:
            return
        # The engine does not remove a name that a container was started by, unless the name has moved.
        repository, _, tag = old.rpartition(":")
        api.tag(new, repository, tag)
        api.remove_image(old)
        try:
            api.remove_image(image)
        except docker.errors.APIError as error:  # in use by another name, image or container, or gone
            if error.status_code not in KEPT:
                raise

    def _load(self, image: layout.Image, present: frozenset[str], reference: str) -> None:
        """Load an image; the engine has the layers `present` from another image."""
        with self._unpacking(image.layers) as new:
            # The classic store needs every layer in the archive.
            missing = [layer for layer in new if layer not in present]
            if not self.has_manifests or not self._loads(image, reference, missing):
                self._loads(image, reference, image.layers)
        digest = str(self._client.api.inspect_image(reference)["Id"])
        expected = image.digest if self.has_manifests else image.config
        if digest != expected:
            raise EngineError(f"{reference} was stored as {digest}, but {expected} was built")

    @contextlib.contextmanager
    def _unpacking(self, layers: Sequence[str]) -> Iterator[list[str]]:
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

    def _loads(self, image: layout.Image, reference: str, layers: Sequence[str]) -> bool:
        """Load an image by sending `layers`; return False if the engine lacks another layer."""
        import docker

        large = sum(image.blob(layer).stat().st_size for layer in layers) > SMALL
        with contextlib.ExitStack() as turn:
            # containerd reads one archive at a time; another one is retried seconds later. Unpacking then
            # runs in parallel, which pays off for large layers.
            turn.enter_context(self._sending)
            archive = self._archive(image, reference, layers, turn.close if large else lambda: None)
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

    @staticmethod
    def _archive(
        image: layout.Image, reference: str, layers: Sequence[str], sent: Callable[[], None]
    ) -> Iterator[bytes]:
        yield from image.archive(reference, layers)
        sent()

    def adopt(self, reference: str) -> str:
        """Return the digest of a present image."""
        return str(self.digest(reference))

    def image(self, reference: str) -> str:
        """Return the ID of the image with this name."""
        with engine.errors():
            return str(self._client.api.inspect_image(reference)["Id"])

    def save(self, image: str) -> BinaryIO:
        """Return an image, as `docker save` writes it."""
        with engine.errors():
            return io.BufferedReader(_Stream(self._client.api.get_image(image)))

    def push(self, reference: str) -> None:
        """Push an image to the registry in its name, with docker's own credentials.

        Docker does not retry transient errors of the registry, such as one while another client pushes the
        same blob (see oci.Registry.push_manifest). So the push is repeated; it continues where it stopped.
        """
        attempt = 1
        while error := self._pushed(reference):
            if attempt == TRIES or not TRANSIENT.search(error):
                raise EngineError(f"{reference} was not pushed: {error}")
            time.sleep(PAUSE * 2 ** (attempt - 1))
            attempt += 1

    def _pushed(self, reference: str) -> str | None:
        """Push an image once, and return the error of docker, if any."""
        repository, _, tag = reference.rpartition(":")
        with engine.errors():
            answers = self._client.api.push(repository, tag=tag, stream=True, decode=True)
            return next((str(answer["error"]) for answer in answers if "error" in answer), None)
