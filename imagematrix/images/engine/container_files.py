"""The files of containers: all of them, those of one folder, those that differ from the image's.

Every function raises EngineError.
"""

from __future__ import annotations

import contextlib
import tarfile

from imagematrix.errors import EngineError
from imagematrix.images.engine.images import PieceStream
from imagematrix.images.engine.transport import DockerPy, convert_errors, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from docker import DockerClient
ADDED, MODIFIED = 1, 0  # kinds of changes in the engine's API; 2 is for what was deleted


@contextlib.contextmanager
def open_files(client: DockerClient, container: str, path: str | None = None) -> Iterator[PieceStream]:
    """Yield the tar of a container's files, running or not; with `path`, of that file or folder only.

    Without, it has no files of volumes. With, names in it begin with the path's last part, and docker-py's
    NotFound is raised if the container has no such file. A tar that is found to be damaged within the context
    is an EngineError.
    """
    from docker.errors import NotFound

    with convert_errors(NotFound):
        api = client.api
        pieces = api.get_archive(container, path)[0] if path else api.export(container)
    try:
        with contextlib.closing(pieces):
            yield PieceStream(pieces)
    except tarfile.TarError as error:
        message = f"the engine sent damaged files of the container {container[:12]}: {error}"
        raise EngineError(message, remedy="run the command again") from error


def put_files(client: DockerClient, container: str, archive: bytes | Iterator[bytes]) -> None:
    """Unpack a tar, which may be compressed, at the root of a container's files."""
    with convert_errors():
        client.api.put_archive(container, "/", archive)


def list_written(client: DockerClient, container: str) -> tuple[str, ...]:
    """Return the paths that a container added or changed, sorted; folders are among them."""
    with convert_errors():
        changes = client.api.diff(container) or ()
    return tuple(sorted(str(change["Path"]) for change in changes if change["Kind"] in (ADDED, MODIFIED)))


def measure_written(client: DockerClient, container: str) -> int:
    """Return how many bytes the files take that a container has written, outside of volumes."""
    answer = DockerPy(client).get(f"/containers/{quote(container)}/json?size=1").expect(dict)
    return int(answer.get("SizeRw") or 0)


def make_image(client: DockerClient, container: str) -> str:
    """Return the id of a new image without a name: the container's files and the settings of its image."""
    with convert_errors():
        return str(client.api.commit(container)["Id"])
