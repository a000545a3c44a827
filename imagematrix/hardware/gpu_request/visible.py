"""Which GPUs the environment names: the variables of NVIDIA's runtime, of CUDA, and of batch systems.

A batch system names a job's GPUs in them, and the job may use no others. Sources for the syntax: the CUDA C++
Programming Guide ("CUDA Environment Variables"), the MIG user guide ("CUDA device enumeration"), the
Container Device Interface, and nvidia-container-toolkit (internal/config/image).
"""

from __future__ import annotations

import os
import re

from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.hardware.gpu_request.spec import ALL, NONE, find_candidates, make_exact_spec, select_gpus
from imagematrix.hardware.host import device
from imagematrix.hardware.host.host import Accelerator
from imagematrix.hardware.vendors.runtime import VISIBLE as RUNTIME
from imagematrix.hardware.vendors.runtime import VOID

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Never

    from imagematrix.hardware.host.host import Gpu, Host

CUDA = "CUDA_VISIBLE_DEVICES"
# Slurm uses the numbers of the device files, even if its cgroups hide some GPUs (sbatch(1), under
# SLURM_JOB_GPUS); a step has some of the job's GPUs. But tasks with GPUs of their own (--gpus-per-task,
# --gpu-bind) count from 0 if cgroups hide the others: then only access to the files tells them apart.
# HTCondor uses shortened UUIDs, or names such as CUDA0.
# A job with shards has neither, and a job without GPUs may open none.
SLURM = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
JOB = "SLURM_JOB_ID"
CONDOR = "_CONDOR_AssignedGPUs"
HIDDEN = frozenset({"", "-1", "NoDevFiles"})  # CUDA ignores this name and all names after it
MOUNTED = "/var/run/nvidia-container-devices"  # as a value: the files in this folder name the devices
NODES = "/dev"
CDI = re.compile(r"[\w.-]*nvidia\.com/[\w.-]+=", re.ASCII)  # nvidia.com/gpu=, before a device's own name
NUMBER = re.compile(r"(?:gpu)?(\d{1,4})", re.ASCII)
# A MIG device by the numbers of GPU and device, by its name in CDI, and as drivers before branch 470 name it.
MIG = re.compile(r"(?:mig)?(\d{1,4}):(\d{1,4})", re.ASCII)
OLD_MIG = re.compile(r"MIG-(GPU-[\w-]+)/(\d{1,4})/(\d{1,4})", re.ASCII)
NO_GPU = "Slurm gave it none of the GPUs of this node"
NOT_FOUND = "it names GPUs, but none was found on this node"


def select_within_environment(
    gpus: tuple[Gpu, ...], wanted: str, environment: Mapping[str, str]
) -> tuple[Gpu, ...]:
    """Return those of `gpus` that the `--gpus` value `wanted` may use within `environment`.

    Raises UsageError, which names the variables, if these GPUs cannot serve it.
    """
    allowed = None if wanted == NONE else parse_visible(gpus, environment)
    if allowed is None:
        return gpus
    visible_gpus = select_gpus(gpus, allowed)
    try:
        find_candidates(visible_gpus, wanted)
        if visible_gpus:
            return visible_gpus
        message = f"GPUs {wanted}: no GPU is available"
    except UsageError as error:
        message = str(error)
    restrictions = _read_restrictions(environment, MOUNTED, NODES)
    variables = " and ".join(f"{name}={environment[name]}" for name in restrictions)
    raise UsageError(
        f"{message}, restricted by {variables}",
        remedy="request GPUs of this job; outside of a job, unset the variables that name them",
    )


