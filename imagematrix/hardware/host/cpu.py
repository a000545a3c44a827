"""The processors of a host, from /proc/cpuinfo or the output of `lscpu` or `lscpu -J` in any language.

A host without these has them from the library py-cpuinfo. It sleeps and starts processes, which takes over a
second, so it is the last resort.
"""

from __future__ import annotations

import re

from imagematrix.errors import ProbeError
from imagematrix.hardware.host.host import Cpu

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# "CPU implementer" and "CPU part" of Arm's MIDR register, by the names that lscpu prints (lscpu-arm.c).
IMPLEMENTERS = {
    0x41: "ARM",
    0x42: "Broadcom",
    0x43: "Cavium",
    0x46: "FUJITSU",
    0x48: "HiSilicon",
    0x4E: "NVIDIA",
    0x50: "APM",
    0x51: "Qualcomm",
    0x53: "Samsung",
    0x56: "Marvell",
    0x61: "Apple",
    0x69: "Intel",
    0x6D: "Microsoft",
    0x70: "Phytium",
    0xC0: "Ampere",
}
PARTS = {
    (0x41, 0xD03): "Cortex-A53",
    (0x41, 0xD07): "Cortex-A57",
    (0x41, 0xD08): "Cortex-A72",
    (0x41, 0xD0B): "Cortex-A76",
    (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD40): "Neoverse-V1",
    (0x41, 0xD41): "Cortex-A78",
    (0x41, 0xD42): "Cortex-A78AE",
    (0x41, 0xD46): "Cortex-A510",
    (0x41, 0xD47): "Cortex-A710",
    (0x41, 0xD48): "Cortex-X2",
    (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4D): "Cortex-A715",
    (0x41, 0xD4E): "Cortex-X3",
    (0x41, 0xD4F): "Neoverse-V2",
    (0x41, 0xD83): "Neoverse-V3AE",
    (0x41, 0xD84): "Neoverse-V3",
    (0x41, 0xD85): "Cortex-X925",
    (0x41, 0xD87): "Cortex-A725",
    (0x41, 0xD8E): "Neoverse-N3",
    (0x43, 0x0AF): "ThunderX2-99xx",
    (0x46, 0x001): "A64FX",
    (0x4E, 0x010): "Olympus",
    (0x6D, 0xD49): "Azure-Cobalt-100",
    (0xC0, 0xAC3): "Ampere-1",
    (0xC0, 0xAC4): "Ampere-1a",
}
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
# These are compiled when they are first used: the kernel's own format needs neither.
PROCESSOR = r"(?m)^processor[ \t]*:"
FLAGS = r"(?m)^(?:flags|Features)[ \t]*:[ \t]*\S"
LISTS = ("flags", "features")
KEYS = frozenset({*LISTS, "processor"})  # untranslated output with flags has one of these
ARCHITECTURES = frozenset({"x86_64", "aarch64", "i686", "ppc64le", "riscv64", "s390x"})
VENDORS = frozenset({"GenuineIntel", "AuthenticAMD", "HygonGenuine", *IMPLEMENTERS.values()})
FLAG_LISTS = (
    frozenset({"fpu", "sse2", "lm"}),
    frozenset({"fp", "asimd"}),
)  # a list of flags contains one of these
# What CPUID tells kinds of processors apart by (leaf 1), and their flags.
SAME = ("vendor_id", "cpu family", "model", "stepping", "flags")
JSON_LIMIT = 1 << 20  # characters of `lscpu -J`, which prints some thousand
MODELS_NAMED = 4  # further kinds of cores in one machine are not listed


def parse_cpu(text: str) -> tuple[Cpu, tuple[str, ...]]:
    """Return the processors that `text` describes, and warnings about missing facts.

    The flags are those that every CPU has.
    """
    fields = _parse_fields(text)
    flags = _intersect_flags(fields)
    incomplete = bool(flags) and _lacks_flags(text, fields)
    if incomplete:
        flags = frozenset()
    vendor = _get_vendor(fields)
    # /proc/cpuinfo and lscpu have names of models, kernels of Arm numbers of parts, those of POWER `cpu`.
    implementer = _parse_hex(fields.get("cpu implementer", [""])[0])
    parts = [
        PARTS.get((implementer, _parse_hex(part)), f"CPU part {part}") for part in fields.get("cpu part", [])
    ]
    names = fields.get("model name") or parts or fields.get("cpu", [])
    model = " + ".join(list(dict.fromkeys(names))[:MODELS_NAMED]) or None
    warnings = []
    if incomplete:
        warnings.append(
            "flags of some CPUs unknown, so that no flag is known to be on all of them: "
            "only code for the baseline architecture is known to run"
        )
    elif not flags:
        warnings.append(
            "CPU flags unknown (no `flags` or `Features` line): "
            "only code for the baseline architecture is known to run"
        )
    if vendor is None:
        warnings.append("CPU vendor unknown")
    if model is None:
        warnings.append("CPU model unknown")
    psabi = get_level(flags) if _guess_arch(fields, flags) == "x86_64" else None
    return Cpu(vendor=vendor, model=model, flags=flags, level=psabi), tuple(warnings)


def read_from_library() -> tuple[Cpu, tuple[str, ...]]:
    """Return the processors that py-cpuinfo reports; raise ProbeError if it reports none."""
    try:
        import cpuinfo  # in the `try`, because it may fail already here

        info = cpuinfo.get_cpu_info()
    except Exception as error:  # it runs machine code and the tools of several systems
        raise ProbeError(f"/proc/cpuinfo not found, and py-cpuinfo failed: {error}") from error
    if not info:
        raise ProbeError("/proc/cpuinfo not found, and py-cpuinfo detected no CPU")
    return convert_cpu(info)


