"""The engine's images."""

from __future__ import annotations

import contextlib

from imagematrix.errors import EngineError
from imagematrix.images.engine.endpoint import find_address
from imagematrix.images.engine.transport import (
    connect,
    convert_errors,
    make_filters,
    make_refused_error,
    open_client,
    quote,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any, Self

    import docker

    from imagematrix.images.engine.transport import Transport


def list_labelled(*labels: str, transport: Transport | None = None) -> list[Any]:
    """Return the images with these labels (NAME or NAME=VALUE), as the engine lists them.

    Raises EngineError.
    """
    with connect(transport) as engine:
        return engine.get(f"/images/json?{make_filters(label=[*labels])}").expect(list)


def inspect_image(reference: str, transport: Transport | None = None) -> dict[str, Any] | None:
    """Return what the engine tells of the image with this name or id; None if it is not found.

    Raises EngineError.
    """
    with connect(transport) as engine:
        return engine.get(f"/images/{quote(reference)}/json").expect_or_none(dict)


def require_image(reference: str, transport: Transport | None = None) -> dict[str, Any]:
    """Return the same as `inspect_image`; raise EngineError if the image is not found."""
    image = inspect_image(reference, transport)
    if image is None:
        raise make_refused_error(find_address(), f"no such image: {reference}")
    return image


def get_history(reference: str, transport: Transport | None = None) -> list[Any] | None:
    """Return the steps in which the image with this name or id was built; None if it is not found."""
    with connect(transport) as engine:
        return engine.get(f"/images/{quote(reference)}/history").expect_or_none(list)


def get_digests(reference: str, transport: Transport | None = None) -> frozenset[str]:
    """Return the digests of the image with this name; none if it is not found.

    Raises EngineError.
    """
    return read_digests(inspect_image(reference, transport))


def read_digests(image: Mapping[str, Any] | None) -> frozenset[str]:
    """Return the digests of an image that the engine told of; none if it has no such image."""
    if image is None:
        return frozenset()
    names = image.get("RepoDigests") or ()
    return frozenset([str(image.get("Id")), *(str(name).rpartition("@")[2] for name in names)])


def get_environment(name: str) -> tuple[str, ...]:
    """Return the environment that the image with this name or id sets, as "NAME=value".

    Raises EngineError, also if there is no such image.
    """
    return tuple(map(str, (require_image(name).get("Config") or {}).get("Env") or ()))


def tag_image(name: str, repository: str, tag: str, connection: docker.DockerClient | None = None) -> None:
    """Give the image with this name another: `repository`:`tag`; raise EngineError."""
    with contextlib.ExitStack() as stack:
        engine = connection or stack.enter_context(contextlib.closing(open_client()))
        with convert_errors():
            engine.api.tag(name, repository, tag)


def remove_image(name: str, connection: docker.DockerClient) -> None:
    """Remove a name of an image, and the image with its last name; nothing if there is no such name.

    Raises EngineError, also if a container uses the image.
    """
    from docker.errors import ImageNotFound

    with convert_errors(ImageNotFound), contextlib.suppress(ImageNotFound):
        # The parents that images of old builders have are not ours to remove.
        connection.api.remove_image(name, noprune=True)


class PieceStream:
    """A stream of the `pieces` that an engine sends; reading raises EngineError if it ends early."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = memoryview(b"")

    def read(self, size: int = -1, /) -> bytes:
        """Return the next `size` bytes, less only at the end."""
        from requests.exceptions import RequestException
        from urllib3.exceptions import HTTPError

        parts = []
        try:
            while size > 0 and (self._left or (piece := next(self._pieces, b""))):
                self._left = self._left or memoryview(piece)  # slices of it copy nothing
                parts.append(self._left[:size])
                self._left = self._left[size:]
                size -= len(parts[-1])
        except (RequestException, HTTPError) as error:
            raise EngineError(f"the engine aborted the export: {error}") from error
        return b"".join(parts)


class ExportedImage:
    """An image in the format of `docker save`, read while the engine exports it; raises EngineError."""

    def __init__(self, reference: str) -> None:
        self._client = open_client()
        try:
            with convert_errors():
                self._stream = PieceStream(self._client.api.get_image(reference))
        except BaseException:
            self._client.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the export."""
        self._client.close()

    def read(self, size: int = -1, /) -> bytes:
        """Return the next `size` bytes, less only at the end."""
        return self._stream.read(size)
