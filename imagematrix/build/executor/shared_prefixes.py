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

from imagematrix.build.dockerfile.steps import list_build_steps
from imagematrix.build.plan.protocols import SharedPrefix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from imagematrix.build.dockerfile.steps import BuildStep, Recipe

    Steps = Mapping[str, BuildStep]  # by digest, in order

K = TypeVar("K", bound="Hashable")


def find_shared_prefixes(
    images: Mapping[K, Recipe], others: Mapping[K, Recipe], *, parallelism: int
) -> dict[K, tuple[SharedPrefix, ...]]:
    """Return the prefixes to build before each of `images` and `others`, by their keys.

    As many images as `parallelism` says are built at a time. Their layers are exported, those of the others
    not.
    """
    recipes = {**images, **others}
    steps = {key: _index_by_digest(list_build_steps(recipe)) for key, recipe in recipes.items()}
    times = Counter(chain.from_iterable(steps.values()))
    least = 2 * len(images) / parallelism  # so many that two of them are built at a time, on average
    common = (_find_common_step(steps[key], times, least) for key in images)
    exported = {digest for digest in common if digest}
    first = _choose_shared_steps(steps, times, exported)
    return {
        key: tuple(
            SharedPrefix(
                name=step.digest,
                dockerfile=_format_prefix(recipe.dockerfile, step),
                needs=step.needs & first[key],
                exported=step.digest in exported,
            )
            for step in steps[key].values()
            if step.digest in first[key]
        )
        for key, recipe in recipes.items()
    }


def _find_common_step(steps: Steps, times: Mapping[str, int], least: float) -> str | None:
    """Return the uppermost step above an image's base that at least `least` images have; None without one."""
    step = max(steps.values(), key=lambda step: len(step.needs), default=None)
    while step and times[step.digest] < max(2, least):
        step = steps[step.below[0]] if step.below else None
    return step.digest if step and step.command != "from" else None


def _index_by_digest(steps: Iterable[BuildStep]) -> Steps:
    """Return the steps by digest, each at its first occurrence."""
    found: dict[str, BuildStep] = {}
    for step in steps:
        found.setdefault(step.digest, step)
    return found


def _format_prefix(dockerfile: str, step: BuildStep) -> str:
    """Return the part of a Dockerfile with a step and what it is built from, and nothing else."""
    own = dockerfile[step.start : step.end]
    before = {"from": "", "link": f"{dockerfile[: step.begin]}FROM scratch\n"}
    return before.get(step.command, dockerfile[: step.start]) + own


def _choose_shared_steps(
    images: Mapping[K, Steps], times: Counter[str], exported: set[str]
) -> Mapping[K, frozenset[str]]:
    """Return the steps of each image that are built first, `exported` among them.

    A step is built first if images differ on top of it. Building it first makes a build that ends with it,
    which may in turn lack a step that others have on top of one of its own. So this repeats until it finds no
    more steps.
    """
    steps = {digest: step for own in images.values() for digest, step in own.items()}
    pairs = _find_stacked_pairs(steps, times)
    first: dict[K, frozenset[str]] = {key: frozenset() for key in images}
    branching = frozenset[str]()
    more = {below for below, above in pairs if times[below] > times[above]} | exported
    while not more <= branching:
        branching |= more
        first = {
            key: _add_waiting_steps(branching.intersection(own), own, times, exported)
            for key, own in images.items()
        }
        builds = {digest: steps[digest].needs | {digest} for digest in chain.from_iterable(first.values())}
        more = {
            below
            for below, above in pairs
            for digest, parts in builds.items()
            if below in parts and above not in parts and digest != below
        }
    return first


def _find_stacked_pairs(steps: Steps, times: Mapping[str, int]) -> set[tuple[str, str]]:
    """Return (lower, upper) pairs of steps whose upper step is a RUN of several images, or is below one."""
    pairs: set[tuple[str, str]] = set()
    above = [digest for digest, step in steps.items() if step.command == "run" and times[digest] > 1]
    while above:
        upper = above.pop()
        for below in steps[upper].below:
            if (below, upper) not in pairs:
                pairs.add((below, upper))
                above.append(below)
    return pairs


def _add_waiting_steps(
    branching: frozenset[str], steps: Steps, times: Counter[str], exported: set[str]
) -> frozenset[str]:
    """Return `branching` and each RUN that would have to wait for it without building on it.

    Whatever as many images have in common starts while layers are exported.
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
