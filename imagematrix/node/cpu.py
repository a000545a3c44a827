"""The processors of a host, from the text of /proc/cpuinfo, or of `lscpu` and `lscpu -J` in any language."""

from __future__ import annotations

import re

from imagematrix.node.host import Cpu

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["arch", "level", "parse"]

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
    (0x41, 0xD84): "Neoverse-V3",
    (0x41, 0xD85): "Cortex-X925",
    (0x41, 0xD87): "Cortex-A725",
    (0x41, 0xD8E): "Neoverse-N3",
    (0x46, 0x001): "A64FX",
    (0xC0, 0xAC3): "Ampere-1",
    (0xC0, 0xAC4): "Ampere-1a",
}
PROCESSOR = re.compile(r"^processor[ \t]*:", re.MULTILINE)
FLAGS = re.compile(r"^(?:flags|Features)[ \t]*:[ \t]*\S", re.MULTILINE)
KEYS = frozenset({"flags", "features", "processor"})  # one is in all that tells flags, but in translations
ARCHITECTURES = frozenset({"x86_64", "aarch64", "i686", "ppc64le", "riscv64", "s390x"})
VENDORS = frozenset({"GenuineIntel", "AuthenticAMD", "HygonGenuine", *IMPLEMENTERS.values()})
FLAG_LISTS = (
    frozenset({"fpu", "sse2", "lm"}),
    frozenset({"fp", "asimd"}),
)  # what a list of flags begins with
MODELS_NAMED = 4  # more kinds of cores than this in one machine are not spelled out


def parse(text: str) -> tuple[Cpu, tuple[str, ...]]:
    """Return the processors that `text` describes, and sentences about what it does not tell.

    The flags are those that every CPU has.
    """
    fields = _fields(text)
    flags = _flags(fields)
    silent = bool(flags) and _has_silent(text)
    if silent:
        flags = frozenset()
    vendor = _vendor(fields)
    model = _model(fields)
    warnings = []
    if silent:
        warnings.append(
            "the flags of some CPUs are not told, so that none is known to be on all of them: "
            "only code for the plain architecture is known to run"
        )
    elif not flags:
        warnings.append(
            "the CPU's flags are not told (no `flags` or `Features` line), "
            "so only code for the plain architecture is known to run"
        )
    if vendor is None:
        warnings.append("the CPU's vendor is not told")
    if model is None:
        warnings.append("the CPU's model is not told")
    known = level(flags) if _arch(fields, flags) == "x86_64" else None
    return Cpu(vendor=vendor, model=model, flags=flags, level=known), tuple(warnings)


def arch(text: str) -> str | None:
    """Return the machine name of uname(2) that `text` gives away, or None."""
    fields = _fields(text)
    return _arch(fields, _flags(fields))


def level(flags: frozenset[str]) -> str | None:
    """Return the highest psABI level that x86 flags reach."""
    from imagematrix.facts import marches

    return marches.level(flags)


def _fields(text: str) -> dict[str, list[str]]:
    # The CPUs of a host repeat the same lines: 192 of them write 272 kB, of which 20 kB differ.
    fields: dict[str, list[str]] = {}
    lines = _lscpu_json(text) if text.lstrip().startswith("{") else text.splitlines()
    for line in dict.fromkeys(lines):
        key, _, value = line.replace("\N{FULLWIDTH COLON}", ":").partition(":")
        if value := value.strip():
            fields.setdefault(key.strip().lower(), []).append(value)
    return fields if fields.keys() & KEYS else fields | _translated(fields)


def _lscpu_json(text: str) -> Iterator[str]:
    """Yield what `lscpu -J` says as the lines of `lscpu`; none where it is no such JSON."""
    from imagematrix import documents
    from imagematrix.errors import UsageError

    try:
        data = documents.parse(text, "lscpu -J")
    except UsageError:
        return
    left = [data.get("lscpu")] if isinstance(data, dict) else []
    while left:
        for item in found if isinstance(found := left.pop(0), list) else ():
            if isinstance(item, dict):
                yield f"{item.get('field')}".rstrip(":") + f": {item.get('data') or ''}"
                left.append(item.get("children"))


def _translated(fields: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return what values say for themselves where lscpu wrote its keys in another language."""
    values = [value for some in fields.values() for value in some]
    found = {
        "architecture": [value for value in values if value in ARCHITECTURES],
        "vendor id": [value for value in values if value in VENDORS],
        "flags": [
            value for value in values if any(proof <= {*value.lower().split()} for proof in FLAG_LISTS)
        ],
    }
    return {key: some for key, some in found.items() if some}


def _has_silent(text: str) -> bool:
    """Whether the part of /proc/cpuinfo about some CPU has no flags; what it has is not known, then."""
    written = f"\n{text}"
    told = written.count("\nflags\t\t: ") + written.count("\nFeatures\t: ")
    if told and told == written.count("\nprocessor\t: "):  # as kernels write it, of which there can be much
        return False
    parts = text.replace("\r\n", "\n").split("\n\n")
    return any(PROCESSOR.search(part) and not FLAGS.search(part) for part in parts)


def _flags(fields: dict[str, list[str]]) -> frozenset[str]:
    lines = fields.get("flags") or fields.get("features") or []
    sets = [frozenset(line.lower().split()) for line in lines]
    return frozenset.intersection(*sets) if sets else frozenset()


def _arch(fields: dict[str, list[str]], flags: frozenset[str]) -> str | None:
    told = fields.get("architecture", [""])[0]
    if told.isidentifier() and told.isascii():
        return told
    if "lm" in flags:  # long mode
        return "x86_64"
    if "asimd" in flags:  # the 64-bit name; a 32-bit kernel says "neon"
        return "aarch64"
    return None


def _vendor(fields: dict[str, list[str]]) -> str | None:
    for key in ("vendor_id", "vendor id"):
        if fields.get(key):
            return fields[key][0]
    codes = fields.get("cpu implementer", [])
    names = dict.fromkeys(IMPLEMENTERS.get(_number(code), code) for code in codes)
    return next(iter(names), None)


def _model(fields: dict[str, list[str]]) -> str | None:
    names = fields.get("model name") or _parts(fields) or fields.get("cpu", [])
    return " + ".join(list(dict.fromkeys(names))[:MODELS_NAMED]) or None


def _parts(fields: dict[str, list[str]]) -> list[str]:
    implementer = _number(fields.get("cpu implementer", [""])[0])
    return [
        PARTS.get((implementer, _number(part)), f"CPU part {part}") for part in fields.get("cpu part", [])
    ]


def _number(text: str) -> int:
    return int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]{1,8}", text) else -1
