"""Checks that need an engine: `imagematrix run`, as a user runs it."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

from machine import FailedError, NotTriedError
from shared import BUSY, FOREVER, IMAGE, archived, device, facts, labelled, same, train, trained

if TYPE_CHECKING:
    from collections.abc import Callable

    from machine import Done, Machine
    from shared import Check


def selects(machine: Machine, show: Callable[[str], None]) -> None:
    """Check that `select` finds the image in the engine."""
    reference = machine.once(_imported)
    done = machine.imagematrix("select", IMAGE, "--gpus", device(machine))
    show(done.text)
    same("selected", done.out.strip() or done.err, reference)


def runs(machine: Machine, show: Callable[[str], None]) -> None:
    """Check that `run` starts the image, and it trains."""
    machine.once(_imported)
    done = _run(machine, "--rm", steps=machine.steps)
    show(done.text)
    trained(machine, done.json())


def refuses_a_second(machine: Machine, show: Callable[[str], None]) -> None:
    """Check that a second `run` is refused the GPU of a container."""
    machine.once(_imported)
    name = f"gpu-check-{os.getpid()}"
    machine.at_end.callback(machine.try_to_run, "docker", "rm", "--force", name)
    first = _run(machine, "--detach", "--name", name, steps=FOREVER)
    if first.code:
        raise FailedError(first.why)
    done = _run(machine, "--rm", steps=machine.steps)
    show(done.text)
    machine.run("docker", "rm", "--force", name)
    same("exit code", done.code, BUSY)


def doctor(machine: Machine, show: Callable[[str], None]) -> None:
    """Check that `doctor` says that the image fits this node."""
    machine.once(_imported)
    done = machine.imagematrix("doctor", IMAGE)
    show(done.text)
    same("exit code", done.code, 0)


CHECKS: tuple[Check, ...] = (selects, runs, refuses_a_second, doctor)


def _imported(machine: Machine) -> str:
    """Import the image into the engine; return its reference."""
    if not shutil.which("docker"):
        raise NotTriedError("this machine has no docker")
    version = machine.run("docker", "version")
    if version.code:
        raise NotTriedError(f"no engine answers: {version.why}")
    archive = machine.work / "root.tar"
    digest = archived(machine.image, archive)
    reference, labels = labelled(facts(machine, machine.driver, machine.target), digest)
    changes = [
        word for name, value in labels.items() for word in ("--change", f"LABEL {name}={json.dumps(value)}")
    ]
    machine.at_end.callback(machine.try_to_run, "docker", "rmi", "--force", reference)
    done = machine.run("docker", "import", *changes, archive, reference)
    if done.code:
        raise FailedError(done.why)
    return reference


def _run(machine: Machine, *options: str, steps: int) -> Done:
    words = ("run", *options, "--gpus", device(machine), IMAGE, *train(machine, steps))
    return machine.imagematrix(*words)
