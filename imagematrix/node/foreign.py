"""The processors of a host without /proc/cpuinfo, from the py-cpuinfo library.

The library sleeps and starts processes, which takes over a second, so it is the last resort.
"""

from __future__ import annotations

from imagematrix.errors import ProbeError
from imagematrix.node import cpu
from imagematrix.node.host import Cpu

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["read", "translate"]

# py-cpuinfo's names, from CPUID and from macOS's sysctl, that differ from the Linux kernel's (cpufeatures.h).
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


def read() -> tuple[Cpu, tuple[str, ...]]:
    """Return the processors that py-cpuinfo reports; raise ProbeError if it reports none."""
    try:
        import cpuinfo

        info = cpuinfo.get_cpu_info()
    except Exception as error:  # it runs machine code and the tools of several systems
        raise ProbeError(f"/proc/cpuinfo not found, and py-cpuinfo failed: {error}") from error
    if not info:
        raise ProbeError("/proc/cpuinfo not found, and py-cpuinfo detected no CPU")
    return translate(info)


def translate(info: Mapping[str, object]) -> tuple[Cpu, tuple[str, ...]]:
    """Return the processors from py-cpuinfo's result, with the kernel's names of their flags."""
    listed = info.get("flags")
    names = [str(flag).lower() for flag in listed] if isinstance(listed, list) else []
    flags = frozenset(KERNEL_NAMES.get(name, name) for name in names)
    warnings = () if flags else ("CPU flags unknown: py-cpuinfo reported none",)
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
