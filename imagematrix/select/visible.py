"""Which GPUs the environment names: the variables that NVIDIA's runtime and CUDA read.

A job of a batch system finds its share of the node in them.
"""

from __future__ import annotations

from imagematrix.errors import UsageError
from imagematrix.select.gpus import among, exactly

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.probe.host import Gpu

__all__ = ["CUDA", "RUNTIME", "visible"]

RUNTIME = "NVIDIA_VISIBLE_DEVICES"
CUDA = "CUDA_VISIBLE_DEVICES"
HIDDEN = frozenset({"", "-1", "NoDevFiles"})  # CUDA sees no GPU from there on


def visible(gpus: tuple[Gpu, ...], environment: Mapping[str, str]) -> str | None:
    """Return what `--gpus` would have to say for the GPUs that `environment` names; None where it names none.

    Numbers count the GPUs that work, in PCI bus order, because those that do not are not there for either of
    the two. What both variables name is visible. Raises UsageError where it is not there.
    """
    runtime, cuda = environment.get(RUNTIME) or None, environment.get(CUDA)
    if runtime is None and cuda is None:
        return None
    found = tuple(gpu for gpu in gpus if gpu.state == "ok")
    numbers = {str(number): str(gpu.index) for number, gpu in enumerate(found)}
    if runtime is not None:
        found = _named(found, RUNTIME, "none" if runtime == "void" else runtime, numbers)
    if cuda is not None:
        found = _named(found, CUDA, _until_hidden(cuda), numbers)
    return exactly(found) if found else "none"


def _named(gpus: tuple[Gpu, ...], variable: str, value: str, numbers: Mapping[str, str]) -> tuple[Gpu, ...]:
    names = [numbers.get(name.strip(), name.strip()) for name in value.split(",")]
    try:
        return among(gpus, value if value in ("all", "none") else f"device={','.join(names)}")
    except UsageError as error:
        raise UsageError(
            f"{variable}={value}: {str(error).removeprefix('--gpus: ')}",
            remedy=f"unset {variable}, or say with --gpus which GPUs to use",
        ) from error


def _until_hidden(value: str) -> str:
    """Return the names in CUDA_VISIBLE_DEVICES that count; see the CUDA C++ Programming Guide."""
    names: list[str] = []
    for name in value.split(","):
        if name.strip() in HIDDEN:
            break
        names.append(name)
    return ",".join(names) or "none"
