"""Files of which a program loads one by the CPU: their paths differ only in a CPU's name.

Such as lib/avx2/libit.so beside lib/basic/libit.so, and libit.so beside libit-avxonly.so.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict

from imagematrix.audit.binaries.cpu import dispatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Set as AbstractSet

# Words in names of files for no CPU in particular.
PLAIN = re.compile(r"(?<![a-z])(?:basic|baseline|default|generic|noavx|plain|portable|scalar|sse2)(?![a-z])")
WORD = re.compile(
    rf"[-_.]?(?:(?:{dispatch.FLAVOUR.pattern})[a-z0-9]*|{PLAIN.pattern})", re.IGNORECASE | re.ASCII
)
DEEPEST = 32  # parts of a path whose folders are compared


def find_cpu_alternatives(
    flags: Mapping[str, AbstractSet[str]], packages: Mapping[str, str]
) -> frozenset[str]:
    """Return the paths of the files that are loaded only on some CPUs.

    `flags` are those of all instructions in each file, by its path; `packages` are the names of packages by
    the paths of their files. Files of different packages are no alternatives. Of those that are, the one
    without a CPU's name is loaded on every CPU, unless another one uses fewer flags.
    """
    specific = [path for path in flags if any(map(dispatch.has_cpu_word, path.split("/")))]
    groups: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    candidates = {place for path in specific for place in _list_places(path, packages)}
    for path in flags if specific else ():
        for place in _list_places(path, packages):
            if place in candidates:
                groups[place].add(path)
    alternatives: set[str] = set()
    for (folder, _, _), group in groups.items():
        words = {path: path.removeprefix(folder).partition("/")[0] for path in group}
        for_some_cpus = {path for path, word in words.items() if dispatch.has_cpu_word(word)}
        if not for_some_cpus or len(group) == 1:
            continue
        flag_sets = {frozenset(flags[path]) for path in group}
        alternatives |= for_some_cpus
        alternatives |= {
            path for path in group - for_some_cpus if any(fewer < flags[path] for fewer in flag_sets)
        }
    return frozenset(alternatives)


def _list_places(path: str, packages: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the places of a path in which its alternatives differ: a folder of it, or a word of its name.

    A place is the path before it, the rest, and the package.
    """
    package = packages.get(path, "")
    parts = path.split("/")
    for index in range(1, len(parts) - 1) if len(parts) <= DEEPEST else ():
        yield "/".join(parts[:index]) + "/", "/" + "/".join(parts[index + 1 :]), package
    folder, name = posixpath.split(path)
    yield folder.rstrip("/") + "/", WORD.sub("", name), package
