"""`imagematrix probe`: the description of this node."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from imagematrix.cli.shared.options import Json, NvidiaSmi, Root
from imagematrix.cli.shared.output import print_info, print_json, print_text, warn
from imagematrix.common.suggestions import require_known
from imagematrix.errors import UsageError

EXAMPLE = "imagematrix probe --json > node.json"
TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.hardware.host.host import Host

FORMATS = {
    "text": "for people",
    "json": "as --json",
    "conda": "variables that make conda solve for this node",
    "classad": "attributes of a ClassAd, for HTCondor",
}
TEXT, JSON, CONDA = "text", "json", "conda"


def command(
    root: Root = None,
    nvidia_smi: NvidiaSmi = None,
    format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help=f"{'; '.join(f'{name}: {text}' for name, text in FORMATS.items())}.",
            autocompletion=lambda: list(FORMATS),
        ),
    ] = TEXT,
    json: Json = False,
) -> None:
    """Show the facts about this node that matter for selecting an image."""
    from imagematrix.hardware.host.probe import probe

    require_known(format, FORMATS, "format")
    if json and format not in (TEXT, JSON):
        raise UsageError(f"--json and --format {format} are mutually exclusive")
    host = probe(root or "/", smi=nvidia_smi)
    if json or format == JSON:
        print_json(host.to_json())
    elif format == CONDA:
        from imagematrix.integrations.export import conda

        # The captured tree of another node does not say which C library runs there.
        variables = conda.make_variables(host, None if root else _find_glibc_version())
        print_text(*(f"{name}={value}" for name, value in variables.items() if value is not None))
        for name in (name for name, value in variables.items() if value is None):
            warn(f"{name} is left out: unknown for this node")
    elif format != TEXT:
        from imagematrix.integrations.export import classad

        print_text(*classad.make_attribute_lines(host))
    else:
        print_text(*_describe_host(host))
    for warning in host.warnings:
        print_info(f"warning: {warning}")


def _find_glibc_version() -> str | None:
    """Return the version of this machine's GNU C library; None if it has another one."""
    try:
        name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
    except (OSError, ValueError):
        return None
    return version if name == "glibc" else None


def _describe_host(host: Host) -> list[str]:
    cpu = host.cpu
    driver = f"{host.driver.version} ({host.driver.kind or 'kind unknown'})" if host.driver else "none loaded"
    gpus = []
    for gpu in host.gpus:
        facts = [
            gpu.name or "unknown",
            f"compute {gpu.compute}" if gpu.compute else "compute capability unknown",
            f"{gpu.memory_mib} MiB" if gpu.memory_mib else "",
            f"/dev/nvidia{gpu.minor}" if gpu.minor is not None else "no device node known",
            gpu.uuid or "",
            f"{len(gpu.mig)} MIG devices" if gpu.mig is not None else "",
            "" if gpu.state == "ok" else f"state {gpu.state}",
        ]
        gpus.append(f"GPU {gpu.index:<10}{', '.join(fact for fact in facts if fact)}")
    return [
        f"architecture  {host.arch}",
        f"processor     {cpu.model or 'unknown'} ({cpu.vendor or 'vendor unknown'}), {len(cpu.flags)} flags",
        *([f"level         {cpu.level}"] if cpu.level else []),
        f"driver        {driver}",
        *(gpus or ["GPUs          none"]),
        *[f"accelerator   {accelerator.label}" for accelerator in host.accelerators],
        f"device nodes  {' '.join(host.devices) or 'none'}",
    ]
