"""Why a container failed, where a rule of the selector covers the failure.

Codes and messages are those of cudaError_t in the CUDA Runtime API and CUresult in the Driver API.
"""

from __future__ import annotations

import re

from imagematrix.common.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.selection.rule import RuleResult
    from imagematrix.selection.selection import Selection

SIGILL = 132  # 128 + the number of the signal
NOT_THE_PROGRAM = frozenset({0, 125, 126, 127})  # it succeeded, or never ran (exit codes of docker run)
# How programs report a CUDA error number: `CUDA error 35`, `cuda runtime error (35)`, `cuInit returned 803`,
# `cudaSetDevice(0) failed with error code 35`. The name is CUDA itself or a CUDA function, which has a
# lower-case letter after its first capital (cuInit, unlike cuDNN); only words of an error report may follow
# up to the number.
BY_NAME = r"(?i:\bcuda(?: (?:runtime|driver|api))?[ _](?:error|failure)(?: (?:code|number|status))?)"
BY_CALL = (
    r"\bcu(?:da)?[A-Z][a-z]\w*(?:\([^()]{0,99}\))?\)?"
    r"(?:\W{1,3}(?i:call|cuda|with|the|an?))*"
    r"(?:\W{1,3}(?i:failed|failure|returned|error|err|status|result|code|with|an?))+"
)
NUMBER = r"\W{1,3}"
# 35 samples/s, 35.1, 35%, 35 bytes, 35 ms and 35 devices are not codes.
UNITS = (
    r"(?:[kmgt]?i?b|[mnu]?s|[kmg]?hz|(?:byte|second|time|item|element|device|thread|block|kernel|sample)s?)"
)
END = rf"(?![\w%/]|[.,]\d|\s+\w+/|\s+(?i:{UNITS})\b)"
LONGEST = 4096  # characters of a line
ILLEGAL = "SIGILL: the program used an instruction that this CPU lacks"


class Failure(Record):
    """A CUDA failure: its code, names and message, and the rules that are meant to prevent it.

    The first of `rules` that applies to an image is responsible. Without rules the cause is on the node, and
    `remedy` states what to check there.
    """

    code: int
    names: tuple[str, ...]
    message: str
    rules: tuple[str, ...] = ()
    remedy: str | None = None

    @property
    def text(self) -> str:
        """Code and message as CUDA has them."""
        return f"CUDA error {self.code}: {self.message.removeprefix('CUDA error: ')}"

    def is_reported_in(self, line: str) -> bool:
        """Whether a line of output reports it: by name, by message, or by number as a CUDA error."""
        lower = line.lower()
        names = (name.lower() for name in self.names)
        if self.message.lower() in lower or any(
            name in lower and re.search(rf"\b{name}\b", lower) for name in names
        ):
            return True
        if str(self.code) not in line or "cu" not in lower:  # the pattern is too slow for every line
            return False
        return re.search(rf"(?:{BY_NAME}|{BY_CALL}){NUMBER}{self.code}{END}", line) is not None


