"""A node's facts as attributes of a ClassAd, in which HTCondor describes machines and jobs.

HTCondor reads lines in its long form, where a backslash has a meaning only before a quotation mark; in other
ClassAds it begins any escape. No text with one means the same in both, so it is replaced, as controls are.
See https://htcondor.readthedocs.io/en/latest/classads/classad-mechanism.html.
"""

from __future__ import annotations

import re

from imagematrix.common.image_reference import split_version
from imagematrix.errors import REPLACED, sanitize_line
from imagematrix.hardware.vendors import cuda, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from imagematrix.hardware.host.host import Gpu, Host
    from imagematrix.selection.selection import Selection

    Scalar = str | int | float | None
    Value = Scalar | list[Scalar]

VARIANT = "ImVariant_"  # the beginning of the name of an attribute with a selected variant
# In the order of the output, each with its meaning.
ATTRIBUTES: dict[str, tuple[str, Callable[[Host], Value]]] = {
    "ImArch": ("The architecture, as by `uname -m`.", lambda host: host.arch),
    "ImCpuVendor": ("The vendor of the processors.", lambda host: host.cpu.vendor),
    "ImCpuModel": ("Their model.", lambda host: host.cpu.model),
    "ImCpuLevel": ("The highest psABI level that they reach, on x86-64.", lambda host: host.cpu.level),
    "ImCpuFlags": ("The flags that all of them have, sorted.", lambda host: [*sorted(host.cpu.flags)]),
    "ImDriver": (
        "The version of the loaded driver.",
        lambda host: host.driver.version if host.driver else None,
    ),
    "ImDriverKind": ("`open` or `proprietary`.", lambda host: host.driver.kind if host.driver else None),
    "ImDriverUserMode": (
        "The version of the node's own libcuda.",
        lambda host: host.driver.user_mode if host.driver else None,
    ),
    "ImDriverCuda": (
        "The newest CUDA release that the driver supports.",
        lambda host: cuda.get_newest_cuda(host.driver.version) if host.driver else None,
    ),
    "ImGpus": ("The number of GPUs.", lambda host: len(host.gpus)),
    "ImGpusUsable": (
        "The number of those that a container can use.",
        lambda host: sum(gpu.usable for gpu in host.gpus),
    ),
    "ImGpuNames": (
        "For each GPU, in the order of the probe: its name.",
        lambda host: _list_gpu_facts(host, "name"),
    ),
    "ImGpuUuids": ("Its UUID.", lambda host: _list_gpu_facts(host, "uuid")),
    "ImGpuComputes": ("Its compute capability, as text.", lambda host: _list_gpu_facts(host, "compute")),
    "ImGpuMemoryMib": ("Its memory in MiB.", lambda host: _list_gpu_facts(host, "memory_mib")),
    "ImGpuStates": ("Its state, `ok` if it works.", lambda host: _list_gpu_facts(host, "state")),
    "ImGpuMigDevices": (
        "The number of its MIG devices.",
        lambda host: [len(gpu.mig or ()) for gpu in host.gpus],
    ),
    "ImGpuComputeMin": (
        "The least compute capability of the GPUs, as a number.",
        lambda host: _get_compute_bound(host, min),
    ),
    "ImGpuComputeMax": ("The greatest one.", lambda host: _get_compute_bound(host, max)),
    "ImAccelerators": (
        "The number of signs of other accelerators.",
        lambda host: len(host.accelerators),
    ),
}


def make_attribute_lines(host: Host) -> list[str]:
    """Return a line for each attribute whose value is known; without one, HTCondor takes it as UNDEFINED."""
    values = ((name, get_value(host)) for name, (_, get_value) in ATTRIBUTES.items())
    return [f"{name} = {_format_literal(value)}" for name, value in values if value is not None]


def make_variant_line(image: str, selection: Selection | None) -> str:
    """Return the line of the attribute with the selected variant of an image, `undefined` without one.

    It has the last part of the image's name. Names in ClassAds have letters, digits and underscores.
    """
    name = re.sub(r"[^a-z0-9]", "_", split_version(image)[0].rpartition("/")[2])
    reference = selection.selected if selection else None
    if selection and selection.digest:
        reference = f"{reference}@{selection.digest}"
    return f"{VARIANT}{name} = {_format_literal(reference)}"


def _list_gpu_facts(host: Host, fact: str) -> Value:
    return [getattr(gpu, fact) for gpu in host.gpus]


def _get_compute_bound(host: Host, choose: Callable[..., Gpu]) -> Value:
    if not host.gpus or any(gpu.compute is None for gpu in host.gpus):
        return None
    return float(choose(host.gpus, key=lambda gpu: versions.make_sort_key(gpu.compute)).compute or 0)


def _format_literal(value: Value) -> str:
    if value is None:
        return "undefined"
    if isinstance(value, list):
        return f"{{{', '.join(map(_format_literal, value))}}}"
    if isinstance(value, str):
        quoted = sanitize_line(value).replace("\\", REPLACED).replace('"', '\\"')
        return f'"{quoted}"'
    return str(value)
