"""Checks without a daemon: `pull` into a store, and `run --engine oci` from it, as a user runs it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import oci
from machine import FailedError, NotTriedError
from shared import BUSY, FOREVER, IMAGE, archived, begun, device, facts, labelled, same, train, trained

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from machine import Done, Machine
    from shared import Check

PULL_S = 120.0
NO_CGROUPS = "no cgroup mount found"  # what runc says in sandboxes
TYPE = "application/vnd.oci.image"


def pulls(machine: Machine, show: Callable[[str], None]) -> None:
    """Check that `pull` brings the image from a layout into a store."""
    show(machine.once(_filled))


def runs(machine: Machine, show: Callable[[str], None]) -> None:
    """Check that `run --engine oci` starts the image without a daemon, and it trains."""
    machine.once(_filled)
    done = machine.once(_started)
    show(done.text)
    trained(machine, done.json())


def refuses_a_second(machine: Machine, show: Callable[[str], None]) -> None:
    """Check that a second `run --engine oci` is refused the GPU of the first."""
    machine.once(_filled)
    machine.once(_started)
    words = machine.command(*_words(machine, FOREVER))
    with machine.start(*words, PATH=_path(machine)) as process, begun(process):
        done = machine.imagematrix(*_words(machine, 1), PATH=_path(machine))
    show(done.err.strip())
    same("exit code", done.code, BUSY)


CHECKS: tuple[Check, ...] = (pulls, runs, refuses_a_second)


def _filled(machine: Machine) -> str:
    """Pull the image into a store; return what `pull` wrote."""
    findings = machine.imagematrix("doctor", "--json", PATH=_path(machine)).document["findings"]
    saw = next(one["saw"] for one in findings if one["check"] == "without-daemon")
    if saw.startswith("no containers"):
        raise NotTriedError(saw)
    layout = machine.work / "layout"
    _write(machine, layout)
    words = ("pull", IMAGE, "--gpus", device(machine), "--catalog", f"oci:{layout}", "--unpacked")
    done = machine.imagematrix(*words, "--to", machine.work / "store", limit=PULL_S)
    shutil.rmtree(layout)
    if done.code:
        raise FailedError(done.why)
    return done.text


def _started(machine: Machine) -> Done:
    """Run the image to its end."""
    done = machine.imagematrix(*_words(machine, machine.steps), PATH=_path(machine))
    if NO_CGROUPS in done.err:
        raise NotTriedError(done.why)
    return done


def _words(machine: Machine, steps: int) -> tuple[object, ...]:
    options = ("--engine", "oci", "--store", machine.work / "store", "--gpus", device(machine))
    return ("run", *options, IMAGE, *train(machine, steps))


def _path(machine: Machine) -> str:
    """Return the PATH with which imagematrix finds the bundle's runc."""
    return f"{machine.bundle}:{os.environ.get('PATH', os.defpath)}"


def _write(machine: Machine, layout: Path) -> None:
    """Write the image as an OCI layout with one layer."""
    blobs = layout / "blobs/sha256"
    blobs.mkdir(parents=True)
    digest = archived(machine.image, blobs / "layer")
    layer = (blobs / "layer").rename(blobs / digest.removeprefix("sha256:"))
    system, architecture = machine.platform.split("/")
    reference, labels = labelled(facts(machine, machine.driver, machine.target), digest)
    config = {
        "os": system,
        "architecture": architecture,
        "config": {"Env": [oci.PATH], "Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [digest]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{TYPE}.manifest.v1+json",
        "config": _blob(blobs, "config.v1+json", config),
        "layers": [
            {"mediaType": f"{TYPE}.layer.v1.tar", "digest": digest, "size": layer.stat().st_size},
        ],
    }
    entry = _blob(blobs, "manifest.v1+json", manifest)
    entry["annotations"] = {"org.opencontainers.image.ref.name": reference.partition(":")[2]}
    index = {"schemaVersion": 2, "mediaType": f"{TYPE}.index.v1+json", "manifests": [entry]}
    (layout / "index.json").write_text(json.dumps(index))
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


def _blob(blobs: Path, kind: str, document: object) -> dict[str, Any]:
    """Write a document as a blob; return its descriptor."""
    raw = json.dumps(document).encode()
    digest = hashlib.sha256(raw).hexdigest()
    (blobs / digest).write_bytes(raw)
    return {"mediaType": f"{TYPE}.{kind}", "digest": f"sha256:{digest}", "size": len(raw)}
