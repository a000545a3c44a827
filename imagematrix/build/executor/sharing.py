"""What several images share, to be built once.

As long as a build goes on that ran a step, BuildKit does not find the cached results of steps on top of it,
and runs them again for the next image (28.5.2: it compares what was just made only by what others copy from
it). So a step on top of which images differ is built first, in a build of its own. All images then have it
from the cache.

BuildKit also sends a layer with each image that is built at the same time. So the layers that most of them
have in common are exported first, as those of a base are.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TypeVar

from imagematrix.build.dockerfile.steps import built
from imagematrix.build.plan.backend import Beginning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from imagematrix.build.dockerfile.steps import Built, Recipe

    Steps = Mapping[str, Built]  # by digest, in order

__all__ = ["beginnings"]

K = TypeVar("K", bound="Hashable")


def beginnings(
    images: Mapping[K, Recipe], others: Mapping[K, Recipe], *, at_once: int
) -> dict[K, tuple[Beginning, ...]]:
    """Return what to build before `images` and before `others`, by their keys.

    Images are built `at_once`, and their layers are exported. Those of the others are not.
    """
    recipes = {**images, **others}
    steps = {key: _by_digest(built(recipe)) for key, recipe in recipes.items()}
    times = Counter(chain.from_iterable(steps.values()))
    least = 2 * len(images) / at_once  # so many that two of them are built at a time, on average
    common = (_common(steps[key], times, least) for key in images)
    exported = {digest for digest in common if digest}
    first = _first(steps, times, exported)
    return {
        key: tuple(
            Beginning(
                name=step.digest,
                dockerfile=_text(recipe.dockerfile, step),
                needs=step.needs & first[key],
                exported=step.digest in exported,
            )
            for step in steps[key].values()
            if step.digest in first[key]
        )
        for key, recipe in recipes.items()
    }


def _common(steps: Steps, times: Mapping[str, int], least: float) -> str | None:
    """Return the uppermost step of an image that at least so many images have, above its base; or None."""
    step = max(steps.values(), key=lambda step: len(step.needs), default=None)
    while step and times[step.digest] < max(2, least):
        step = steps[step.below[0]] if step.below else None
    return step.digest if step and step.command != "from" else None


def _by_digest(steps: Iterable[Built]) -> Steps:
    """Return each step where it comes first."""
    found: dict[str, Built] = {}
    for step in steps:
        found.setdefault(step.digest, step)
    return found


def _text(dockerfile: str, step: Built) -> str:
    """Return what builds a step, and nothing that it is not built from."""
    own = dockerfile[step.start : step.end]
    before = {"from": "", "link": f"{dockerfile[: step.begin]}FROM scratch\n"}
    return before.get(step.command, dockerfile[: step.start]) + own


def _first(images: Mapping[K, Steps], times: Counter[str], exported: set[str]) -> Mapping[K, frozenset[str]]:
    """Return which steps of each image are built first, `exported` among them."""
    steps = {digest: step for own in images.values() for digest, step in own.items()}
    pairs = _pairs(steps, times)
    first: dict[K, frozenset[str]] = {key: frozenset() for key in images}
    branching = frozenset[str]()
    more = {below for below, above in pairs if times[below] > times[above]} | exported
    while not more <= branching:
        branching |= more
        first = {
            key: _with_others(branching.intersection(own), own, times, exported)
            for key, own in images.items()
        }
        # These builds, too, can have a step without another one on top of it.
        builds = {digest: steps[digest].needs | {digest} for digest in chain.from_iterable(first.values())}
        more = {
            below
            for below, above in pairs
            for digest, parts in builds.items()
            if below in parts and above not in parts and digest != below
        }
    return first


def _pairs(steps: Steps, times: Mapping[str, int]) -> set[tuple[str, str]]:
    """Return which steps are on top of which, as far as RUN of several images is above or the upper one."""
    pairs: set[tuple[str, str]] = set()
    above = [digest for digest, step in steps.items() if step.command == "run" and times[digest] > 1]
    while above:
        upper = above.pop()
        for below in steps[upper].below:
            if (below, upper) not in pairs:
                pairs.add((below, upper))
                above.append(below)
    return pairs


def _with_others(
    branching: frozenset[str], steps: Steps, times: Counter[str], exported: set[str]
) -> frozenset[str]:
    """Return `branching` with RUN that would have to wait for it, though it does not build on it.

    All that as many images have is begun while layers are exported.
    """
    slow = {digest for digest in branching if steps[digest].command != "from"}
    if not slow:
        return branching
    large = exported & slow
    at_once = large | {digest for digest in slow if not steps[digest].needs & slow}
    begun = at_once.union(*(steps[digest].needs for digest in at_once))
    least = min((times[digest] for digest in large), default=times.total())
    others = {
        digest
        for digest, step in steps.items()
        if step.command == "run" and times[digest] > 1 and (not step.needs & slow or times[digest] >= least)
    }
    others -= begun
    return branching | others.difference(*(steps[digest].needs for digest in others))