FAILURES = (
    Failure(
        code=35,
        names=("cudaErrorInsufficientDriver",),
        message="CUDA driver version is insufficient for CUDA runtime version",
        rules=("driver-cuda",),
    ),
    Failure(
        code=200,
        names=("cudaErrorInvalidKernelImage", "CUDA_ERROR_INVALID_IMAGE"),
        message="device kernel image is invalid",
        rules=("fatbin",),
    ),
    Failure(
        code=209,
        names=("cudaErrorNoKernelImageForDevice", "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        message="no kernel image is available for execution on the device",
        rules=("device-code",),
    ),
    Failure(
        code=222,
        names=("cudaErrorUnsupportedPtxVersion", "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"),
        message="the provided PTX was compiled with an unsupported toolchain",
        rules=("device-code",),
    ),
    Failure(
        code=803,
        names=("cudaErrorSystemDriverMismatch", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        message="system has unsupported display driver / cuda driver combination",
        rules=("driver-exact", "driver-compat", "driver-host"),
    ),
    Failure(
        code=804,
        names=("cudaErrorCompatNotSupportedOnDevice", "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"),
        message="forward compatibility was attempted on non supported HW",
        rules=("driver-compat", "driver-exact"),
    ),
    Failure(
        code=802,
        names=("cudaErrorSystemNotReady", "CUDA_ERROR_SYSTEM_NOT_READY"),
        message="system not yet initialized",
        remedy="check that the fabric manager of NVSwitch runs: `systemctl status nvidia-fabricmanager`",
    ),
    Failure(
        code=46,
        names=("cudaErrorDevicesUnavailable", "CUDA_ERROR_DEVICE_UNAVAILABLE"),
        message="CUDA-capable device(s) is/are busy or unavailable",
        remedy="check what uses it (`imagematrix gpus`), and its compute mode: `nvidia-smi -q -d COMPUTE`",
    ),
    Failure(
        code=999,
        names=("cudaErrorUnknown", "CUDA_ERROR_UNKNOWN"),
        message="CUDA error: unknown error",  # with PyTorch's prefix: other software has unknown errors, too
        remedy="run `imagematrix doctor`, and look for NVRM in the kernel log: `dmesg | grep -i nvrm`",
    ),
)

ELSEWHERE = {
    "cpu": "other code in the image, such as a wheel or a library, may need more than its -march allows",
    "device-code": "a library in the image may have device code of its own, for other targets",
    "fatbin": "a library in the image may have device code of its own, compressed or damaged",
}
DRIVER = "check whether something adds another libcuda.so.1 to the container: `imagematrix doctor IMAGE`"


class Diagnosis(Record):
    """Why a container failed, the responsible rule, and the rule's prediction for the image.

    `rule` is None if the cause is on the node. `prediction` is None if the rule does not apply to the image.
    `remedy` states what to check.
    """

    cause: str
    rule: str | None
    prediction: RuleResult | None
    remedy: str

    def __str__(self) -> str:
        if self.rule is None:
            return f"{self.cause}; the cause is on the node, which no rule covers"
        if self.prediction is None:
            return f"{self.cause}; rule {self.rule} does not apply to this image and was not checked"
        need, have = _shorten_line(self.prediction.need), _shorten_line(self.prediction.have or "nothing")
        return (
            f"{self.cause}; rule {self.rule} expected it to run: {self.prediction.why} "
            f"(need {need}; have {have})"
        )


def is_program_failure(code: int) -> bool:
    """Whether the container's program ran and failed, given the exit code of docker's command."""
    return code not in NOT_THE_PROGRAM


def diagnose(code: int, lines: Iterable[str], selection: Selection) -> Diagnosis | None:
    """Return why a container of `selection` failed, or None if that is unknown.

    `code` is its exit code, `lines` are the last lines of its output.
    """
    if code == SIGILL:
        return _make_diagnosis(ILLEGAL, ("cpu",), selection)
    # The last report counts: a program may go on after the first ones.
    for line in reversed(list(lines)):
        for failure in FAILURES:
            if failure.is_reported_in(line[-LONGEST:]):
                return _make_diagnosis(failure.text, failure.rules, selection, failure.remedy)
    return None


def _make_diagnosis(
    cause: str, rules: tuple[str, ...], selection: Selection, remedy: str | None = None
) -> Diagnosis:
    results = next(
        candidate.rules for candidate in selection.candidates if candidate.reference == selection.selected
    )
    by_name = {result.rule: result for result in results}
    rule = next((name for name in rules if name in by_name), rules[0] if rules else None)
    prediction = by_name.get(rule) if rule else None
    return Diagnosis(
        cause=cause, rule=rule, prediction=prediction, remedy=remedy or ELSEWHERE.get(rule or "", DRIVER)
    )


def _shorten_line(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:99]}…"  # noqa: PLR2004 - one line of a terminal
