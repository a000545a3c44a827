"""A manager of a swarm: its nodes, and services on them."""

from __future__ import annotations

import time
from contextlib import suppress

from imagematrix.errors import EngineError, UsageError
from imagematrix.images.engine.transport import convert_errors
from imagematrix.integrations.swarm.nodes import SwarmNode
from imagematrix.integrations.swarm.tasks import SwarmTask, find_latest, has_job_ended, summarize_states

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from docker import DockerClient

    from imagematrix.integrations.swarm.service import SwarmService

POLL_S = 1.0
AWAY_S = 300.0  # how long a manager may be unavailable: a restart or the election of a leader takes seconds
CONFLICT = 409
SWARM = "run `docker swarm init` on the first node, `docker swarm join` on the others"


class RemovedError(EngineError):
    """The service that the command waits for no longer exists."""


class Manager:
    """The swarm behind an engine; `client` is connected to it. Every method raises EngineError."""

    def __init__(self, client: DockerClient) -> None:
        self._client = client

    def is_manager(self) -> bool:
        """Whether the engine is a manager of its swarm."""
        with convert_errors():
            swarm = self._client.info().get("Swarm") or {}
        if swarm.get("LocalNodeState") not in ("active", "locked"):
            raise EngineError("this engine is not in a swarm", remedy=SWARM)
        return bool(swarm.get("ControlAvailable"))

    def list_nodes(self) -> tuple[SwarmNode, ...]:
        """Return the nodes of the swarm."""
        if not self.is_manager():
            raise EngineError(
                "this engine is a worker of its swarm",
                remedy="run this on a manager, or set DOCKER_HOST to one, such as ssh://manager",
            )
        with convert_errors():
            return tuple(map(SwarmNode.from_engine, self._client.api.nodes()))

    def select_overlays(self, networks: Sequence[str]) -> list[str]:
        """Return those of `networks` that are overlay networks; raise UsageError if one does not exist."""
        from docker.errors import NotFound

        drivers = {}
        for name in networks:
            try:
                with convert_errors(NotFound):
                    drivers[name] = self._client.api.inspect_network(name).get("Driver")
            except NotFound as error:
                remedy = f"create it: docker network create --driver overlay {name}"
                raise UsageError(f"network not found: {name}", remedy=remedy) from error
        return [name for name, driver in drivers.items() if driver == "overlay"]

    def create_service(self, service: SwarmService) -> str:
        """Create a service and return its id; raise UsageError if the name is taken."""
        from docker.errors import APIError

        with convert_errors():
            try:
                return str(self._client.services.create(**service.to_arguments()).id)
            except APIError as error:
                if error.status_code != CONFLICT:
                    raise
                raise UsageError(
                    f"service {service.name} already exists",
                    remedy=f"choose another --name, or remove it: docker service rm {service.name}",
                ) from error

    def remove_service(self, identifier: str) -> None:
        """Remove a service, which ends its tasks; it may be removed already."""
        from docker.errors import NotFound

        with convert_errors(), suppress(NotFound):
            self._client.api.remove_service(identifier)

    def list_services(self, label: str) -> list[Mapping[str, Any]]:
        """Return the services with `label` (NAME=VALUE), as the engine describes them."""
        with convert_errors():
            return list(self._client.api.services(filters={"label": label}))

    def list_tasks(self, identifier: str) -> list[SwarmTask]:
        """Return the tasks of a service; raise RemovedError if it no longer exists."""
        from docker.errors import NotFound

        try:
            with convert_errors(NotFound):
                documents = self._client.api.tasks(filters={"service": identifier})
                tasks = [SwarmTask.from_engine(document) for document in documents]
                if not tasks:
                    # No tasks: they have not been created yet, or the service is gone.
                    self._client.api.inspect_service(identifier)
        except NotFound as error:
            raise RemovedError("the service was removed") from error
        return tasks

    def wait(self, identifier: str, count: int, on_progress: Callable[[str], None]) -> list[SwarmTask]:
        """Wait until a job of `count` tasks has ended, and return the last task of each slot.

        `on_progress` gets every change of their states. A manager may be unavailable for up to AWAY_S.
        """
        last_text = ""
        answered = time.monotonic()
        while True:
            try:
                tasks = self.list_tasks(identifier)
            except EngineError as error:
                if isinstance(error, RemovedError) or time.monotonic() - answered > AWAY_S:
                    raise
            else:
                answered = time.monotonic()
                if has_job_ended(tasks, count):
                    return find_latest(tasks)
                text = summarize_states(tasks)
                if text != last_text:
                    on_progress(text)
                    last_text = text
            time.sleep(POLL_S)
