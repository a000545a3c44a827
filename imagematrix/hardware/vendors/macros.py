"""A compiler's predefined macros and the CPU flags of the instructions that they announce.

The flags on the right are those of /proc/cpuinfo: `flags` on x86 (arch/x86/include/asm/cpufeatures.h of
Linux), `Features` on aarch64 (Documentation/arch/arm64/elf_hwcaps.rst). The macros on the left are those that
gcc (gcc/config/i386/i386-c.cc) and clang (clang/lib/Basic/Targets) define, and on aarch64 those of the Arm C
Language Extensions.

Some x86 flags of recent instruction sets (amx_fp8, apx, avx10_2, movrs, ...) are the kernel's internal names,
or modelled on them, because kernels do not print them: the probe reads them from CPUID (cpuid.json).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

X86_64 = {
    "__3dNOW__": "3dnow",
    "__3dNOW_A__": "3dnowext",
    "__ABM__": "abm",
    "__ADX__": "adx",
    "__AES__": "aes",
    "__AMX_AVX512__": "amx_avx512",
    "__AMX_BF16__": "amx_bf16",
    "__AMX_COMPLEX__": "amx_complex",
    "__AMX_FP16__": "amx_fp16",
    "__AMX_FP8__": "amx_fp8",
    "__AMX_INT8__": "amx_int8",
    "__AMX_MOVRS__": "amx_movrs",
    "__AMX_TF32__": "amx_tf32",
    "__AMX_TILE__": "amx_tile",
    "__AMX_TRANSPOSE__": "amx_transpose",
    "__AMXBF16__": "amx_bf16",
    "__AMXINT8__": "amx_int8",
    "__AMXTILE__": "amx_tile",
    "__APX_F__": "apx",
    "__AVX__": "avx",
    "__AVX10_2__": "avx10_2",
    "__AVX2__": "avx2",
    "__AVX5124FMAPS__": "avx512_4fmaps",
    "__AVX5124VNNIW__": "avx512_4vnniw",
    "__AVX512BF16__": "avx512_bf16",
    "__AVX512BITALG__": "avx512_bitalg",
    "__AVX512BMM__": "avx512_bmm",
    "__AVX512BW__": "avx512bw",
    "__AVX512CD__": "avx512cd",
    "__AVX512DQ__": "avx512dq",
    "__AVX512ER__": "avx512er",
    "__AVX512F__": "avx512f",
    "__AVX512FP16__": "avx512_fp16",
    "__AVX512IFMA__": "avx512ifma",
    "__AVX512PF__": "avx512pf",
    "__AVX512VBMI__": "avx512vbmi",
    "__AVX512VBMI2__": "avx512_vbmi2",
    "__AVX512VL__": "avx512vl",
    "__AVX512VNNI__": "avx512_vnni",
    "__AVX512VP2INTERSECT__": "avx512_vp2intersect",
    "__AVX512VPOPCNTDQ__": "avx512_vpopcntdq",
    "__AVXIFMA__": "avx_ifma",
    "__AVXNECONVERT__": "avx_ne_convert",
    "__AVXVNNI__": "avx_vnni",
    "__AVXVNNIINT16__": "avx_vnni_int16",
    "__AVXVNNIINT8__": "avx_vnni_int8",
    "__BMI__": "bmi1",
    "__BMI2__": "bmi2",
    "__CCMP__": "apx",
    "__CF__": "apx",
    "__CLDEMOTE__": "cldemote",
    "__CLFLUSHOPT__": "clflushopt",
    "__CLWB__": "clwb",
    "__CLZERO__": "clzero",
    "__CMPCCXADD__": "cmpccxadd",
    "__CRC32__": "sse4_2",
    "__EGPR__": "apx",
    "__ENQCMD__": "enqcmd",
    "__F16C__": "f16c",
    "__FMA__": "fma",
    "__FMA4__": "fma4",
    "__FSGSBASE__": "fsgsbase",
    "__FXSR__": "fxsr",
    "__GCC_HAVE_SYNC_COMPARE_AND_SWAP_16": "cx16",
    "__GFNI__": "gfni",
    "__HLE__": "hle",
    "__LAHF_SAHF__": "lahf_lm",
    "__LWP__": "lwp",
    "__LZCNT__": "abm",
    "__MMX__": "mmx",
    "__MOVBE__": "movbe",
    "__MOVDIR64B__": "movdir64b",
    "__MOVDIRI__": "movdiri",
    "__MOVRS__": "movrs",
    "__MWAITX__": "mwaitx",
    "__NDD__": "apx",
    "__NF__": "apx",
    "__PCLMUL__": "pclmulqdq",
    "__PKU__": "pku",
    "__POPCNT__": "popcnt",
    "__PPX__": "apx",
    "__PRFCHW__": "3dnowprefetch",
    "__PUSH2POP2__": "apx",
    "__RDPID__": "rdpid",
    "__RDRND__": "rdrand",
    "__RDSEED__": "rdseed",
    "__RTM__": "rtm",
    "__SERIALIZE__": "serialize",
    "__SGX__": "sgx",
    "__SHA__": "sha_ni",
    "__SHA512__": "sha512",
    "__SHSTK__": "user_shstk",
    "__SM3__": "sm3",
    "__SM4__": "sm4",
    "__SSE__": "sse",
    "__SSE2__": "sse2",
    "__SSE3__": "pni",
    "__SSE4_1__": "sse4_1",
    "__SSE4_2__": "sse4_2",
    "__SSE4A__": "sse4a",
    "__SSSE3__": "ssse3",
    "__TBM__": "tbm",
    "__TSXLDTRK__": "tsxldtrk",
    "__VAES__": "vaes",
    "__VPCLMULQDQ__": "vpclmulqdq",
    "__WAITPKG__": "waitpkg",
    "__WBNOINVD__": "wbnoinvd",
    "__XOP__": "xop",
    "__XSAVE__": "xsave",
    "__XSAVEC__": "xsavec",
    "__XSAVEOPT__": "xsaveopt",
    "__XSAVES__": "xsaves",
    "__ZU__": "apx",
}

AARCH64 = {
    "__ARM_FEATURE_AES": "aes pmull",
    "__ARM_FEATURE_ATOMICS": "atomics",
    "__ARM_FEATURE_BF16": "bf16",
    "__ARM_FEATURE_BF16_SCALAR_ARITHMETIC": "bf16",
    "__ARM_FEATURE_BF16_VECTOR_ARITHMETIC": "bf16",
    "__ARM_FEATURE_BTI": "bti",
    "__ARM_FEATURE_COMPLEX": "fcma",
    "__ARM_FEATURE_CRC32": "crc32",
    "__ARM_FEATURE_CSSC": "cssc",
    "__ARM_FEATURE_DOTPROD": "asimddp",
    "__ARM_FEATURE_FAMINMAX": "faminmax",
    "__ARM_FEATURE_FP16_FML": "asimdfhm",
    "__ARM_FEATURE_FP16_SCALAR_ARITHMETIC": "fphp",
    "__ARM_FEATURE_FP16_VECTOR_ARITHMETIC": "asimdhp",
    "__ARM_FEATURE_FP8": "f8cvt",
    "__ARM_FEATURE_FP8DOT2": "f8dp2",
    "__ARM_FEATURE_FP8DOT4": "f8dp4",
    "__ARM_FEATURE_FP8FMA": "f8fma",
    "__ARM_FEATURE_FPRCVT": "fprcvt",
    "__ARM_FEATURE_FRINT": "frint",
    "__ARM_FEATURE_JCVT": "jscvt",
    "__ARM_FEATURE_LUT": "lut",
    "__ARM_FEATURE_MATMUL_INT8": "i8mm",
    "__ARM_FEATURE_MEMORY_TAGGING": "mte",
    "__ARM_FEATURE_MOPS": "mops",
    "__ARM_FEATURE_PAUTH": "paca pacg",
    "__ARM_FEATURE_QRDMX": "asimdrdm",
    "__ARM_FEATURE_RCPC": "lrcpc",
    "__ARM_FEATURE_RNG": "rng",
    "__ARM_FEATURE_SHA2": "sha1 sha2",
    "__ARM_FEATURE_SHA3": "sha3",
    "__ARM_FEATURE_SHA512": "sha512",
    "__ARM_FEATURE_SM3": "sm3",
    "__ARM_FEATURE_SM4": "sm4",
    "__ARM_FEATURE_SME": "sme",
    "__ARM_FEATURE_SME_B16B16": "smeb16b16",
    "__ARM_FEATURE_SME_F16F16": "smef16f16",
    "__ARM_FEATURE_SME2": "sme2",
    "__ARM_FEATURE_SME2p1": "sme2p1",
    "__ARM_FEATURE_SVE": "sve",
    "__ARM_FEATURE_SVE_B16B16": "sveb16b16",
    "__ARM_FEATURE_SVE_BF16": "svebf16",
    "__ARM_FEATURE_SVE_MATMUL_FP32": "svef32mm",
    "__ARM_FEATURE_SVE_MATMUL_FP64": "svef64mm",
    "__ARM_FEATURE_SVE_MATMUL_INT8": "svei8mm",
    "__ARM_FEATURE_SVE2": "sve2",
    "__ARM_FEATURE_SVE2_AES": "sveaes svepmull",
    "__ARM_FEATURE_SVE2_BITPERM": "svebitperm",
    "__ARM_FEATURE_SVE2_SHA3": "svesha3",
    "__ARM_FEATURE_SVE2_SM4": "svesm4",
    "__ARM_FEATURE_SVE2p1": "sve2p1",
    "__ARM_FEATURE_SVE2p2": "sve2p2",
}

FLAGS: Mapping[str, Mapping[str, str]] = {"x86_64": X86_64, "aarch64": AARCH64}
ARCHES = {"__x86_64__": "x86_64", "__aarch64__": "aarch64"}

# Armv8.4 announces no feature of its own. Of the cores that compilers know, those with both of these are of
# Armv8.4 or newer: Armv8.3 made the second mandatory, and Armv8.4 the first.
ARMV8_4 = frozenset(["asimddp", "jscvt"])
SINCE_ARMV8_4 = frozenset(["ilrcpc", "uscat"])
# Further instructions of cores, as in `list_unannounced_flags`. Not every compiler announces `ARMV8_4` for
# saphira.
CORES = {
    "a64fx": ("fcma",),
    "ampere1b": ("cssc",),
    "ampere1c": ("cssc", "faminmax"),
    "c1-nano": ("lrcpc3", "mops"),
    "c1-premium": ("lrcpc3", "mops"),
    "c1-pro": ("lrcpc3", "mops"),
    "c1-ultra": ("lrcpc3", "mops"),
    "cortex-r82": ("fcma",),
    "cortex-r82ae": ("fcma",),
    "fujitsu-monaka": ("faminmax", "mops"),
    "olympus": ("faminmax",),
    "saphira": ("ilrcpc", "uscat"),
    "tsv110": ("fcma",),
}


def parse_flags(text: str, arch: str) -> frozenset[str]:
    """Return the flags of the instructions that code compiled with these macros may contain.

    `text` is the output of `cc -march=M -dM -E -x c /dev/null`, `arch` is "x86_64" or "aarch64".
    """
    names = FLAGS[arch]
    return frozenset(flag for macro in _list_defined(text) & names.keys() for flag in names[macro].split())


def find_arch(text: str) -> str | None:
    """Return the architecture that a compiler makes code for, "x86_64" or "aarch64"; None if it is another.

    `text` is the output of `cc -dM -E -x c /dev/null`.
    """
    return next((ARCHES[macro] for macro in sorted(_list_defined(text) & ARCHES.keys())), None)


def signs_returns(text: str) -> bool:
    """Whether a compiler on aarch64 signs return addresses (-mbranch-protection): see the ACLE."""
    return "__ARM_FEATURE_PAC_DEFAULT" in _list_defined(text)


def list_unannounced_flags(march: str, announced: AbstractSet[str] = frozenset()) -> frozenset[str]:
    """Return the flags of instructions that compilers use for `march` on aarch64 without defining a macro.

    `announced` are the flags for which they do define one: they tell how new a core is.

    From Armv8.4 on these are the second set of release-consistent accesses and single-copy atomic pairs,
    from Armv8.8 on memory copying (where only clang has a macro), from Armv8.9 on common short sequences,
    from Armv9.5 on absolute maximum and minimum (where only gcc has a macro), from Armv9.6 on compare and
    branch. Armv9.N has the instructions of Armv8.(N+5).
    """
    version = march.partition("+")[0].removeprefix("armv").removesuffix("-a")
    major, _, minor = version.partition(".")
    if major not in ("8", "9") or not (minor or "0").isdecimal():
        return frozenset(CORES.get(march, ())) | (SINCE_ARMV8_4 if announced >= ARMV8_4 else frozenset())
    step = int(minor or 0) + (5 if major == "9" else 0)
    newer = ((8, "mops"), (9, "cssc"), (10, "faminmax"), (11, "cmpbr"))
    since = (*((4, flag) for flag in SINCE_ARMV8_4), *newer)
    return frozenset(flag for first, flag in since if step >= first)


def _list_defined(text: str) -> set[str]:
    lines = (line.split(maxsplit=2) for line in text.splitlines())
    return {words[1] for words in lines if len(words) > 1 and words[0] == "#define"}
