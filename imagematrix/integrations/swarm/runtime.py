"""The part of the OCI runtime that creates a container: it gives GPUs to Swarm's tasks, then becomes runc.

All other commands go to runc directly (imagematrix.integrations.swarm.program). Callers see the interface of
runc: the same command line and exit code, and errors as lines of JSON in the file of --log, from which
containerd takes the text for `docker service ps`. See
https://github.com/opencontainers/runc/blob/main/man/runc.8.md.
"""
# pathlib costs more to import than the file takes to read.
# ruff: noqa: PTH123

from __future__ import annotations

import json
import os
import sys
import time
from zipimport import zipimporter

from imagematrix.common.record import Record, describe_fields
from imagematrix.errors import ImagematrixError, ProbeError
from imagematrix.hardware.gpu_request.choice import Choice
from imagematrix.hardware.gpu_request.spec import GPUS_VARIABLE, name_gpus
from imagematrix.hardware.host.host import Host
from imagematrix.hardware.host.tree import Tree
from imagematrix.images.engine import endpoint, images
from imagematrix.integrations.swarm import container, node
from imagematrix.launcher.docker.devices import list_device_nodes, require_device_nodes
from imagematrix.launcher.docker.share import Share
from imagematrix.launcher.gpu_claims import grants
from imagematrix.launcher.gpu_claims.containers import compute_container_usage
from imagematrix.launcher.gpu_claims.gpu_claim import ClaimRequest, LockFolder, claim_gpus
from imagematrix.launcher.gpu_claims.locks import Locks
from imagematrix.launcher.gpu_claims.survey import (
    list_running_containers,
    query_nvml,
    survey_quickly,
    survey_usage,
)
from imagematrix.launcher.gpu_claims.usage import list_lock_names, merge_usages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from imagematrix.images.engine.containers import LeaseCheck
    from imagematrix.integrations.swarm.container import AssignedGpus
    from imagematrix.launcher.gpu_claims.usage import Usage

SETTINGS = "settings.json"  # in the archive
CREATE = "create"
VALUED = frozenset({"bundle", "console-socket", "criu", "log", "log-format", "pid-file", "pidfd-socket"})
VALUED |= {"b", "preserve-fds", "root", "rootless"}
# Swarm gives a GPU to the next task when the container of the last has ended, while its bundle is removed.
WAIT_S = 5.0
FAILED = 1


class RuntimeSettings(Record):
    """The settings with which the runtime was installed: the engine's data root and address, and the node.

    `locks` is the folder of the GPU locks. The engine's environment, which the runtime has, is not that of
    launches.
    """

    data_root: str
    address: str
    host: Host
    locks: str

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RuntimeSettings:
        """Return the settings in a document of `to_json`."""
        return cls(
            data_root=document["data_root"],
            address=document["address"],
            host=Host.from_json(document["host"], SETTINGS),
            locks=document["locks"],
        )

    to_json = describe_fields  # the document that the archive contains


class RuntimeCall(Record):
    """A command line of the runtime: the command, the bundle, the container's id, and the log file."""

    command: str | None = None
    container: str | None = None
    bundle: str = "."
    log: str | None = None

    @classmethod
    def parse(cls, words: Sequence[str]) -> RuntimeCall:
        """Return the parsed words; each flag has one or two dashes, as in runc."""
        flags: dict[str, str] = {}
        arguments = []
        rest = iter(words)
        for word in rest:
            if not word.startswith("-"):
                arguments.append(word)
                continue
            name, equals, value = word.lstrip("-").partition("=")
            if name in VALUED:
                flags[name] = value if equals else next(rest, "")
        command, container = (*arguments, None, None)[:2]
        bundle = flags.get("bundle") or flags.get("b") or "."
        return cls(command=command, container=container, bundle=bundle, log=flags.get("log"))


