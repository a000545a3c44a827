"""Finding out what a node is: from /proc, /sys and /dev, NVML where it helps, or a captured copy of them."""

from __future__ import annotations

import os

from imagematrix.errors import ProbeError, UsageError
from imagematrix.node import cpu
from imagematrix.node.host import Host, machine
from imagematrix.node.signs import look
from imagematrix.node.tree import Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from imagematrix.node.accelerators import Dump
    from imagematrix.node.host import Accelerator, Cpu, Driver, Gpu
    from imagematrix.node.nvml import Nvml
    from imagematrix.node.pci import Function

__all__ = ["assemble", "probe"]

CPUINFO = "/proc/cpuinfo"
LSCPU = ("/lscpu.json", "/lscpu.txt")  # in a captured tree, what `lscpu -J` or `lscpu` printed in its place
CPUINFO_LIMIT = 16 * 1024 * 1024  # bytes; about 11,000 CPUs


def probe(root: str | Path = "/", *, nvml: bool | None = None, smi: str | Path | None = None) -> Host:
    """Return what the node is whose files are below `root`.

    NVML is asked where `root` is `/` and something shows a driver of NVIDIA's; `nvml` true asks it in any
    case, false never. `smi` is a file that holds what `nvidia-smi -q -x` printed: the driver and the GPUs
    come from there, the rest from `root`. What can't be read is None and has a sentence in the Host's
    `warnings`; ProbeError is raised only where there is no host to read at all.
    """
    tree = Tree(os.fspath(root))
    if nvml and smi is not None:
        raise UsageError("the GPUs come either from NVML or from an nvidia-smi dump, not from both")
    if nvml and not tree.live:
        raise UsageError("NVML tells of the running host, not of a captured tree")
    if smi is not None:
        from imagematrix.node.smi import read

        return assemble(tree, dump=read(smi))
    return assemble(tree, ask=_ask if tree.live and nvml is not False else None, always=nvml is True)


def assemble(
    tree: Tree, *, dump: Dump | None = None, ask: Callable[[], Nvml] | None = None, always: bool = False
) -> Host:
    """Return the host that `tree` describes, with the GPUs of `dump`, or with what `ask` learns from NVML.

    Without a sign of a driver `ask` is called only if `always` is set: to NVML it would be a failure, and
    looking for a driver can load one and leave device nodes behind.
    """
    machine, processors, warnings = _processors(tree)
    signs = look(tree)
    functions: tuple[Function, ...] = ()
    driver: Driver | None = None
    gpus: tuple[Gpu, ...] = ()
    devices: tuple[str, ...] = ()
    idle: tuple[Accelerator, ...] = ()
    if signs.functions or signs.functions is None:
        from imagematrix.node import pci

        functions = pci.scan(tree, signs.functions)
    if dump is not None or always or signs.nvidia or any(function.gpu for function in functions):
        from imagematrix.node import accelerators, nvidia

        asked = ask if always or signs.driver else None
        driver, found, devices, remarks = accelerators.find(tree, functions, dump, asked)
        gpus = nvidia.with_capabilities(tree, found)
        warnings += remarks
    if functions or signs.modules or signs.nodes or signs.tegra:
        from imagematrix.node import others

        idle, remarks = others.find(signs, functions, gpus)
        warnings += remarks
    return Host(
        arch=machine,
        cpu=processors,
        driver=driver,
        gpus=gpus,
        devices=devices,
        accelerators=idle,
        warnings=tuple(dict.fromkeys(tree.warnings + warnings)),
    )


def _ask() -> Nvml:
    from imagematrix.node import nvml

    return nvml.read()


def _processors(tree: Tree) -> tuple[str, Cpu, list[str]]:
    text = tree.text(CPUINFO, limit=CPUINFO_LIMIT)
    for path in LSCPU if text is None and not tree.live else ():
        text = text or tree.text(path)
    if text is not None:
        processors, warnings = cpu.parse(text)
    elif tree.live:
        from imagematrix.node import foreign

        processors, warnings = foreign.ask()
    else:
        reason = tree.warnings[-1] if tree.warnings else f"it has no {CPUINFO[1:]}"
        raise ProbeError(
            f"no host was captured there: {reason}",
            remedy="copy at least /proc/cpuinfo (or write what `lscpu -J` prints to lscpu.json), "
            "/proc/driver/nvidia and /dev's listing of nvidia* into it",
        )
    return _arch(tree, text or ""), processors, list(warnings)


def _arch(tree: Tree, text: str) -> str:
    if tree.live:
        return machine(os.uname().machine)
    told = (tree.text("/proc/sys/kernel/arch") or "").strip()  # there from Linux 6.1 on
    if told.isidentifier() and told.isascii():
        return machine(told)
    guess = cpu.arch(text)
    if guess is None:
        raise ProbeError(
            f"the captured {CPUINFO[1:]} does not tell the architecture",
            remedy="write the output of `uname -m` into proc/sys/kernel/arch of the captured tree",
        )
    return machine(guess)
