"""The catalog of a step of Slurm, in the shared folder, where all tasks of the step find the same.

In the subfolder `steps` every user may create files, as in /tmp. Each user has a folder of his own there, in
which the first task of a step puts the catalog, by a link that fails if there is one. Its name, and what it
says of itself, are that of one image, in one step of one run of a job.
"""
# pathlib is slow to load.
# ruff: noqa: PTH101, PTH102, PTH108, PTH116, PTH118

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat

from imagematrix.common import json_documents
from imagematrix.common.user_folder import list_user_folders, make_user_folder
from imagematrix.errors import ProbeError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.integrations.slurm.step import SlurmStep

SCHEMA = "imagematrix.step-catalog/v1"
STEPS = "steps"  # the subfolder
OPEN = 0o1777  # its mode: everybody may create files, and remove their own
KEPT = 7 * 24 * 3600  # seconds; tasks read the catalog of their step when it starts
HASHED = 16  # digits of the hash in a name
# A catalog, or a draft of one that a killed task has left.
OF_A_STEP = re.compile(r"[0-9]+\.[0-9]+-[0-9a-f]{16}\.json(?:\.[0-9a-f]{12})?", re.ASCII)


def prepare_folder(folder: str) -> None:
    """Create the subfolder of the catalogs of steps in the shared folder, or open it to all; raise OSError.

    For the administrator, when a node's Host is saved.
    """
    steps = os.path.join(folder, STEPS)
    with contextlib.suppress(FileExistsError):
        os.mkdir(steps)
    # Also of one that exists: a run that was killed has left it with the mode of an umask.
    if stat.S_IMODE(os.stat(steps).st_mode) & OPEN != OPEN:
        os.chmod(steps, OPEN)


def share_catalog(step: SlurmStep, folder: str, open_catalog: Callable[[], Catalog]) -> Catalog:
    """Return the catalog of a step, which is the same for all of its tasks.

    The first task calls `open_catalog`, and stores the catalog in the shared folder. Raises UsageError if
    that is not possible, or if something else is in its place, and ProbeError if the step has two catalogs.
    """
    from imagematrix.images.catalog.catalog import Catalog

    steps = os.path.join(folder, STEPS)
    try:
        if not _find_catalog(step, steps):
            _store_catalog(step, steps, open_catalog())
        # While somebody else creates and removes folders with this user's name, two tasks may come to have
        # folders of different names, and each writes into its own. So a task looks everywhere once more after
        # the catalog that it takes was there: of two tasks with different ones, the second sees both.
        catalogs = _find_catalog(step, steps)
    except FileExistsError as error:
        raise UsageError(
            f"{steps}: others have taken all names that this user's folder can have, from {_get_user()} on",
            remedy="the administrator removes what is there",
        ) from error
    except OSError as error:
        raise UsageError(
            f"{error.filename or steps}: {error.strerror}",
            remedy="the administrator prepares this folder with `imagematrix slurm node-config --save`",
        ) from error
    if not catalogs:
        raise UsageError(f"{steps}: somebody has removed the catalog of step {step.job}.{step.number}")
    if len({*catalogs.values()}) > 1:
        paths = " and ".join(catalogs)
        raise ProbeError(
            f"step {step.job}.{step.number} has different catalogs, {paths}, so that its tasks "
            "could run different images",
            remedy="start the step again",
        )
    path, raw = catalogs.popitem()
    return Catalog.from_json(_parse_content(step, path, raw), path)


def _make_file_name(step: SlurmStep) -> str:
    """Return the name of the file, the same for all tasks of a step and for no other step."""
    digest = hashlib.sha256(json_documents.dump_json(_describe_step(step)).encode()).hexdigest()
    return f"{step.job}.{step.number}-{digest[:HASHED]}.json"


def _describe_step(step: SlurmStep) -> dict[str, str]:
    """Return what the file says of its step."""
    return {
        "image": step.image,
        "job": step.job,
        "restart": step.restart,
        "start": step.start,
        "step": step.number,
    }


def _find_catalog(step: SlurmStep, steps: str) -> dict[str, bytes]:
    """Return the catalog of a step by its path, in all folders of this user; raise OSError and UsageError."""
    catalogs = {}
    for folder in list_user_folders(steps, _get_user()):
        path = os.path.join(folder, _make_file_name(step))
        with contextlib.suppress(FileNotFoundError):
            catalogs[path] = _read_file(path)
    return catalogs


def _get_user() -> str:
    return str(os.geteuid())


def _store_catalog(step: SlurmStep, steps: str, catalog: Catalog) -> None:
    """Store the catalog of a step unless another task has stored one; raise OSError."""
    path = os.path.join(make_user_folder(steps, _get_user()), _make_file_name(step))
    content = {"schema": SCHEMA, **_describe_step(step), "catalog": catalog.to_json()}
    draft = f"{path}.{os.urandom(6).hex()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(json_documents.dump_json(content))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)
    _remove_old_files(steps, os.stat(path).st_mtime)


def _remove_old_files(steps: str, now: float) -> None:
    """Remove this user's files of steps of long ago, which root may not do on NFS.

    `now` is by the clock of the file system, as that of a node may be wrong.
    """
    for folder in list_user_folders(steps, _get_user()):
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # another task removes it, too
                    old = entry.stat(follow_symlinks=False).st_mtime < now - KEPT
                    if old and OF_A_STEP.fullmatch(entry.name):
                        os.unlink(entry.path)


def _read_file(path: str) -> bytes:
    """Return the bytes of a file of this user's own; raise OSError, and UsageError for anything else."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK  # it may be a link or a pipe
    with open(path, "rb", opener=lambda path, mode: os.open(path, mode | flags)) as file:
        state = os.fstat(file.fileno())
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
            raise UsageError(f"{path} is not a file of this user")
        raw = file.read(json_documents.LIMIT + 1)
    if len(raw) > json_documents.LIMIT:
        raise UsageError(f"{path}: exceeds {json_documents.LIMIT // 2**20} MiB, too large for a catalog")
    return raw


def _parse_content(step: SlurmStep, path: str, raw: bytes) -> object:
    """Return the Catalog document in a file; raise UsageError if it is not that of the step."""
    fields = json_documents.Fields(json_documents.parse_json(raw, path), path)
    fields.require_schema(SCHEMA)
    for key, value in _describe_step(step).items():
        if fields.get_text(key) != value:
            raise fields.fail(
                key, f"{fields.get_text(key)!r:.80} instead of {value!r}: it is of another step"
            )
    return fields.get_object_or_empty("catalog").data