def main() -> None:
    """Give GPUs to the container that is created, then become runc.

    The arguments are the archive, the path of runc, and the arguments of runc.
    """
    archive, runc, *words = sys.argv[1:]
    call = RuntimeCall.parse(words)
    try:
        if call.command == CREATE and call.container:
            settings = RuntimeSettings.from_json(json.loads(zipimporter(archive).get_data(SETTINGS)))
            os.environ["DOCKER_HOST"] = settings.address
            give_gpus(settings, call.container, os.path.abspath(call.bundle))  # noqa: PTH100 - see above
    except ImagematrixError as error:
        _fail(call.log, str(error))
    except Exception as error:  # noqa: BLE001 - the container must not start, and its user has to see why
        _fail(call.log, f"unexpected {type(error).__name__}: {error}")
    os.execv(runc, [runc, *words])  # noqa: S606 - runc replaces this process


def give_gpus(settings: RuntimeSettings, container_id: str, bundle: str) -> None:
    """Give a task the GPUs that Swarm assigned to it: claim them, record them, add them to the bundle.

    A container that belongs to no task, or to a task without GPUs, stays as it is. Raises ImagematrixError.
    """
    task = container.read_task_container(settings.data_root, container_id)
    if task is None:
        return
    assigned = container.parse_assigned_gpus(task.environment, images.get_environment(task.image_id))
    if not assigned:
        return
    group = endpoint.get_socket_group()
    host = node.keep_present_gpus(settings.host, Tree("/"))
    with Locks(settings.locks, group) as locks:
        grants.remove_stale_grants(locks)
        grants.remove_grant(locks, container_id)  # of an earlier start
        with claim_gpus(
            ClaimRequest(choices=[_choose_gpus(host, assigned)], vram_mib=assigned.vram_mib),
            lambda is_lease_live: _survey_usage(host, locks, is_lease_live),
            wait_s=WAIT_S,
            folder=LockFolder(path=locks.path, group=group),
        ) as claim:
            devices = list_device_nodes(host, claim.gpus)
            require_device_nodes(devices)
            environment = Share(vram_mib=assigned.vram_mib).environment(claim.gpus)
            # The engine's own variable for them has a dash in its name, with which shells drop it.
            environment[GPUS_VARIABLE] = ",".join(name_gpus(claim.gpus))
            grant = grants.GpuGrant(
                container=container_id,
                bundle=bundle,
                name=f"{task.name} ({task.image})",
                keys=tuple(key for gpu in claim.gpus for key in list_lock_names(gpu)),
                vram_mib=assigned.vram_mib,
            )
            # The record first: if the rest fails, the engine removes the bundle, and with it the grant ends.
            grants.write_grant(locks, grant)
            container.rewrite_bundle(bundle, devices, environment)


def _choose_gpus(host: Host, assigned: AssignedGpus) -> Choice:
    offered = node.list_offered_gpus(host)
    if assigned.uuids:
        gpus = node.find_gpus(offered, assigned.uuids)
        return Choice(gpus=gpus, count=len(gpus))
    if not offered:
        raise ProbeError(
            f"Swarm assigned {assigned.vram_mib} MiB, but this node has no GPU", remedy=node.REMEDY
        )
    return Choice(gpus=offered, count=1)


def _survey_usage(host: Host, locks: Locks, is_lease_live: LeaseCheck) -> Usage:
    running = list_running_containers(host.gpus, is_lease_live)

    def merge_granted() -> Usage:
        return merge_usages(compute_container_usage(running, host.gpus), grants.compute_grant_usage(locks))

    if host.driver is None:  # without it no process uses a GPU
        return merge_granted()
    return survey_quickly(
        host.gpus, merge_granted, lambda: survey_usage(host.gpus, lambda: running, query_nvml)
    )


def _fail(log: str | None, message: str) -> None:
    text = f"imagematrix: {message}"
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if log:
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps({"level": "error", "msg": text, "time": now}) + "\n")
    sys.stderr.write(f"{text}\n")
    raise SystemExit(FAILED)
