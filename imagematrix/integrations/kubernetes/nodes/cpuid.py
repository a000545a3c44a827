"""CPU flags by their names in Node Feature Discovery (NFD), which hides the flags that most CPUs have.

The labels feature.node.kubernetes.io/cpu-cpuid.NAME use the names of https://github.com/klauspost/cpuid on
x86, and the kernel's names in capitals on arm64. NFD's default `attributeBlacklist` (source/cpu/cpu.go of
https://github.com/kubernetes-sigs/node-feature-discovery) hides the flags in HIDDEN.
"""

from __future__ import annotations

from functools import cache

from imagematrix.hardware.vendors import marches
from imagematrix.integrations.kubernetes.nodes.labels import get_flag_vocabulary

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

ARM = "aarch64"
# Names that differ from the kernel's flags by more than case and underscores.
OTHERS = {
    "abm": "LZCNT",
    "aes": "AESNI",
    "avx_ne_convert": "AVXNECONVERT",
    "fma": "FMA3",
    "lahf_lm": "LAHF",
    "pclmulqdq": "CLMUL",
    "pni": "SSE3",
    "sha_ni": "SHA",
    "sse4_1": "SSE4",
    "sse4_2": "SSE42",
}
SHOWN = """
    adx aes amx_bf16 amx_complex amx_fp16 amx_fp8 amx_int8 amx_tf32 amx_tile amx_transpose avx avx2
    avx512_bf16 avx512_bitalg avx512_fp16 avx512_vbmi2 avx512_vnni avx512_vp2intersect avx512_vpopcntdq
    avx512bw avx512cd avx512dq avx512er avx512f avx512ifma avx512pf avx512vbmi avx512vl avx_ifma
    avx_ne_convert avx_vnni avx_vnni_int16 avx_vnni_int8 clzero cmpccxadd fma fma4 fxsr gfni lahf_lm
    movbe movdir64b movdiri serialize sha_ni sm3 sm4 sse4a tbm vaes vpclmulqdq waitpkg xop xsave xsavec
    xsaveopt
"""
HIDDEN = """
    abm bmi1 bmi2 cx16 f16c mmx pclmulqdq pni popcnt rdrand rdseed sse sse2 sse4_1 sse4_2 ssse3
"""
# A psABI level is inferred from those of its flags that NFD shows. NFD hides the flags of the second level,
# but no CPU has AVX without them.
PROOFS: Mapping[str, frozenset[str]] = {"x86-64-v2": frozenset(["avx"])}


@cache
def get_nfd_names(arch: str) -> dict[str, str]:
    """Return NFD's names of the flags that its labels show, by the kernel's names."""
    if arch == ARM:
        return {flag: flag.upper() for flag in get_flag_vocabulary(arch)}
    return {flag: _make_nfd_name(flag) for flag in SHOWN.split()}


def expand_flags(shown: Iterable[str], arch: str) -> frozenset[str]:
    """Return a CPU's flags from the names that NFD shows, with the flags that the psABI level implies."""
    shown_names = frozenset(shown)
    flag_names = get_nfd_names(arch) | (
        {} if arch == ARM else {flag: _make_nfd_name(flag) for flag in HIDDEN.split()}
    )
    present = frozenset(flag for flag, name in flag_names.items() if name in shown_names)
    if arch != "x86_64" or not present:
        return present
    for level, added in marches.LEVELS:
        if not get_proving_flags(level) <= present:
            break
        present |= added
    return present


@cache
def get_proving_flags(level: str) -> AbstractSet[str]:
    """Return the flags that NFD shows for every CPU of a psABI level; they imply the level's other flags."""
    shown: frozenset[str] = frozenset()
    for name, added in marches.LEVELS:
        shown |= PROOFS.get(name, added) - frozenset(HIDDEN.split())
        if name == level:
            break
    return shown


def _make_nfd_name(flag: str) -> str:
    return OTHERS.get(flag, flag.replace("_", "").upper())
