"""Lists of nodes as Slurm writes them: "a,gpu[01-03,7]-ib"."""

from __future__ import annotations

import re
from itertools import islice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

NODES = 100_000  # more than any cluster has
BRACKETS = 8  # in a name; Slurm has one for each dimension of a network
PART = re.compile(r"(?:[^,\[]+|\[[^\[\]]*\]|\[)+")  # up to a comma that is not in brackets
RANGES = re.compile(r"\[([0-9,-]*)\]", re.ASCII)
RANGE = re.compile(r"([0-9]{1,20})(?:-([0-9]{1,20}))?", re.ASCII)


def expand_node_list(text: str) -> Iterator[str]:
    """Yield the names in a list, not many more than NODES; what is no list has names that no node has."""
    return islice((name for part in PART.findall(text) for name in _expand_part(part)), NODES + 1)


def _expand_part(part: str) -> Iterator[str]:
    ranges = RANGES.search(part)
    if ranges is None or part.count("[") > BRACKETS:
        yield part
        return
    start, rest = part[: ranges.start()], part[ranges.end() :]
    for word in ranges[1].split(","):
        span = RANGE.fullmatch(word)
        # A range of nothing is none: the loops around it would run without a name.
        if span is None or int(span[2] or span[1]) < int(span[1]):
            yield part
            return
        first, last = span[1], span[2] or span[1]
        for number in range(int(first), min(int(last), int(first) + NODES) + 1):
            for end in _expand_part(rest):
                yield f"{start}{number:0{len(first)}}{end}"
