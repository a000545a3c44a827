"""What a container died of, where a rule of the selector speaks about it.

The codes and their sentences are those of cudaError_t in the CUDA Runtime API and CUresult in the Driver API.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.selection.rule import RuleResult
    from imagematrix.selection.selection import Selection

__all__ = ["Death", "death", "died"]

SIGILL = 132  # 128 + the number of the signal
OF_DOCKER = frozenset({0, 125, 126, 127})  # it ended well, or its program never ran
# How programs report a number of CUDA's: `CUDA error 35`, `cuda runtime error (35)`, `cuInit returned 803`,
# `cudaSetDevice(0) failed with error code 35`. It is CUDA's own error or that of one of its functions, which
# have a small letter after the first capital (cuInit, and not cuDNN), and only words of a report are between.
BY_NAME = r"(?i:\bcuda(?: (?:runtime|driver|api))?[ _](?:error|failure)(?: (?:code|number|status))?)"
BY_CALL = (
    r"\bcu(?:da)?[A-Z][a-z]\w*(?:\([^()]{0,99}\))?\)?"
    r"(?:\W{1,3}(?i:call|cuda|with|the|an?))*"
    r"(?:\W{1,3}(?i:failed|failure|returned|error|err|status|result|code|with|an?))+"
)
NUMBER = r"\W{1,3}"
END = r"(?![\w%/]|[.,]\d|\s+\w+/)"  # 35 samples/s, 35.1 and 35% are no codes
LONGEST = 4096  # characters of a line
ILLEGAL = "SIGILL: an instruction that this CPU does not have"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A way to fail: the code of CUDA, how it is written, and the rules that keep it from us.

    The first of `rules` that applies to an image is the one that speaks about it. There are none where no
    image is at fault: then `remedy` says where to look on the node.
    """

    code: int
    names: tuple[str, ...]
    sentence: str
    rules: tuple[str, ...] = ()
    remedy: str | None = None

    @property
    def text(self) -> str:
        """What CUDA calls it."""
        return f"CUDA error {self.code}: {self.sentence.removeprefix('CUDA error: ')}"

    def found_in(self, line: str) -> bool:
        """Whether a line of output tells of it: by a name, its sentence, or the number as an error's."""
        lower = line.lower()
        if self.sentence.lower() in lower or any(_is_word(name.lower(), lower) for name in self.names):
            return True
        if str(self.code) not in line or "cu" not in lower:  # to search every line by patterns takes long
            return False
        return re.search(rf"(?:{BY_NAME}|{BY_CALL}){NUMBER}{self.code}{END}", line) is not None


def _is_word(name: str, line: str) -> bool:
    return name in line and re.search(rf"\b{name}\b", line) is not None


FAILURES = (
    Failure(
        code=35,
        names=("cudaErrorInsufficientDriver",),
        sentence="CUDA driver version is insufficient for CUDA runtime version",
        rules=("driver-cuda",),
    ),
    Failure(
        code=200,
        names=("cudaErrorInvalidKernelImage", "CUDA_ERROR_INVALID_IMAGE"),
        sentence="device kernel image is invalid",
        rules=("fatbin",),
    ),
    Failure(
        code=209,
        names=("cudaErrorNoKernelImageForDevice", "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        sentence="no kernel image is available for execution on the device",
        rules=("device-code",),
    ),
    Failure(
        code=222,
        names=("cudaErrorUnsupportedPtxVersion", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
        sentence="the provided PTX was compiled with an unsupported toolchain",
        rules=("device-code",),
    ),
    Failure(
        code=803,
        names=("cudaErrorSystemDriverMismatch", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        sentence="system has unsupported display driver / cuda driver combination",
        rules=("driver-exact", "driver-compat"),
    ),
    Failure(
        code=804,
        names=("cudaErrorCompatNotSupportedOnDevice", "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"),
        sentence="forward compatibility was attempted on non supported HW",
        rules=("driver-compat", "driver-exact"),
    ),
    Failure(
        code=802,
        names=("cudaErrorSystemNotReady", "CUDA_ERROR_SYSTEM_NOT_READY"),
        sentence="system not yet initialized",
        remedy="the fabric manager of NVSwitch has to run: `systemctl status nvidia-fabricmanager`",
    ),
    Failure(
        code=46,
        names=("cudaErrorDevicesUnavailable", "CUDA_ERROR_DEVICE_UNAVAILABLE"),
        sentence="CUDA-capable device(s) is/are busy or unavailable",
        remedy="see who has it (`imagematrix gpus`), and its mode: `nvidia-smi -q -d COMPUTE`",
    ),
    Failure(
        code=999,
        names=("cudaErrorUnknown", "CUDA_ERROR_UNKNOWN"),
        sentence="CUDA error: unknown error",
        remedy="see `imagematrix doctor`, and the kernel's log for lines with NVRM: `dmesg | grep -i nvrm`",
    ),
)

ELSEWHERE = {
    "cpu": "code from elsewhere in the image may need more than -march says, such as a wheel or a library",
    "device-code": "a library in the image may bring device code of its own, for other targets",
    "fatbin": "a library in the image may bring device code of its own, compressed or damaged",
}
DRIVER = "see whether something brings another libcuda.so.1 into the container: `imagematrix doctor IMAGE`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """What a container died of, the rule that speaks about it, and what that rule had said of the image.

    `rule` is None where none does, because it is the node that failed. `believed` is None where the rule does
    not apply to the image, and so nothing was believed. `remedy` says where to look.
    """

    cause: str
    rule: str | None
    believed: RuleResult | None
    remedy: str

    def __str__(self) -> str:
        if self.rule is None:
            return f"{self.cause}; it comes from the node, and no rule speaks about it"
        if self.believed is None:
            return f"{self.cause}; the rule {self.rule} does not apply to this image, and said nothing"
        need, have = _short(self.believed.need), _short(self.believed.have or "nothing")
        return (
            f"{self.cause}; by the rule {self.rule} it should have run: {self.believed.why} "
            f"(need {need}; have {have})"
        )


def died(code: int) -> bool:
    """Whether a container's program ran and failed, if docker's command ended with `code`."""
    return code not in OF_DOCKER


def death(code: int, lines: Iterable[str], selection: Selection) -> Death | None:
    """Return what a container of `selection` died of, or None where no rule speaks about it.

    `code` is its exit code, `lines` are what it said last.
    """
    if code == SIGILL:
        return _death(ILLEGAL, ("cpu",), selection)
    for line in reversed(list(lines)):
        for failure in FAILURES:
            if failure.found_in(line[-LONGEST:]):
                return _death(failure.text, failure.rules, selection, failure.remedy)
    return None


def _death(cause: str, rules: tuple[str, ...], selection: Selection, remedy: str | None = None) -> Death:
    told = next(one.rules for one in selection.candidates if one.reference == selection.selected)
    by_name = {result.rule: result for result in told}
    rule = next((name for name in rules if name in by_name), rules[0] if rules else None)
    believed = by_name.get(rule) if rule else None
    return Death(
        cause=cause, rule=rule, believed=believed, remedy=remedy or ELSEWHERE.get(rule or "", DRIVER)
    )


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:99]}…"  # noqa: PLR2004 - a line of a terminal
