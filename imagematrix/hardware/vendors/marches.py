"""The meaning of -march and -mcpu: the flags that a CPU needs to run code compiled for them.

The table in marches.json is for planning. For an image, the macros of the compiler inside it decide, which
`get_flags_from_macros` reads.
"""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType

from imagematrix.hardware.vendors import _data

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

# User code does not depend on these: they are privileged, hints, or kernel services that code checks for at
# run time, and kernels and hypervisors hide them.
IGNORED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "x86_64": frozenset(
            [
                "3dnowprefetch",
                "cldemote",
                "enqcmd",
                "hle",
                "lwp",
                "mwaitx",
                "pku",
                "rdpid",
                "rtm",
                "sgx",
                "tsxldtrk",
                "user_shstk",
                "wbnoinvd",
                "xsaves",
            ]
        ),
        "aarch64": frozenset(["bti", "mte", "paca", "pacg", "rng"]),
    }
)

# What LLVM detects of the CPU that it runs on, besides the flags of marches (getHostCPUFeatures):
# https://github.com/llvm/llvm-project/blob/main/llvm/lib/TargetParser/Host.cpp.
DETECTED: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "x86_64": frozenset(["cmov", "cx8", "invpcid", "pconfig", "rdpru"]),
        "aarch64": frozenset(["asimd", "fp"]),
    }
)

# Needed by code that signs return addresses, if the architecture has instructions for it. Otherwise it signs
# with instructions that are hints on older CPUs.
SIGNING = frozenset(["paca", "pacg"])

# The levels of the x86-64 psABI with the flags that each adds, without those for which compilers have no
# macro (cmov, cx8, fpu, and osxsave, which a kernel that shows avx has enabled).
LEVELS = (
    ("x86-64-v1", frozenset(["fxsr", "mmx", "sse", "sse2"])),
    ("x86-64-v2", frozenset(["cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"])),
    ("x86-64-v3", frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"])),
    ("x86-64-v4", frozenset(["avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"])),
)
RANKS = {name: rank for rank, (name, _) in enumerate(LEVELS, start=1)}

HOST_VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "HygonGenuine": "amd"}
# Prefixes of names on x86; all other names are Intel's. c86-4g is Hygon's, which counts as AMD.
VENDORS = (
    (("amdfam", "athlon", "barcelona", "bdver", "btver", "c86-4g", "k8", "opteron", "znver"), "amd"),
    (("eden", "lujiazui", "nano", "shijidadao", "yongfeng"), "centaurhauls"),
    (("x86-64",), None),
)
ARM_NAMES = ("armv", "cortex-", "neoverse-")


def list_compilers() -> tuple[str, ...]:
    """Return the compilers in the table, as family and major version: "gcc-12"."""
    return tuple(_data.load("marches.json")["compilers"])


def list_code_flags(arch: str) -> frozenset[str]:
    """Return all flags on which code compiled for a CPU of `arch` may depend, without `IGNORED`.

    They are those of every march, and those that LLVM detects. It is empty for an unknown architecture.
    """
    marches = _data.load("marches.json").get(arch) or {}
    flags = frozenset(flag for sets in marches.values() for text in sets.values() for flag in text.split())
    return (flags | DETECTED.get(arch, frozenset())) - IGNORED.get(arch, frozenset())


@lru_cache
def list_known_names(compiler: str) -> frozenset[str] | None:
    """Return the names that `compiler` ("gcc-12") accepts for -march or -mcpu; None if it is unknown."""
    if compiler not in list_compilers():
        return None
    return frozenset(
        march
        for arch in IGNORED
        for march, sets in _data.load("marches.json")[arch].items()
        if any(compiler in names.split() for names in sets)
    )


def list_names() -> frozenset[str]:
    """Return the names that any compiler in the table accepts for -march or -mcpu."""
    table = _data.load("marches.json")
    return frozenset(march for arch in IGNORED for march in table[arch])


