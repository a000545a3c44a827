"""The images and stages of a rendered Dockerfile."""

from __future__ import annotations

import re
from itertools import pairwise

from imagematrix.errors import UsageError
from imagematrix.render.instructions import (
    GOES_ON,
    Name,
    by_paragraph,
    imported,
    read,
    says_nothing,
    unreadable,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from imagematrix.render.instructions import Instruction

__all__ = [
    "bases",
    "beginning",
    "has_stage",
    "replaced",
    "require_known_inputs",
    "require_no_files",
    "stages",
    "through_stage",
    "with_environment",
]

DIRECTIVE = re.compile(r"#\s*([a-zA-Z][a-zA-Z0-9]*)\s*=\s*(\S+)", re.ASCII)
DIRECTIVES = ("syntax", "escape", "check")


def bases(dockerfile: str) -> tuple[str, ...]:
    """Return the external images that `dockerfile` names, in order, each once.

    Raises UsageError if a FROM contains a variable, because the base is part of an image's identity and must
    be written out (a template can do that), for inputs that no identity can contain, and for syntax that
    cannot be parsed reliably.
    """
    return tuple(dict.fromkeys(name.text for name in _external(dockerfile, by_paragraph(dockerfile))))


def has_stage(dockerfile: str, stage: str) -> bool:
    """Whether `dockerfile` has a stage named `stage`."""
    return any(step.stage == stage for step in by_paragraph(dockerfile))


def through_stage(dockerfile: str, stage: str) -> str | None:
    """Return `dockerfile` up to the end of the stage named `stage`, or None if there is no such stage."""
    inside = False
    for step in read(dockerfile):
        if step.stage is not None and inside:
            return dockerfile[: step.start]
        inside = inside or step.stage == stage
    return dockerfile if inside else None


def beginning(dockerfile: str) -> str | None:
    """Return the external image that the last stage of `dockerfile` starts from; None for scratch."""
    name, begins = "scratch", {"scratch": "scratch"}
    for step in read(dockerfile):
        if step.stage is not None:
            base = step.names[0].text
            name = begins.get(base.lower(), base)
            begins[step.stage] = name
    return None if name == "scratch" else name


def require_no_files(dockerfile: str) -> None:
    """Raise UsageError if an instruction of `dockerfile`, whose image has no context, reads files of it."""
    for step in by_paragraph(dockerfile):
        if step.copying:
            raise UsageError(
                f"the image has no context, which this instruction reads: {step.copying}",
                remedy="name the folder with its files in matrix.yaml, such as context: src",
            )


def require_known_inputs(triggers: Iterable[str], base: str) -> None:
    """Raise UsageError if an ONBUILD trigger of a base image brings inputs from elsewhere.

    The other inputs of triggers are in the base and in the context, and so in the identity.
    """
    for trigger in triggers:
        source = imported(trigger)
        if source:
            raise UsageError(
                f"the base image {base} brings {source} into every build, by ONBUILD {trigger.strip()}",
                remedy="build on an image without it, and write the instruction into the template",
            )


def stages(dockerfile: str) -> tuple[str, ...]:
    """Return the text of each stage except the last, preceded by the text of the stage that it starts from.

    Dockerfiles with one of these texts in common share that stage.
    """
    begins = [step for step in read(dockerfile) if step.stage is not None]
    texts: dict[str, str] = {}
    for step, following in pairwise(begins):
        text = texts.get(step.names[0].text.lower(), "") + dockerfile[step.start : following.start]
        texts[step.stage or text] = text
    return tuple(texts.values())


def replaced(dockerfile: str, images: Mapping[str, str]) -> str:
    """Return `dockerfile` with the images that `images` maps replaced; names of stages stay."""
    parts: list[str] = []
    end = 0
    for name in _external(dockerfile, read(dockerfile)):
        if name.text in images:
            parts += [dockerfile[end : name.at], images[name.text]]
            end = name.at + len(name.text)
    return "".join([*parts, dockerfile[end:]])


def with_environment(dockerfile: str, environment: Mapping[str, str]) -> str:
    """Return `dockerfile` with variables set at its end, so that no earlier line replaces them.

    The values are plain words. Raises UsageError if the last instruction is not complete.
    """
    lines = (line for line in reversed(dockerfile.splitlines()) if not says_nothing(line))
    if GOES_ON.search(next(lines, "")):
        raise unreadable("a last instruction that goes on", "remove the backslash at its end")
    words = " ".join(f"{name}={value}" for name, value in environment.items())
    return f"{dockerfile.rstrip()}\n\nENV {words}\n"


def _external(dockerfile: str, steps: Iterable[Instruction]) -> Iterator[Name]:
    """Yield the images that a Dockerfile's syntax line and its steps name, without stages."""
    yield from _syntax(dockerfile)
    steps = list(steps)
    later = {step.stage for step in steps if step.stage}
    internal = {"scratch"}
    for step in steps:
        for name in step.names:
            low = name.text.lower()
            if step.stage is None and low in later and low not in internal:
                raise unreadable(f"{name.text} as a source before its stage", "put its stage first")
            if low not in internal and not (name.numbered and name.text.isdigit()):
                yield name
        if step.stage:
            internal.add(step.stage)


def _syntax(dockerfile: str) -> Iterator[Name]:
    """Yield the image of the frontend, if a syntax line names one."""
    at = 0
    if dockerfile.startswith("\ufeff"):
        raise unreadable("a byte order mark", "save it as UTF-8 without one")
    if dockerfile.startswith("#!"):
        at = dockerfile.find("\n") + 1 or len(dockerfile)
    syntax = None
    while dockerfile.startswith("#", at):
        end = dockerfile.find("\n", at)
        line = DIRECTIVE.match(dockerfile, at, end if end >= 0 else len(dockerfile))
        key = line[1].lower() if line else ""
        if line is None or key not in DIRECTIVES:
            break
        if key == "escape" and line[2] != "\\":
            raise unreadable(f"the directive escape={line[2]}", "write it with backslashes")
        if key == "syntax" and not syntax:
            syntax = Name(line[2], line.start(2))
        at = end + 1 if end >= 0 else len(dockerfile)
    if syntax:
        yield syntax
