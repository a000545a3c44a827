"""`imagematrix gpus`: the GPUs of this node, free, shared or used, and by what."""

from __future__ import annotations

import os

from imagematrix.cli.options import HostFile, Json
from imagematrix.cli.output import answer, say, table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from imagematrix.allocation.report import Status
    from imagematrix.allocation.usage import Usage

__all__ = ["command"]

COLUMNS = ("GPU", "name", "uuid", "", "used by", "load", "memory", "heat")


def command(host: HostFile = None, json: Json = False) -> None:
    """Tell which GPUs of this node are free or shared, and who uses them."""
    from imagematrix.allocation.report import statuses, to_json
    from imagematrix.allocation.survey import query_nvml, survey
    from imagematrix.allocation.usage import combined
    from imagematrix.node.host import Host
    from imagematrix.node.probe import assemble
    from imagematrix.node.tree import Tree

    live = query_nvml()
    # NVML is asked once: some of what it says is about the host, some about now.
    node = Host.load(host) if host else assemble(Tree("/"), query=(lambda: live) if live else None)
    containers, warnings = _containers()
    uses = combined(_leases(), survey(node.gpus, lambda: containers, lambda: live))
    found = statuses(node.gpus, uses, live, complete=not warnings)
    if json:
        answer(to_json(found, (*node.warnings, *warnings)))
    elif found:
        table(COLUMNS, [row for status in found for row in _rows(status)])
    else:
        print("this node has no GPU")
    told = (f"what can't be used: {accelerator.label}" for accelerator in node.accelerators)
    for warning in (*node.warnings, *told, *warnings):
        say(f"warning: {warning}")


def _containers() -> tuple[list[dict[str, Any]], list[str]]:
    from imagematrix import engine
    from imagematrix.errors import EngineError

    try:
        return engine.running(), []
    except EngineError as error:
        return [], [f"{error}, so the GPUs of containers are not known"]


def _leases() -> Usage:
    from imagematrix import engine
    from imagematrix.allocation.locks import Locks, folder
    from imagematrix.allocation.survey import leases

    if not os.path.isdir(folder()):  # noqa: PTH112 - it takes a string
        return {}
    with Locks(folder(), engine.group()) as locks:
        return leases(locks)


def _rows(status: Status) -> Iterator[tuple[str, ...]]:
    from rich.markup import escape

    gpu, live = status.gpu, status.live
    known = {
        "load": f"{live.utilization} %" if live and live.utilization is not None else "",
        "memory": _memory(live.memory_used_mib if live else None, gpu.memory_mib),
        "heat": f"{live.temperature} °C" if live and live.temperature is not None else "",
    }
    if not status.parts:
        yield (str(gpu.index), escape(gpu.name or ""), escape(gpu.uuid or ""), *_use(status), *known.values())
        return
    yield (str(gpu.index), escape(gpu.name or ""), escape(gpu.uuid or ""), "", "", *known.values())
    for part in status.parts:
        (device,) = part.gpu.mig or ()
        name = f"{gpu.index}:{device.gpu_instance}:{device.compute_instance}"
        memory = _memory(None, device.memory_mib)
        yield (name, escape(device.profile or ""), escape(device.uuid or ""), *_use(part), "", memory, "")


def _use(status: Status) -> tuple[str, str]:
    from rich.markup import escape

    if status.used_by:
        left = status.free_mib
        state = "used" if left is None else f"shared, {left} MiB left"
        return state, escape("\n".join(map(str, status.used_by)))
    if status.free is None:
        return "unknown", ""
    return ("free" if status.free else status.gpu.state), ""


def _memory(used: int | None, total: int | None) -> str:
    words = [str(number) for number in (used, total) if number is not None]
    return f"{' of '.join(words)} MiB" if words else ""
