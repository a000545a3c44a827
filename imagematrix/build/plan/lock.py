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

from imagematrix.build.matrix.axis_values import COMPAT_DRIVER
from imagematrix.build.plan.context import LOCK
from imagematrix.build.plan.remote_driver import LockedDriver
from imagematrix.common import files, json_documents
from imagematrix.common.image_reference import DIGEST
from imagematrix.errors import UsageError
from imagematrix.images.catalog.catalog import read_user_mode_driver

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SCHEMA = "imagematrix.lock/v1"


def locate_lock(matrix: Path) -> Path:
    """Return the lock file of a matrix: matrix.yaml has imagematrix.lock, x.yaml has x.imagematrix.lock."""
    return matrix.with_name(LOCK if matrix.stem == "matrix" else f"{matrix.stem}.{LOCK}")


def read_base_digests(path: Path) -> dict[str, str]:
    """Return the digests of base images by reference; empty if there is no such file.

    Raises UsageError if it is damaged.
    """
    return read_lock(path)[0]


def read_lock(path: Path) -> tuple[dict[str, str], dict[str, LockedDriver]]:
    """Return base images as `read_base_digests` does, and the digests of drivers by https address."""
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return {}, {}
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if not regular:  # to open a pipe would wait for a writer
        raise UsageError(f"{path} is not a file", remedy="remove it and run `imagematrix lock`")
    try:
        fields = json_documents.Fields(json_documents.read_json(path), str(path))
        fields.require_schema(SCHEMA)
        return _parse_bases(fields), _parse_drivers(fields)
    except UsageError as error:
        remedy = error.remedy or "restore it from version control, or delete it and run `imagematrix lock`"
        raise UsageError(str(error), remedy=remedy) from error


def make_lock_document(bases: Mapping[str, str], drivers: Mapping[str, LockedDriver]) -> dict[str, object]:
    """Return the Lock document."""
    base_entries = [{"name": name, "digest": digest} for name, digest in sorted(bases.items())]
    driver_entries = [
        {
            "address": address,
            "file": locked.file,
            "driver": locked.driver,
            **({"compat": locked.compat.to_json()} if locked.compat else {}),
        }
        for address, locked in sorted(drivers.items())
    ]
    return {
        "schema": SCHEMA,
        "bases": base_entries,
        **({"drivers": driver_entries} if driver_entries else {}),
    }


def extend_lock(path: Path, bases: Mapping[str, str]) -> bool:
    """Add missing bases to the lock file `path`; existing digests stay.

    Return whether it now has all of `bases`: another build may have locked other digests.
    """
    locked = read_base_digests(path)
    if not bases.keys() <= locked.keys():
        with _hold_folder_lock(path):
            locked, drivers = read_lock(path)
            locked = {**bases, **locked}
            _write_lock(path, locked, drivers)
    return bases.items() <= locked.items()


def renew_lock(
    path: Path, before: Mapping[str, str], bases: Mapping[str, str], drivers: Mapping[str, LockedDriver]
) -> tuple[dict[str, str], dict[str, LockedDriver]]:
    """Write `bases` and `drivers` to the lock file `path`, and return all that it now has.

    `before` are its base images when `bases` were resolved: those that others have added since then stay. If
    the path is a link, other projects may share the file, and all that they have locked stays.
    """
    with _hold_folder_lock(path):
        current, current_drivers = read_lock(path)
        if path.is_symlink():
            locked, locked_drivers = {**current, **bases}, {**current_drivers, **drivers}
        else:
            added = {name: digest for name, digest in current.items() if name not in before}
            locked, locked_drivers = {**bases, **added}, {**drivers}
        if (locked, locked_drivers) != (current, current_drivers):
            _write_lock(path, locked, locked_drivers)
    return locked, locked_drivers


@contextlib.contextmanager
def _hold_folder_lock(path: Path) -> Iterator[None]:
    """Keep other processes from changing lock files in the folder of `path`, if the file system can lock."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # unwritable files are reported by the writer
            folder = os.open(_resolve_link(path).parent, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, folder)
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield


def _write_lock(path: Path, bases: Mapping[str, str], drivers: Mapping[str, LockedDriver]) -> None:
    """Write the digests to `path` atomically; raise UsageError on failure."""
    try:
        files.replace_file(
            _resolve_link(path), json_documents.dump_json(make_lock_document(bases, drivers)).encode()
        )
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error


def _resolve_link(path: Path) -> Path:
    """Return the lock file itself, to which a link may lead that several projects share."""
    return Path(os.path.realpath(path))


def _parse_bases(fields: json_documents.Fields) -> dict[str, str]:
    bases: dict[str, str] = {}
    for item in fields.list_objects("bases"):
        digest = _parse_digest(item, "digest")
        if bases.setdefault(item.get_text("name"), digest) != digest:
            raise item.fail("name", f"{item.get_text('name')} occurs twice")
    return bases


def _parse_drivers(fields: json_documents.Fields) -> dict[str, LockedDriver]:
    drivers: dict[str, LockedDriver] = {}
    for item in fields.list_objects("drivers") if fields.has("drivers") else ():
        address = item.get_text("address")
        if address in drivers:
            raise item.fail("address", f"{address} occurs twice")
        compat = read_user_mode_driver(item, "compat") if item.has("compat") else None
        if compat and compat.mode != COMPAT_DRIVER:
            raise item.fail("compat", f"its mode is {compat.mode}")
        drivers[address] = LockedDriver(
            file=_parse_digest(item, "file"), driver=_parse_digest(item, "driver"), compat=compat
        )
    return drivers


def _parse_digest(item: json_documents.Fields, key: str) -> str:
    digest = item.get_text(key)
    if not DIGEST.fullmatch(digest):
        raise item.fail(key, f"{digest[:80]!r} is not a sha256 digest")
    return digest
