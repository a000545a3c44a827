"""What the instructions of a Dockerfile build, and which of them build the same in another Dockerfile."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from itertools import count, zip_longest

from imagematrix.render.instructions import SPACE, WITH_HEREDOCS, read

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Built", "Recipe", "built"]

BUILDING = (*WITH_HEREDOCS, "workdir")


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
class Built:
    """An instruction that builds something. Those of two recipes that build the same have one `digest`.

    `before` is the digest of the one on whose file system it builds, and `needs` are the digests of all that
    it is built from. `start` and `end` are its offsets. An image that a stage starts from counts as well, by
    its name.
    """

    digest: str
    command: str
    before: str | None
    needs: frozenset[str]
    start: int
    end: int


def built(recipe: Recipe) -> tuple[Built, ...]:
    """Return the instructions from which the last stage of a recipe is built, in order.

    ENV and the like count with the instruction that follows them.
    """
    dockerfile = recipe.dockerfile
    steps = read(dockerfile)
    found: list[Built] = []
    stages: dict[str, _Chain] = {"scratch": _Chain(_digest("scratch", recipe.platform))}  # by name and number
    chain, stage, numbers, number = stages["scratch"], "", count(), ""
    for step, following in zip_longest(steps, steps[1:]):
        end = following.start if following else len(dockerfile)
        names = [name.text for name in step.names]
        inputs = [recipe.images.get(name, "") for name in names if name.lower() not in stages]
        if step.stage is not None:
            image = names[0]
            stage, number = step.stage, str(next(numbers))
            builds = image.lower() not in stages
            chain = _Chain(_digest(image, recipe.platform, *inputs)) if builds else stages[image.lower()]
            digest = image
        else:
            sources = [stages[name.lower()] for name in names if name.lower() in stages]
            inputs += [source.whole for source in sources]
            inputs += [recipe.context] if step.copying else []
            inputs += [recipe.arguments] if step.command == "arg" else []
            digest = _digest(chain.whole, _without_comments(dockerfile[step.start : end]), *inputs)
            chain = _Chain(digest, chain.last, chain.needs.union(*(source.needs for source in sources)))
            builds = step.command in BUILDING
        if builds:
            found.append(Built(digest, step.command, chain.last, chain.needs, step.start, end))
            chain = _Chain(chain.whole, digest, chain.needs | {digest})
        stages[stage] = stages[number] = chain
    return tuple(one for one in found if one.digest in chain.needs)


@dataclass(frozen=True, slots=True)
class _Chain:
    """What a stage has so far: a digest of it, that of its last file system, and of all it is built from."""

    whole: str
    last: str | None = None
    needs: frozenset[str] = frozenset()


def _without_comments(text: str) -> str:
    """Return the text of an instruction without the comments that follow it."""
    lines = text.rstrip().split("\n")
    while lines[-1].strip(SPACE)[:1] in ("", "#"):
        lines.pop()
    return "\n".join(lines)


def _digest(*texts: str) -> str:
    return hashlib.sha256(repr(texts).encode()).hexdigest()
