"""What the instructions of a Dockerfile build, and which of them build the same in another Dockerfile."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from itertools import count, takewhile, zip_longest

from imagematrix.build.dockerfile.instructions import WITH_HEREDOCS, is_blank_or_comment, read_instructions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

LAYER_COMMANDS = (*WITH_HEREDOCS, "workdir")
NUMBERS = re.compile(r"--chown=\d+(:\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A Dockerfile, and what else decides what its instructions build.

    `context` is the folder that it copies from, `arguments` are the build arguments, and `images` the sources
    of images by name.
    """

    dockerfile: str
    platform: str
    context: str = ""
    arguments: str = ""
    images: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BuildStep:
    """An instruction that builds something. Those of two recipes that build the same have one `digest`.

    `below` are the digests of those that its file system starts from, and `needs` of all that it is built
    from. `begin` is the offset of its stage, `start` and `end` are its own. An image that a stage starts from
    counts as well, by its name, with the command "from". So does what COPY --link puts on top of any file
    system, with the command "link".
    """

    digest: str
    command: str
    below: tuple[str, ...]
    needs: frozenset[str]
    begin: int
    start: int
    end: int


def list_build_steps(recipe: Recipe) -> tuple[BuildStep, ...]:
    """Return the instructions from which the last stage of a recipe is built, in order.

    ENV and the like count with the instruction that follows them.
    """
    dockerfile = recipe.dockerfile
    steps = read_instructions(dockerfile)
    build_steps: list[BuildStep] = []
    stages: dict[str, _Chain] = {
        "scratch": _Chain(_hash_texts("scratch", recipe.platform))
    }  # by name and number
    chain, stage, numbers, number, begin = stages["scratch"], "", count(), "", 0
    # A chain is what a stage has so far. Each instruction makes a new one, whose digest covers all above it,
    # so that two instructions have the same digest exactly if they, and all that they build on, are the same.
    for step, following in zip_longest(steps, steps[1:]):
        end = following.start if following else len(dockerfile)
        names = [name.text for name in step.names]
        inputs = [recipe.images.get(name, "") for name in names if name.lower() not in stages]
        if step.stage is not None:
            image, begin = names[0], step.start
            stage, number = step.stage, str(next(numbers))
            builds = image.lower() not in stages
            chain = _Chain(_hash_texts(image, recipe.platform, *inputs)) if builds else stages[image.lower()]
            digest = image
        else:
            sources = [stages[name.lower()] for name in names if name.lower() in stages]
            needs = frozenset[str]().union(*(source.needs for source in sources))
            inputs += [source.whole for source in sources]
            inputs += [recipe.context] if step.copied else []
            inputs += [recipe.arguments] if step.command == "arg" else []
            text = _strip_comments(dockerfile[step.start : end])
            digest = _hash_texts(chain.whole, text, *inputs)
            below = chain.below
            if _is_independent(text):
                link = _hash_texts("link", recipe.platform, text, *inputs)
                build_steps.append(BuildStep(link, "link", (), needs, begin, step.start, end))
                below, needs = (*below, link), needs | {link}
            chain = _Chain(digest, below, chain.needs | needs)
            builds = step.command in LAYER_COMMANDS
        if builds:
            build_steps.append(
                BuildStep(digest, step.command, chain.below, chain.needs, begin, step.start, end)
            )
            chain = _Chain(chain.whole, (digest,), chain.needs | {digest})
        stages[stage] = stages[number] = chain
    return tuple(build_step for build_step in build_steps if build_step.digest in chain.needs)


@dataclass(frozen=True, slots=True)
class _Chain:
    """What a stage has so far.

    `whole` is a digest of all of it, `below` are the digests of the steps that make up its file system, and
    `needs` those of all steps that it is built from.
    """

    whole: str
    below: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()


def _is_independent(text: str) -> bool:
    """Whether this COPY or ADD makes the same layer on any image, whatever its variables and users."""
    command, *words = (word for word in text.split() if word != "\\")
    flags = [*takewhile(lambda word: word.startswith("--"), words)]
    owners = [flag for flag in flags if flag.startswith("--chown=")]
    return (
        command.lower() in ("add", "copy")
        and not {"--link", "--link=true"}.isdisjoint(flags)
        and all(NUMBERS.fullmatch(owner) for owner in owners)
        and words[-1].startswith("/")
        and "$" not in text
    )


def _strip_comments(text: str) -> str:
    """Return the text of an instruction without the comments that follow it."""
    lines = text.rstrip().split("\n")
    while is_blank_or_comment(lines[-1]):
        lines.pop()
    return "\n".join(lines)


def _hash_texts(*texts: str) -> str:
    return hashlib.sha256(repr(texts).encode()).hexdigest()
