"""The Python and the platform that an image's locked wheels are for, as far as these wheels tell."""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.tags import Tag, compatible_tags, cpython_tags

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from imagematrix.build.outdated.wheel_files import WheelFile

MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}  # by minor version of glibc
OLDEST = 17  # minor version of glibc 2: every image of today has a newer one


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelTarget:
    """What an image installs: the `ranks` of tags, as pip prefers them, and the version of its `python`."""

    ranks: Mapping[Tag, int]
    python: str

    def get_rank(self, file: WheelFile) -> int | None:
        """Return the place of a wheel, the best is 0; None if it is for another target."""
        if not file.python.contains(self.python, prereleases=True):
            return None
        return min((self.ranks[tag] for tag in file.tags if tag in self.ranks), default=None)


def infer_wheel_target(platform: str, locked: Iterable[Iterable[WheelFile]]) -> WheelTarget | None:
    """Return the target of an image from the locked files of each project; None if they leave it open.

    Of each project, one file has to fit. So the Python is the one that all projects have wheels for, and
    glibc is at least as new as all of them need.
    """
    machine = MACHINES.get(platform)
    if machine is None:
        return None
    for_machine = re.compile(rf"any|(many)?linux\w*_{machine}")
    glibc, pythons = OLDEST, None
    for files in locked:
        tags_by_file = [[tag for tag in file.tags if for_machine.fullmatch(tag.platform)] for file in files]
        fitting = [tags for tags in tags_by_file if tags]
        glibc = max(glibc, min((min(map(_parse_glibc_minor, tags)) for tags in fitting), default=0))
        abis = {tag.abi for tags in fitting for tag in tags}
        if abis and not abis & {"none", "abi3"}:
            pythons = abis if pythons is None else pythons & abis
    matches = [match for abi in pythons or () if (match := re.fullmatch(r"cp(\d)(\d{1,3})", abi))]
    if len(matches) != 1:
        return None

    # The tags of this interpreter, best first: those for a newer glibc, and their older names.
    interpreter, python = matches[0][0], (int(matches[0][1]), int(matches[0][2]))
    platforms = []
    for minor in range(glibc, 4, -1):
        platforms.append(f"manylinux_2_{minor}_{machine}")
        platforms += [f"{LEGACY[minor]}_{machine}"] if minor in LEGACY else []
    platforms.append(f"linux_{machine}")
    tags = [
        *cpython_tags(python, abis=[interpreter], platforms=platforms),
        *compatible_tags(python, interpreter=interpreter, platforms=platforms),
    ]
    ranks = {tag: rank for rank, tag in reversed([*enumerate(tags)])}
    return WheelTarget(ranks=ranks, python=f"{python[0]}.{python[1]}")


def _parse_glibc_minor(tag: Tag) -> int:
    match = re.match(r"manylinux_2_(\d{1,3})_", tag.platform)
    return int(match[1]) if match else 0
