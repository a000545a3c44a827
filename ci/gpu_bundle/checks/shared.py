"""Shared by checks of several tiers: the catalog, the program's report, waiting for training to begin."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from machine import FailedError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from subprocess import Popen

    from machine import Machine

# A check is called with a function that records evidence. It may return a remark; it raises FailedError or
# NotTriedError.
Check = Callable[["Machine", Callable[[str], None]], str | None]

IMAGE = "gpu-check:v1"
FOREVER = 1_000_000_000
OTHER_DRIVER = "450.51.05"
TOLERANCE = 1e-3
BUSY = 10  # the exit code of a launch whose GPUs are in use


def trained(machine: Machine, report: dict[str, Any]) -> None:
    """Raise FailedError unless the program's report shows correct training on this GPU."""
    same("backend", report["backend"], "gpu")
    if not (report["device"] or "").startswith(machine.gpu["name"]):  # the name of a MIG device is longer
        raise FailedError(f"device: {report['device']!r}, not {machine.gpu['name']!r}")
    same("compute capability", report["compute"], machine.gpu["compute"])
    same("libcuda", report["libcuda"] or machine.driver, machine.driver)
    cpu, gpu = (report["check"][key] for key in ("cpu_loss", "gpu_loss"))
    if abs(cpu - gpu) > TOLERANCE * cpu:
        raise FailedError(f"the loss is {gpu} on the GPU and {cpu} on the CPU")
    if not report["final_loss"] < report["initial_loss"]:
        raise FailedError("the loss did not fall")


def catalog(machine: Machine, drivers: tuple[str, ...] = ()) -> str:
    """Write a catalog with an image for each target and driver, and a CPU-only one; return its path."""
    machine.lacks("kernels")
    variants: list[dict[str, Any]] = [
        {"reference": reference(driver, target), **facts(machine, driver, target)}
        for driver in drivers or (machine.driver, OTHER_DRIVER)
        for target in machine.about["kernels"]["targets"]
    ]
    variants.append({"reference": "gpu-check:v1-cpu", "platform": machine.platform})
    return saved(machine, variants)


def saved(machine: Machine, variants: list[dict[str, Any]]) -> str:
    """Write a catalog with these variants; return its path."""
    image, version = IMAGE.split(":")
    document = {
        "schema": "imagematrix.catalog/v1",
        "image": image,
        "version": version,
        "variants": variants,
    }
    path = machine.work / f"catalog-{len(variants)}.json"
    path.write_text(json.dumps(document))
    return str(path)


def launch(machine: Machine, *command: object) -> dict[str, Any]:
    """Return the launch of the image for the GPU, as data."""
    image = reference(machine.driver, machine.target)
    words = ("run", "--print", "json", "--gpus", device(machine), "--catalog", catalog(machine), image)
    document: dict[str, Any] = machine.imagematrix(*words, *command).json()
    return document


def train(machine: Machine, steps: int) -> list[object]:
    """Return the words that run the program in a container."""
    return ["train", "--steps", steps, "--cubin", machine.cubin()]


def device(machine: Machine) -> str:
    """Return the value of --gpus for the GPU."""
    return f"device={machine.gpu['index']}"


def reference(driver: str, target: str) -> str:
    """Return the reference in the catalog."""
    return f"gpu-check:v1-drv{driver}-sm{target}"


def facts(machine: Machine, driver: str, target: str) -> dict[str, Any]:
    """Return the facts of an image with the kernel for a target and a driver."""
    return {
        "platform": machine.platform,
        "cuda": machine.about["kernels"]["cuda"],
        "cubins": [target],
        "driver": {"mode": "exact", "version": driver},
    }


def labelled(variant: dict[str, Any], digest: str) -> tuple[str, dict[str, str]]:
    """Return the reference and the labels of an image with these facts; `digest` is that of its files."""
    from imagematrix.images.catalog import labels

    cell = f"cuda{variant['cuda']}-sm{variant['cubins'][0]}"
    image, version = IMAGE.split(":")
    own = {
        labels.IMAGE: image,
        labels.VERSION: version,
        labels.CELL: cell,
        labels.INPUT: digest,
        labels.VARIANT: json.dumps(variant),
    }
    return f"{image}:{labels.make_tag(version, cell, digest)}", own


def archived(folder: Path, archive: Path) -> str:
    """Write the files of a folder to a tar archive; return its digest."""
    with tarfile.open(archive, "w") as tar:
        for item in sorted(folder.iterdir()):
            tar.add(item, item.name)
    with archive.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


@contextmanager
def begun(process: Popen[str]) -> Iterator[None]:
    """Wait until the program trains on the GPU."""
    lines: list[str] = []
    for line in process.stderr or ():
        lines.append(line)
        if line == "train: training on the GPU\n":
            break
    else:
        raise FailedError(f"the program did not train: {lines[-1:] or 'it printed nothing'}")
    yield


def same(what: str, actual: object, wanted: object) -> None:
    """Raise FailedError unless both are equal."""
    if actual != wanted:
        raise FailedError(f"{what}: {actual!r}, not {wanted!r}")
