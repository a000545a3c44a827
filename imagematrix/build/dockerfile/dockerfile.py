"""The images and stages of a rendered Dockerfile."""

from __future__ import annotations

import re
from itertools import pairwise

from imagematrix.build.dockerfile.instructions import (
    GOES_ON,
    MOST,
    DockerfileError,
    Fault,
    Name,
    find_trigger_input,
    is_blank_or_comment,
    parse_by_paragraph,
    parse_instructions,
    read_instructions,
)
from imagematrix.build.dockerfile.platforms import (
    FLAG,
    TARGET,
    find_builder_image_faults,
    find_stage_platforms,
)
from imagematrix.common.suggestions import SLIP, suggest_nearest
from imagematrix.errors import UsageError
from imagematrix.hardware.vendors import vector_length

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from imagematrix.build.dockerfile.instructions import Instruction

DIRECTIVE = re.compile(r"#\s*([a-zA-Z][a-zA-Z0-9]*)\s*=\s*(\S+)", re.ASCII)
DIRECTIVES = ("syntax", "escape", "check")
PLAIN_NAME = re.compile(r"[\w-]+", re.ASCII)  # of an image without registry, tag and digest
SLIPPED = 2  # letters by which a misspelt name is longer or shorter


def list_bases(dockerfile: str) -> tuple[str, ...]:
    """Return the external images that `dockerfile` names, in order, each once.

    Raises DockerfileError with all faults: a FROM with a variable, because the base is part of an image's
    identity, inputs that no identity can contain, stages that are misspelt or out of order, and syntax that
    cannot be parsed reliably.
    """
    try:
        names, faults = _find_external_images(dockerfile, parse_by_paragraph(dockerfile))
    except DockerfileError as error:
        raise DockerfileError(dockerfile, find_faults(dockerfile)) from error
    if faults:
        raise DockerfileError(dockerfile, find_faults(dockerfile))
    return tuple(dict.fromkeys(name.text for name in names))


def find_faults(dockerfile: str) -> list[Fault]:
    """Return all faults of a Dockerfile that `list_bases` reports."""
    steps, unread = parse_instructions(dockerfile)
    return [*unread, *_find_external_images(dockerfile, steps)[1]]


def find_frontend(dockerfile: str) -> str | None:
    """Return the image that reads the Dockerfile in BuildKit's place, of its directive `syntax`, if any."""
    name = _parse_directives(dockerfile)[0]
    return name.text if name else None


def has_stage(dockerfile: str, stage: str) -> bool:
    """Whether `dockerfile` has a stage named `stage`."""
    return any(step.stage == stage for step in parse_by_paragraph(dockerfile))


def truncate_after_stage(dockerfile: str, stage: str) -> str | None:
    """Return `dockerfile` up to the end of the stage named `stage`, or None if there is no such stage."""
    inside = False
    for step in read_instructions(dockerfile):
        if step.stage is not None and inside:
            return dockerfile[: step.start]
        inside = inside or step.stage == stage
    return dockerfile if inside else None


def find_last_base(dockerfile: str) -> str | None:
    """Return the external image that the last stage of `dockerfile` starts from; None for scratch."""
    name, begins = "scratch", {"scratch": "scratch"}
    for step in read_instructions(dockerfile):
        if step.stage is not None:
            base = step.names[0].text
            name = begins.get(base.lower(), base)
            begins[step.stage] = name
    return None if name == "scratch" else name


def list_run_platforms(
    dockerfile: str, targets: Collection[str] = (), arguments: Mapping[str, str | None] | None = None
) -> frozenset[str]:
    """Return the platforms whose programs a build runs, as `find_stage_platforms` names them.

    Only the stages that it needs count: the last one, the stages `targets`, and those that they are built
    from.
    """
    steps = read_instructions(dockerfile)
    platforms = {step.start: platform for step, platform, _ in find_stage_platforms(steps, arguments)}
    platform = TARGET
    running: set[str] = set()
    for step in _find_needed_steps(steps, targets):
        platform = platforms.get(step.start, platform)
        if step.command == "run":
            running.add(platform)
    return frozenset(running)


