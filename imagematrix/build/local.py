"""The Docker engine as a store of images: what it has, what it is given, what it pushes."""

from __future__ import annotations

import contextlib
import threading
from functools import cached_property
from typing import Any, Self

from imagematrix import engine
from imagematrix.build import layout
from imagematrix.build.backend import Present
from imagematrix.catalog import labels
from imagematrix.errors import EngineError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    import docker

    from imagematrix.build.backend import Made, Order

__all__ = ["Engine"]


class Engine:
    """The Store that the Docker engine is which `engine.address` finds. Use it as a context manager.

    Of an image in an OCI layout it loads what it lacks.
    """

    def __init__(self) -> None:
        # That nobody answers is to be known at once; to load docker-py for it can wait.
        if not engine.answers():
            self._client  # noqa: B018 - which raises EngineError
        self._components: dict[str, Mapping[str, str]] = {}
        self._loaded: set[str] = set()  # layers
        self._sending = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if "_client" in self.__dict__:
            self._client.close()

    @cached_property
    def _client(self) -> docker.DockerClient:
        return engine.client()

    @cached_property
    def _info(self) -> dict[str, Any]:
        with self._reached():
            return dict(self._client.info())

    @property
    def version(self) -> str:
        """The version of Docker."""
        return str(self._info.get("ServerVersion", "0"))

    @property
    def has_manifests(self) -> bool:
        """Whether it has the containerd image store, which keeps images as they are in a registry."""
        return ["driver-type", "io.containerd.snapshotter.v1"] in (self._info.get("DriverStatus") or [])

    def require(self) -> None:
        """Raise EngineError where it does not answer any more."""
        with self._reached():
            self._client.ping()

    def digest(self, reference: str) -> str | None:
        """Return the digest of the image with this name in the engine; None where there is none."""
        import docker

        with self._reached():
            try:
                image = self._client.api.inspect_image(reference)
            except docker.errors.ImageNotFound:
                return None
        repository = reference.partition("@")[0].rpartition(":")[0] or reference
        for name in image.get("RepoDigests") or ():
            if name.startswith(f"{repository}@"):
                return str(name).rpartition("@")[2]
        return str(image["Id"])

    def resolve(self, reference: str) -> str:
        """Return the digest that a base image's name stands for: here, or else in its registry.

        Raises UsageError where it is nowhere.
        """
        return self.digest(reference) or self._newest(reference)

    def newest(self, reference: str) -> str:
        """Return the digest that a base image's name stands for in its registry, or else here."""
        try:
            return self._newest(reference)
        except (EngineError, UsageError):
            found = self.digest(reference)
            if found is None:
                raise
            return found

    def is_published(self, reference: str) -> bool:
        """Whether a registry has this image, as the engine reaches it."""
        try:
            self._newest(reference)
        except (EngineError, UsageError):
            return False
        return True

    def _newest(self, reference: str) -> str:
        import docker

        with self._reached():
            try:
                return str(self._client.api.inspect_distribution(reference)["Descriptor"]["digest"])
            except docker.errors.APIError as error:
                message = f"the base image {reference} is not in the engine, and no registry gives it"
                remedy = f"`docker pull {reference}`, or import one of that name"
                kind = EngineError if error.is_server_error() else UsageError
                raise kind(f"{message}: {error.explanation}", remedy=remedy) from error

    def present(self, image: str, version: str) -> list[Present]:
        """Return the images of `image`:`version` that it has."""
        wanted = [f"{labels.IMAGE}={image}", f"{labels.VERSION}={version}"]
        with self._reached():
            found = self._client.api.images(filters={"label": wanted})
        return [item for entry in found for item in self._present(entry, image)]

    def _present(self, entry: dict[str, Any], image: str) -> Iterator[Present]:
        own = entry.get("Labels") or {}
        components = labels.components(own)
        if components is None or not {labels.CELL, labels.INPUT} <= own.keys():
            return
        for reference in entry.get("RepoTags") or ():
            if reference.startswith(f"{image}:"):
                self._components[reference] = components
                yield Present(
                    reference=reference,
                    cell=own[labels.CELL],
                    input_digest=own[labels.INPUT],
                    development=own.get(labels.DEVELOPMENT) == "true",
                )

    def components(self, reference: str) -> Mapping[str, str]:
        """Return what an image that is present was made of."""
        return self._components.get(reference, {})

    def source(self, reference: str) -> str | None:  # noqa: ARG002 - a build finds what the engine has
        """Return None: a build finds the engine's images by their names."""
        return None

    def store(self, order: Order, made: Made) -> str:
        """Name the image; from a layout, load what the engine lacks of it first."""
        import docker

        with self._reached():
            if made.layout:
                self._load(layout.Image(made.layout, made.digest), order.reference)
            else:
                repository, _, tag = order.reference.rpartition(":")
                self._client.api.tag(made.digest, repository, tag)
            if order.replaces:
                with contextlib.suppress(docker.errors.ImageNotFound):
                    self._client.api.remove_image(order.replaces, force=True)
        return made.digest

    def _load(self, image: layout.Image, reference: str) -> None:
        # Images have most of their layers in common, and what one has loaded the next has; the classic store
        # does not find a layer again, so it gets them all.
        if not self.has_manifests or not self._loads(image, reference, whole=False):
            self._loads(image, reference, whole=True)
        found = str(self._client.api.inspect_image(reference)["Id"])
        expected = image.digest if self.has_manifests else image.config
        if found != expected:
            raise EngineError(f"{reference} was stored as {found}, but {expected} was built")

    def _loads(self, image: layout.Image, reference: str, *, whole: bool) -> bool:
        """Load an image, all of it or what was not loaded yet; return False where the engine misses more."""
        import docker

        with contextlib.closing(self._archive(image, reference, whole=whole)) as archive:
            try:
                answers = self._client.api.load_image(archive)
                errors = [answer["error"] for answer in answers if "error" in answer]
            except docker.errors.APIError as error:
                errors = [str(error.explanation or error)]
        if errors and "not found" in errors[0] and not whole:
            return False
        if errors:
            raise EngineError(f"the Docker engine does not take {reference}: {errors[0]}")
        return True

    def _archive(self, image: layout.Image, reference: str, *, whole: bool) -> Generator[bytes, None, None]:
        # One at a time: containerd takes in only one archive, and who comes meanwhile waits for another try,
        # seconds at a time. What it does then, to unpack the layers, it does for several at once.
        with self._sending:
            yield from image.archive(
                reference, [layer for layer in image.layers if whole or layer not in self._loaded]
            )
            self._loaded.update(image.layers)

    def adopt(self, reference: str) -> str:
        """Return the digest of an image that is there already."""
        return str(self.digest(reference))

    def push(self, reference: str) -> None:
        """Push an image to the registry that its name says, with docker's own credentials."""
        repository, _, tag = reference.rpartition(":")
        with self._reached():
            for answer in self._client.api.push(repository, tag=tag, stream=True, decode=True):
                if "error" in answer:
                    raise EngineError(f"{reference} was not pushed: {answer['error']}")

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Turn what docker-py raises when the engine is gone into EngineError."""
        import docker
        import requests
        import urllib3

        try:
            yield
        except docker.errors.APIError as error:  # which is one of requests' errors, too
            raise EngineError(f"the Docker engine refused: {error.explanation or error}") from error
        except (requests.RequestException, urllib3.exceptions.HTTPError, ConnectionError) as error:
            raise engine.unreachable(engine.address(), error) from error
