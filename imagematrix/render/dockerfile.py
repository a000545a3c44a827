"""What a rendered Dockerfile builds on: the images its FROM, COPY --from and RUN --mount name."""

from __future__ import annotations

import re
from functools import lru_cache

from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["bases", "through_stage"]

FROM = re.compile(r"FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?\s*", re.IGNORECASE)
FLAGS = re.compile(r"(?:COPY|ADD|RUN)((?:\s+--\S+)*)", re.IGNORECASE)
SOURCE = re.compile(r"\s--(?:from=|mount=(?:\S*?,)?from=)([^,\s]+)", re.IGNORECASE)
WORD = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*"|'[^']*')+""")
HEREDOC = re.compile(r"""\d*<<(-?)(["']?)([^\s<"']+)\2""")


def bases(dockerfile: str) -> tuple[str, ...]:
    """Return the external images that `dockerfile` names, in order, each once.

    Raises UsageError where a FROM holds a variable: the base is part of an image's identity, so it has to be
    written out (a template can do that).
    """
    found: dict[str, None] = {}
    stages = {"scratch"}
    for _, instruction in _instructions(dockerfile):
        names, stage = _named(instruction)
        for name in names:
            if "$" in name:
                remedy = "write the base with the template's variables, not with ARG"
                raise UsageError(f"the Dockerfile takes a base from a variable: {instruction}", remedy=remedy)
            if name.lower() not in stages and not name.isdigit():
                found[name] = None
        if stage:
            stages.add(stage)
    return tuple(found)


def through_stage(dockerfile: str, stage: str) -> str | None:
    """Return `dockerfile` up to the end of the stage named `stage`, or None where it has none."""
    inside = False
    for start, instruction in _instructions(dockerfile):
        _, begun = _named(instruction)
        if begun is not None and inside:
            return dockerfile[:start]
        inside = inside or begun == stage
    return dockerfile if inside else None


@lru_cache(maxsize=4096)
def _named(instruction: str) -> tuple[tuple[str, ...], str | None]:
    """Return the images and stages an instruction names, and the stage it begins ("" is one without a name).

    The Dockerfiles of a matrix have most of their instructions in common.
    """
    line = FROM.fullmatch(instruction)
    if line:
        return (line[1],), (line[2] or "").lower()
    flags = FLAGS.match(instruction)
    return tuple(SOURCE.findall(flags[1])) if flags else (), None


def _instructions(dockerfile: str) -> Iterator[tuple[int, str]]:
    """Yield each instruction, its continuation lines joined, with the offset where it starts."""
    start = offset = 0
    parts: list[str] = []
    heredocs: list[tuple[str, str]] = []  # those that are still to end: "-" or nothing, and the last line
    for raw in dockerfile.split("\n"):
        begin, offset = offset, offset + len(raw) + 1
        if heredocs:
            dash, last = heredocs[0]
            if (raw.lstrip("\t") if dash else raw).rstrip("\r") == last:
                heredocs.pop(0)
            continue
        line = raw.strip()
        if not line or line[0] == "#":
            continue
        if not parts:
            start = begin
        if line[-1] == "\\":
            parts.append(line[:-1])
            continue
        instruction = " ".join([*parts, line]) if parts else line
        parts = []
        heredocs = _heredocs(instruction) if "<<" in instruction and FLAGS.match(instruction) else []
        yield start, instruction
    if parts:
        yield start, " ".join(parts)


def _heredocs(instruction: str) -> list[tuple[str, str]]:
    words = (HEREDOC.fullmatch(word) for word in WORD.findall(instruction))
    return [(found[1], found[3]) for found in words if found]
