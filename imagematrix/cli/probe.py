"""`imagematrix probe`: the description of this node."""

from __future__ import annotations

from imagematrix.cli.options import Json, NvidiaSmi, Root
from imagematrix.cli.output import info, print_json, print_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.node.host import Gpu, Host

__all__ = ["command"]


def command(root: Root = None, nvidia_smi: NvidiaSmi = None, json: Json = False) -> None:
    """Show the facts about this node that matter for selecting an image."""
    from imagematrix.node.probe import probe

    host = probe(root or "/", smi=nvidia_smi)
    if json:
        print_json(host.to_json())
    else:
        print_text("\n".join(_lines(host)))
    for warning in host.warnings:
        info(f"warning: {warning}")


def _lines(host: Host) -> list[str]:
    cpu = host.cpu
    driver = f"{host.driver.version} ({host.driver.kind or 'kind unknown'})" if host.driver else "none loaded"
    return [
        f"architecture  {host.arch}",
        f"processor     {cpu.model or 'unknown'} ({cpu.vendor or 'vendor unknown'}), {len(cpu.flags)} flags",
        *([f"level         {cpu.level}"] if cpu.level else []),
        f"driver        {driver}",
        *[f"GPU {gpu.index:<10}{_gpu(gpu)}" for gpu in host.gpus],
        *([] if host.gpus else ["GPUs          none"]),
        *[f"accelerator   {accelerator.label}" for accelerator in host.accelerators],
        f"device nodes  {' '.join(host.devices) or 'none'}",
    ]


def _gpu(gpu: Gpu) -> str:
    facts = [
        gpu.name or "unknown",
        f"compute {gpu.compute}" if gpu.compute else "compute capability unknown",
        f"{gpu.memory_mib} MiB" if gpu.memory_mib else "",
        f"/dev/nvidia{gpu.minor}" if gpu.minor is not None else "no device node known",
        gpu.uuid or "",
        f"{len(gpu.mig)} MIG devices" if gpu.mig is not None else "",
        "" if gpu.state == "ok" else f"state {gpu.state}",
    ]
    return ", ".join(fact for fact in facts if fact)
