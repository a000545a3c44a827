"""imagematrix.lock: the digests of base images and of drivers to download, kept beside the matrix.

They are resolved once. Like every lock file it is committed: all builds of the same matrix use the same bases
and drivers, even after tags have moved and files were replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from imagematrix.build.plan.context import LOCK
from imagematrix.build.plan.remote_driver import LockedDriver
from imagematrix.common import files, json_documents
from imagematrix.common.image_reference import DIGEST
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["SCHEMA", "beside", "contents", "document", "extend", "read", "renew"]

SCHEMA = "imagematrix.lock/v1"


def beside(matrix: Path) -> Path:
    """Return the lock file of a matrix: matrix.yaml has imagematrix.lock, x.yaml has x.imagematrix.lock."""
    return matrix.with_name(LOCK if matrix.stem == "matrix" else f"{matrix.stem}.{LOCK}")


def read(path: Path) -> dict[str, str]:
    """Return the digests of base images by reference; empty if there is no such file.

    Raises UsageError if it is damaged.
    """
    return contents(path)[0]


def contents(path: Path) -> tuple[dict[str, str], dict[str, LockedDriver]]:
    """Return base images as `read` does, and the digests of drivers by https address."""
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return {}, {}
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if not regular:  # to open a pipe would wait for a writer
        raise UsageError(f"{path} is not a file", remedy="remove it and run `imagematrix lock`")
    try:
        fields = json_documents.Fields(json_documents.read(path), str(path))
        fields.schema(SCHEMA)
        return _bases(fields), _drivers(fields)
    except UsageError as error:
        remedy = error.remedy or "restore it from version control, or delete it and run `imagematrix lock`"
        raise UsageError(str(error), remedy=remedy) from error


def document(bases: Mapping[str, str], drivers: Mapping[str, LockedDriver]) -> dict[str, object]:
    """Return the Lock document."""
    listed = [{"name": name, "digest": digest} for name, digest in sorted(bases.items())]
    downloaded = [
        {"address": address, "file": one.file, "driver": one.driver}
        for address, one in sorted(drivers.items())
    ]
    return {"schema": SCHEMA, "bases": listed, **({"drivers": downloaded} if downloaded else {})}


def extend(path: Path, bases: Mapping[str, str]) -> bool:
    """Add missing bases to the lock file `path`; existing digests stay.

    Return whether it now has all of `bases`: another build may have locked other digests.
    """
    locked = read(path)
    if not bases.keys() <= locked.keys():
        with _alone(path):
            locked, drivers = contents(path)
            locked = {**bases, **locked}
            _write(path, locked, drivers)
    return bases.items() <= locked.items()


def renew(
    path: Path, before: Mapping[str, str], bases: Mapping[str, str], drivers: Mapping[str, LockedDriver]
) -> dict[str, str]:
    """Write `bases` and `drivers` to the lock file `path`, and return its new base images.

    `before` are its base images when `bases` were resolved: those that others have added since then stay.
    """
    with _alone(path):
        current, current_drivers = contents(path)
        added = {name: digest for name, digest in current.items() if name not in before}
        locked = {**bases, **added}
        if (locked, drivers) != (current, current_drivers):
            _write(path, locked, drivers)
    return locked


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes from changing lock files in the folder of `path`, if the file system can lock."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # unwritable files are reported by the writer
            folder = os.open(_target(path).parent, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield


def _write(path: Path, bases: Mapping[str, str], drivers: Mapping[str, LockedDriver]) -> None:
    """Write the digests to `path` atomically; raise UsageError on failure."""
    try:
        files.replace(_target(path), json_documents.dump(document(bases, drivers)).encode())
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


def _target(path: Path) -> Path:
    """Return the lock file itself, to which a link may lead that several projects share."""
    return Path(os.path.realpath(path))


def _bases(fields: json_documents.Fields) -> dict[str, str]:
    bases: dict[str, str] = {}
    for item in fields.objects("bases"):
        digest = _digest(item, "digest")
        if bases.setdefault(item.text("name"), digest) != digest:
            raise item.fail("name", f"{item.text('name')} occurs twice")
    return bases


def _drivers(fields: json_documents.Fields) -> dict[str, LockedDriver]:
    drivers: dict[str, LockedDriver] = {}
    for item in fields.objects("drivers") if fields.present("drivers") else ():
        address = item.text("address")
        if address in drivers:
            raise item.fail("address", f"{address} occurs twice")
        drivers[address] = LockedDriver(file=_digest(item, "file"), driver=_digest(item, "driver"))
    return drivers


def _digest(item: json_documents.Fields, key: str) -> str:
    digest = item.text(key)
    if not DIGEST.fullmatch(digest):
        raise item.fail(key, f"{digest[:80]!r} is not a sha256 digest")
    return digest
