"""The container to start without a daemon, as data: as docker would make it of an image and its options."""

from __future__ import annotations

import os

from imagematrix.common.record import Record
from imagematrix.errors import UsageError
from imagematrix.images.oci.process import ImageProcess
from imagematrix.launcher.daemonless.options import Bind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from imagematrix.common.json_documents import Fields
    from imagematrix.launcher.daemonless.options import ContainerOptions
    from imagematrix.launcher.docker.plan import Launch

# Docker's, for images that set none (daemon/oci_linux.go of moby).
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ROOTS = ("", "0", "root")
# Of the node, so that names of hosts are found; some nodes lack one. Docker writes its own.
NETWORK = ("/etc/resolv.conf", "/etc/hosts", "/etc/hostname")


class ContainerSpec(Record):
    """A process with its files: `args` run in `folder`, with exactly these variables, binds and devices.

    Each of `devices` is a device node of the node, at the same path in the container. `annotations` are its
    labels. Without `own_processes`, an OCI runtime starts it among the processes of the node, so that a batch
    system signals it like any other: the first process of a namespace ignores what it does not handle. A
    batch system may name `descriptors` for it: their number, from 3. `layer` is a folder whose files are over
    those of the image. One that is `apart` has a host name and shared memory of its own, and without
    `has_network` no network.
    """

    name: str
    args: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str
    binds: tuple[Bind, ...]
    devices: tuple[str, ...]
    annotations: Mapping[str, str]
    read_only: bool = False
    terminal: bool = False
    interactive: bool = False
    own_processes: bool = True
    descriptors: int = 0
    layer: str | None = None
    apart: bool = False
    has_network: bool = True


def make_container(
    config: Fields,
    launch: Launch,
    options: ContainerOptions,
    binds: Sequence[Bind],
    *,
    name: str,
    home: str,
    inherited: Mapping[str, str] | None = None,
) -> ContainerSpec:
    """Return the container of a launch.

    `config` is the image's configuration, its `config` object; `binds` are the site's, and `home` is the
    user's home if those mount it, else the one of root. All other variables override `inherited` ones.
    Raises UsageError if the image has no command and the launch neither, and if its configuration is damaged.
    """
    process = ImageProcess.from_config(config)
    entrypoint, command = process.entrypoint, process.command
    if options.entrypoint is not None:  # which also replaces the image's command
        entrypoint, command = (options.entrypoint,) if options.entrypoint else (), ()
    args = (*entrypoint, *(launch.command or command))
    if not args:
        raise UsageError(f"{launch.reference} has no command", remedy="name one after the image")
    image_variables = dict(text.partition("=")[::2] for text in process.variables)
    terminal = {"TERM": "xterm"} if options.terminal else {}
    environment = {
        **(inherited or {}),
        "PATH": PATH,
        "HOME": home,
        **terminal,
        **image_variables,
        **launch.environment,
        **options.environment,
    }
    return ContainerSpec(
        name=options.name or name,
        args=args,
        environment={key: value for key, value in environment.items() if key not in options.unset},
        folder=options.folder or process.folder,
        binds=(
            *(
                Bind(source=path, target=path, read_only=True, of_network=True)
                for path in NETWORK
                if os.path.exists(path)  # noqa: PTH110 - pathlib is slow
            ),
            *binds,
            *(Bind(source=path, target=path) for path in launch.mounts),
            *options.binds,
        ),
        devices=launch.devices,
        annotations={**options.labels, **launch.labels},
        read_only=options.read_only,
        terminal=options.terminal,
        interactive=options.interactive,
    )


def find_other_user(config: Fields) -> str | None:
    """Return the user that an image names if that is not root: without ranges of ids, nobody can be it."""
    user = config.get_text_or_none("User") or ""
    return None if user.partition(":")[0] in ROOTS else user
