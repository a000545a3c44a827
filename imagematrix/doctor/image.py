"""Which user-mode drivers an image has, read from the file system that a container of it would see."""

from __future__ import annotations

import posixpath
import tarfile

from imagematrix import engine
from imagematrix.audit.layers import LIBCUDA
from imagematrix.errors import EngineError, UnknownImageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["libcudas"]


def libcudas(reference: str) -> tuple[str, ...]:
    """Return the path of each libcuda in an image of the engine; raise UnknownImageError, EngineError.

    A container is created for it, never started, and removed.
    """
    from docker.errors import DockerException, ImageNotFound
    from requests.exceptions import RequestException

    client = engine.client()
    try:
        container = client.containers.create(reference, ["true"], network_disabled=True)
        try:
            stream = _Stream(container.export())  # type: ignore[arg-type]  # it gives bytes
            with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
                names = [f"/{member.name.lstrip('/')}" for member in archive if member.isfile()]
        finally:
            container.remove(force=True)
    except ImageNotFound as error:
        raise UnknownImageError(
            f"the engine has no {reference}", remedy=f"docker pull {reference}"
        ) from error
    except (DockerException, RequestException, tarfile.TarError) as error:
        raise EngineError(f"what is in {reference} can't be read: {error}") from error
    finally:
        client.close()
    return tuple(sorted(name for name in names if LIBCUDA.fullmatch(posixpath.basename(name))))


class _Stream:
    """A file to read from, of pieces that come one after the other."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = iter(pieces)
        self._left = b""

    def read(self, size: int) -> bytes:
        while len(self._left) < size and (piece := next(self._pieces, b"")):
            self._left += piece
        found, self._left = self._left[:size], self._left[size:]
        return found
