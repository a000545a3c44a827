"""The OCI bundle of a container: devices and variables in its config.json.

See https://github.com/opencontainers/runtime-spec/blob/main/config-linux.md#devices. The runtime turns the
rules into a devices cgroup (v1) or a program in the kernel (v2).
"""
# pathlib costs more to import than the file takes to read.
# ruff: noqa: PTH116, PTH123

from __future__ import annotations

import json
import os
import stat

from imagematrix.errors import ProbeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

__all__ = ["rewrite", "with_devices", "with_environment"]

CONFIG = "config.json"
ACCESS = "rwm"  # the default of the engine's --device


def rewrite(bundle: str, devices: Iterable[str], environment: Mapping[str, str]) -> None:
    """Add device nodes of this machine, under the same paths, and variables to the bundle's config.json.

    The file is replaced atomically. Raises ProbeError if it is malformed or cannot be written, or if a device
    does not exist.
    """
    path = f"{bundle}/{CONFIG}"
    try:
        with open(path, encoding="utf-8") as file:
            spec = json.load(file)
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        spec = with_environment(with_devices(spec, devices), environment)
        draft = f"{path}.imagematrix"
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
            file.write(json.dumps(spec))  # json.dump would use the slow encoder in Python
        os.replace(draft, path)  # noqa: PTH105 - see above
    except OSError as error:
        raise ProbeError(f"{error.filename or path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProbeError(f"{path} is malformed") from error


def with_devices(spec: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """Return `spec` with device nodes and the rules that allow them added; existing ones stay."""
    linux = spec["linux"]
    resources = linux.get("resources") or {}
    devices, rules = list(linux.get("devices") or ()), list(resources.get("devices") or ())
    present = {device["path"] for device in devices}
    for path in paths:
        status = os.stat(path)
        kind = "c" if stat.S_ISCHR(status.st_mode) else "b"
        numbers = {"major": os.major(status.st_rdev), "minor": os.minor(status.st_rdev)}
        rules.append({"allow": True, "type": kind, **numbers, "access": ACCESS})
        if path not in present:
            mode = stat.S_IMODE(status.st_mode)
            devices.append(
                {
                    "path": path,
                    "type": kind,
                    **numbers,
                    "fileMode": mode,
                    "uid": status.st_uid,
                    "gid": status.st_gid,
                }
            )
    return {**spec, "linux": {**linux, "devices": devices, "resources": {**resources, "devices": rules}}}


def with_environment(spec: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return `spec` with variables, which replace those of the same name."""
    process = spec["process"]
    kept = [entry for entry in process.get("env") or () if entry.partition("=")[0] not in environment]
    added = [f"{name}={value}" for name, value in environment.items()]
    return {**spec, "process": {**process, "env": kept + added}}