def parse_visible(
    gpus: tuple[Gpu, ...], environment: Mapping[str, str], mounted: str = MOUNTED, nodes: str = NODES
) -> str | None:
    """Return the `--gpus` value for the GPUs that `environment` names; None if it names none.

    Numbers count the GPUs that work, in PCI bus order, because CUDA and NVIDIA's runtime do not see the
    others. The GPUs that all variables name are visible; a variable with no GPU in it hides all. In a job of
    Slurm that may open only some of the device files in `nodes`, its GPUs are those, and it has none if its
    cgroup denies all. `mounted` is the folder MOUNTED. Raises UsageError if a named GPU does not exist,
    except on a host without GPUs: see `list_gpu_variables`.
    """
    restrictions = _read_restrictions(environment, mounted, nodes)
    if [] in restrictions.values():
        return NONE
    usable = remaining = tuple(gpu for gpu in gpus if gpu.usable)
    if not restrictions or not gpus:
        return None
    numbers = _number_gpus(usable)
    for variable, names in restrictions.items():
        if variable in (*SLURM, JOB):
            # Slurm's numbers are those of the device files.
            permitted = [str(minor) for minor in device.list_permitted_minors(nodes)]
            by_minor = {
                str(gpu.index if gpu.minor is None else gpu.minor): str(gpu.index) for gpu in remaining
            }
            files = [(f"/dev/nvidia{name}", by_minor.get(name)) for name in permitted or names]
            remaining = _select_named(remaining, variable, environment, files)
            # If a cgroup hides all other GPUs, CUDA's numbers count those of the job.
            of_job = {str(gpu.index) for gpu in remaining}
            of_others = {number for number, index in numbers.items() if index not in of_job}
            hidden = bool(permitted) or not of_others.isdisjoint(restrictions.get(CUDA, ()))
            numbers = _number_gpus(remaining) if hidden else numbers
        elif names != [ALL] and not (variable == RUNTIME and _is_already_applied(names, usable, numbers)):
            words = [_translate_name(name, usable, numbers, variable) for name in names]
            named = list(zip(names, words, strict=True))
            remaining = _select_named(remaining, variable, environment, named)
    return make_exact_spec(remaining) if remaining else None


def within(
    host: Host, gpus: str | None = None, environment: Mapping[str, str] | None = None
) -> tuple[Host, str | None]:
    """Return this machine's `host` as restricted by the environment, and the `--gpus` value.

    The value is `gpus`, as given with `--gpus`, or else the GPUs that the environment names, by default this
    process's. If the environment names GPUs, the host has no others. If a host without GPUs has an
    environment that names some, that is a sign of an accelerator. Raises UsageError if a named GPU does not
    exist.
    """
    environment = os.environ if environment is None else environment
    if gpus is None and host.gpus and _read_restrictions(environment, MOUNTED, NODES).get(JOB) == []:
        sign = Accelerator(kind="environment", where="the job", why=NO_GPU)
        return replace(host, gpus=(), accelerators=(*host.accelerators, sign)), None
    if not host.gpus:
        host = replace(host, accelerators=host.accelerators + list_gpu_variables(environment))
    if gpus is None:
        return host, parse_visible(host.gpus, environment)
    return replace(host, gpus=select_within_environment(host.gpus, gpus, environment)), gpus


def list_gpu_variables(environment: Mapping[str, str], mounted: str = MOUNTED) -> tuple[Accelerator, ...]:
    """Return the variables of `environment` that name GPUs: signs of accelerators if a probe finds none."""
    return tuple(
        Accelerator(kind="environment", where=f"{variable}={environment[variable]}", why=NOT_FOUND)
        for variable, names in _read_restrictions(environment, mounted, NODES).items()
        if names not in ([], [ALL])
    )


def _read_restrictions(environment: Mapping[str, str], mounted: str, nodes: str) -> dict[str, list[str]]:
    """Return the names in each variable that has an effect, in order of precedence."""
    restrictions: dict[str, list[str]] = {}
    if value := environment.get(RUNTIME):
        names = _read_runtime_variable(value, mounted)
        if names is not None:
            restrictions[RUNTIME] = names
    slurm = next((name for name in SLURM if environment.get(name)), None)
    if slurm:
        restrictions[slurm] = _split(environment[slurm])
    if environment.get(JOB):
        # The device files that the job may open tell only if it may not open all of them.
        permitted = device.list_permitted_minors(nodes)
        if permitted or device.is_withheld(nodes):
            restrictions[JOB] = [str(minor) for minor in permitted]
    if value := environment.get(CONDOR):
        restrictions[CONDOR] = _split(value)
    if CUDA in environment:
        # A name that hides no GPU hides all names after it.
        names = _split(environment[CUDA])
        end = next((position for position, name in enumerate(names) if name in HIDDEN), None)
        restrictions[CUDA] = names[:end]
    return restrictions


