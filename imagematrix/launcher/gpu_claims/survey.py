"""Surveys of the usage of this node's GPUs by running containers, processes and leases."""

from __future__ import annotations

import os
from functools import partial

from imagematrix.common.record import replace
from imagematrix.errors import EngineError
from imagematrix.hardware.gpu_request.spec import name_gpus
from imagematrix.images.engine import containers as engine
from imagematrix.images.engine import endpoint
from imagematrix.launcher.gpu_claims import containers, other_engines, processes
from imagematrix.launcher.gpu_claims.container_leases import (
    compute_lease_usage,
    find_live_leases,
    find_share_namespaces,
)
from imagematrix.launcher.gpu_claims.containers import GPUS, LEASE
from imagematrix.launcher.gpu_claims.grants import compute_grant_usage
from imagematrix.launcher.gpu_claims.locks import MUTEX, Locks, locate_locks
from imagematrix.launcher.gpu_claims.other_engines import PODS
from imagematrix.launcher.gpu_claims.shares import parse_mib
from imagematrix.launcher.gpu_claims.usage import Consumer, find_consumers, list_lock_names, merge_usages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from imagematrix.hardware.host.host import Gpu
    from imagematrix.hardware.host.nvml import Nvml
    from imagematrix.images.engine.containers import LeaseCheck, RunningContainer
    from imagematrix.images.engine.transport import Transport
    from imagematrix.launcher.gpu_claims.container_leases import ContainerLeases
    from imagematrix.launcher.gpu_claims.usage import Usage

# Prefix of the locks that are leases of a share: the file contains the MiB and the keys of the GPUs.
SHARE = "share-"


def survey_node(
    gpus: tuple[Gpu, ...], is_lease_live: LeaseCheck = lambda _: True, transport: Transport | None = None
) -> Usage:
    """Return the usage of this node's `gpus` by anything but leases; raise EngineError.

    `is_lease_live` and `transport` are those of `list_running_containers`.
    """
    return _survey_with_pods(gpus, partial(list_running_containers, gpus, is_lease_live, transport))


def survey_without_daemon(gpus: tuple[Gpu, ...], is_lease_live: LeaseCheck) -> Usage:
    """Return the usage of this node's `gpus` by anything but leases, as far as this user may know it.

    The node may have no engine, or one that this user has no access to: containers of such engines are found
    by their processes. Raises EngineError if a kubelet that this user may ask does not answer.
    """

    def list_containers() -> list[RunningContainer]:
        try:
            return list_running_containers(gpus, is_lease_live)
        except EngineError:
            return other_engines.find_other_containers(gpus, tuple)

    return _survey_with_pods(gpus, list_containers)


def _survey_with_pods(
    gpus: tuple[Gpu, ...], list_containers: Callable[[], Iterable[RunningContainer]]
) -> Usage:
    """Return the usage of `gpus` by anything but leases, and by pods as the kubelet lists them.

    A container of a pod counts by its nodes if the kubelet does not list all of its GPUs: those that a pod
    has by a claim, or by a variable for NVIDIA's runtime, it never lists.
    """
    from imagematrix.launcher.gpu_claims import pods  # the runtime of Swarm's tasks does without it

    listed = pods.compute_pod_usage(gpus)
    usage = survey_usage(gpus, lambda: drop_listed(list_containers(), listed, gpus), query_nvml)
    # What a pod runs belongs to what the kubelet lists for it, such as a share.
    of_pods = _exclude_pods({key: usage[key] for key in listed.keys() & usage.keys()}, "/proc")
    others = {key: consumers for key, consumers in usage.items() if key not in listed}
    return merge_usages(listed, others, of_pods)


def drop_listed(
    running: Iterable[RunningContainer], listed: Usage, gpus: tuple[Gpu, ...]
) -> list[RunningContainer]:
    """Return the containers without those of pods whose GPUs the kubelet has all `listed`."""
    return [
        container
        for container in running
        if PODS not in container.cgroup_parent
        or not listed.keys() >= {*containers.find_gpu_keys(container.devices, gpus)}
    ]


def survey_containers(gpus: tuple[Gpu, ...], is_lease_live: LeaseCheck) -> Usage:
    """Return the usage of `gpus` by the engine's containers only; raise EngineError."""
    return containers.compute_container_usage(engine.list_running_or_starting(is_lease_live), gpus)


