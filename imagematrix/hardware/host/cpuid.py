"""CPU flags that kernels do not print, from CPUID by way of the C library.

`ld.so --list-diagnostics` of glibc prints what CPUID returns (2.33 and newer; the manual's section "Dynamic
Linker Diagnostics"): first the leaves that the library itself uses, and from 2.40 on all leaves of each
processor. The latter takes long in virtual machines, so it is read only where a flag needs it, and only for
the first processor.
"""

from __future__ import annotations

import os
import re

from imagematrix.common.record import Record
from imagematrix.hardware.vendors import cpuid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Set as AbstractSet

    from imagematrix.hardware.host.tree import Tree
    from imagematrix.hardware.vendors.cpuid import Leaf

LOADER = "/lib64/ld-linux-x86-64.so.2"  # by the psABI
CAPTURED = "/ld-diagnostics.txt"  # its output in a captured tree
BOOT = "/proc/sys/kernel/random/boot_id"
LIMIT = 1024 * 1024  # bytes; the parts that are read have 20 kB
TIMEOUT_S = 10.0  # in a virtual machine, each CPUID ends in the hypervisor
SIGKILL = 9  # the module `signal` is slow to import
# After the first mark the library's own leaves are complete, after the second those of the first processor.
COMPLETE = "\nx86.processor[0x0].xgetbv."
MARKS = ("\nx86.cpu_features.preferred.", COMPLETE)

FEATURE = re.compile(
    r"^x86\.cpu_features\.features\[0x([0-9a-f]{1,2})\]\.(cpuid|active)\[0x([0-3])\]=0x([0-9a-f]{1,8})$",
    re.ASCII | re.MULTILINE,
)
PROCESSOR = re.compile(
    r"^x86\.processor\[0x0\]\.cpuid\.(?:subleaf_)?eax\[0x([0-9a-f]{1,8})\]\.(?:ecx\[0x([0-9a-f]{1,3})\]\.)?"
    r"(e[a-d]x)=0x([0-9a-f]{1,8})$",
    re.ASCII | re.MULTILINE,
)
# Of the leaves that the library uses, by its numbers for them (bits/platform/x86.h), which are a stable ABI.
FEATURES: dict[int, Leaf] = {0x6: (0x7, 1), 0x9: (0x24, 0)}

NEWEST = (0x24, 0)
NOTHING = (0, 0, 0, 0)

NO_GLIBC = f"this system has no glibc ({LOADER})"
OLD = "`ld.so --list-diagnostics` does not show them (glibc shows some from 2.33 on, all from 2.40 on)"
NOT_CAPTURED = f"the captured tree has no {CAPTURED[1:]}"
DIFFERENT = "the processors are not of one kind"


class UnprintedFlags(Record):
    """Flags that kernels do not print: those that are there, and those of which that is unknown, and why."""

    present: frozenset[str]
    unknown: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()


def read_unprinted_flags(tree: Tree, shown: AbstractSet[str], *, alike: bool) -> UnprintedFlags:
    """Return the flags that the kernel does not print.

    `shown` are the flags that it prints. CPUID is read of one processor: it counts if all are `alike`.
    """
    present, unknown = cpuid.decode_flags(shown, {}, {})
    if not unknown:
        return UnprintedFlags(present=present)
    reason = DIFFERENT
    if alike:
        texts, reason = _read_diagnostics(tree)
        for text in texts:
            present, unknown = cpuid.decode_flags(shown, *_parse_registers(text))
            if not unknown:
                return UnprintedFlags(present=present)
    warning = f"CPU flags unknown, which kernels do not print: {', '.join(sorted(unknown))}: {reason}"
    return UnprintedFlags(present=present, unknown=unknown, warnings=(warning,))


def _read_diagnostics(tree: Tree) -> tuple[Iterable[str], str]:
    """Return more and more of the loader's output, and the reason why it may lack flags."""
    from imagematrix.hardware.host.tree import Tree

    # The node's files in a container are of this machine, too.
    if tree.live or tree.read_text(BOOT) == Tree("/").read_text(BOOT) is not None:
        return (_run_loader(), OLD) if os.access(LOADER, os.X_OK) else ((), NO_GLIBC)
    text = tree.read_text(CAPTURED)
    return ((), NOT_CAPTURED) if text is None else ((text,), OLD)


def _run_loader() -> Iterator[str]:
    """Yield the output of the loader up to each of `MARKS`, and all of it if marks are missing."""
    import time
    from select import POLLIN, poll  # `select` accepts no file descriptor above 1023

    reader, writer = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, writer, 1), (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
    try:
        # Without an environment: tunables change the answer, and the output would show it.
        child = os.posix_spawn(LOADER, [LOADER, "--list-diagnostics"], {}, file_actions=actions)
    except OSError:
        os.close(reader)
        return
    finally:
        os.close(writer)
    try:
        text, marks, end = "", [*MARKS], time.monotonic() + TIMEOUT_S
        poller = poll()
        poller.register(reader, POLLIN)
        while len(text) < LIMIT and poller.poll(max(0.0, end - time.monotonic()) * 1000):
            chunk = os.read(reader, LIMIT)
            text += chunk.decode("ascii", "replace")
            if not chunk or marks[0] in text:
                yield text
                marks.pop(0)
            if not chunk or not marks:
                break
    finally:
        os.close(reader)
        _end_child(child)


def _end_child(child: int) -> None:
    """Kill a child process and wait for it, unless the process that imports this package has waited for it.

    It may ignore SIGCHLD, or wait for all children. The number of one that ended may be another process's.
    """
    try:
        if os.waitpid(child, os.WNOHANG) == (0, 0):
            os.kill(child, SIGKILL)
            os.waitpid(child, 0)
    except (ChildProcessError, ProcessLookupError):
        pass


def _parse_registers(text: str) -> tuple[dict[Leaf, tuple[int, ...]], dict[Leaf, tuple[int, ...]]]:
    """Return what CPUID returns for each leaf, and the same with only the bits of usable features."""
    values: dict[tuple[str, Leaf], list[int]] = {}
    for index, kind, register, value in FEATURE.findall(text):
        if leaf := FEATURES.get(int(index, 16)):
            values.setdefault((kind, leaf), [*NOTHING])[int(register)] = int(value, 16)
    for number, subleaf, register, value in PROCESSOR.findall(text):
        leaf = int(number, 16), int(subleaf or "0", 16)
        values.setdefault(("cpuid", leaf), [*NOTHING])[cpuid.REGISTERS.index(register)] = int(value, 16)
    registers, active = (
        {leaf: tuple(row) for (kind, leaf), row in values.items() if kind == wanted}
        for wanted in ("cpuid", "active")
    )
    if COMPLETE in text:  # the loader leaves out what is nothing but zeros
        registers = {bit.leaf: NOTHING for bit in cpuid.list_unprinted_flags().values()} | registers
    # A library that does not know the newest leaf does not know the newest registers either.
    return registers, active if NEWEST in active else {}
