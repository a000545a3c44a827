"""Probing a node: from /proc, /sys, /dev and NVML, or from a captured copy of these files."""

from __future__ import annotations

import os

from imagematrix.common.record import replace
from imagematrix.errors import ProbeError, UsageError
from imagematrix.hardware.host import cpu
from imagematrix.hardware.host.accelerator_hints import find_hints
from imagematrix.hardware.host.host import Cpu, Host, get_machine_name
from imagematrix.hardware.host.tree import Tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from imagematrix.hardware.host.gpus import Dump
    from imagematrix.hardware.host.host import Accelerator, Driver, Gpu
    from imagematrix.hardware.host.nvml import Nvml
    from imagematrix.hardware.host.pci import Function

CPUINFO = "/proc/cpuinfo"
LSCPU = ("/lscpu.json", "/lscpu.txt")  # output of `lscpu -J` or `lscpu`, instead of it in a captured tree
SIGN = "avx_vnni"  # no CPU without it has flags that kernels do not print: spare the others the reading
# Older releases of QEMU show programs that they emulate the /proc/cpuinfo of the machine on which they run.
EMULATED = frozenset({"x86_64", "aarch64"})
CPUINFO_LIMIT = 16 * 1024 * 1024  # bytes; about 11,000 CPUs


def probe(root: str | Path = "/", *, nvml: bool | None = None, smi: str | Path | None = None) -> Host:
    """Return the Host whose files are below `root`, and of `/` the number of CPUs that this process may use.

    NVML is queried if `root` is `/` and NVIDIA's driver is detected; always if `nvml` is true, never if it is
    false. `smi` is a file with the output of `nvidia-smi -q -x`: driver and GPUs come from there, the rest
    from `root`. A fact that cannot be read is None and has a sentence in the Host's `warnings`; ProbeError is
    raised only if `root` contains no host at all.
    """
    host = probe_hardware(root, nvml=nvml, smi=smi)
    if not Tree(os.fspath(root)).live:
        return host
    from imagematrix.hardware.host.usable_cpus import add_usable_cpus

    return add_usable_cpus(host)


def probe_hardware(
    root: str | Path = "/", *, nvml: bool | None = None, smi: str | Path | None = None
) -> Host:
    """Return the Host as `probe` does, without the number of CPUs, which only warm images need."""
    for path in (root, root if smi is None else smi):
        if not isinstance(path, str | os.PathLike):
            raise UsageError(f"{path!r:.80} is not the path of a captured tree or a dump")
    tree = Tree(os.fspath(root))
    if nvml and smi is not None:
        raise UsageError("NVML and an nvidia-smi dump are mutually exclusive")
    if nvml and not tree.live:
        raise UsageError("cannot query NVML for a captured tree: it describes the running host")
    if smi is not None:
        from imagematrix.hardware.host.smi import read_dump

        return assemble_host(tree, dump=read_dump(smi))
    query = _query_nvml if tree.live and nvml is not False else None
    return assemble_host(tree, query=query, always=nvml is True)


def assemble_host(
    tree: Tree, *, dump: Dump | None = None, query: Callable[[], Nvml] | None = None, always: bool = False
) -> Host:
    """Return the host that `tree` describes, with the GPUs of `dump`, or with the readings of `query` (NVML).

    Without a sign of a driver `query` is called only with `always`: NVML would fail, and its search for a
    driver can load one and leave device nodes behind.
    """
    machine, processors, warnings = _read_processors(tree)
    hints = find_hints(tree)
    functions: tuple[Function, ...] = ()
    driver: Driver | None = None
    gpus: tuple[Gpu, ...] = ()
    devices: tuple[str, ...] = ()
    accelerators: tuple[Accelerator, ...] = ()
    if hints.functions or hints.functions is None:
        from imagematrix.hardware.host import pci

        functions = pci.list_functions(tree, hints.functions)
    if dump is not None or always or hints.has_nvidia or any(function.is_gpu for function in functions):
        from imagematrix.hardware.host import gpus as nvidia_gpus
        from imagematrix.hardware.host import nvidia

        permitted_query = query if always or hints.has_driver else None
        driver, detected, devices, remarks = nvidia_gpus.find_gpus(tree, functions, dump, permitted_query)
        gpus = nvidia.with_capabilities(tree, detected)
        warnings += remarks
    if functions or hints.modules or hints.nodes or hints.tegra:
        from imagematrix.hardware.host import other_accelerators

        accelerators, remarks = other_accelerators.find_accelerators(tree, hints, functions, gpus)
        warnings += remarks
    return Host(
        arch=machine,
        cpu=processors,
        driver=driver,
        gpus=gpus,
        devices=devices,
        accelerators=accelerators,
        warnings=tuple(dict.fromkeys(tree.warnings + warnings)),
    )


def _query_nvml() -> Nvml:
    from imagematrix.hardware.host import nvml

    return nvml.read_nvml()


def _read_processors(tree: Tree) -> tuple[str, Cpu, list[str]]:
    text = tree.read_text(CPUINFO, limit=CPUINFO_LIMIT)
    # Files of these names in the root of a running host could be anybody's.
    for path in LSCPU if text is None and not tree.live else ():
        text = text or tree.read_text(path)
    if text is None:
        processors, warnings = _read_from_library(tree)
        return _read_arch(tree, ""), processors, warnings
    machine = _read_arch(tree, text)
    processors, remarks = cpu.parse_cpu(text)
    warnings = list(remarks)
    described = cpu.infer_arch(processors.flags)
    if {machine, described} == EMULATED:
        processors = Cpu(vendor=None, model=None, flags=frozenset(), level=None)
        warnings.append(
            f"CPU unknown: {CPUINFO[1:]} describes one of {described}, but this machine, which is probably "
            f"emulated, is {machine}: only code for the baseline architecture is known to run"
        )
    elif SIGN in processors.flags:
        from imagematrix.hardware.host import cpuid

        read = cpuid.read_unprinted_flags(tree, processors.flags, alike=cpu.has_equal_cpus(text))
        flags = processors.flags | read.present
        processors = replace(processors, flags=flags, unknown_flags=read.unknown)
        warnings += read.warnings
    return machine, processors, warnings


def _read_from_library(tree: Tree) -> tuple[Cpu, list[str]]:
    """Return the processors where there is no text about them, and warnings; only those of a running host."""
    if not tree.live:
        reason = tree.warnings[-1] if tree.warnings else f"{CPUINFO[1:]} not found"
        raise ProbeError(
            f"not a captured host: {reason}",
            remedy="copy at least /proc/cpuinfo (or the output of `lscpu -J` as lscpu.json), "
            "/proc/driver/nvidia and the names of /dev/nvidia* into it",
        )
    processors, remarks = cpu.read_from_library()
    return processors, list(remarks)


def _read_arch(tree: Tree, text: str) -> str:
    if tree.live:
        return get_machine_name(os.uname().machine)
    name = (tree.read_text("/proc/sys/kernel/arch") or "").strip()  # exists from Linux 6.1 on
    if name.isidentifier() and name.isascii():
        return get_machine_name(name)
    guess = cpu.parse_arch(text)
    if guess is None:
        raise ProbeError(
            f"architecture unknown: the captured {CPUINFO[1:]} does not show it",
            remedy="write the output of `uname -m` into proc/sys/kernel/arch of the captured tree",
        )
    return get_machine_name(guess)
