"""What a container died of, where a rule of the selector speaks about it.

The codes and their sentences are those of cudaError_t in the CUDA Runtime API and CUresult in the Driver API.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from imagematrix.select.selection import RuleResult, Selection

__all__ = ["Death", "death", "died"]

SIGILL = 132  # 128 + the number of the signal
OF_DOCKER = frozenset({0, 125, 126, 127})  # it ended well, or its program never ran
# How programs name CUDA or one of its functions, and what came of a call, both in one short sentence.
CUDA = r"(?:(?i:\bcuda)|\bcu[A-Z])"
ERROR = r"(?i:\b(?:error|code|result|status|returned|failed)\b)"
BETWEEN, LONGEST = 200, 4096  # characters: of what is between, and of a line
ILLEGAL = "SIGILL: an instruction that this CPU does not have"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A way to fail: the code of CUDA, how it is written, and the rules that keep it from us.

    The first of `rules` that applies to an image is the one that speaks about it.
    """

    code: int
    names: str
    sentence: str
    rules: tuple[str, ...]

    @property
    def text(self) -> str:
        """What CUDA calls it."""
        return f"CUDA error {self.code}: {self.sentence}"

    def found_in(self, line: str) -> bool:
        """Whether a line of output tells of it: by a name, its sentence, or the number as an error's."""
        number = rf"{CUDA}.{{0,{BETWEEN}}}?{ERROR}\D{{0,20}}\b{self.code}\b"
        return re.search(f"(?i:{self.names}|{re.escape(self.sentence)})|{number}", line) is not None


FAILURES = (
    Failure(
        code=35,
        names="cudaErrorInsufficientDriver",
        sentence="CUDA driver version is insufficient for CUDA runtime version",
        rules=("driver-cuda",),
    ),
    Failure(
        code=200,
        names="cudaErrorInvalidKernelImage|CUDA_ERROR_INVALID_IMAGE",
        sentence="device kernel image is invalid",
        rules=("fatbin",),
    ),
    Failure(
        code=209,
        names="cudaErrorNoKernelImageForDevice|CUDA_ERROR_NO_BINARY_FOR_GPU",
        sentence="no kernel image is available for execution on the device",
        rules=("device-code",),
    ),
    Failure(
        code=222,
        names="cudaErrorUnsupportedPtxVersion|CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        sentence="the provided PTX was compiled with an unsupported toolchain",
        rules=("device-code",),
    ),
    Failure(
        code=803,
        names="cudaErrorSystemDriverMismatch|CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        sentence="system has unsupported display driver / cuda driver combination",
        rules=("driver-exact", "driver-compat"),
    ),
    Failure(
        code=804,
        names="cudaErrorCompatNotSupportedOnDevice|CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        sentence="forward compatibility was attempted on non supported HW",
        rules=("driver-compat", "driver-exact"),
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

    `believed` is None where the rule does not apply to the image, and so nothing was believed.
    """

    cause: str
    rule: str
    believed: RuleResult | None

    def __str__(self) -> str:
        if self.believed is None:
            return f"{self.cause}; the rule {self.rule} does not apply to this image, and said nothing"
        need, have = _short(self.believed.need), _short(self.believed.have or "nothing")
        return (
            f"{self.cause}; by the rule {self.rule} it should have run: {self.believed.why} "
            f"(need {need}; have {have})"
        )

    @property
    def remedy(self) -> str:
        """Where to look."""
        return ELSEWHERE.get(self.rule, DRIVER)


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
                return _death(failure.text, failure.rules, selection)
    return None


def _death(cause: str, rules: tuple[str, ...], selection: Selection) -> Death:
    told = next(one.rules for one in selection.candidates if one.reference == selection.selected)
    by_name = {result.rule: result for result in told}
    rule = next((name for name in rules if name in by_name), rules[0])
    return Death(cause=cause, rule=rule, believed=by_name.get(rule))


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:99]}…"  # noqa: PLR2004 - a line of a terminal
