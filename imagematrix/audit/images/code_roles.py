"""Which files with device code decide on which GPUs an image runs.

Of files that are alternatives by CUDA release, such as libit_cuda118.so and libit_cuda128.so, only one
counts. Optional files are used on some GPUs only. Test data of a package is not used at all.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from imagematrix.hardware.vendors import versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

DECIDES, OPTIONAL, UNUSED, TESTS = "decides", "optional", "unused", "tests"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedFile:
    """A file with device code: its path, its short name, its package, and the compilers of its cubins.

    `is_test`: it is test data of the package. `is_listed`: it is in the table of files that some GPUs do not
    use.
    """

    path: str
    name: str
    package: str | None
    toolkits: frozenset[str]
    is_test: bool = False
    is_listed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRoles:
    """The roles of files by path; a file without one decides.

    `release` is the CUDA release of the alternative that counts because nothing else shows a release, or
    None. `unmatched` are the globs that match no file.
    """

    by_path: Mapping[str, str] = field(default_factory=dict)
    release: str | None = None
    unmatched: tuple[str, ...] = ()


def assign_roles(files: Sequence[CodedFile], runtimes: Iterable[str], globs: Sequence[str] = ()) -> CodeRoles:
    """Return the roles of all files with device code in an image.

    `runtimes` are the releases of CUDA's runtimes in it, `globs` match the paths or names of optional files.

    In an image of CUDA 12.6, of libit_cuda118.so, libit_cuda124.so and libit_cuda128.so, the second one
    counts: it is the newest of CUDA 12 that is not above 12.6.
    """
    used = [file for file in files if not file.is_test]
    groups = _group_alternatives(used)
    grouped = {path for group in groups for path in group}
    alone = {release for file in used if file.path not in grouped for release in file.toolkits}
    # The runtimes in the image show its release best, and then the compilers of files that have no
    # alternatives.
    release = max(runtimes, key=versions.make_sort_key, default=None) or max(
        alone, key=versions.make_sort_key, default=None
    )
    by_path = {file.path: TESTS for file in files if file.is_test}
    used_releases: set[str] = set()
    for group in groups:
        paths = _choose_alternative(group, release)
        by_path.update(dict.fromkeys(group.keys() - paths, UNUSED))
        used_releases.update(group[path] for path in paths)

    matches = {
        glob: [file.path for file in used if fnmatchcase(file.name, glob) or fnmatchcase(file.path, glob)]
        for glob in globs
    }
    by_path.update((file.path, OPTIONAL) for file in used if file.is_listed)
    by_path.update((path, OPTIONAL) for paths in matches.values() for path in paths)
    return CodeRoles(
        by_path=by_path,
        release=max(used_releases, key=versions.make_sort_key, default=None) if release is None else None,
        unmatched=tuple(glob for glob, paths in matches.items() if not paths),
    )


def _group_alternatives(files: Iterable[CodedFile]) -> list[dict[str, str]]:
    """Return groups of files whose names differ only in a CUDA release, each with the releases by path.

    The files of a group are in one folder and one package.
    """
    groups: dict[tuple[str, str, str], dict[str, str]] = {}
    for file in files:
        folder, name = posixpath.split(file.path)
        release = versions.parse_release_in_name(name)
        if release:
            stem = re.sub(versions.NAMED, r"\1", name, count=1)
            groups.setdefault((folder, file.package or "", stem), {})[file.path] = release
    return [group for group in groups.values() if len(set(group.values())) > 1]


def _choose_alternative(group: Mapping[str, str], image_release: str | None) -> frozenset[str]:
    """Return the files of a group that count in an image of a CUDA release, or of an unknown one.

    This is the newest one that is not above it, of the same major release, or else the oldest of that major
    release. If there is none, all of them count. For an unknown release, it is the newest.
    """
    key = versions.make_sort_key
    releases = set(group.values())
    if image_release is None:
        chosen = max(releases, key=key)
    else:
        major = key(image_release)[0]
        releases = {release for release in releases if key(release)[0] == major}
        if not releases:
            return frozenset(group)
        below = [release for release in releases if key(release) <= key(image_release)]
        chosen = max(below, key=key) if below else min(releases, key=key)
    return frozenset(path for path, release in group.items() if release == chosen)
