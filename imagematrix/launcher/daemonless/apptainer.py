"""Starting a container with Apptainer, from the folder in which the image's files are mounted.

By itself it passes the node's /dev, home, working folder and variables, and what the user and the site set up
for all containers. Here it gets no variable of the user's, and a list of all that it is to mount. It runs as
the root of the namespace in which the image is mounted, so it needs neither a set-user-id program nor a user
namespace of its own.
"""
# pathlib and shutil are slow to load.
# ruff: noqa: PTH110, PTH120, PTH123

from __future__ import annotations

import os
import re

from imagematrix.errors import EngineError, UsageError
from imagematrix.launcher.daemonless import namespace
from imagematrix.launcher.daemonless.gate import OwnGate
from imagematrix.launcher.daemonless.oci import CAPABILITIES
from imagematrix.launcher.daemonless.places import (
    KERNEL_FILES,
    SHARED_MEMORY,
    fit_container,
    make_node_read_only,
    mount_read_only_sources,
)
from imagematrix.launcher.daemonless.runtime import FOLDER, RuntimeCommand

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.launcher.daemonless.container import ContainerSpec
    from imagematrix.launcher.daemonless.runtime import Place

PROGRAM = "apptainer"
NOT_MOUNTED = "home,tmp,cwd,hostfs,bind-paths"  # what the site's settings mount in every container
DEVICES = ("/dev/full", SHARED_MEMORY)  # the first is not in Apptainer's own small /dev
LIMIT = 1 << 20  # bytes of the settings
# Settings without which a container would lack something, of which Apptainer says nothing or only warns.
NEEDED = {
    "allow container dir": ("yes",),
    "allow user ns": ("yes",),
    "mount dev": ("yes", "minimal"),
    "mount proc": ("yes",),
    "mount sys": ("yes",),
    "user bind control": ("yes",),
}
DRIVERS = ("always use nv", "always use rocm")
# Variables are exported by a shell in Apptainer, which gives some another meaning and leaves others out.
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
RESERVED = frozenset(
    {
        "APPEND_PATH",
        "APPTAINER_APPNAME",
        "APPTAINER_SHELL",
        "EUID",
        "GID",
        "PREPEND_PATH",
        "SINGULARITY_APPNAME",
        "SINGULARITY_SHELL",
        "SING_USER_DEFINED_APPEND_PATH",
        "SING_USER_DEFINED_PATH",
        "SING_USER_DEFINED_PREPEND_PATH",
        "UID",
        "e",
        "key",
    }
)
HOME = "HOME"  # an option of its own
FILES = ("/etc/hosts", "/etc/resolv.conf")  # on which it mounts the node's by itself


class Apptainer:
    """Apptainer: a process is root in its container, which ends with it."""

    name = PROGRAM
    as_root = False
    becomes_process = False
    ends_with_keeper = False  # its processes change their capabilities, which clears a parent's death signal

    def __init__(self, program: str) -> None:
        self.program = program

    def require_possible(self, container: ContainerSpec) -> None:
        """See `Runtime`: variables are exported by a shell."""
        for name in container.environment:
            if not VARIABLE.fullmatch(name) or name in RESERVED:
                raise UsageError(f"Apptainer cannot set the variable {name}", remedy="use --engine oci")
        home = container.environment.get(HOME, "/")
        if not home.startswith("/") or ":" in home:
            raise UsageError(
                f"Apptainer cannot set HOME to {home!r}: expected an absolute path", remedy="use --engine oci"
            )

    def is_isolating(self, container: ContainerSpec) -> bool:  # noqa: ARG002 - of the protocol
        """See `Runtime`."""
        return True

    def make_gate(self) -> OwnGate:
        """See `Runtime`."""
        self._gate = OwnGate()
        return self._gate

    def fit(self, container: ContainerSpec, root: str) -> ContainerSpec:
        """See `Runtime`."""
        return fit_container(container, root, FILES)

    def prepare(self, container: ContainerSpec, place: Place) -> RuntimeCommand:
        """See `Runtime`: it leaves what is mounted in a read-only folder writable."""
        container = mount_read_only_sources(container, namespace.make_memory_folder(place.at, "binds"))
        make_node_read_only(FILES)
        variables = {
            f"APPTAINERENV_{name}": value for name, value in container.environment.items() if name != HOME
        }
        return RuntimeCommand(
            words=_format_command(self.program, container, place.root),
            environment={**place.environment, **variables},
            wait=self._gate.wait,
        )

    def format_command(self, container: ContainerSpec) -> list[str]:
        """See `Runtime`."""
        return _format_command(self.program, container, f"{FOLDER}/root")


def _format_command(program: str, container: ContainerSpec, root: str) -> list[str]:
    return [
        program,
        *("--silent", "--nocolor"),  # but for errors
        *("exec", "--contain", "--cleanenv", "--no-eval"),
        *("--no-nv", "--no-rocm"),  # whatever the site's settings are
        *("--no-mount", NOT_MOUNTED, "--home", container.environment.get(HOME, "/")),
        *("--pid", "--no-init", "--no-privs", "--add-caps", ",".join(CAPABILITIES)),
        *([] if container.read_only else ["--writable"]),
        # It mounts a /proc of its own.
        *(
            word
            for path in (*KERNEL_FILES, *DEVICES)
            if os.path.exists(path)
            for word in _format_mount(path, path)
        ),
        *(word for path in container.devices for word in _format_mount(path, path)),
        *(word for bind in container.binds for word in _format_mount(bind.source, bind.target)),
        *("--pwd", container.folder, root, *container.args),
    ]


def locate_settings(program: str) -> str:
    """Return the file with the settings of the Apptainer whose command is the file `program`."""
    prefix = os.path.dirname(os.path.dirname(os.path.realpath(program)))
    return f"{'' if prefix == '/usr' else prefix}/etc/apptainer/apptainer.conf"


def require_settings(path: str) -> None:
    """Raise EngineError if a setting in the file at `path` keeps something from a container."""
    settings = _read_settings(path)
    for key, needed in NEEDED.items():
        if key in settings and settings[key] not in needed:
            raise EngineError(
                f"{path}: {key} = {settings[key]}, so that no container can have what an image needs",
                remedy=f"ask the administrator to set {key} = {needed[0]}, or use --engine oci",
            )


def find_driver_setting(path: str) -> str | None:
    """Return the setting in the file at `path` by which Apptainer mounts a driver of the node, if any."""
    settings = _read_settings(path)
    return next((f"{key} = yes" for key in DRIVERS if settings.get(key) == "yes"), None)


def _read_settings(path: str) -> Mapping[str, str]:
    """Return the settings in a file; none if there is no such file. Raises EngineError."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(LIMIT)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}") from error
    lines = (line.partition("=") for line in text.splitlines() if not line.lstrip().startswith("#"))
    return {" ".join(key.split()): value.strip() for key, equals, value in lines if equals}


def _format_mount(source: str, target: str) -> tuple[str, str]:
    """Return the option that mounts a file or folder; its fields are of CSV, with quotes."""
    fields = ("type=bind", f"source={source}", f"destination={target}")
    return "--mount", ",".join(f'"{field.replace(chr(34), chr(34) * 2)}"' for field in fields)
