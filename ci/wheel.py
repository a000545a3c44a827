"""Builds the wheel, installs it in empty environments, and runs every command there as a user would.

    python ci/wheel.py

This finds dependencies and files that only a development environment has: an undeclared package, or a file
that the wheel lacks. There is no engine, so commands that need one exit with 8. One environment has no extra:
what needs one says so there, with the command that installs it. The other has all of them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = Path(sys.executable).with_name("uv")
HOST = ROOT / "tests" / "hosts" / "genoa-h200.json"
OFFLINE = {"DOCKER_HOST": "unix:///nowhere.sock", "NO_COLOR": "1"}
NO_ENGINE = 8
USAGE = 2
# The commands that need an extra to do more than to print something.
EXTRAS = {
    "kubernetes webhook": "kubernetes",
    "kubernetes device-plugin --host nowhere": "kubernetes",
    "kubernetes dra-driver --kubeconfig": "kubernetes",
    "resolver": "resolver",
}
# A line or two for each command, with the expected exit code. They run in this order, in one folder. Those of
# EXTRAS end with a usage error in any case; without the extra, it is another one.
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
    ("needs training:v1 --catalog catalog.json", 0),
    ("pull training:v1", NO_ENGINE),
    ("prune --keep 2", NO_ENGINE),
    ("run training:v1", NO_ENGINE),
    ("warm training:v1", NO_ENGINE),
    (f"kubernetes labels --host {HOST}", 0),
    ("kubernetes classes --nodes nodes.json --catalog catalog.json", 3),  # a node without labels gets nothing
    ("kubernetes needs training:v1 --catalog catalog.json", 0),
    ("kubernetes render job training:v1 --nodes nodes.json --catalog catalog.json", 2),  # without a registry
    (f"kubernetes device-plugin --by product --vram --dry-run --host {HOST}", 0),
    ("kubernetes device-plugin --host nowhere", USAGE),
    (f"kubernetes dra-driver --node-name n1 --dry-run --host {HOST}", 0),
    (f"kubernetes dra-driver --kubeconfig /nowhere --node-name n1 --host {HOST}", USAGE),
    ("kubernetes render prepull training:v1 --nodes nodes.json --catalog catalog.json", 2),
    ("kubernetes render deployment training:v1 --nodes nodes.json --catalog catalog.json", 2),
    ("kubernetes render daemonset training:v1 --nodes nodes.json --catalog catalog.json", 2),
    ("kubernetes render jobset training:v1 --nodes nodes.json --catalog catalog.json", 2),
    ("kubernetes render leaderworkerset training:v1 --nodes nodes.json --catalog catalog.json", 2),
    ("kubernetes render flavors training:v1 --nodes nodes.json --catalog catalog.json", 2),  # no labels
    ("kubernetes render policy training:v1 --nodes nodes.json --catalog catalog.json", 0),
    ("kubernetes render compatibility training:v1 --catalog catalog.json", 0),
    ("kubernetes render install reg.example.com/t:v1 --program p --device-plugin", 0),
    ("kubernetes render chart -o chart", 0),
    # The TLS files do not exist.
    ("kubernetes webhook --catalog catalog.json --nodes nodes.json --tls-cert x --tls-key y", USAGE),
    ("kubernetes explain pod.json --nodes nodes.json --catalog catalog.json", 3),
    ("kubernetes gpus --nodes nodes.json --pods pods.json", 0),
    ("resolver", USAGE),  # without an upstream; with one it would not end
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
    ("help run", 0),
    ("help exit-codes", 0),
    ("help rules", 0),
)
EVERY_MODULE = """
import importlib, pkgutil, imagematrix
from imagematrix.common.extras import find_missing_extra
for module in pkgutil.walk_packages(imagematrix.__path__, "imagematrix."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if not (extra := find_missing_extra(error)):
            raise
        print(extra)
"""
# Prints the name of each command, and shows its help.
COMMANDS = """
import contextlib, io
from typer.main import get_command
from imagematrix.cli.app import make_app
def call_help(command, *words):
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        application([*words, "--help"], "imagematrix", standalone_mode=False)
    assert "Usage" in shown.getvalue(), words
    for word, member in getattr(command, "commands", {}).items():
        call_help(member, *words, word)
    if not hasattr(command, "commands"):
        print(*words)
application = get_command(make_app())
call_help(application)
"""


def main() -> None:
    """Run all checks; stop at the first failure."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run([UV, "build", "--quiet", "--wheel", "--out-dir", folder, ROOT], folder)
        (wheel,) = folder.glob("*.whl")
        with ThreadPoolExecutor() as pool:
            (count, _) = pool.map(partial(_check, wheel), (None, "all"))
    print(f"the wheel has everything that {count} commands need, and names the extras that some of them do")


def _check(wheel: Path, extras: str | None) -> int:
    """Install the wheel with these extras, and run everything there; return the number of commands."""
    folder = wheel.parent / (extras or "bare")
    folder.mkdir()
    python = folder / "venv" / "bin" / "python"
    _run([UV, "venv", "--quiet", "--python", sys.executable, folder / "venv"], folder)
    requirement = f"{wheel}[{extras}]" if extras else wheel
    _run([UV, "pip", "install", "--quiet", "--python", python, requirement], folder)
    named = set(_run([python, "-c", EVERY_MODULE], folder).split())
    if named != (set() if extras else set(EXTRAS.values())):
        raise SystemExit(f"with the extras {extras}, modules miss those of {named}")
    commands = _run([python, "-c", COMMANDS], folder).splitlines()
    idle = [name for name in commands if not any(f"{line} ".startswith(f"{name} ") for line, _ in CALLS)]
    if idle:
        raise SystemExit(f"commands without a line here: {', '.join(idle)}")
    _documents(folder)
    command = python.with_name("imagematrix")
    for line, code in CALLS:
        extra = next((extra for words, extra in EXTRAS.items() if line.startswith(words)), None)
        if extra or not extras:  # what works without extras works with them
            said = _run([command, *shlex.split(line)], folder, code, stream="stderr")
            if re.findall(r" needs the extra \[(\w+)\]: ", said) != ([extra] if extra and not extras else []):
                raise SystemExit(f"{line}, with the extras {extras}:\n{said}")
    if not extras:
        _paste_install_command(command, folder)
    return len(commands)


def _paste_install_command(command: Path, folder: Path) -> None:
    """Run what a command says for want of an extra; an index that has our name must not be asked for it."""
    line, extra = next(iter(EXTRAS.items()))
    words: list[str | Path] = [
        command,
        *shlex.split(next(called for called, _ in CALLS if called.startswith(line))),
    ]
    said = _run(words, folder, USAGE, stream="stderr")
    foreign = folder / "index" / "imagematrix-99-py3-none-any.whl"
    foreign.parent.mkdir()
    foreign.write_bytes(b"somebody else's")
    install = f"export UV_FIND_LINKS={foreign.parent} PATH={UV.parent}:$PATH; {said.partition(']: ')[2]}"
    _run(["sh", "-euc", install], folder)
    if f"[{extra}]" in _run(words, folder, USAGE, stream="stderr"):
        raise SystemExit(f"the extra {extra} is still missing after: {install}")


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


def _run(
    command: list[str | Path], folder: Path, code: int | tuple[int, ...] = 0, stream: str = "stdout"
) -> str:
    """Run a command; return its output to `stream`. It has to exit with `code`, or with one of these."""
    codes = code if isinstance(code, tuple) else (code,)
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=folder, env={**os.environ, **OFFLINE}
    )
    if done.returncode not in codes or "Traceback" in done.stderr:
        line = shlex.join(map(str, command))
        raise SystemExit(f"{line}\nexited with {done.returncode}, not {code}:\n{done.stdout}{done.stderr}")
    return str(getattr(done, stream))


if __name__ == "__main__":
    main()