def convert_cpu(info: Mapping[str, object]) -> tuple[Cpu, tuple[str, ...]]:
    """Return the processors from py-cpuinfo's result, with the kernel's names of their flags."""
    raw_flags = info.get("flags")
    names = [str(flag).lower() for flag in raw_flags] if isinstance(raw_flags, list) else []
    flags = frozenset(KERNEL_NAMES.get(name, name) for name in names)
    warnings = () if flags else ("CPU flags unknown: py-cpuinfo reported none",)
    return (
        Cpu(
            vendor=_text_or_none(info.get("vendor_id_raw")),
            model=_text_or_none(info.get("brand_raw")),
            flags=flags,
            level=get_level(flags) if "lm" in flags else None,
        ),
        warnings,
    )


def parse_arch(text: str) -> str | None:
    """Return the machine name of uname(2) that `text` implies, or None."""
    fields = _parse_fields(text)
    return _guess_arch(fields, _intersect_flags(fields))


def infer_arch(flags: frozenset[str]) -> str | None:
    """Return the 64-bit architecture whose CPUs have these flags, or None."""
    if "lm" in flags:  # long mode
        return "x86_64"
    if "asimd" in flags:  # the 64-bit name; a 32-bit kernel has "neon"
        return "aarch64"
    return None


def has_equal_cpus(text: str) -> bool:
    """Whether all processors are of one model and have the same flags; true if only one is described."""
    fields = _parse_fields(text)
    return all(len(fields.get(key, ())) <= 1 for key in SAME) and not _lacks_flags(text, fields)


def get_level(flags: frozenset[str]) -> str | None:
    """Return the highest psABI level that x86 flags reach."""
    from imagematrix.hardware.vendors import marches

    return marches.get_level(flags)


def _parse_fields(text: str) -> dict[str, list[str]]:
    # The CPUs of a host repeat the same lines: 192 CPUs have 272 kB, of which 20 kB are distinct.
    fields: dict[str, list[str]] = {}
    lines = _list_lscpu_lines(text) if text.lstrip().startswith("{") else text.splitlines()
    for line in dict.fromkeys(lines):
        # Some translations of lscpu end its keys with a full-width colon.
        key, _, value = line.replace("\N{FULLWIDTH COLON}", ":").partition(":")
        name, value = key.strip().lower(), value.strip()
        if value or name in LISTS:
            fields.setdefault(name, []).append(value)
    return fields if fields.keys() & KEYS else fields | _recognise_fields(fields)


def _list_lscpu_lines(text: str) -> Iterator[str]:
    """Yield the output of `lscpu -J` as lines of `lscpu`; nothing if it is other JSON."""
    from collections import deque

    from imagematrix.common import json_documents
    from imagematrix.errors import UsageError

    try:
        data = json_documents.parse_json(text[:JSON_LIMIT], "lscpu -J")
    except UsageError:
        return
    pending = deque([data.get("lscpu")] if isinstance(data, dict) else [])
    while pending:
        for item in items if isinstance(items := pending.popleft(), list) else ():
            if isinstance(item, dict):
                yield f"{item.get('field')}".rstrip(":") + f": {item.get('data') or ''}"
                pending.append(item.get("children"))


def _recognise_fields(fields: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the fields that are recognisable by value, for keys of lscpu in another language."""
    values = [value for group in fields.values() for value in group]
    recognised = {
        "architecture": [value for value in values if value in ARCHITECTURES],
        "vendor id": [value for value in values if value in VENDORS],
        "flags": [
            value for value in values if any(proof <= {*value.lower().split()} for proof in FLAG_LISTS)
        ],
    }
    return {key: group for key, group in recognised.items() if group}


def _lacks_flags(text: str, fields: dict[str, list[str]]) -> bool:
    """Whether a CPU in the text of /proc/cpuinfo, which has these fields, has no flags."""
    if any("" in fields.get(key, ()) for key in LISTS):
        return True
    lines = f"\n{text}"
    with_flags = lines.count("\nflags\t\t: ") + lines.count("\nFeatures\t: ")
    if with_flags and with_flags == lines.count("\nprocessor\t: "):  # fast path for the kernel's own format
        return False
    parts = text.replace("\r\n", "\n").split("\n\n")
    return any(re.search(PROCESSOR, part) and not re.search(FLAGS, part) for part in parts)


def _intersect_flags(fields: dict[str, list[str]]) -> frozenset[str]:
    lines = fields.get("flags") or fields.get("features") or []
    sets = [frozenset(line.lower().split()) for line in lines if line]
    return frozenset.intersection(*sets) if sets else frozenset()


def _guess_arch(fields: dict[str, list[str]], flags: frozenset[str]) -> str | None:
    name = fields.get("architecture", [""])[0]
    if name.isidentifier() and name.isascii():
        return name
    return infer_arch(flags)


def _get_vendor(fields: dict[str, list[str]]) -> str | None:
    for key in ("vendor_id", "vendor id"):
        if fields.get(key):
            return fields[key][0]
    codes = fields.get("cpu implementer", [])
    names = dict.fromkeys(IMPLEMENTERS.get(_parse_hex(code), code) for code in codes)
    return next(iter(names), None)


def _parse_hex(text: str) -> int:
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", text) else -1


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
