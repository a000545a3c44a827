"""Installed packages, as the databases of package managers and Python's metadata state them."""

from __future__ import annotations

import csv
import posixpath
import re
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# The types of packages in package URLs.
DEB, RPM, APK, PYPI, GENERIC = "deb", "rpm", "apk", "pypi", "generic"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_~-]{0,199}", re.ASCII)
VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_~:^!*-]{0,199}", re.ASCII)
ARCH = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}", re.ASCII)
# The metadata of Python packages, with the lists of their files.
METADATA_FILES = re.compile(r"/.*\.(?:dist-info/(?:METADATA|RECORD)|egg-info(?:/PKG-INFO)?)")
RECORD = "RECORD"  # the list of a Python package's files
SOURCE = re.compile(r"(\S+)(?: \((\S+)\))?")  # of dpkg: NAME, or NAME (VERSION)
LONGEST_LICENSE = 500  # characters; longer ones are texts of licenses, not their names


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledPackage:
    """An installed package; what is not stated is None.

    `kind` is its type in package URLs. `source` is the name of the package of sources that it was built from,
    if that is another name, and `source_version` the version of the sources, if it is another version.
    `license` is what its packager or author states. `path` is the file that lists it; None if only an SBOM
    does.
    """

    kind: str
    name: str
    version: str | None
    arch: str | None = None
    source: str | None = None
    source_version: str | None = None
    license: str | None = None
    path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Database:
    """The packages in a database, and the number of entries that are damaged or beyond limits."""

    packages: tuple[InstalledPackage, ...] = ()
    unread: int = 0


def make_package(
    kind: str,
    name: str | None,
    version: str | None,
    *,
    arch: str | None = None,
    source: str | None = None,
    source_version: str | None = None,
    license: str | None = None,  # noqa: A002 - the field's name
) -> InstalledPackage | None:
    """Return a package; None if its name or its version is missing or invalid.

    Other fields are None if they are invalid.
    """
    if not _match_or_none(NAME, name) or not _match_or_none(VERSION, version):
        return None
    license_name = " ".join((license or "").split())
    is_name = license_name.isprintable() and 0 < len(license_name) <= LONGEST_LICENSE
    return InstalledPackage(
        kind=kind,
        name=str(name),
        version=version,
        arch=_match_or_none(ARCH, arch),
        source=_match_or_none(NAME, source) if source != name else None,
        source_version=_match_or_none(VERSION, source_version) if source_version != version else None,
        license=license_name if is_name else None,
    )


def parse_dpkg(fields: Mapping[str, str]) -> InstalledPackage | None:
    """Return the package of a paragraph in dpkg's database, as `make_package` does."""
    source = SOURCE.fullmatch(fields.get("Source", ""))
    return make_package(
        DEB,
        fields.get("Package"),
        fields.get("Version"),
        arch=fields.get("Architecture"),
        source=source[1] if source else None,
        source_version=source[2] if source else None,
    )


def parse_apk(fields: Mapping[str, str]) -> InstalledPackage | None:
    """Return the package of a paragraph in apk's database, as `make_package` does."""
    return make_package(
        APK,
        fields.get("P"),
        fields.get("V"),
        arch=fields.get("A"),
        source=fields.get("o"),
        license=fields.get("L"),
    )


def list_recorded_files(folder: str, record: bytes) -> Iterator[tuple[str, str]]:
    """Yield the paths in a RECORD, which are in its first column, with the hashes in the second."""
    lines = record.decode("utf-8", "replace").splitlines()
    try:
        for row in csv.reader(lines):
            if row:
                yield posixpath.normpath(posixpath.join(folder, row[0])), "".join(row[1:2])
    except csv.Error:
        return


def _match_or_none(pattern: re.Pattern[str], text: str | None) -> str | None:
    return text if text is not None and pattern.fullmatch(text) else None