def list_running_containers(
    gpus: tuple[Gpu, ...], is_lease_live: LeaseCheck, transport: Transport | None = None
) -> list[RunningContainer]:
    """Return this node's containers that may use `gpus`, of its engine and of others; raise EngineError.

    Left out are containers whose lease counts: `is_lease_live` decides that by the labels of a launch.
    `transport` is by default that to the engine which docker's command uses.
    """
    # The engine comes last: a launch that it does not list yet holds its lease.
    foreign = other_engines.find_other_containers(gpus, partial(engine.list_ids, transport))
    return [*foreign, *engine.list_running_or_starting(is_lease_live, transport)]


def survey_usage(
    gpus: tuple[Gpu, ...],
    list_containers: Callable[[], Iterable[RunningContainer]],
    query: Callable[[], Nvml | None],
) -> Usage:
    """Return the usage of `gpus` by containers and processes.

    `list_containers` returns the running containers, and `query` the state from
    NVML, or None if no driver is loaded, so that no process can use a GPU. Raises what `list_containers`
    raises.
    """
    # Containers come last: if a launch released its lease before the survey, its container runs by then.
    nvml = query()
    computing: Usage = {}
    if nvml is not None:
        computing, covered = processes.compute_process_usage(nvml)
        uncovered = {gpu.minor for gpu in gpus if gpu.minor is not None} - covered
        computing = (
            merge_usages(computing, processes.compute_open_node_usage(uncovered)) if uncovered else computing
        )
    return merge_usages(computing, containers.compute_container_usage(list_containers(), gpus))


def survey_quickly(
    gpus: tuple[Gpu, ...],
    survey_containers: Callable[[], Usage],
    survey: Callable[[], Usage],
) -> Usage:
    """Return the usage of `gpus`, from `survey` only if a process has a GPU open that its container lacks.

    `survey_containers` returns the usage by containers. A query of NVML takes longer than starting a
    container, and adds nothing if only containers use GPUs.
    """
    opened = processes.compute_open_node_usage({gpu.minor for gpu in gpus if gpu.minor is not None})
    usage = survey_containers()
    for key, openers in opened.items():
        owner_ids = frozenset[str]().union(*(consumer.owner_ids for consumer in find_consumers(usage, [key])))
        if any(owner_ids.isdisjoint(process.owner_ids) for process in openers):
            return survey()
    return usage


def compute_locked_usage(
    locks: Locks, *, whole: bool = True, containers: ContainerLeases | None = None
) -> Usage:
    """Return the leases in `locks` with their holders, and the grants.

    Without `whole`, leases of whole GPUs are left out, which saves 10 ms if there are no shares. A launch
    that is still choosing has no lease yet. `containers` are the leases of live containers, if the caller has
    read them. Removes the files of shares whose process has ended, as far as this user may.
    """
    shares = _list_shares(locks)
    holders = locks.find_holders() if whole or shares else {}
    chooser = holders.get(MUTEX)
    leased = {
        name: (processes.describe_process(pid, kind="lease"),)
        for name, pid in holders.items()
        if name.startswith("nvidia") and pid != chooser
    }
    if containers is None:
        containers = find_live_leases(locks)
    namespaces = find_share_namespaces(containers)
    shared = merge_usages(*(_read_share(locks, name, holders, namespaces) for name in shares))
    # Containers whose keepers were killed: those of live keepers are among the leases already.
    orphans = [(lease, holder) for lease, holder in containers if not lease.is_held(holders, shared)]
    return merge_usages(leased, shared, compute_lease_usage(orphans), compute_grant_usage(locks))


def compute_share_usage(locks: Locks) -> Usage:
    """Return the leases of shares in `locks` with their holders."""
    shares = _list_shares(locks)
    holders = locks.find_holders() if shares else {}
    return merge_usages(*(_read_share(locks, name, holders, {}) for name in shares))


def _list_shares(locks: Locks) -> list[str]:
    return [name for name in locks.list_names() if name.startswith(SHARE)]


