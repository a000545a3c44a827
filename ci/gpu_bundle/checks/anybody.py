"""Checks for any user: the probe, the selection, and the program with this machine's own driver."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from machine import FailedError, NotTriedError
from shared import (
    FOREVER,
    IMAGE,
    OTHER_DRIVER,
    begun,
    catalog,
    device,
    launch,
    reference,
    same,
    trained,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from xml.etree import ElementTree as ET

    from machine import Machine
    from shared import Check

ENDED_S = 15.0
MIB_APART = 64  # allowed difference of memory in use between two readings
# Checks of `doctor` that are not about the GPU.
OF_THE_ENGINE = frozenset({"engine", "docker-command"})
ASK_NVML = """\
import ctypes, json
from imagematrix.hardware.host import nvml_library
nvml_library.load_library()
nvml = ctypes.CDLL("libnvidia-ml.so.1")
def text(call, *handle):
    buffer = ctypes.create_string_buffer(96)
    code = getattr(nvml, call)(*handle, buffer, 96)
    return buffer.value.decode() if code == 0 else None
count, gpus = ctypes.c_uint(), []
assert nvml.nvmlInitWithFlags(0) == 0
nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
for index in range(count.value):
    handle, minor = ctypes.c_void_p(), ctypes.c_uint()
    nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    known = nvml.nvmlDeviceGetMinorNumber(handle, ctypes.byref(minor)) == 0
    name, uuid = text("nvmlDeviceGetName", handle), text("nvmlDeviceGetUUID", handle)
    gpus.append({"uuid": uuid, "name": name, "minor": minor.value if known else None})
print(json.dumps({"driver": text("nvmlSystemGetDriverVersion"), "gpus": gpus}))
"""


def starts(machine: Machine, show: Callable[[str], None]) -> None:
    """Check that the package starts from one file."""
    done = machine.imagematrix("--version")
    show(done.text)
    if done.code:
        raise FailedError(done.why)


def finds_gpus(machine: Machine, show: Callable[[str], None]) -> None:
    """Check that the probe finds GPUs, and one that works."""
    done = machine.imagematrix("probe")
    show(done.text)
    gpus = machine.host["gpus"]
    if not gpus:
        raise FailedError("no GPU was found")
    if all(gpu["state"] != "ok" for gpu in gpus):
        raise FailedError(f"no GPU works: {', '.join(gpu['state'] for gpu in gpus)}")


def agrees_with_smi(machine: Machine, show: Callable[[str], None]) -> None:
    """Check that the probe agrees with `nvidia-smi -q -x`, and so does the reader of such dumps."""
    by_uuid = {_text(gpu, "uuid"): gpu for gpu in machine.smi.iter("gpu")}
    dump = machine.imagematrix("probe", "--json", "--nvidia-smi", machine.work / "smi.xml").json()
    version = next(filter(None, (_text(machine.smi, key) for key in ("kmd_version", "driver_version"))), None)
    for source, host in (("the probe", machine.host), ("probe --nvidia-smi", dump)):
        show(f"{source}: {'; '.join([str(_version(host)), *map(_brief, host['gpus'])])}")
        same(f"{source}: driver", _version(host), version)
        same(f"{source}: GPUs", sorted(str(gpu["uuid"]) for gpu in host["gpus"]), sorted(map(str, by_uuid)))
        for gpu in host["gpus"]:
            reported = by_uuid[gpu["uuid"]]
            for fact, path in (
                ("name", "product_name"),
                ("minor", "minor_number"),
                ("pci_bus_id", "pci/pci_bus_id"),
            ):
                if (value := _text(reported, path)) is not None:
                    same(f"{source}: {fact}", _plain(gpu[fact]), _plain(value))
            memory = _text(reported, "fb_memory_usage/total")
            if memory and abs(int(memory.split()[0]) - (gpu["memory_mib"] or 0)) > 1:
                raise FailedError(f"{source}: memory is {gpu['memory_mib']}, nvidia-smi says {memory}")


def agrees_with_nvml(machine: Machine, show: Callable[[str], None]) -> None:
    """Check that the probe agrees with NVML, asked without pynvml."""
    done = machine.run(sys.executable, "-c", ASK_NVML, PYTHONPATH=str(machine.app))
    show(f"NVML: {(done.out if done.code == 0 else done.err).strip()}")
    if done.code:
        raise NotTriedError(f"NVML does not answer: {done.err.strip().splitlines()[-1]}")
    reported = json.loads(done.out)
    same("driver", _version(machine.host), reported["driver"])
    by_uuid = {gpu["uuid"]: gpu for gpu in machine.host["gpus"]}
    for gpu in reported["gpus"]:
        ours = by_uuid.get(gpu["uuid"])
        if ours is None:
            raise FailedError(f"NVML lists a GPU that the probe does not list: {gpu['name']}")
        same("name", ours["name"], gpu["name"])
        same("minor", ours["minor"], gpu["minor"])


def opens_nodes(machine: Machine, show: Callable[[str], None]) -> None:
    """Check that the device nodes that a container would get can be opened."""
    devices = launch(machine)["devices"]
    show("\n".join(devices))
    if f"/dev/nvidia{machine.gpu['minor']}" not in devices:
        raise FailedError(f"the node of the GPU is not among {devices}")
    for path in devices:
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            raise FailedError(f"{path} cannot be opened: {error.strerror}") from error


def selects(machine: Machine, show: Callable[[str], None]) -> None:
    """Check that the image for this GPU is selected among images for two drivers and all targets."""
    done = machine.imagematrix("select", IMAGE, "--gpus", device(machine), "--catalog", catalog(machine))
    show(done.text)
    if done.code:
        raise FailedError(done.why)
    same("selected", done.out.strip(), reference(machine.driver, machine.target))


def refuses_another_driver(machine: Machine, show: Callable[[str], None]) -> None:
    """Check that images of another driver are refused, and no CPU image is selected instead."""
    path = catalog(machine, drivers=(OTHER_DRIVER,))
    done = machine.imagematrix("select", IMAGE, "--gpus", device(machine), "--catalog", path)
    show(done.text)
    same("exit code", done.code, 3)


def computes(machine: Machine, show: Callable[[str], None]) -> None:
    """Check that the program computes the same on the GPU as on the CPU, with this machine's libcuda."""
    cubin = machine.cubin(machine.rootfs)
    done = machine.run(*machine.training(cubin, machine.steps), CUDA_VISIBLE_DEVICES=machine.gpu["uuid"])
    show(done.text)
    trained(machine, done.json())