def find_missing_sources(
    dockerfile: str, find_complaint: Callable[[str], tuple[str, str] | None], targets: Collection[str] = ()
) -> list[Fault]:
    """Return a fault for each path in the context that cannot be copied.

    `find_complaint` returns what is wrong with a path, as it is written, and a remedy, or None. Stages that
    no build needs do not count: it needs those of the last stage, and of the stages `targets`.
    """
    try:
        if all(
            find_complaint(name.text) is None
            for step in parse_by_paragraph(dockerfile)
            for name in step.copied
        ):
            return []
    except DockerfileError:  # of other instructions
        pass
    faults: list[Fault] = []
    for step in _find_needed_steps(parse_instructions(dockerfile)[0], targets):
        for name in step.copied:
            problem = find_complaint(name.text)
            if problem and len(faults) < MOST:
                faults.append(Fault(problem[0], name.at, problem[1]))
    return faults


def find_fixed_vectors(dockerfile: str) -> list[Fault]:
    """Return a fault for each compiler option, outside comments, that fixes the length of vectors."""
    faults = []
    for option in vector_length.find_options(dockerfile):
        line = dockerfile[dockerfile.rfind("\n", 0, option.start()) + 1 : option.end()]
        if not is_blank_or_comment(line):
            message = vector_length.explain_option(option[0])
            faults.append(Fault(message, option.start(), vector_length.REMEDY))
    return faults[:MOST]


def _find_needed_steps(steps: Sequence[Instruction], targets: Collection[str]) -> list[Instruction]:
    """Return the instructions of the last stage, the stages `targets`, and those that they are built from."""
    stages: list[list[Instruction]] = []
    sources: list[set[int]] = []
    by_name: dict[str, int] = {}
    for step in steps:
        if step.stage is not None:
            stages.append([])
            sources.append(set())
        if not stages:
            continue
        stages[-1].append(step)
        for name in step.names:
            if name.numbered and name.text.isdigit() and int(name.text) < len(stages):
                sources[-1].add(int(name.text))
            elif name.text.lower() in by_name:
                sources[-1].add(by_name[name.text.lower()])
        if step.stage:
            by_name[step.stage] = len(stages) - 1
    pending = [len(stages) - 1, *(by_name[name] for name in targets if name in by_name)] if stages else []
    needed: set[int] = set()
    while pending:
        number = pending.pop()
        if number not in needed:
            needed.add(number)
            pending += sources[number]
    return [step for number in sorted(needed) for step in stages[number]]


def require_known_inputs(triggers: Iterable[str], base: str) -> None:
    """Raise UsageError if an ONBUILD trigger of a base image brings inputs from elsewhere.

    The other inputs of triggers are in the base and in the context, and so in the identity.
    """
    for trigger in triggers:
        source = find_trigger_input(trigger)
        if source:
            raise UsageError(
                f"the base image {base} brings {source} into every build, by ONBUILD {trigger.strip()}",
                remedy="build on an image without it, and write the instruction into the template",
            )


def split_stages(dockerfile: str) -> tuple[str, ...]:
    """Return the text of each stage except the last, preceded by the text of the stage that it starts from.

    Dockerfiles with one of these texts in common share that stage.
    """
    begins = [step for step in read_instructions(dockerfile) if step.stage is not None]
    texts: dict[str, str] = {}
    for step, following in pairwise(begins):
        text = texts.get(step.names[0].text.lower(), "") + dockerfile[step.start : following.start]
        texts[step.stage or text] = text
    return tuple(texts.values())


def replace_images(dockerfile: str, images: Mapping[str, str]) -> str:
    """Return `dockerfile` with the images that `images` maps replaced; names of stages stay."""
    parts: list[str] = []
    end = 0  # of what `parts` has
    for name in _find_external_images(dockerfile, read_instructions(dockerfile))[0]:
        if name.text in images:
            parts += [dockerfile[end : name.at], images[name.text]]
            end = name.at + len(name.text)
    return "".join([*parts, dockerfile[end:]])


def with_environment(dockerfile: str, environment: Mapping[str, str]) -> str:
    """Return `dockerfile` with variables set at its end, so that no earlier line replaces them.

    The values are plain words. Raises DockerfileError if the last instruction is not complete.
    """
    last = next((line for line in _read_lines_backwards(dockerfile) if not is_blank_or_comment(line)), "")
    if GOES_ON.search(last):
        message = "the Dockerfile has a last instruction that goes on"
        fault = Fault(message, dockerfile.rindex(last), "remove the backslash at its end")
        raise DockerfileError(dockerfile, [fault])
    words = " ".join(f"{name}={value}" for name, value in environment.items())
    return f"{dockerfile.rstrip()}\n\nENV {words}\n"


