"""Checks for root without an engine: containers started by runc, or only by mounts if runc cannot."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import oci
from machine import FailedError, NotTriedError
from shared import BUSY, FOREVER, begun, launch, same, train, trained

if TYPE_CHECKING:
    from collections.abc import Callable

    from machine import Done, Machine
    from shared import Check

HERE = Path(__file__).parent
NO_DEVICE = {"code": 100, "name": "CUDA_ERROR_NO_DEVICE"}


class Runtime(NamedTuple):
    """How to start containers here: the command for a bundle, why it is not runc, and the first result."""

    words: Callable[[Machine, Path], list[object]]
    note: str
    first: Done


def no_nodes(machine: Machine, show: Callable[[str], None]) -> str:
    """Check that a container without device nodes has no GPU: CUDA error 100."""
    runtime = machine.once(_runtime)
    show(runtime.first.text)
    same("cuInit", runtime.first.document["cuinit"], NO_DEVICE)
    return runtime.note


def with_nodes(machine: Machine, show: Callable[[str], None]) -> str:
    """Check that a container with the GPU's device nodes and nothing else trains."""
    runtime = machine.once(_runtime)
    planned = launch(machine, *train(machine, machine.steps))
    show("\n".join(planned["devices"]))
    folder = _bundle(machine, "nodes", planned)
    done = machine.run(*_claiming(machine), *runtime.words(machine, folder), PYTHONPATH=str(machine.app))
    show(done.text)
    trained(machine, done.json())
    return runtime.note


def refuses_a_second(machine: Machine, show: Callable[[str], None]) -> str:
    """Check that a second launch is refused the GPU of a container."""
    runtime = machine.once(_runtime)
    folder = _bundle(machine, "busy", launch(machine, *train(machine, FOREVER)))
    machine.at_end.callback(_end, machine, folder)
    words = [*_claiming(machine), *runtime.words(machine, folder)]
    with machine.start(*words, PYTHONPATH=str(machine.app)) as process, begun(process):
        done = machine.run(*_claiming(machine), "true", PYTHONPATH=str(machine.app))
        _end(machine, folder)
    show(done.err.strip())
    same("exit code", done.code, BUSY)
    return runtime.note


CHECKS: tuple[Check, ...] = (no_nodes, with_nodes, refuses_a_second)


def _runtime(machine: Machine) -> Runtime:
    """Return how to start a container here, after one without device nodes was started."""
    if not machine.root:
        raise NotTriedError("this needs root")
    planned = {**launch(machine, *train(machine, 1)), "devices": []}
    folder = _bundle(machine, "bare", planned)
    reasons = []
    for words in (_runc_words, _mount_words):
        try:
            done = machine.run(*words(machine, folder))
        except (FailedError, NotTriedError) as error:
            reasons.append(str(error))
            continue
        try:
            json.loads(done.out)
        except ValueError:
            reasons.append(done.why)
            continue
        note = f"started only by mounts, because {reasons[0]}" if reasons else ""
        return Runtime(words, note, done)
    raise NotTriedError(f"no container can be started here: {'; '.join(reasons)}")


def _runc_words(machine: Machine, folder: Path) -> list[object]:
    return [*_runc(machine), "run", "--bundle", folder, folder.name]


def _mount_words(_machine: Machine, folder: Path) -> list[object]:
    return [sys.executable, "-B", HERE / "contain.py", folder]


def _end(machine: Machine, folder: Path) -> None:
    """End the container; a container started only by mounts ends with its process."""
    with suppress(FailedError, NotTriedError):
        machine.run(*_runc(machine), "delete", "--force", folder.name)


def _bundle(machine: Machine, name: str, planned: dict[str, Any]) -> Path:
    """Write the bundle of a launch; return its folder."""
    folder = machine.work / name
    folder.mkdir(exist_ok=True)
    try:
        oci.write(folder, machine.image, planned)
    except OSError as error:
        raise FailedError(f"{error.filename}: {error.strerror}") from error
    return folder


def _runc(machine: Machine) -> list[object]:
    carried = machine.bundle / "runc"
    program = carried if carried.exists() else shutil.which("runc") or shutil.which("crun")
    if not program:
        machine.lacks("runc")
        raise NotTriedError("there is no runc")
    return [program, "--root", machine.work / "containers"]


def _claiming(machine: Machine) -> list[object]:
    return [sys.executable, "-B", HERE / "claim.py", machine.gpu["index"]]
