"""The GPUs that the user's own options for `docker run` pass to a container; the launch claims them too."""

# pathlib is slow to import.
# ruff: noqa: PTH100, PTH112

from __future__ import annotations

import contextlib
import os
import stat

from imagematrix.common.record import Record, replace
from imagematrix.errors import UsageError
from imagematrix.hardware.gpu_request.choice import list_mig_devices
from imagematrix.hardware.host.host import Gpu
from imagematrix.hardware.vendors.runtime import VISIBLE, is_nvidia
from imagematrix.images.engine.containers import PassedDevices, list_requested_names
from imagematrix.launcher.docker import env_file
from imagematrix.launcher.gpu_claims.containers import (
    CDI,
    CDI_KIND,
    find_gpu_keys,
    list_known_nodes_below,
)
from imagematrix.launcher.gpu_claims.usage import list_lock_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from imagematrix.launcher.docker.options import RunArgs


ROOTLESS = "name=rootless"  # in the engine's SecurityOptions


class UserGpus(Record):
    """GPUs that a container gets through the user's own options; with `names_all`, these name each GPU.

    A privileged container gets all GPUs, although no list of devices shows them.
    """

    gpus: tuple[Gpu, ...] = ()
    names_all: bool = False


def find_user_gpus(
    args: RunArgs,
    gpus: tuple[Gpu, ...],
    info: Callable[[], Mapping[str, Any]],
    mounted: Iterable[str] = (),
    *,
    without_daemon: bool = False,
) -> UserGpus:
    """Return the GPUs that docker's options in `args` pass, including those that are not in `gpus`.

    `info` returns the engine's information, and is called only if needed. Files and folders that are
    `mounted`, such as /dev, pass no GPUs where the devices cgroup denies the container access; without a
    daemon, or with one of an ordinary user, there is none. Raises UsageError for an `--env-file` that may
    name GPUs but can be read only once.
    """
    if args.is_privileged:
        return UserGpus(gpus=_list_with_nodes(gpus))
    devices = args.get_values("--device")
    names = [name for name in devices if CDI.match(name) or name.startswith(f"{CDI_KIND}=")]
    files = args.get_values("--env-file")
    once = [path for path in files if not _is_regular_file(path)]
    # Files first: docker lets --env win, in whatever order the options come.
    variables: list[str] = []
    for path in files:
        if path not in once:
            with contextlib.suppress(UsageError):  # docker will refuse it
                variables += env_file.read_env_file(path, os.environ)
    variables += args.get_values("--env", "e")
    visible = [expand_variable(text) for text in variables if text.partition("=")[0] == VISIBLE]
    runtime = [None, *args.get_values("--runtime")][-1]
    injected = bool(visible or once) and _is_injecting(runtime, info)
    if once and injected:
        raise UsageError(
            f"--env-file {once[0]}: not a regular file, so the GPUs that it may name cannot be claimed",
            remedy="write the variables to a file",
        )
    nodes = [node for source in mounted for node in _list_mounted_nodes(source, gpus)]
    if nodes and not without_daemon and ROOTLESS not in (info().get("SecurityOptions") or ()):
        nodes = []
    passed = PassedDevices(
        paths=(*(name.partition(":")[0] for name in devices if name not in names), *nodes),
        cgroup_rules=args.get_values("--device-cgroup-rule"),
        requested=(*names, *(visible[-1].split(",") if injected else ())),
    )
    passed_gpus = _find_passed_gpus(passed, gpus)
    return UserGpus(gpus=passed_gpus, names_all=bool(passed_gpus))


def find_gpus_in_api_options(
    options: Mapping[str, Any], gpus: tuple[Gpu, ...], info: Callable[[], Mapping[str, Any]]
) -> tuple[Gpu, ...]:
    """Return the GPUs that options of docker-py's `containers.create` pass, including those not in `gpus`.

    `info` returns the engine's information, and is called only if needed.
    """
    if options.get("privileged"):
        return _list_with_nodes(gpus)
    environment = options.get("environment") or ()
    if isinstance(environment, dict):
        environment = [f"{name}={value}" for name, value in environment.items()]
    variables = dict(text.partition("=")[::2] for text in environment if "=" in text)
    requested = [*list_requested_names(options.get("device_requests") or ())]
    if VISIBLE in variables and _is_injecting(options.get("runtime"), info):
        requested += variables[VISIBLE].split(",")
    passed = PassedDevices(
        paths=tuple(str(name).partition(":")[0] for name in options.get("devices") or ()),
        cgroup_rules=tuple(options.get("device_cgroup_rules") or ()),
        requested=tuple(requested),
    )
    return _find_passed_gpus(passed, gpus)


def list_mounted(args: RunArgs) -> Iterator[str]:
    """Yield the files and folders that docker's `--volume` and `--mount` in `args` mount, but no volumes."""
    sources = [text.partition(":")[0] for text in args.get_values("--volume", "v")]
    for text in args.get_values("--mount"):
        import csv

        fields = next(csv.reader([text]), [])
        sources += [field.partition("=")[2] for field in fields if field.startswith(("source=", "src="))]
    return (os.path.abspath(source) for source in sources if "/" in source or source in (".", ".."))


def _list_mounted_nodes(source: str, gpus: tuple[Gpu, ...]) -> Sequence[str]:
    """Return the device nodes of GPUs in a folder, as far as their names are known, or else the file."""
    # A folder of data can have millions of files, so nothing looks at each of them.
    return list_known_nodes_below(source, gpus) if os.path.isdir(source) else [source]


def _is_injecting(runtime: str | None, info: Callable[[], Mapping[str, Any]]) -> bool:
    """Whether the runtime, or else the engine's default, reads the variable that names GPUs."""
    return is_nvidia(runtime or info().get("DefaultRuntime"), info)


def _list_with_nodes(gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    return tuple(gpu for gpu in gpus if gpu.minor is not None)


def _find_passed_gpus(devices: PassedDevices, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
    return tuple(_look_up_gpu(key, gpus) for key in find_gpu_keys(devices, gpus))


def _look_up_gpu(key: str, gpus: tuple[Gpu, ...]) -> Gpu:
    """Return the GPU with this key; if the key is of a MIG device, the GPU has only that device."""
    for gpu in gpus:
        for part in (replace(gpu, mig=None), *list_mig_devices(gpu)) if gpu.minor is not None else ():
            if list_lock_names(part) == (key,):
                return gpu if part.mig is None else part
    minor = int(key.removeprefix("nvidia").partition("-")[0])
    return Gpu(index=minor, minor=minor)


def _is_regular_file(path: str) -> bool:
    """Whether docker can read a file after this process; true for a missing file, which docker reports."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)  # noqa: PTH116 - pathlib is slow to import
    except (OSError, ValueError):
        return True


def expand_variable(text: str) -> str:
    """Return the value in NAME=VALUE; for NAME alone, this process's variable, as docker does."""
    name, equals, value = text.partition("=")
    return value if equals else os.environ.get(name, "")
