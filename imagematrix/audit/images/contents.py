"""The packages in an image, from the files that its containers see."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from imagematrix.audit.packages import packages
from imagematrix.audit.packages.installed_package import GENERIC, PYPI, InstalledPackage, make_package

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from imagematrix.audit.images.layer import PlainFile
    from imagematrix.audit.images.python_packages import Package
    from imagematrix.images.oci.tree import ImageTree

OS_RELEASE = ("/etc/os-release", "/usr/lib/os-release")
ASSIGNED = re.compile(r"(ID|VERSION_ID)=([\"']?)([A-Za-z0-9._-]{1,64})\2", re.ASCII)  # os-release(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The packages in an image, sorted by kind, name, version and path.

    `unread` are the paths of databases with the number of entries that are damaged or beyond limits.
    `distribution` is the name and the version in os-release, such as "debian" and "13"; None if not stated.
    """

    packages: tuple[InstalledPackage, ...] = ()
    unread: tuple[tuple[str, int], ...] = ()
    distribution: tuple[str | None, str | None] = (None, None)


def list_contents(
    tree: ImageTree[PlainFile],
    python: Iterable[Package],
    libraries: Iterable[tuple[str, str | None, str]] = (),
    damaged: Iterable[str] = (),
) -> Contents:
    """Return the packages in the databases of a tree, those of `python`, and `libraries` without metadata.

    A library is its name, version and path. `damaged` are the paths of metadata of Python.
    """
    installed: list[InstalledPackage] = []
    unread = [(path, 1) for path in damaged]

    # Each database counts once, by the path that links such as /lib lead to.
    paths = (*packages.LISTS, *(f"{packages.FOLDER}/{name}" for name in tree.list_names(packages.FOLDER)))
    for path, file in dict(filter(None, map(tree.find, paths))).items():
        if file.database:
            installed += [replace(package, path=path) for package in file.database.packages]
            if file.database.unread:
                unread.append((path, file.database.unread))

    listed = [(PYPI, package.name, package.version, package.license, package.metadata) for package in python]
    for kind, name, version, license_name, path in (
        *listed,
        *((GENERIC, name, version, None, path) for name, version, path in libraries),
    ):
        package = make_package(kind, name, version, license=license_name)
        if package:
            installed.append(replace(package, path=path))
        elif version:
            unread.append((path, 1))
    return Contents(
        packages=tuple(
            sorted(
                set(installed),
                key=lambda package: (
                    *(package.kind, package.name, package.version or "", package.arch or ""),
                    package.path or "",
                ),
            )
        ),
        unread=tuple(sorted(unread)),
        distribution=_read_distribution(tree),
    )


def _read_distribution(tree: ImageTree[PlainFile]) -> tuple[str | None, str | None]:
    file = next(filter(None, map(tree.find, OS_RELEASE)), None)
    lines = ((file[1].text if file else None) or b"").decode("utf-8", "replace").splitlines()
    values: Mapping[str, str] = {
        match[1]: match[3] for line in lines if (match := ASSIGNED.fullmatch(line.strip()))
    }
    return values.get("ID"), values.get("VERSION_ID")
