"""Builds the wheel, installs it in an empty environment, and runs every command there as a user would.

    python ci/wheel.py

This finds dependencies and files that only a development environment has: an undeclared package, or a file
that the wheel lacks. There is no engine, so commands that need one exit with 8.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOST = ROOT / "tests" / "hosts" / "genoa-h200.json"
OFFLINE = {"DOCKER_HOST": "unix:///nowhere.sock", "NO_COLOR": "1"}
NO_ENGINE = 8
# A line or two for each command, with the expected exit code. They run in this order, in one folder.
CALLS = (
    ("init", 0),
    (f"init fleet --from {HOST} --cuda 12.4", 0),
    ("validate", 0),
    ("plan", 0),
    ("plan --why cpu-x86-64-v3", 0),
    (f"plan --for {HOST} --at-most 2", 0),
    ("render --only cuda=none,march=x86-64-v3", 0),
    ("lock", NO_ENGINE),
    ("outdated --only cuda=none", NO_ENGINE),  # whether the image exists
    ("bump", NO_ENGINE),
    ("build", NO_ENGINE),
    ("export github", 0),
    ("export gitlab", 0),
    ("publish training:v1", 2),  # the name has no registry
    ("copy 127.0.0.1:1/ml/training:v1 127.0.0.1:1/prod/training", 8),  # no registry
    ("retire registry.example.com/ml/training", 2),  # it says nothing about what to keep
    ("report build.json", 0),
    ("ls", NO_ENGINE),
    ("schema catalog", 0),
    ("probe --json", 0),
    ("gpus", 0),
    ("gpus --metrics", 0),
    ("doctor", (0, NO_ENGINE)),  # by whether this machine starts containers without an engine
    (f"select training:v1 --catalog catalog.json --host {HOST}", 0),
    (f"explain training:v1 --catalog catalog.json --host {HOST}", 0),
    (f"coverage --catalog catalog.json {HOST}", 0),
    ("pull training:v1", NO_ENGINE),
    ("prune --keep 2", NO_ENGINE),
    ("run training:v1", NO_ENGINE),
    (f"kubernetes labels --host {HOST}", 0),
    ("kubernetes classes --nodes nodes.json --catalog catalog.json", 3),  # a node without labels gets nothing
    ("kubernetes needs training:v1 --catalog catalog.json", 0),
    ("kubernetes render job training:v1 --nodes nodes.json --catalog catalog.json", 2),  # without a registry
    (f"kubernetes device-plugin --by product --vram --dry-run --host {HOST}", 0),
    ("kubernetes render prepull training:v1 --nodes nodes.json --catalog catalog.json", 2),
    ("kubernetes render install reg.example.com/t:v1 --program p --device-plugin", 0),
    ("kubernetes render chart -o chart", 0),
    # The TLS files do not exist.
    ("kubernetes webhook --catalog catalog.json --nodes nodes.json --tls-cert x --tls-key y", 2),
    ("kubernetes explain pod.json --nodes nodes.json --catalog catalog.json", 3),
    ("kubernetes gpus --nodes nodes.json --pods pods.json", 0),
    ("resolver", 2),  # without an upstream; with one it would not end
    ("swarm run --gpus 1 training:v1", NO_ENGINE),
    ("swarm gc", NO_ENGINE),
    (f"swarm node-config --dry-run --file daemon.json --host {HOST} --vram 4G", 0),
    (f"slurm node-config --host {HOST} --node n1 --program /usr/local/bin/imagematrix", 0),
    ("slurm importer get docker://training:v1", 2),  # the name has no registry
    ("slurm epilog", 2),  # no job
    ("oci-task training:v1 none none -- true", 2),  # no file of variables
    (f"select training:v1 --catalog catalog.json --gang {HOST}", 0),
    ("verify training:v1", NO_ENGINE),
    ("trim --compute 9.0 --dry-run .", 0),
    ("adopt torch:2.8 --as torch:v1", NO_ENGINE),
)
EVERY_MODULE = """
import importlib, pkgutil, imagematrix
for module in pkgutil.walk_packages(imagematrix.__path__, "imagematrix."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
COMMANDS = "from imagematrix.cli.app import COMMANDS; print(*COMMANDS)"


def main() -> None:
    """Run all checks; stop at the first failure."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = _installed(folder)
        _run([python, "-c", EVERY_MODULE], folder)
        commands = set(_run([python, "-c", COMMANDS], folder).split())
        called = {line.split()[0] for line, _ in CALLS}
        if commands != called:
            raise SystemExit(f"commands without a line here, or lines without one: {commands ^ called}")
        _documents(folder)
        command = python.with_name("imagematrix")
        for words in sorted(commands):
            _run([command, words, "--help"], folder)
        for line, code in CALLS:
            _run([command, *shlex.split(line)], folder, code)
    print(f"the wheel has everything that {len(commands)} commands need")


def _installed(folder: Path) -> Path:
    """Install the wheel into a new environment, and return the environment's Python."""
    wheels = folder / "wheels"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "wheel", "--no-deps", "--wheel-dir", wheels, ROOT], folder)
    (wheel,) = wheels.iterdir()
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    _run([*pip, "--python", python, "install", wheel], folder)
    return python


def _documents(folder: Path) -> None:
    variant = {
        "reference": "training:v1-cuda12.4-drv550.163.01-sm90-x86-64-v3-0123456789ab",
        "digest": None,
        "platform": "linux/amd64",
        "cuda": "12.4",
        "cubins": ["90"],
        "driver": {"mode": "host", "version": None},
    }
    catalog = {
        "schema": "imagematrix.catalog/v1",
        "image": "training",
        "version": "v1",
        "variants": [variant],
    }
    (folder / "catalog.json").write_text(json.dumps(catalog))
    node = {"kind": "Node", "metadata": {"name": "node1"}}
    (folder / "nodes.json").write_text(json.dumps(node))
    pod = {"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [{"image": "training:v1"}]}}
    (folder / "pod.json").write_text(json.dumps(pod))
    (folder / "pods.json").write_text(json.dumps({"kind": "PodList", "items": []}))
    (folder / "build.json").write_text(json.dumps({"schema": "imagematrix.build/v1", "cells": []}))


def _run(command: list[str | Path], folder: Path, code: int | tuple[int, ...] = 0) -> str:
    """Run a command; return its stdout. It has to exit with `code`, or with one of these."""
    codes = code if isinstance(code, tuple) else (code,)
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=folder, env={**os.environ, **OFFLINE}
    )
    if done.returncode not in codes or "Traceback" in done.stderr:
        line = shlex.join(map(str, command))
        raise SystemExit(f"{line}\nexited with {done.returncode}, not {code}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
