"""The `docker run` options that are supported without a daemon.

Any other option is an error: a container that ignores one is not the requested container.
"""

from __future__ import annotations

import contextlib
import os
import re

from imagematrix.common.record import Record
from imagematrix.errors import UsageError
from imagematrix.launcher.docker import env_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from imagematrix.launcher.docker.options import RunArgs

# Each with its short form, "" if it has none.
OPTIONS = {
    "--entrypoint": "",
    "--env": "e",
    "--env-file": "",
    "--interactive": "i",
    "--label": "l",
    "--mount": "",
    "--name": "",
    "--read-only": "",
    "--rm": "",
    "--tty": "t",
    "--volume": "v",
    "--workdir": "w",
}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", re.ASCII)
VOLUME_MODES = {"ro": True, "rw": False, "z": False, "Z": False, "": False}  # SELinux labels need a daemon
MOUNT_KEYS = {
    "source": "source",
    "src": "source",
    "target": "target",
    "dst": "target",
    "destination": "target",
    "readonly": "readonly",
    "ro": "readonly",
    "type": "type",
}
TRUE = ("", "1", "true")


class Bind(Record):
    """A file or folder of the node, mounted at `target` in the container.

    Those `of_network` are this program's own, and are left out where they have no place.
    """

    source: str
    target: str
    read_only: bool = False
    of_network: bool = False


class ContainerOptions(Record):
    """The user's own options; `entrypoint` is None without one, and empty to drop the image's.

    `environment` has a variable for each `--env` and each line of an `--env-file`. Variables that are `unset`
    are left out though the image sets them: those that `--env` names and the caller does not have.
    """

    environment: Mapping[str, str]
    binds: tuple[Bind, ...]
    labels: Mapping[str, str]
    folder: str | None
    entrypoint: str | None
    name: str | None
    interactive: bool
    terminal: bool
    read_only: bool
    unset: frozenset[str] = frozenset()


def parse_container_options(args: RunArgs, environment: Mapping[str, str], engine: str) -> ContainerOptions:
    """Return the options in `args`; `environment` is the caller's, for variables without a value.

    Raises UsageError for an option that `engine` does not take, and for an invalid value.
    """
    supported = {*OPTIONS, *(f"-{short}" for short in OPTIONS.values() if short)}
    for name in args.names:
        if name not in supported:
            raise UsageError(
                f"{name} has no effect with --engine {engine}",
                remedy=f"leave it out, or use --engine docker; {engine} takes {', '.join(OPTIONS)}",
            )
    if args.measure:
        raise UsageError(f"--measure has no effect with --engine {engine}", remedy="use --engine docker")
    names = args.get_values("--name")
    if names and not NAME.fullmatch(names[-1]):
        raise UsageError(f"invalid --name {names[-1]}: expected letters, digits, _, . and -")
    folders = args.get_values("--workdir", "w")
    if folders and not folders[-1].startswith("/"):
        raise UsageError(f"invalid --workdir {folders[-1]}: expected an absolute path")
    variables, unset = _parse_environment(args, environment)
    return ContainerOptions(
        environment=variables,
        unset=unset,
        binds=(
            *map(_parse_volume, args.get_values("--volume", "v")),
            *map(_parse_mount, args.get_values("--mount")),
        ),
        labels=dict(text.partition("=")[::2] for text in args.get_values("--label", "l")),
        folder=folders[-1] if folders else None,
        entrypoint=[None, *args.get_values("--entrypoint")][-1],
        name=names[-1] if names else None,
        interactive=args.is_interactive,
        terminal=args.has_terminal,
        read_only=args.is_read_only,
    )


