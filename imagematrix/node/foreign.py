"""The processors of a host that has no /proc/cpuinfo, as the py-cpuinfo library finds them.

That takes over a second, because it sleeps and starts processes, so it is the last resort.
"""

from __future__ import annotations

from imagematrix.errors import ProbeError
from imagematrix.node import cpu
from imagematrix.node.host import Cpu

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ask", "translate"]

# py-cpuinfo's names, from CPUID and from macOS's sysctl, where the Linux kernel has others (cpufeatures.h).
KERNEL_NAMES = {
    "1gbpage": "pdpe1gb",
    "avx1.0": "avx",
    "avx512bitalg": "avx512_bitalg",
    "avx512vbmi2": "avx512_vbmi2",
    "avx512vnni": "avx512_vnni",
    "avx512vpopcntdq": "avx512_vpopcntdq",
    "clfsopt": "clflushopt",
    "em64t": "lm",
    "lahf": "lahf_lm",
    "lzcnt": "abm",
    "mon": "monitor",
    "prefetchw": "3dnowprefetch",
    "rdrnd": "rdrand",
    "rdwrfsgs": "fsgsbase",
    "sha": "sha_ni",
    "sse3": "pni",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "tscdeadline": "tsc_deadline_timer",
    "tsctmr": "tsc_deadline_timer",
    "xd": "nx",
}


def ask() -> tuple[Cpu, tuple[str, ...]]:
    """Return the processors that py-cpuinfo finds; raise ProbeError where it finds nothing."""
    try:
        import cpuinfo

        info = cpuinfo.get_cpu_info()
    except Exception as error:  # it runs machine code and the tools of several systems
        raise ProbeError(f"there is no /proc/cpuinfo, and py-cpuinfo failed: {error}") from error
    if not info:
        raise ProbeError("there is no /proc/cpuinfo, and py-cpuinfo found no CPU")
    return translate(info)


def translate(info: Mapping[str, object]) -> tuple[Cpu, tuple[str, ...]]:
    """Return the processors of a py-cpuinfo answer, with the kernel's names for their flags."""
    found = info.get("flags")
    names = [str(flag).lower() for flag in found] if isinstance(found, list) else []
    flags = frozenset(KERNEL_NAMES.get(name, name) for name in names)
    warnings = () if flags else ("the CPU's flags are not told by py-cpuinfo",)
    return (
        Cpu(
            vendor=_text(info.get("vendor_id_raw")),
            model=_text(info.get("brand_raw")),
            flags=flags,
            level=cpu.level(flags) if "lm" in flags else None,
        ),
        warnings,
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
