"""The end of containers, and their removal from the engine."""

from __future__ import annotations

from imagematrix.images.engine.transport import convert_errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from docker import DockerClient

GONE, BEING_REMOVED = 404, 409


def end_container(client: DockerClient, identifier: str) -> None:
    """Kill the processes of a container unless they have ended, and wait for the end; raise EngineError."""
    from docker.errors import APIError

    with convert_errors():
        try:
            client.api.kill(identifier)
        except APIError as error:
            if error.status_code not in (GONE, BEING_REMOVED):  # it does not run
                raise
        client.api.wait(identifier)


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
