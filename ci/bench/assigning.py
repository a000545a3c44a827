"""Measure what the OCI runtime of Swarm's tasks adds to runc."""

from __future__ import annotations

import contextlib
import re
import shutil
from typing import TYPE_CHECKING

import building  # noqa: F401 - makes the machines of the tests importable
from cluster import Cluster
from measure import PASS, REFERENCE, Pace, overhead, processes
from processes import new_folder, remove_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cluster import Node
    from measure import Extent, Row

BAR = 3.5  # times `python -c pass`, in the whole life of a container
PROFILE = "milan-a10"
IMAGE = "debian:trixie"
SERVICE = "bench"
NOTHING = "/bin/true"
RUNC = re.compile(rb"^runc=.*$", re.MULTILINE)


def rows(_folder: Path, _pace: Pace, extent: Extent) -> Iterator[Row]:
    """Yield the time of all calls for a container with a GPU, compared with a runc that does nothing.

    Engine, task and bundle are real. A real runc takes ten times as long and varies by more than is measured.
    """
    with _node() as node:
        container = _ended_task(node)
        runtime = _runtime(node)
        ours, runc = (_life(node, path, container) for path in (runtime, NOTHING))
        taken = processes({"pass": PASS, "ours": ours, "runc": runc}, extent.rounds)
    yield overhead(
        "the runtime of Swarm's tasks, all calls for a container",
        (taken["ours"].seconds, taken["runc"].seconds),
        "as many calls of `true`",
        BAR * REFERENCE,
        Pace(seconds=taken["pass"].seconds),
    )


@contextlib.contextmanager
def _node() -> Iterator[Node]:
    """Start a machine with one simulated GPU, whose engine is a swarm with one node."""
    data = new_folder()
    cluster = Cluster(data)
    try:
        node = cluster.add("n1", PROFILE, 1)
        node.offer()
        node.seed()
        cluster.form()
        yield node
    finally:
        cluster.remove()
        remove_folder(data)


def _ended_task(node: Node) -> str:
    """Return the container of a task that got the GPU, and copy its bundle to the node's folder."""
    options = ("-d", "--no-resolve-image", "--restart-condition", "none")
    resource = ("--generic-resource", "NVIDIA-GPU=1")
    node.docker("service", "create", "--name", SERVICE, *options, *resource, IMAGE, "sleep", "600")
    listed = ("ps", "-q", "--no-trunc", "--filter", f"name={SERVICE}.")
    Cluster.wait(lambda: node.docker(*listed).stdout)
    container = str(node.docker(*listed).stdout.strip())
    tasks = node.folder / "run" / "containerd" / "daemon" / "io.containerd.runtime.v2.task"
    shutil.copy(tasks / "moby" / container / "config.json", node.folder / "config.json")
    node.docker("kill", container)
    Cluster.wait(lambda: not node.docker(*listed).stdout)
    return container


def _runtime(node: Node) -> str:
    """Install the runtime once more, over a runc that does nothing."""
    runtime = node.folder / "measured"
    words = ("swarm", "node-config", "--file", str(node.config_file), "--runtime", str(runtime))
    done = node.imagematrix(*words)
    if done.returncode:
        raise SystemExit(done.stderr)
    # Root's programs are found in the system's folders only. The runtime is an archive, whose members have
    # their places, so the other runc has as many bytes.
    text = RUNC.sub(
        lambda line: f"runc={NOTHING}".encode().ljust(len(line[0])), runtime.read_bytes(), count=1
    )
    runtime.write_bytes(text)
    return str(runtime)


def _life(node: Node, runtime: str, container: str) -> tuple[str, ...]:
    """Return the command that calls a runtime as containerd does in the life of a container."""
    bundle = node.folder / "bundle"
    bundle.mkdir(exist_ok=True)
    call = f"{runtime} --root {bundle} --log {bundle}/log.json --log-format json"
    lines = [
        f"cp {node.folder}/config.json {bundle}",  # the runtime writes to it
        f"{call} create --bundle {bundle} --pid-file {bundle}/pid {container}",
        f"{call} start {container}",
        f"{call} state {container}",
        f"{call} kill --all {container} 9",
        f"{call} delete {container}",
    ]
    locks = f"IMAGEMATRIX_LOCKS={node.environment['IMAGEMATRIX_LOCKS']}"
    return (*node.inside, "env", locks, "sh", "-ec", "\n".join(lines))