def is_lease_live(labels: Mapping[str, str], leased: Usage, unleased: Collection[str]) -> bool:
    """Whether the lease of a launch still counts, given the labels of its container.

    `leased` are the leases, and `unleased` the names of GPUs that no launch leases as a whole.
    """
    share = labels.get(LEASE)
    if share is not None:
        return any(share in consumer.owner_ids for consumers in leased.values() for consumer in consumers)
    return set(labels.get(GPUS, "").split(",")).isdisjoint(unleased)


def make_lease_check(gpus: Iterable[Gpu], leased: Usage) -> LeaseCheck:
    """Return a function that decides by the labels of a launch's container whether its lease counts."""
    free = (gpu for gpu in gpus if gpu.minor is not None and not find_consumers(leased, list_lock_names(gpu)))
    unleased = frozenset(name for gpu in free for name in name_gpus([gpu]))
    return lambda labels: is_lease_live(labels, leased, unleased)


def survey_node_leases() -> Usage:
    """Return the leases and grants in the lock folder of this node."""
    if not os.path.isdir(locate_locks()):  # noqa: PTH112 - pathlib is slow to import
        return {}
    with Locks(locate_locks(), endpoint.get_socket_group()) as locks:
        return compute_locked_usage(locks)


def survey_outside_pods(gpus: tuple[Gpu, ...]) -> Usage:
    """Return the usage of this node's `gpus` by anything but pods, which the kubelet does not report.

    Raises EngineError if there is an engine that does not answer.
    """
    leased = survey_node_leases()
    path = endpoint.find_address().removeprefix("unix://")
    if path.startswith("/") and not os.path.lexists(path):  # most nodes of Kubernetes have no engine
        found = other_engines.find_other_containers(gpus, tuple)
    else:
        # With cri-dockerd, kubelet has the engine start the containers of pods.
        found = list_running_containers(gpus, make_lease_check(gpus, leased))
    running = [container for container in found if PODS not in container.cgroup_parent]
    # Processes of pods have their GPUs open all the time. NVML is queried only if others do.
    query = query_nvml if survey_open_outside_pods(gpus) else lambda: None
    return merge_usages(leased, _exclude_pods(survey_usage(gpus, lambda: running, query), "/proc"))


def survey_open_outside_pods(gpus: tuple[Gpu, ...], root: str = "/") -> Usage:
    """Return the usage by processes outside of pods that have a GPU's node open, as `root` shows them.

    In a container, which sees only the node's /proc, nothing else is known.
    """
    proc = os.path.join(root, "proc")  # noqa: PTH118 - see above
    minors = {gpu.minor for gpu in gpus if gpu.minor is not None}
    return _exclude_pods(processes.compute_open_node_usage(minors, proc), proc)


def _exclude_pods(usage: Usage, proc: str) -> Usage:
    remaining = {
        key: tuple(
            consumer
            for consumer in consumers
            if consumer.pid is None or not processes.is_in_pod(consumer.pid, proc)
        )
        for key, consumers in usage.items()
    }
    return {key: consumers for key, consumers in remaining.items() if consumers}


def _read_share(
    locks: Locks, name: str, holders: Mapping[str, int], namespaces: Mapping[str, frozenset[str]]
) -> Usage:
    """Return the usage by the lease of a share; remove its file if its process has ended.

    `namespaces` are those of containers without a daemon, whose processes belong to the lease.
    """
    text = locks.read_held_text(name)
    if text is None:
        locks.remove(name)
        return {}
    declared, *keys = text.split() or [""]
    holder = (
        processes.describe_process(holders[name], kind="lease")
        if name in holders
        else Consumer(kind="lease", name="unknown")
    )
    # Any user can write a malformed file: without a valid size the lease is for the whole GPU.
    owner_ids = frozenset({name}) | namespaces.get(name, frozenset())
    lease = replace(holder, vram_mib=parse_mib(declared), owner_ids=owner_ids)
    return dict.fromkeys(keys, (lease,))


def query_nvml() -> Nvml | None:
    """Return the state from NVML; None if no driver is loaded, because a query might load it."""
    from imagematrix.hardware.host import accelerator_hints, nvml
    from imagematrix.hardware.host.tree import Tree

    if not accelerator_hints.find_hints(Tree("/")).has_driver:
        return None

    return nvml.read_nvml()