@lru_cache(maxsize=4096)
def get_required_flags(march: str, compiler: str) -> frozenset[str] | None:
    """Return the flags that code compiled for `march` by `compiler` ("gcc-12") needs, without `IGNORED`.

    For a version that is not in the table, it is the union over the known versions of the same family. None
    if the compiler does not know the name, or no version of its family does.
    """
    sets: dict[str, str] = _data.load("marches.json")[get_arch(march)].get(march, {})
    if compiler in list_compilers():
        compilers = {compiler}
    else:
        family = compiler.partition("-")[0]
        compilers = {name for name in list_compilers() if name.partition("-")[0] == family}
    matches = [flags for names, flags in sets.items() if compilers & set(names.split())]
    return frozenset(" ".join(matches).split()) - IGNORED[get_arch(march)] if matches else None


@lru_cache(maxsize=4096)
def get_common_flags(march: str) -> frozenset[str]:
    """Return the flags that code for `march` needs from all known compilers, without `IGNORED`.

    It is empty for an unknown name.
    """
    sets = [
        frozenset(flags.split())
        for flags in _data.load("marches.json")[get_arch(march)].get(march, {}).values()
    ]
    return frozenset.intersection(*sets) - IGNORED[get_arch(march)] if sets else frozenset()


def get_flags_from_macros(text: str, arch: str, march: str = "") -> frozenset[str]:
    """Return the flags needed by code whose compiler predefines these macros, without `IGNORED`.

    `SIGNING` is included if return addresses are signed and the march has pointer authentication.

    `text` is the output of `cc -march=M -dM -E -x c /dev/null`, `arch` is "x86_64" or "aarch64". `march` is
    the M, which on aarch64 implies instructions that no macro announces.
    """
    from imagematrix.hardware.vendors import macros

    announced = macros.parse_flags(text, arch)
    needed = announced | macros.list_unannounced_flags(march, announced)
    # gcc has a macro for pointer authentication from 13 on and clang from 16; both used it before.
    sets: dict[str, str] = _data.load("marches.json")[arch].get(march, {})
    known = needed.union(" ".join(sets.values()).split())
    signed = macros.signs_returns(text) and not SIGNING.isdisjoint(known)
    return needed - IGNORED[arch] | (SIGNING if signed else frozenset())


def get_level(flags: AbstractSet[str]) -> str | None:
    """Return the highest psABI level ("x86-64-v3") that `flags` reach; None below the first, or not x86.

    They may be the flags of a host, or the flags that code needs.
    """
    level = None
    for name, added in LEVELS:
        if not added <= flags:
            break
        level = name
    return level


def get_level_flags(level: str | None) -> frozenset[str]:
    """Return all flags of a psABI level, with those of the levels below; none without one."""
    return frozenset[str]().union(*(added for _, added in LEVELS[: get_level_rank(level)]))


def get_level_rank(level: str | None) -> int:
    """Return the number of a psABI level, 1 to 4; 0 without one."""
    return RANKS.get(level or "", 0)


def get_vendor(march: str) -> str | None:
    """Return the vendor of `march`'s CPUs, as `get_host_vendor` names it; None for generic names.

    It is also None on aarch64, where the vendor does not indicate which code runs best.
    """
    if march not in _data.load("marches.json")["x86_64"]:
        return None
    return next((name for starts, name in VENDORS if march.startswith(starts)), "intel")


def get_host_vendor(vendor_id: str | None) -> str | None:
    """Return the vendor behind the `vendor_id` of /proc/cpuinfo: "intel", "amd", others in lower case."""
    name = (vendor_id or "").strip()
    return HOST_VENDORS.get(name, name.lower()) or None


def get_arch(march: str) -> str:
    """Return the architecture of `march`: "x86_64" or "aarch64"."""
    listed_for_arm = march in _data.load("marches.json")["aarch64"]
    return "aarch64" if listed_for_arm or march.startswith(ARM_NAMES) else "x86_64"


def get_option(march: str, arch: str) -> str:
    """Return the compiler option that selects `march` of `arch`: on aarch64, cores use -mcpu."""
    core = arch == "aarch64" and not march.startswith("armv")
    return f"-mcpu={march}" if core else f"-march={march}"
