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

    `test`: it is test data of the package. `listed`: it is in the table of files that some GPUs do not use.
    """

    path: str
    name: str
    package: str | None
    toolkits: frozenset[str]
    test: bool = False
    listed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRoles:
    """The roles of files by path; those that are missing decide.

    `release` is the CUDA release of the alternative that counts because nothing else shows a release, or
    None. `unmatched` are the globs that match no file.
    """

    by_path: Mapping[str, str] = field(default_factory=dict)
    release: str | None = None
    unmatched: tuple[str, ...] = ()


def assign_roles(files: Sequence[CodedFile], runtimes: Iterable[str], globs: Sequence[str] = ()) -> CodeRoles:
    """Return the roles of all files with device code in an image.

    `runtimes` are the releases of CUDA's runtimes in it, `globs` match the paths or names of optional files.
    """
    used = [file for file in files if not file.test]
    groups = _alternatives([file.path for file in used], {file.path: file.package or "" for file in used})
    grouped = {path for group in groups for path in group}
    alone = {release for file in used if file.path not in grouped for release in file.toolkits}
    # The runtimes in the image show its release best, and then the compilers of files that have no
    # alternatives.
    own = max(runtimes, key=versions.make_sort_key, default=None) or max(
        alone, key=versions.make_sort_key, default=None
    )
    by_path = {file.path: TESTS for file in files if file.test}
    chosen: set[str] = set()
    for group in groups:
        kept = _chosen(group, own)
        by_path.update(dict.fromkeys(group.keys() - kept, UNUSED))
        chosen.update(group[path] for path in kept)
    matched = {glob: [file.path for file in used if _matches(file, glob)] for glob in globs}
    by_path.update((file.path, OPTIONAL) for file in used if file.listed)
    by_path.update((path, OPTIONAL) for paths in matched.values() for path in paths)
    return CodeRoles(
        by_path=by_path,
        release=max(chosen, key=versions.make_sort_key, default=None) if own is None else None,
        unmatched=tuple(glob for glob, paths in matched.items() if not paths),
    )


def _matches(file: CodedFile, glob: str) -> bool:
    return fnmatchcase(file.name, glob) or fnmatchcase(file.path, glob)


def _alternatives(paths: Iterable[str], packages: Mapping[str, str]) -> list[dict[str, str]]:
    """Return groups of files whose names differ only in a CUDA release, each with the releases by path.

    The files of a group are in one folder and one package. `packages` are the names of packages by the paths
    of their files.
    """
    found: dict[tuple[str, str | None, str], dict[str, str]] = {}
    for path in paths:
        folder, name = posixpath.split(path)
        release = versions.parse_release_in_name(name)
        if release:
            same = re.sub(versions.NAMED, r"\1", name, count=1)
            found.setdefault((folder, packages.get(path), same), {})[path] = release
    return [group for group in found.values() if len(set(group.values())) > 1]


def _chosen(group: Mapping[str, str], own: str | None) -> frozenset[str]:
    """Return the files of a group that count in an image of the CUDA release `own`, or of an unknown one.

    This is the newest one that is not above it, of the same major release, or else the oldest of that major
    release. If there is none, all of them count. For an unknown release, it is the newest.
    """
    releases = set(group.values())
    if own is not None:
        major = versions.make_sort_key(own)[0]
        releases = {each for each in releases if versions.make_sort_key(each)[0] == major} or releases
        if any(versions.make_sort_key(each)[0] != major for each in releases):
            return frozenset(group)
        below = [each for each in releases if versions.make_sort_key(each) <= versions.make_sort_key(own)]
        release = (
            max(below, key=versions.make_sort_key) if below else min(releases, key=versions.make_sort_key)
        )
    else:
        release = max(releases, key=versions.make_sort_key)
    return frozenset(path for path, named in group.items() if named == release)
