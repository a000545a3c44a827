"""The user-mode drivers in an image, read from the file system that a container of it would see."""

from __future__ import annotations

import tarfile

from imagematrix import engine
from imagematrix.audit.driver_file import named
from imagematrix.errors import EngineError, UnknownImageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["libcudas"]


def libcudas(reference: str) -> tuple[str, ...]:
    """Return the path of each libcuda in an image of the engine; raise UnknownImageError, EngineError.

    This creates a container of the image, does not start it, and removes it.
    """
    from docker.errors import DockerException, ImageNotFound
    from requests.exceptions import RequestException

    client = engine.client()
    try:
        container = client.containers.create(reference, ["true"], network_disabled=True)
        try:
            stream = _Stream(container.export())  # type: ignore[arg-type]  # it yields bytes
            with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
                names = [f"/{member.name.lstrip('/')}" for member in archive if member.isfile()]
        finally:
            container.remove(force=True)
    except ImageNotFound as error:
        raise UnknownImageError(
            f"image not found in the engine: {reference}", remedy=f"docker pull {reference}"
        ) from error
    except (DockerException, RequestException, tarfile.TarError) as error:
        raise EngineError(f"cannot read the files of {reference}: {error}") from error
    finally:
        client.close()
    return tuple(sorted(filter(_is_libcuda, names)))


def _is_libcuda(path: str) -> bool:
    library, version = named(path) or ("", None)
    return library == "libcuda" and version is not None


class _Stream:
    """A readable file over an iterator of chunks."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = iter(chunks)
        self._buffer = b""

    def read(self, size: int) -> bytes:
        while len(self._buffer) < size and (chunk := next(self._chunks, b"")):
            self._buffer += chunk
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data
