"""Clean-up after one-shot jobs: services whose tasks have ended, and their containers on this node."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from imagematrix.common.record import describe_fields
from imagematrix.images.engine.removal import remove_container
from imagematrix.images.engine.transport import convert_errors
from imagematrix.integrations.swarm.manager import Manager, RemovedError
from imagematrix.integrations.swarm.service import JOB, LABEL
from imagematrix.integrations.swarm.tasks import get_replicas, has_job_ended, parse_timestamp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from docker import DockerClient

SCHEMA = "imagematrix.swarm-gc/v1"
SERVICE_ID = "com.docker.swarm.service.id"  # a label that Swarm sets


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedObjects:
    """What was removed, or would be with `dry_run`: names of services, and of containers of this node."""

    services: tuple[str, ...]
    containers: tuple[str, ...]
    dry_run: bool

    def to_json(self) -> dict[str, object]:
        """Return the SwarmGc document."""
        return {"schema": SCHEMA, **describe_fields(self)}


def collect_garbage(
    client: DockerClient, older_than_s: float = 0.0, *, dry_run: bool = False
) -> RemovedObjects:
    """Remove jobs that ended at least `older_than_s` seconds ago, and the containers of jobs on this node.

    A job stays until all of its tasks have certainly ended, even if a node is down. A container stays while
    its service exists; on a worker, which cannot list services, only its age counts. Raises EngineError.
    """
    manager = Manager(client)
    before = time.time() - older_than_s
    label = f"{LABEL}={JOB}"
    is_manager = manager.is_manager()
    # Containers first: a job that starts and ends after this is not among them.
    containers = list(_list_ended_containers(client, label, before))
    services = manager.list_services(label) if is_manager else []
    names = []
    for service in services:
        count = get_replicas(service)
        with suppress(RemovedError):  # somebody else has removed it
            tasks = manager.list_tasks(service["ID"])
            if count and has_job_ended(tasks, count) and max(task.since for task in tasks) <= before:
                if not dry_run:
                    manager.remove_service(service["ID"])
                names.append(str(service["Spec"]["Name"]))
    present = {service["ID"] for service in services}
    orphans = [(identifier, name) for identifier, service, name in containers if service not in present]
    if not dry_run:
        for identifier, _ in orphans:
            remove_container(client, identifier)
    return RemovedObjects(
        services=tuple(sorted(names)), containers=tuple(sorted(name for _, name in orphans)), dry_run=dry_run
    )


def _list_ended_containers(client: DockerClient, label: str, before: float) -> Iterator[tuple[str, str, str]]:
    """Yield id, service and name of each container with `label` that ended before the time `before`."""
    from docker.errors import NotFound

    filters = {"label": [label, SERVICE_ID], "status": ["exited", "dead"]}
    with convert_errors():
        for summary in client.api.containers(all=True, filters=filters):
            with suppress(NotFound):  # somebody else has removed it
                state = client.api.inspect_container(summary["Id"])["State"]
                if parse_timestamp(str(state.get("FinishedAt") or "")) <= before:
                    yield summary["Id"], summary["Labels"][SERVICE_ID], summary["Names"][0].lstrip("/")