def tells_use(machine: Machine, show: Callable[[str], None]) -> None:
    """Check that `gpus` shows the GPU as used while it computes, and as free afterwards."""
    others = _until_free(machine)
    if others:
        raise NotTriedError(f"others use the GPU: {others}")
    cubin = machine.cubin(machine.rootfs)
    words = machine.training(cubin, FOREVER)
    with machine.start(*words, CUDA_VISIBLE_DEVICES=machine.gpu["uuid"]) as process, begun(process):
        during = _status(machine)
        smi = _memory_in_use(machine)
    show(
        json.dumps(
            {"pid of the program": process.pid, "gpus says": during, "nvidia-smi says MiB": smi}, indent=1
        )
    )
    if not during["used_by"] or during["free"]:
        raise FailedError("a program computes on the GPU, but `gpus` says that it is free")
    used = during["memory_used_mib"]
    if smi is not None and used is not None and abs(smi - used) > MIB_APART:
        raise FailedError(f"`gpus` says that {used} MiB are used, nvidia-smi {smi}")
    if left := _until_free(machine):
        raise FailedError(f"the program has ended, and `gpus` still says {left}")


def doctor(machine: Machine, show: Callable[[str], None]) -> None:
    """Check that `doctor` finds nothing that would stop a launch, except for engines."""
    if not machine.host["gpus"]:
        raise NotTriedError("the probe finds no GPU")
    done = machine.imagematrix("doctor", "--json")
    findings = done.document["findings"]
    show("\n".join(f"{one['severity']:<8} {one['check']:<15} {one['saw']}" for one in findings))
    errors = [one for one in findings if one["severity"] == "error" and one["check"] not in OF_THE_ENGINE]
    if errors:
        raise FailedError("; ".join(one["saw"] for one in errors))


CHECKS: tuple[Check, ...] = (
    starts,
    finds_gpus,
    agrees_with_smi,
    agrees_with_nvml,
    opens_nodes,
    selects,
    refuses_another_driver,
    computes,
    tells_use,
    doctor,
)


def _status(machine: Machine) -> dict[str, Any]:
    number = machine.gpu["index"]
    gpus = machine.imagematrix("gpus", "--json").json()["gpus"]
    return next(gpu for gpu in gpus if gpu["index"] == number)


def _until_free(machine: Machine) -> list[dict[str, Any]]:
    """Return the users of the GPU; processes that have just ended get time to disappear."""
    limit = time.monotonic() + ENDED_S
    users: list[dict[str, Any]] = _status(machine)["used_by"]
    while users and time.monotonic() < limit:
        time.sleep(0.5)
        users = _status(machine)["used_by"]
    return users


def _memory_in_use(machine: Machine) -> int | None:
    machine.__dict__.pop("smi", None)
    try:
        dump = machine.smi
    except NotTriedError:
        return None
    used = {_text(gpu, "uuid"): _text(gpu, "fb_memory_usage/used") for gpu in dump.iter("gpu")}
    value = used.get(machine.gpu["uuid"])
    return int(value.split()[0]) if value else None


def _text(element: ET.Element, path: str) -> str | None:
    text = (element.findtext(path) or "").strip()
    return None if text in {"", "N/A", "[N/A]"} or "Deprecated" in text else text


def _plain(value: object) -> str:
    """Return a fact as text; PCI domains have four digits here, but eight in NVIDIA's tools."""
    return str(value).lower().removeprefix("0000").removeprefix("0000")


def _brief(gpu: dict[str, Any]) -> str:
    return f"{gpu['uuid']} {gpu['name']} {gpu['pci_bus_id']} minor {gpu['minor']} {gpu['memory_mib']} MiB"


def _version(host: dict[str, Any]) -> str | None:
    version: str | None = (host["driver"] or {}).get("version")
    return version
