"""Which calls and attributes tell a program the compute capability of a GPU, by their names.

The names are those of PyTorch, vLLM, SGLang, FlashInfer, Triton, TensorRT-LLM, CuPy, Numba, JAX, TensorFlow
and NVML. If the source of a function with such a name is there, and shows what it returns, that counts.
"""

from __future__ import annotations

import re

from imagematrix.audit.guards.values import ComputeCapability, compare, make_constant, make_unknown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from imagematrix.audit.guards.values import Line, PossibleValue

# Return the capability, as a tuple, a number, a text or an object with `major` and `minor`.
TELLING = frozenset(
    {
        "compute_capability",
        "get_compute_capability",
        "get_cuda_compute_capability",
        "get_device_capability",
        "get_device_compute_capability",
        "get_device_properties",
        "cuda_get_device_properties",
        "getDeviceProperties",
        "get_device_sm",
        "get_sm_version",
        "getSMVersion",
        "nvmlDeviceGetCudaComputeCapability",
    }
)
# Compare it with their arguments: the operator's name in `ast`.
COMPARING = {
    "has_device_capability": "GtE",
    "cuda_capability_geq": "GtE",
    "is_device_capability": "Eq",
    "is_device_capability_family": "family",
}
STATING = ("capability", "major", "minor")  # the names of these arguments
SUPPORTED = re.compile(r"is_sm(\d{2,3})[af]?_supported", re.ASCII)
# Whether the text of a module may ask.
QUESTION = re.compile(
    rb"\b(?:"
    + b"|".join(sorted(name.encode() for name in TELLING | COMPARING.keys()))
    + rb"|is_sm\d{2,3}[af]?_supported)\b"
)


def is_query(name: str) -> bool:
    """Whether a name is that of a question."""
    return name in TELLING or name in COMPARING or SUPPORTED.fullmatch(name) is not None


def answer_query(
    name: str, arguments: Sequence[PossibleValue], capability: ComputeCapability, line: Line
) -> PossibleValue | None:
    """Return what the function of a name answers on a GPU, or None if it is no question."""
    if name in TELLING:
        return make_constant(capability, line)
    supported = SUPPORTED.fullmatch(name)
    if supported:
        return make_constant(capability.major == int(supported[1]) // 10, line)
    if name not in COMPARING:
        return None
    threshold = _parse_arguments(arguments)
    if threshold is None:
        return make_unknown(make_constant(capability, line), *arguments)
    if COMPARING[name] == "family":
        return make_constant(capability.major == threshold.major, line)
    return compare(COMPARING[name], make_constant(capability, line), make_constant(tuple(threshold)))


def _parse_arguments(arguments: Sequence[PossibleValue]) -> ComputeCapability | None:
    """Return the capability that arguments state: (90,), ((9, 0),) or (9, 0)."""
    constants: list[object] = []
    for argument in arguments[:2]:
        if argument.options is None or len(argument.options) != 1:
            break
        constants += argument.options
    if constants and isinstance(constants[0], tuple):
        constants = [*constants[0], 0][:2]
    numbers = [constant for constant in constants if isinstance(constant, int)]
    if not numbers or numbers != constants:
        return None
    major, minor = numbers[0], numbers[1] if len(numbers) > 1 else 0
    return ComputeCapability(*divmod(major, 10)) if major >= 20 else ComputeCapability(major, minor)  # noqa: PLR2004


def get_attribute(value: PossibleValue, name: str) -> PossibleValue | None:
    """Return an attribute of a capability, or the result of its method; None if it is something else."""
    capability = _get_capability(value)
    if capability is None or name not in ("major", "minor"):
        return None
    return make_constant(getattr(capability, name), value.question)


def convert(value: PossibleValue, name: str) -> PossibleValue | None:
    """Return what a method or a function of this name makes of a capability, or None if it makes nothing."""
    capability = _get_capability(value)
    if capability is None:
        return None
    results: dict[str, object] = {
        "to_int": capability.number,
        "int": capability.number,
        "float": float(capability.text),
        "as_version_str": capability.text,
        "replace": str(capability.number),
        "tuple": tuple(capability),
    }
    return make_constant(results[name], value.question) if name in results else None


def _get_capability(value: PossibleValue) -> ComputeCapability | None:
    """Return the capability that a value is for certain, or None."""
    if value.options is None or len(value.options) != 1:
        return None
    (option,) = value.options
    return option if isinstance(option, ComputeCapability) else None
