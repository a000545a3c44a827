"""`imagematrix gpus`: the GPUs of this node, their usage and their load."""

from __future__ import annotations

from typing import Annotated

import typer

from imagematrix.cli.shared.options import HostFile, Json
from imagematrix.cli.shared.output import escape_text, print_info, print_json, print_table, print_text
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from imagematrix.hardware.host.host import Host
    from imagematrix.hardware.host.nvml import Nvml
    from imagematrix.images.engine.containers import RunningContainer
    from imagematrix.launcher.gpu_claims.report import GpuStatus
    from imagematrix.launcher.gpu_claims.usage import Usage

COLUMNS = ("GPU", "name", "uuid", "", "used by", "load", "memory", "temperature")


def command(
    host: HostFile = None,
    json: Json = False,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Print metrics for Prometheus, as text.")
    ] = False,
) -> None:
    """Show which GPUs of this node are free, shared or in use, and by what."""
    if json and metrics:
        raise UsageError("--json and --metrics are mutually exclusive")
    from imagematrix.hardware.host.host import Host
    from imagematrix.hardware.host.probe import assemble_host
    from imagematrix.hardware.host.tree import Tree
    from imagematrix.launcher.gpu_claims.report import list_statuses, make_gpus_document
    from imagematrix.launcher.gpu_claims.survey import query_nvml

    nvml = None if host else query_nvml()
    # One query of NVML serves both: it has facts about the host and current readings.
    query = (lambda: nvml) if nvml else None
    node = Host.load(host) if host else assemble_host(Tree("/"), query=query)
    usage, warnings = _survey_saved_host(node) if host else _survey_this_node(node, nvml)
    gpus = list_statuses(node.gpus, usage, nvml, complete=not warnings)
    if json:
        print_json(make_gpus_document(gpus, (*node.warnings, *warnings)))
    elif metrics:
        from imagematrix.launcher.gpu_claims.metrics import format_metrics

        print_text(*format_metrics(gpus).rstrip("\n").split("\n"))
    elif gpus:
        print_table(COLUMNS, [row for status in gpus for row in _format_rows(status)])
    else:
        print("this node has no GPU")
    unsupported = (f"unsupported accelerator: {accelerator.label}" for accelerator in node.accelerators)
    for warning in (*node.warnings, *unsupported, *warnings):
        print_info(f"warning: {warning}")


def _survey_saved_host(node: Host) -> tuple[Usage, list[str]]:
    """Return the GPU usage of another node by containers, if the engine is remote, and what is unknown."""
    from imagematrix.errors import EngineError
    from imagematrix.images.engine import system
    from imagematrix.launcher.gpu_claims.survey import make_lease_check, survey_containers

    try:
        machine = system.get_remote_name()
        if not machine:
            return {}, ["GPU usage of a saved host unknown; without --host, it is that of this node"]
        warning = f"the engine runs on {machine}: GPU usage by processes and leases there unknown"
        return survey_containers(node.gpus, make_lease_check(node.gpus, {})), [warning]
    except EngineError as error:
        return {}, [f"{error}: GPU usage unknown"]


def _survey_this_node(node: Host, nvml: Nvml | None) -> tuple[Usage, list[str]]:
    """Return the GPU usage of this node, and what of it is unknown."""
    from imagematrix.launcher.gpu_claims.survey import drop_listed, survey_node_leases, survey_usage
    from imagematrix.launcher.gpu_claims.usage import merge_usages

    leased = survey_node_leases()
    containers, engine_warnings = _list_containers(node, leased)
    pods, pod_warnings = _survey_pods(node)
    # On a node of Kubernetes all containers belong to pods, and there is often no engine.
    warnings = pod_warnings if pod_warnings or pods is not None else engine_warnings
    containers = drop_listed(containers, pods or {}, node.gpus)
    usage = merge_usages(leased, pods or {}, survey_usage(node.gpus, lambda: containers, lambda: nvml))
    return usage, [*warnings, *_check_locks()]


def _list_containers(node: Host, leased: Usage) -> tuple[list[RunningContainer], list[str]]:
    """Return the containers that may use GPUs of this node, and warnings."""
    from imagematrix.errors import EngineError
    from imagematrix.images.engine import system
    from imagematrix.launcher.gpu_claims import other_engines
    from imagematrix.launcher.gpu_claims.survey import list_running_containers, make_lease_check

    gpus = node.gpus
    try:
        machine = system.get_remote_name()
        if not machine:
            return list_running_containers(gpus, make_lease_check(gpus, leased)), []
        warning = f"the engine runs on {machine}: GPU usage by containers here unknown"
    except EngineError as error:
        warning = f"{error}: GPU usage by containers unknown"
    return other_engines.find_other_containers(gpus, tuple), [warning]


def _check_locks() -> list[str]:
    """Return the warning that leases cannot be read, if they cannot."""
    from imagematrix.errors import EngineError, ProbeError
    from imagematrix.launcher.gpu_claims.lock_folder import require_shared
    from imagematrix.launcher.gpu_claims.locks import locate_locks

    try:
        require_shared(locate_locks())
    except EngineError:  # it has a warning of its own
        pass
    except ProbeError as error:
        return [f"{error}: GPU usage by leases unknown"]
    return []


def _survey_pods(node: Host) -> tuple[Usage | None, list[str]]:
    """Return the GPU usage of pods, or None without a kubelet, and warnings."""
    from imagematrix.errors import EngineError
    from imagematrix.launcher.gpu_claims import pods

    access = pods.check_access()
    if not access:
        return None, [] if access is None else [pods.format_denied()]
    try:
        return pods.compute_pod_usage(node.gpus), []
    except EngineError as error:
        return None, [f"{error}: GPU usage by pods unknown"]


def _format_rows(status: GpuStatus) -> Iterator[tuple[str | tuple[str, ...], ...]]:
    gpu, reading = status.gpu, status.reading
    identity = (str(gpu.index), escape_text(gpu.name or ""), escape_text(gpu.uuid or ""))
    readings = (
        f"{reading.utilization} %" if reading and reading.utilization is not None else "",
        _format_memory(reading.memory_used_mib if reading else None, gpu.memory_mib),
        f"{reading.temperature} °C" if reading and reading.temperature is not None else "",
    )
    if not status.parts:
        yield (*identity, *_format_usage(status), *readings)
        return
    yield (*identity, "", "", *readings)
    for part in status.parts:
        (device,) = part.gpu.mig or ()
        name = f"{gpu.index}:{device.gpu_instance}:{device.compute_instance}"
        memory = _format_memory(None, device.memory_mib)
        yield (
            name,
            escape_text(device.profile or ""),
            escape_text(device.uuid or ""),
            *_format_usage(part),
            "",
            memory,
            "",
        )


def _format_usage(status: GpuStatus) -> tuple[str, str | tuple[str, ...]]:
    if status.used_by:
        free_mib = status.free_mib
        state = "used" if free_mib is None else f"shared, {free_mib} MiB free"
        return state, tuple(escape_text(str(use)) for use in status.used_by)
    if status.is_free is None:
        return "unknown", ""
    return ("free" if status.is_free else status.gpu.state), ""


def _format_memory(used: int | None, total: int | None) -> str:
    sizes = [str(size) for size in (used, total) if size is not None]
    return f"{' of '.join(sizes)} MiB" if sizes else ""
