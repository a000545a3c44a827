"""Which values axes can have, and which names are reserved."""

from __future__ import annotations

import math
import re
import string
from fnmatch import fnmatchcase

from imagematrix.common import units
from imagematrix.common.suggestions import suggest_nearest
from imagematrix.hardware.vendors import cuda, gpus, macros, marches, versions
from imagematrix.images.catalog.catalog import MOST_MIB, VALUE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from imagematrix.build.matrix.matrix_facts import MatrixFacts

# Variables of templates other than axes and properties, and keywords of the matrix and of Jinja.
RESERVED = frozenset(
    {"image", "images", "version", "arch", "march_option", "cflags", "why", "loop", "self", "none", "true"}
    | {"sm", "cudaarchs", "torch_cuda_arch_list", "tf_cuda_compute_capabilities", "nvcc_gencode"}
    | {"archspec", "driver_cuda", "torch_backend"}
)
HOST_DRIVER = "host"  # no driver in the image: the node's NVIDIA runtime injects its own
COMPAT_DRIVER = "compat"  # cuda-compat in the image, which states its version and what it supports
DRIVER_MODES = (HOST_DRIVER, COMPAT_DRIVER)  # values of the axis driver that are no version
DRIVER_FROM = "driver_from"  # the property of a driver with the folder or the installer that has its files
COMPAT_FROM = "compat_from"  # the same for cuda-compat: a folder or a package
MEMORY = "memory"  # the property of a value of an own axis with the memory that each GPU needs
MEBIBYTE = 1024 * 1024
# The placeholders in the properties that name files of a driver.
PLACEHOLDERS = {
    DRIVER_FROM: re.compile(r"\{(?:version|arch)\}"),
    COMPAT_FROM: re.compile(r"\{arch\}"),
}
PLATFORMS = ("linux/amd64", "linux/arm64")
GLOB = re.compile(r"[!-~]{1,200}", re.ASCII)  # of files
GIVEN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", re.ASCII)  # of secrets and SSH agents
ARGUMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)
# Build arguments with a meaning for BuildKit itself: the frontend, timestamps, proxies, attestations.
BUILDKITS = re.compile(
    r"BUILD(KIT|X)_.*|SOURCE_DATE_EPOCH|(ALL|FTP|HTTPS?|NO)_PROXY", re.ASCII | re.IGNORECASE
)
SAFE = re.compile(r"[A-Za-z0-9 ._:/@+=,~%-]*", re.ASCII)
# Stricter than for nodes: drivers in images have a branch of three digits.
DRIVER = re.compile(r"\d{3}(\.\d{1,4}){1,2}", re.ASCII)
COMPUTE = re.compile(r"\d{1,2}\.\d[af]?", re.ASCII)
FLAG = re.compile(r"[a-z0-9][a-z0-9_]{0,31}", re.ASCII)

NEW = "if it is newer than this release of imagematrix, state it under `facts`"
FLAG_SLIP = 0.9  # flags are short and similar, and a typo changes one letter

Complaint = tuple[str, str | None]  # message and remedy

# Other words for an axis, of which one is spelt nearly like another axis.
AXIS_SYNONYMS = {"arch": "platform", "architecture": "platform"}


def check_value(axis: str, value: str, facts: MatrixFacts) -> Complaint | None:
    """Return what is wrong with `value` as a value of `axis`, and a remedy; None if it is valid.

    `facts` are the facts of the matrix.
    """
    if axis == "platform":
        if value in PLATFORMS:
            return None
        return f"{value!r} is not a supported platform", f"one of {', '.join(PLATFORMS)}"
    if not VALUE.fullmatch(value):
        return (
            f"{value[:80]!r} cannot be the value of an axis",
            "up to 64 letters, digits, dots, dashes, underscores and plus signs: it is part of a tag",
        )
    checks: dict[str, Callable[[str, MatrixFacts], Complaint | None]] = {
        "cuda": _check_cuda,
        "compute": _check_compute,
        "march": _check_march,
        "driver": _check_driver,
    }
    return checks[axis](value, facts) if axis in checks else None


def suggest_axis(name: str, axes: Collection[str], *, likeness: float = 0.5) -> str | None:
    """Return a suggestion for a name that is none of `axes`: by meaning, or else the nearest."""
    synonym = AXIS_SYNONYMS.get(name)
    return f"did you mean {synonym!r}?" if synonym in axes else suggest_nearest(name, axes, likeness=likeness)


