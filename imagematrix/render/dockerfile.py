"""What a rendered Dockerfile builds on: the images its FROM, COPY --from, RUN --mount and syntax name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["bases", "beginning", "replaced", "stages", "through_stage"]

FROM = re.compile(r"FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?\s*", re.IGNORECASE)
FLAGS = re.compile(r"(?:COPY|ADD|RUN)((?:\s+--\S+)*)", re.IGNORECASE)
SOURCE = re.compile(r"\s--(?:from=|mount=(?:\S*?,)?from=)([^,\s]+)", re.IGNORECASE)
# The image of the program that reads the rest; only directives may come before it (Dockerfile reference).
SYNTAX = re.compile(r"(?:#[ \t]*(?!syntax)\w+[ \t]*=.*\n)*#[ \t]*syntax[ \t]*=[ \t]*(\S+)", re.IGNORECASE)
WORD = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*"|'[^']*')+""")
HEREDOC = re.compile(r"""\d*<<(-?)(["']?)([^\s<"']+)\2""")


def bases(dockerfile: str) -> tuple[str, ...]:
    """Return the external images that `dockerfile` names, in order, each once.

    Raises UsageError where a FROM holds a variable: the base is part of an image's identity, so it has to be
    written out (a template can do that).
    """
    found: dict[str, None] = {}
    for step, name in _external(dockerfile, _steps(dockerfile)):
        if "$" in name:
            remedy = "write the base with the template's variables, not with ARG"
            message = f"the Dockerfile takes a base from a variable: {step.instruction}"
            raise UsageError(message, remedy=remedy)
        found[name] = None
    return tuple(found)


def through_stage(dockerfile: str, stage: str) -> str | None:
    """Return `dockerfile` up to the end of the stage named `stage`, or None where it has none."""
    inside = False
    for step in _read(dockerfile).steps:
        if step.stage is not None and inside:
            return dockerfile[: step.start]
        inside = inside or step.stage == stage
    return dockerfile if inside else None


def beginning(dockerfile: str) -> str | None:
    """Return the external image that the last stage of `dockerfile` begins with; None for scratch."""
    name, begins = "scratch", {"scratch": "scratch"}
    for step in _read(dockerfile).steps:
        if step.stage is not None:
            name = begins.get(step.names[0].lower(), step.names[0])
            begins[step.stage] = name
    return None if name == "scratch" else name


def stages(dockerfile: str) -> tuple[str, ...]:
    """Return what each stage but the last is made of: its text, after that of the stage it begins with.

    Dockerfiles that have one of these texts in common have that stage in common.
    """
    begins = [step for step in _read(dockerfile).steps if step.stage is not None]
    found: dict[str, str] = {}
    for step, following in pairwise(begins):
        text = found.get(step.names[0].lower(), "") + dockerfile[step.start : following.start]
        found[step.stage or text] = text
    return tuple(found.values())


def replaced(dockerfile: str, images: Mapping[str, str]) -> str:
    """Return `dockerfile` with other images in place of those that `images` has; stages keep their names."""
    parts: list[str] = []
    end = 0
    for step, name in _external(dockerfile, _read(dockerfile).steps):
        if name in images:
            token = re.compile(rf"(?<![^\s=]){re.escape(name)}(?![^\s,])")
            found = token.search(dockerfile, max(step.start, end))
            assert found is not None  # noqa: S101 - it was read there; this tells the type checker
            parts += [dockerfile[end : found.start()], images[name]]
            end = found.end()
    return "".join([*parts, dockerfile[end:]])


@dataclass(frozen=True, slots=True)
class _Step:
    """An instruction that names images or begins a stage ("" is one without a name), and where it starts."""

    start: int
    instruction: str
    names: tuple[str, ...]
    stage: str | None


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a Dockerfile: its steps, and whether it ends inside an instruction."""

    steps: tuple[_Step, ...]
    cut: bool


def _external(dockerfile: str, steps: Iterable[_Step]) -> Iterator[tuple[_Step, str]]:
    """Yield the images that a Dockerfile's syntax line and its steps name, each with its step; no stages."""
    syntax = SYNTAX.match(dockerfile)
    if syntax:
        yield _Step(syntax.start(1), syntax[0], (syntax[1],), None), syntax[1]
    stages = {"scratch"}
    for step in steps:
        for name in step.names:
            if "$" in name or (name.lower() not in stages and not name.isdigit()):
                yield step, name
        if step.stage:
            stages.add(step.stage)


def _steps(dockerfile: str) -> Iterator[_Step]:
    """Yield the steps of a Dockerfile, read by paragraphs: those of a matrix have most of them in common."""
    paragraphs = dockerfile.split("\n\n")
    for number, paragraph in enumerate(paragraphs):
        part = _paragraph(paragraph)
        if part.cut:  # an instruction has an empty line inside: the rest is read as one
            yield from _read("\n\n".join(paragraphs[number:])).steps
            return
        yield from part.steps


@lru_cache(maxsize=4096)
def _paragraph(text: str) -> _Part:
    return _read(text)


def _read(text: str) -> _Part:
    """Read a Dockerfile, or a part of one that begins with an instruction."""
    steps: list[_Step] = []
    start = offset = 0
    parts: list[str] = []  # of an instruction that goes on in the next line
    heredocs: list[tuple[str, str]] = []  # those that are still to end: "-" or nothing, and the last line
    for raw in text.split("\n"):
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
        instruction = " ".join([*parts, line])
        parts = []
        heredocs = _heredocs(instruction) if "<<" in instruction and FLAGS.match(instruction) else []
        steps += _step(start, instruction)
    if parts:
        steps += _step(start, " ".join(parts))
    return _Part(tuple(steps), cut=bool(parts or heredocs))


def _step(start: int, instruction: str) -> Iterator[_Step]:
    line = FROM.fullmatch(instruction)
    flags = FLAGS.match(instruction)
    if line:
        yield _Step(start, instruction, (line[1],), (line[2] or "").lower())
    elif flags and flags[1]:
        yield _Step(start, instruction, tuple(SOURCE.findall(flags[1])), None)


def _heredocs(instruction: str) -> list[tuple[str, str]]:
    words = (HEREDOC.fullmatch(word) for word in WORD.findall(instruction))
    return [(found[1], found[3]) for found in words if found]
