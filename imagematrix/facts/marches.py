"""What -march and -mcpu mean: the flags a CPU must have to run what was compiled for them.

The table in marches.json is for planning. The truth about an image is what the compiler inside it says,
which `flags_from_macros` reads.
"""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType

from imagematrix.facts import _data

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

__all__ = [
    "IGNORED",
    "SIGNING",
    "arch",
    "compilers",
    "flags_from_macros",
    "host_vendor",
    "known",
    "level",
    "level_rank",
    "names",
    "option",
    "required",
    "vendor",
]

# Code does not depend on these: they are privileged, or hints, or services of the kernel that user code asks
# for at run time, and kernels and hypervisors hide them.
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

# What code needs that signs return addresses where the architecture has instructions for that. Of one without
# them, it signs by what is a hint to older CPUs.
SIGNING = frozenset(["paca", "pacg"])

# The levels of the x86-64 psABI, each with what it adds, without the flags that compilers have no macro for
# (cmov, cx8, fpu, and osxsave, which a kernel that shows avx has turned on).
LEVELS = (
    ("x86-64-v1", frozenset(["fxsr", "mmx", "sse", "sse2"])),
    ("x86-64-v2", frozenset(["cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"])),
    ("x86-64-v3", frozenset(["abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"])),
    ("x86-64-v4", frozenset(["avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"])),
)
RANKS = {name: rank for rank, (name, _) in enumerate(LEVELS, start=1)}

HOST_VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "HygonGenuine": "amd"}
# Beginnings of names on x86; those of no other vendor are Intel's. c86-4g is Hygon's, which counts as AMD's.
VENDORS = (
    (("amdfam", "athlon", "barcelona", "bdver", "btver", "c86-4g", "k8", "opteron", "znver"), "amd"),
    (("eden", "lujiazui", "nano", "shijidadao", "yongfeng"), "centaurhauls"),
    (("x86-64",), None),
)
ARM_NAMES = ("armv", "cortex-", "neoverse-")


def compilers() -> tuple[str, ...]:
    """Return the compilers in the table, as family and major version: "gcc-12"."""
    return tuple(_data.load("marches.json")["compilers"])


@lru_cache
def known(compiler: str) -> frozenset[str] | None:
    """Return the names that `compiler` ("gcc-12") takes for -march or -mcpu; None where it is not known."""
    if compiler not in compilers():
        return None
    return frozenset(
        march
        for arch in IGNORED
        for march, sets in _data.load("marches.json")[arch].items()
        if any(compiler in names.split() for names in sets)
    )


def names() -> frozenset[str]:
    """Return the names that some compiler in the table takes for -march or -mcpu."""
    table = _data.load("marches.json")
    return frozenset(march for arch in IGNORED for march in table[arch])


@lru_cache(maxsize=4096)
def required(march: str, compiler: str) -> frozenset[str] | None:
    """Return the flags that code compiled for `march` by `compiler` ("gcc-12") needs, less `IGNORED`.

    Of a version that is not in the table, it is all that the known versions of the same family need. None
    where the compiler does not know the name, or no version of its family does.
    """
    sets: dict[str, str] = _data.load("marches.json")[arch(march)].get(march, {})
    if compiler in compilers():
        wanted = {compiler}
    else:
        family = compiler.partition("-")[0]
        wanted = {name for name in compilers() if name.partition("-")[0] == family}
    found = [flags for names, flags in sets.items() if wanted & set(names.split())]
    return frozenset(" ".join(found).split()) - IGNORED[arch(march)] if found else None


def flags_from_macros(text: str, arch: str, march: str = "") -> frozenset[str]:
    """Return the flags that code needs whose compiler has these predefined macros, less `IGNORED`.

    `SIGNING` is needed where return addresses are signed and the march has pointer authentication.

    `text` is the output of `cc -march=M -dM -E -x c /dev/null`, `arch` is "x86_64" or "aarch64". `march` is
    the M, which on aarch64 tells of instructions that no macro announces.
    """
    from imagematrix.facts import macros

    told = macros.flags(text, arch) | macros.unannounced(march)
    # gcc has a macro for pointer authentication from 13 on and clang from 16; both used it before.
    signed = macros.signs_returns(text) and not SIGNING.isdisjoint(told | _by_any_compiler(arch, march))
    return told - IGNORED[arch] | (SIGNING if signed else frozenset())


def level(flags: AbstractSet[str]) -> str | None:
    """Return the highest psABI level ("x86-64-v3") that `flags` reach; None below the first, or not x86.

    They may be those of a host or those that code needs.
    """
    reached = None
    for name, added in LEVELS:
        if not added <= flags:
            break
        reached = name
    return reached


def level_rank(level: str | None) -> int:
    """Return the number of a psABI level, 1 to 4; 0 where there is none."""
    return RANKS.get(level or "", 0)


def vendor(march: str) -> str | None:
    """Return whose CPUs `march` was made for, as `host_vendor` names them; None for generic names.

    It is also None on aarch64, where no name of a vendor tells whose code runs best.
    """
    if march not in _data.load("marches.json")["x86_64"]:
        return None
    return next((name for starts, name in VENDORS if march.startswith(starts)), "intel")


def host_vendor(vendor_id: str | None) -> str | None:
    """Return the vendor behind the `vendor_id` of /proc/cpuinfo: "intel", "amd", others in lower case."""
    name = (vendor_id or "").strip()
    return HOST_VENDORS.get(name, name.lower()) or None


def arch(march: str) -> str:
    """Return the architecture that `march` is a name of: "x86_64" or "aarch64"."""
    known_to_arm = march in _data.load("marches.json")["aarch64"]
    return "aarch64" if known_to_arm or march.startswith(ARM_NAMES) else "x86_64"


def option(march: str, arch: str) -> str:
    """Return the compiler option that selects `march` of `arch`: cores have their own on aarch64."""
    core = arch == "aarch64" and not march.startswith("armv")
    return f"-mcpu={march}" if core else f"-march={march}"


def _by_any_compiler(arch: str, march: str) -> frozenset[str]:
    sets: dict[str, str] = _data.load("marches.json")[arch].get(march, {})
    return frozenset(" ".join(sets.values()).split())
