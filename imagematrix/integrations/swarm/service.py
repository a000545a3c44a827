"""A service of Docker Swarm to create: as data, as arguments of docker-py, and as a docker command."""

from __future__ import annotations

import re
from dataclasses import dataclass

from imagematrix.common.image_reference import Reference, names_registry
from imagematrix.common.text import format_csv_line
from imagematrix.errors import UsageError
from imagematrix.launcher.gpu_claims.containers import VRAM, WHOLE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from imagematrix.integrations.swarm.reservation import Reservation

SCHEMA = "imagematrix.service/v1"
LABEL = "io.imagematrix.swarm"  # label of the service and of its containers: JOB or SERVICE
JOB, SERVICE = "job", "service"
INVALID = re.compile(r"[^A-Za-z0-9_-]+", re.ASCII)  # in the name of a service: isValidDNSName of SwarmKit
NAME_LENGTH = 40  # Swarm takes 63 characters
CONSTRAINT = re.compile(r"(node|engine)\.\S+?\s*[!=]=\s*\S.*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmService:
    """A service with `replicas` tasks; with `job`, a job that ends when all of them have ended.

    `volumes` are SOURCE:TARGET or SOURCE:TARGET:ro, `environment` NAME=VALUE. An empty `command` means the
    image's own.
    """

    name: str
    image: str
    command: tuple[str, ...]
    job: bool
    replicas: int
    reservation: Reservation
    environment: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise UsageError for values that Swarm would refuse later, or would misinterpret."""
        if self.replicas < 1:
            raise UsageError(f"invalid number of replicas {self.replicas}: expected 1 or more")
        for constraint in self.constraints:
            if not CONSTRAINT.fullmatch(constraint):
                raise UsageError(
                    f"invalid constraint {constraint!r}: expected a constraint such as node.labels.rack==a7",
                    remedy="Swarm compares values only with == and !=",
                )
        for volume in self.volumes:
            source, _, rest = volume.partition(":")
            target, _, mode = rest.partition(":")
            if not source or not target.startswith("/") or mode not in ("", "ro", "rw"):
                raise UsageError(f"invalid volume {volume!r}: expected SOURCE:TARGET or SOURCE:TARGET:ro")
        for variable in self.environment:
            if not variable.partition("=")[0] or "=" not in variable:
                raise UsageError(f"invalid variable {variable!r}: expected NAME=VALUE")

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the service."""
        return {LABEL: JOB if self.job else SERVICE}

    @property
    def container_labels(self) -> dict[str, str]:
        """The labels of its containers, including their share of each GPU."""
        return {**self.labels, VRAM: str(self.reservation.vram_mib or WHOLE)}

    @property
    def placement(self) -> tuple[str, ...]:
        """The constraints of the service, including those of the reservation."""
        return (*self.reservation.constraints, *self.constraints)

    def to_arguments(self) -> dict[str, Any]:
        """Return the arguments of docker-py's `services.create`, which leaves the image's name as it is.

        Without --no-resolve-image, docker's own command would replace it by the digest that the manager gets.
        """
        from docker.types import Resources, RestartPolicy, ServiceMode

        reserved: dict[str, int | str] = {**self.reservation.resources}
        arguments: dict[str, Any] = {
            "image": self.image,
            "args": list(self.command) or None,
            "name": self.name,
            "labels": self.labels,
            "container_labels": self.container_labels,
            "env": list(self.environment) or None,
            "mounts": list(self.volumes) or None,
            "networks": list(self.networks) or None,
            "constraints": list(self.placement) or None,
            "resources": Resources(generic_resources=reserved or None),
        }
        if self.job:
            # Tasks without room wait in the swarm's queue. By default, Swarm restarts failed tasks forever.
            arguments["mode"] = ServiceMode("replicated-job", self.replicas, self.replicas)
            arguments["restart_policy"] = RestartPolicy("none")
        else:
            arguments["mode"] = ServiceMode("replicated", self.replicas)
        return arguments

    def to_command(self) -> list[str]:
        """Return the docker command that creates the service."""
        words = ["docker", "service", "create", "--detach", "--no-resolve-image", "--with-registry-auth"]
        words += ["--name", self.name, "--replicas", str(self.replicas)]
        if self.job:
            words += ["--mode", "replicated-job", "--max-concurrent", str(self.replicas)]
            words += ["--restart-condition", "none"]
        for kind, count in self.reservation.resources.items():
            words += ["--generic-resource", f"{kind}={count}"]
        mounts = []
        for volume in self.volumes:
            source, target, *mode = volume.split(":")
            kind = "bind" if source.startswith("/") else "volume"
            fields = [f"type={kind}", f"source={source}", f"target={target}"]
            mounts.append(format_csv_line(*fields, *(["readonly"] if mode == ["ro"] else [])))
        options = (
            ("--constraint", self.placement),
            ("--network", self.networks),
            ("--mount", mounts),
            ("--env", self.environment),
            ("--label", _format_pairs(self.labels)),
            ("--container-label", _format_pairs(self.container_labels)),
        )
        for option, values in options:
            for value in values:
                words += [option, value]
        return [*words, self.image, *self.command]

    def to_json(self, identifier: str | None = None) -> dict[str, object]:
        """Return the Service document; `identifier` is the id of the created service."""
        return {
            "schema": SCHEMA,
            "id": identifier,
            "name": self.name,
            "image": self.image,
            "mode": self.labels[LABEL],
            "replicas": self.replicas,
            "resources": self.reservation.resources,
            "vram_mib": self.reservation.vram_mib,
            "constraints": list(self.placement),
            "networks": list(self.networks),
            "volumes": list(self.volumes),
            "environment": list(self.environment),
            "command": list(self.command),
            "docker": self.to_command(),
        }


def make_image_name(image: str, resolver: str) -> str:
    """Return the name under which every node gets its variant of `image` from its own resolver.

    The resolver replaces the registry in the name. A name by digest means one image on all nodes, so it stays
    as it is. Raises UsageError if the name is invalid.
    """
    reference = Reference.parse(image)
    if "@" in image:
        return image
    path = image.partition("/")[2] if names_registry(image) else image
    return f"{resolver}/{path}" if ":" in path else f"{resolver}/{path}:{reference.tag}"


def make_service_name(image: str, token: str) -> str:
    """Return a name for a service with this image: the image's last component, and a unique token."""
    component = image.partition("@")[0].rpartition("/")[2].partition(":")[0]
    return f"{INVALID.sub('-', component)[:NAME_LENGTH]}-{token}"


def _format_pairs(mapping: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in mapping.items()]