def _parse_environment(
    args: RunArgs, environment: Mapping[str, str]
) -> tuple[Mapping[str, str], frozenset[str]]:
    """Return the variables, and the names of those that are unset.

    Those of files come first, as docker does, whatever the order of the options.
    """
    variables: dict[str, str] = {}
    unset: set[str] = set()
    for path in args.get_values("--env-file"):
        variables |= dict(line.split("=", 1) for line in env_file.read_env_file(path, environment))
    for text in args.get_values("--env", "e"):
        name, equals, value = text.partition("=")
        if not name or "\0" in text:
            raise UsageError(f"invalid variable {text!r}: expected NAME=VALUE or NAME")
        unset.discard(name)
        if equals:
            variables[name] = value
        elif name in environment:
            variables[name] = environment[name]
        else:
            variables.pop(name, None)
            unset.add(name)
    return variables, frozenset(unset)


def _parse_volume(text: str) -> Bind:
    """Return the folder of a `--volume` value, SOURCE:TARGET[:MODES]."""
    source, _, rest = text.partition(":")
    target, _, modes = rest.partition(":")
    flags = modes.split(",")
    if not target or not all(flag in VOLUME_MODES for flag in flags):
        raise UsageError(
            f"invalid --volume {text}: expected SOURCE:TARGET, or SOURCE:TARGET:ro",
            remedy="an anonymous volume needs a daemon: name a folder" if not target else None,
        )
    if "/" not in source and source not in (".", ".."):
        raise UsageError(
            f"invalid --volume {text}: {source} names a volume, and volumes need a daemon",
            remedy=f"write ./{source} for the folder",
        )
    return _make_bind(source, target, f"--volume {text}", read_only=any(VOLUME_MODES[flag] for flag in flags))


def _parse_mount(text: str) -> Bind:
    """Return the folder of a `--mount` value, type=bind,source=SOURCE,target=TARGET[,readonly]."""
    import csv

    values: dict[str, str] = {}
    try:
        fields = next(csv.reader([text], strict=True), [])
    except csv.Error as error:
        raise UsageError(
            f"invalid --mount {text}: {error}", remedy="write it on one line, with closed quotes"
        ) from error
    for field in fields:
        name, _, value = field.partition("=")
        if name not in MOUNT_KEYS:
            raise UsageError(f"invalid --mount {text}: {name} has no effect without a daemon")
        values[MOUNT_KEYS[name]] = value
    if values.get("type") != "bind" or not values.get("source") or not values.get("target"):
        raise UsageError(
            f"invalid --mount {text}: expected type=bind,source=SOURCE,target=TARGET",
            remedy="other types need a daemon",
        )
    read_only = "readonly" in values and values["readonly"] in TRUE
    return _make_bind(values["source"], values["target"], f"--mount {text}", read_only=read_only)


def _make_bind(source: str, target: str, option: str, *, read_only: bool) -> Bind:
    path = os.path.abspath(os.path.expanduser(source))  # noqa: PTH100, PTH111 - pathlib is slow to load
    if not target.startswith("/") or ".." in target.split("/") or not os.path.normpath(target).strip("/"):
        raise UsageError(f"invalid {option}: expected an absolute path in the container, found {target}")
    if not os.path.exists(path):  # noqa: PTH110 - as above
        raise UsageError(f"{option}: {path} not found", remedy="create it first, as no daemon does it")
    return Bind(source=path, target=os.path.normpath(target), read_only=read_only)


def make_site_binds(mounts: Sequence[str]) -> tuple[Bind, ...]:
    """Return the folders that the site's file mounts in every container, each at the same path.

    A folder that this user does not have is left out.
    """
    from imagematrix.common.settings import HERE, HOME

    places = {HOME: os.path.expanduser("~"), HERE: ""}  # noqa: PTH111 - as above
    if HERE in mounts:
        with contextlib.suppress(FileNotFoundError):  # it was removed
            places[HERE] = os.getcwd()  # noqa: PTH109 - as above
    paths = dict.fromkeys(places.get(mount, mount) for mount in mounts)
    return tuple(Bind(source=path, target=path) for path in paths if os.path.isdir(path))  # noqa: PTH112