def _split(value: str) -> list[str]:
    return [name.strip() for name in value.split(",")]


def _read_runtime_variable(value: str, mounted: str) -> list[str] | None:
    """Return the names in NVIDIA_VISIBLE_DEVICES, None if the variable has no effect."""
    words = _list_mounted_names(mounted) if value == MOUNTED else _split(value)
    names = [CDI.sub("", name, count=1) for name in words if name not in {"", VOID}]
    if NONE in names:
        return []
    return [ALL] if ALL in names else names or None


def _list_mounted_names(folder: str) -> list[str]:
    """Return the names of the files in a folder; below cdi/VENDOR/CLASS they name CDI devices."""

    def fail(error: OSError) -> Never:
        raise error

    try:
        return sorted(name for _, _, files in os.walk(folder, onerror=fail) for name in files)
    except OSError as error:
        raise _make_error(RUNTIME, folder, str(error.strerror)) from error


def _is_already_applied(names: list[str], usable: tuple[Gpu, ...], numbers: Mapping[str, str]) -> bool:
    """Whether this container has only the GPUs that NVIDIA's runtime was asked for, so that all are visible.

    The numbers are then those of the machine: some do not exist in the container, and there are as many
    numbers as GPUs in it.
    """
    matches = [match for name in names if (match := NUMBER.fullmatch(name) or MIG.fullmatch(name))]
    present = sum(len(gpu.mig or ()) or 1 for gpu in usable)
    some_absent = any(_translate_name(name, usable, numbers, RUNTIME) is None for name in names)
    return some_absent and len(matches) == len(names) and len(set(names)) == present


def _number_gpus(gpus: tuple[Gpu, ...]) -> dict[str, str]:
    return {str(number): str(gpu.index) for number, gpu in enumerate(gpus)}


def _translate_name(
    name: str, usable: tuple[Gpu, ...], numbers: Mapping[str, str], variable: str
) -> str | None:
    """Return the `--gpus` name of the GPU or MIG device `name`, or None if there is none."""
    if variable == CONDOR:
        return numbers.get(name.removeprefix("CUDA")) if name.startswith("CUDA") else name
    if match := NUMBER.fullmatch(name):
        return numbers.get(match[1])
    if match := OLD_MIG.fullmatch(name):
        return next((f"{gpu.index}:{match[2]}:{match[3]}" for gpu in usable if gpu.uuid == match[1]), None)
    if match := MIG.fullmatch(name):
        return _name_numbered_device(numbers.get(match[1]), int(match[2]), usable)
    return name


def _name_numbered_device(index: str | None, number: int, usable: tuple[Gpu, ...]) -> str | None:
    """Return the `--gpus` name of a MIG device from its number on a GPU."""
    devices = next((gpu.mig or () for gpu in usable if str(gpu.index) == index), ())
    # The order of several devices is known only from NVML, which also reports their UUIDs.
    if number >= len(devices) or (len(devices) > 1 and devices[number].uuid is None):
        return None
    return f"{index}:{devices[number].gpu_instance}:{devices[number].compute_instance}"


def _select_named(
    gpus: tuple[Gpu, ...],
    variable: str,
    environment: Mapping[str, str],
    words: list[tuple[str, str | None]],
) -> tuple[Gpu, ...]:
    """Return those of `gpus` that a variable names; `words` has each name with its `--gpus` name."""
    value = environment[variable]
    missing = next((name for name, word in words if word is None), None)
    if missing is not None:
        raise _make_error(variable, value, f"{missing!r} not found on this host")
    try:
        return select_gpus(gpus, f"device={','.join(word for _, word in words if word)}")
    except UsageError as error:
        raise _make_error(variable, value, str(error)) from error


def _make_error(variable: str, value: str, what: str) -> UsageError:
    return UsageError(f"{variable}={value}: {what}", remedy=f"unset {variable}, or correct it")
