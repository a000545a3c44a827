"""Removal of containers from the engine."""

from __future__ import annotations

from imagematrix.images.engine.transport import convert_errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from docker import DockerClient

GONE, BEING_REMOVED = 404, 409


def remove_container(client: DockerClient, identifier: str, *, running: bool = False) -> None:
    """Remove a container and its anonymous volumes; it may be removed already. Raises EngineError.

    One that runs is killed if `running`, and is an error otherwise.
    """
    from docker.errors import APIError

    with convert_errors():
        try:
            client.api.remove_container(identifier, v=True, force=running)
        except APIError as error:
            if error.status_code not in (GONE, BEING_REMOVED):
                raise
