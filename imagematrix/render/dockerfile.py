"""What a rendered Dockerfile builds on: the images its FROM, COPY --from and RUN --mount name."""

from __future__ import annotations

import re

from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["bases", "through_stage"]

FROM = re.compile(r"FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?\s*", re.IGNORECASE)
COPIED = re.compile(r"(?:COPY|ADD)\b.*?\s--from=(\S+)", re.IGNORECASE)
MOUNTED = re.compile(r"--mount=\S*?\bfrom=([^,\s]+)", re.IGNORECASE)
HEREDOC = re.compile(r"<<-?\s*([\"']?)([A-Za-z_]\w*)\1")


def bases(dockerfile: str) -> tuple[str, ...]:
    """Return the external images that `dockerfile` names, in order, each once.

    Raises UsageError where a FROM holds a variable: the base is part of an image's identity, so it has to be
    written out (a template can do that).
    """
    found: dict[str, None] = {}
    stages = {"scratch"}
    for _, instruction in _instructions(dockerfile):
        line = FROM.fullmatch(instruction)
        names = [line[1]] if line else COPIED.findall(instruction) + MOUNTED.findall(instruction)
        for name in names:
            if "$" in name:
                remedy = "write the base with the template's variables, not with ARG"
                raise UsageError(f"the Dockerfile takes a base from a variable: {instruction}", remedy=remedy)
            if name.lower() not in stages and not name.isdigit():
                found[name] = None
        if line and line[2]:
            stages.add(line[2].lower())
    return tuple(found)


def through_stage(dockerfile: str, stage: str) -> str | None:
    """Return `dockerfile` up to the end of the stage named `stage`, or None where it has none."""
    inside = False
    for start, instruction in _instructions(dockerfile):
        line = FROM.fullmatch(instruction)
        if line and inside:
            return dockerfile[:start]
        inside = inside or bool(line and line[2] and line[2].lower() == stage)
    return dockerfile if inside else None


def _instructions(dockerfile: str) -> Iterator[tuple[int, str]]:
    """Yield each instruction, its continuation lines joined, with the offset where it starts."""
    start = offset = 0
    parts: list[str] = []
    terminators: list[str] = []
    for raw in dockerfile.splitlines(keepends=True):
        line = raw.strip()
        begin, offset = offset, offset + len(raw)
        if terminators:
            if line == terminators[0]:
                terminators.pop(0)
            continue
        if not line or line.startswith("#"):
            continue
        if not parts:
            start = begin
        if line.endswith("\\"):
            parts.append(line[:-1])
            continue
        instruction = " ".join([*parts, line])
        parts = []
        if re.match(r"(?:RUN|COPY|ADD)\b", instruction, re.IGNORECASE):
            terminators = [found[1] for found in HEREDOC.findall(instruction)]
        yield start, instruction
    if parts:
        yield start, " ".join(parts)