def _read_lines_backwards(text: str) -> Iterator[str]:
    """Yield the lines that `splitlines` returns, the last first; some empty lines are missing.

    A reader of the last lines does not split a long Dockerfile as a whole.
    """
    end = len(text)
    while end >= 0:
        begin = text.rfind("\n", 0, end)
        yield from reversed(text[begin + 1 : end].splitlines())
        end = begin


def _find_external_images(dockerfile: str, steps: Sequence[Instruction]) -> tuple[list[Name], list[Fault]]:
    """Return the images that a Dockerfile's syntax line and steps name, without stages, and the faults."""
    syntax, faults = _parse_directives(dockerfile)
    images = [syntax] if syntax else []
    later = {step.stage for step in steps if step.stage}
    internal = {"scratch"}
    for step in steps:
        for name in step.names:
            low = name.text.lower()
            if low in internal or (name.numbered and name.text.isdigit()):
                continue
            if "$" in low:
                message = f"no value is known for the variable in FROM {name.text}"
                remedy = (
                    "give it one before the first FROM, such as ARG BASE=debian:trixie, or name the image"
                )
                faults.append(Fault(message, name.at, remedy))
            elif step.stage is None and low in later:
                message = f"the Dockerfile has {name.text} as a source before its stage"
                faults.append(Fault(message, name.at, "put its stage first"))
            elif fault := PLAIN_NAME.fullmatch(low) and _find_misspelt_stage(
                name, step, steps, internal, later
            ):
                faults.append(fault)
            else:
                images.append(name)
        if step.stage:
            if step.stage in internal:
                # BuildKit builds the last one, and tells nobody.
                message = f"the Dockerfile has a second stage {step.stage}"
                faults.append(Fault(message, step.start, "give each stage a name of its own"))
            internal.add(step.stage)
    if FLAG in dockerfile:
        faults += find_builder_image_faults(steps)
    return images, faults[:MOST]


def _find_misspelt_stage(
    name: Name,
    step: Instruction,
    steps: Sequence[Instruction],
    earlier: Collection[str],
    later: Collection[str],
) -> Fault | None:
    """Return the fault of a name in `step` that is nearly that of a stage, or None.

    Few images are named without a tag, so such a name is more likely a misspelt stage. But if another stage
    starts from the same name, it is an image.
    """
    word = name.text
    begins = step.stage is not None
    stages = earlier if begins else later
    if len(stages) > MOST:  # it is generated, and does not misspell
        return None
    near = [stage for stage in sorted(stages) if abs(len(stage) - len(word)) <= SLIPPED]
    guess = suggest_nearest(word.lower(), near, likeness=SLIP) if near else None
    if guess is None:
        return None
    if any(
        later_step is not step and later_step.stage is not None and later_step.names[0].text == word
        for later_step in steps
    ):
        return None
    remedy = f"{guess} An image of this name is written {word}:latest"
    return Fault(f"no stage is called {word}", name.at, remedy)


def _parse_directives(dockerfile: str) -> tuple[Name | None, list[Fault]]:
    """Return the image of the frontend, if a syntax line names one, and faults of parser directives."""
    if dockerfile.startswith("\ufeff"):
        return None, [Fault("the Dockerfile has a byte order mark", 0, "save it as UTF-8 without one")]
    at = dockerfile.find("\n") + 1 or len(dockerfile) if dockerfile.startswith("#!") else 0
    syntax: Name | None = None
    faults: list[Fault] = []
    while dockerfile.startswith("#", at):
        end = dockerfile.find("\n", at)
        line = DIRECTIVE.match(dockerfile, at, end if end >= 0 else len(dockerfile))
        key = line[1].lower() if line else ""
        if line is None or key not in DIRECTIVES:
            break
        if key == "escape" and line[2] != "\\":
            message = f"the Dockerfile has the directive escape={line[2]}"
            faults.append(Fault(message, at, "remove it, and continue lines with backslashes"))
        if key == "syntax" and not syntax:
            syntax = Name(line[2], line.start(2))
        at = end + 1 if end >= 0 else len(dockerfile)
    return syntax, faults
