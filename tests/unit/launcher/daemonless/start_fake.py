"""Starts a container with a runtime that is a shell, in namespaces of its caller.

Its argument is a JSON object: `script` is what the shell runs, with the files in the folder `work`. The other
members change the container and the runtime.
"""

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from imagematrix.errors import ImagematrixError
from imagematrix.images.local_store.folder import ImageStore, StoredImage
from imagematrix.launcher.daemonless import lease_holder, namespace, runtime_process, start
from imagematrix.launcher.daemonless.container import ContainerSpec
from imagematrix.launcher.daemonless.gate import HookGate, OwnGate
from imagematrix.launcher.daemonless.runtime import RuntimeCommand

GIVEN = {
    "terminal": False,
    "interactive": True,
    "isolates": False,
    "ends_with_keeper": True,
    "hook": False,  # the shell is no first process, and can tell of one with "$HOOK"
    "fails": None,
    "enters": False,
    "slow": False,  # the keeper, after it has opened the gate
    "environment": {},
    **json.loads(sys.argv[1]),
}
WORK = Path(GIVEN["work"])
IMAGE = StoredImage(
    digest=f"sha256:{'1' * 64}",
    kind="folder",
    root=str(WORK / "root"),
    size=0,
    config={},
    names=(),
)


class Store(ImageStore):
    """A store with this image."""

    def find(self, _):
        return IMAGE


class Claim:
    """Writes what it is extended to."""

    def extend_to(self, holder):
        with (WORK / "claimed").open("a") as file:
            file.write(f"{holder.pid} {holder.mounts}\n")


class SlowGate(HookGate):
    """A gate whose keeper is slow."""

    def open(self):
        super().open()
        time.sleep(0.5)


class Runtime:
    """The shell."""

    name = "fake"
    program = "/bin/sh"
    as_root = False

    def __init__(self):
        self.becomes_process = not GIVEN["hook"]
        self.ends_with_keeper = GIVEN["ends_with_keeper"]

    def require_possible(self, _):
        pass

    def is_isolating(self, _):
        return GIVEN["isolates"]

    def make_gate(self):
        self._gate: Any = SlowGate() if GIVEN["slow"] else HookGate() if GIVEN["hook"] else OwnGate()
        return self._gate

    def fit(self, container, _):
        return container

    def prepare(self, container, _):
        (WORK / "prepared").write_text(str(os.getpid()))
        environment = {"PATH": os.environ["PATH"], **container.environment}
        if GIVEN["fails"] == "error":
            raise FileNotFoundError(2, "No such file or directory", "/place")
        if GIVEN["fails"] == "exit":
            os._exit(9)
        if GIVEN["fails"] == "never":
            time.sleep(600)
        words = [self.program, "-c", GIVEN["script"]]
        if GIVEN["fails"] == "program":
            words[0] = "/nowhere/program"
        if isinstance(self._gate, HookGate):
            environment["HOOK"] = self._gate.make_hook()["args"][-1]  # type: ignore[index]
            return RuntimeCommand(words=words, environment=environment, descriptors=self._gate.descriptors)
        return RuntimeCommand(words=words, environment=environment, wait=self._gate.wait)

    def format_command(self, _):
        return []


def main():
    patch.object(runtime_process, "mount_image", lambda *_, **__: IMAGE.root).start()
    patch.object(namespace, "enter_namespaces", lambda: None).start()
    patch.object(lease_holder, "RENEW_S", 0.1).start()
    if GIVEN["enters"]:
        seen = itertools.chain(["mnt:[1]", "mnt:[1]"], itertools.repeat("mnt:[2]"))
        patch.object(lease_holder, "read_mount_namespace", lambda _: next(seen)).start()
    if GIVEN["hook"]:  # the shell stays outside of the container's
        told = WORK / "prepared"

        def read_mount_namespace(pid: int) -> str:
            return "mnt:[1]" if str(pid) == told.read_text() else "mnt:[2]"

        patch.object(lease_holder, "read_mount_namespace", read_mount_namespace).start()
    container = ContainerSpec(
        name="n",
        args=(GIVEN.get("program", "sh"),),
        environment={"PATH": "/bin", **GIVEN["environment"]},
        folder="/",
        binds=(),
        devices=(),
        annotations={},
        terminal=GIVEN["terminal"],
        interactive=GIVEN["interactive"],
    )
    try:
        claim: Any = Claim()
        return start.run_container(container, IMAGE, Runtime(), Store(WORK / "store"), claim)
    except ImagematrixError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.exit_code


sys.exit(main())