def check_flag(flag: str, arch: str) -> Complaint | None:
    """Return what is wrong with `flag` as a CPU flag of `arch`, and a remedy; None if it is valid.

    An unknown flag may be a new one, so only likely typos and compilers' names for flags are rejected.
    """
    names = macros.FLAGS[arch]
    flags = {word for group in names.values() for word in group.split()}
    if flag in flags:
        return None
    if not FLAG.fullmatch(flag):
        return f"{flag[:80]!r} is not a CPU flag of /proc/cpuinfo", suggest_nearest(flag.lower(), flags)
    kernel_names = names.get(f"__{flag.upper()}__")
    if kernel_names:
        return (
            f"{flag!r} is a compiler's name for what the kernel calls {kernel_names}",
            f"did you mean {kernel_names!r}?",
        )
    distant_flags = [word for word in flags if _get_series(word) != _get_series(flag)]
    guess = suggest_nearest(flag, distant_flags, likeness=FLAG_SLIP)
    return (f"unknown CPU flag {flag!r}", guess) if guess else None


def parse_memory(text: str) -> int | None:
    """Return an amount such as 16GiB or 15000MiB in MiB, rounded up; None if it is none, or too large."""
    size = units.parse_size(text)
    mib = math.ceil(size / MEBIBYTE) if size else 0
    return mib if 0 < mib <= MOST_MIB else None


def is_glob(value: str) -> bool:
    """Whether this key of an axis' properties stands for several values."""
    return "*" in value


def is_covered(glob: str, axis: str, value: str) -> bool:
    """Whether the properties of `glob` hold for `value`; a driver mode is no version of a driver."""
    is_version = axis != "driver" or value not in DRIVER_MODES
    return is_glob(glob) and is_version and fnmatchcase(value, glob)


def find_unsafe_character(text: str) -> str | None:
    """Return the first character of a property that could break out of a Dockerfile instruction, or None."""
    match = SAFE.match(text)
    end = match.end() if match else 0
    return text[end] if end < len(text) else None


def _get_series(flag: str) -> str:
    """Return the common part of flags of one series, such as avx512_vbmi and avx512_vbmi2."""
    return flag.replace("_", "").rstrip(string.digits)


def _check_cuda(value: str, facts: MatrixFacts) -> Complaint | None:
    if value == "none":
        return None
    releases = [name for name, release in cuda.load_releases().items() if release.targets]
    if not versions.RELEASE.fullmatch(value):
        return f"{value!r} is not a CUDA release such as 12.4", suggest_nearest(value, ["none", *releases])
    newest = max(releases, key=versions.make_sort_key)
    if (
        value in releases
        or value in facts.cuda
        or versions.make_sort_key(value) > versions.make_sort_key(newest)
    ):
        return None
    return f"unknown CUDA release {value}", suggest_nearest(value, releases)


def _check_compute(value: str, facts: MatrixFacts) -> Complaint | None:
    capabilities = facts.list_capabilities()
    if value in capabilities:
        return None
    guess = re.sub(r"^(sm_|compute_|sm)", "", value)
    if guess.isdigit() and len(guess) > 1:
        guess = f"{guess[:-1]}.{guess[-1]}"
    elif guess.isdigit():
        guess = f"{guess}.0"
    message = f"{value!r} is not a compute capability such as 8.6 or 9.0a"
    product_capabilities = [
        capability for capability in gpus.find_capabilities(value) if capability in capabilities
    ]
    if product_capabilities and guess not in capabilities:
        return message, f"did you mean {' or '.join(map(repr, product_capabilities))}, which such a GPU has?"
    suggestion = suggest_nearest(guess, capabilities)
    return message, _mention_facts(suggestion) if COMPUTE.fullmatch(value) else suggestion


def _check_march(value: str, facts: MatrixFacts) -> Complaint | None:
    if value == "native":
        return (
            "march native depends on the builder's CPU, so its images are indistinguishable",
            "name the CPU, such as x86-64-v3 or znver4",
        )
    names = sorted({*facts.march, *marches.list_names()})
    if value in names:
        return None
    return f"unknown -march={value}", _mention_facts(suggest_nearest(value, names))


def _mention_facts(remedy: str | None) -> str:
    return f"{remedy} {NEW.capitalize()}" if remedy else NEW


def _check_driver(value: str, _: MatrixFacts) -> Complaint | None:
    if value in DRIVER_MODES or DRIVER.fullmatch(value):
        return None
    return (
        f"{value!r} is not a driver version such as 550.163.01",
        f"or {HOST_DRIVER!r}, for none in the image, or {COMPAT_DRIVER!r}, for cuda-compat",
    )
