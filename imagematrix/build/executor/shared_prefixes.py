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
    images: Mapping[K, Recipe], helpers: Mapping[K, Recipe], *, parallelism: int
) -> dict[K, tuple[SharedPrefix, ...]]:
    """Return the prefixes to build before each of `images` and `helpers`, by their keys.

    As many images as `parallelism` says are built at a time. Their layers are exported, those of the helpers,
    such as compilers, not.
    """
    recipes = {**images, **helpers}
    # Three kinds of steps are built first. Images differ on top of some: those branch. Others are layers that
    # most images have: those are exported as well. And a RUN that would have to wait for one of these without
    # building on it need not wait, so it is started with them.
    steps = {key: _index_by_digest(list_build_steps(recipe)) for key, recipe in recipes.items()}
    times = Counter(chain.from_iterable(steps.values()))
    min_images = 2 * len(images) / parallelism  # so many that two of them are built at a time, on average
    common_steps = (_find_common_step(steps[key], times, min_images) for key in images)
    exported = {digest for digest in common_steps if digest}
    first_steps = _choose_shared_steps(steps, times, exported)
    return {
        key: tuple(
            SharedPrefix(
                name=step.digest,
                dockerfile=_format_prefix(recipe.dockerfile, step),
                needs=step.needs & first_steps[key],
                exported=step.digest in exported,
            )
            for step in steps[key].values()
            if step.digest in first_steps[key]
        )
        for key, recipe in recipes.items()
    }


def _find_common_step(steps: Steps, times: Mapping[str, int], min_images: float) -> str | None:
    """Return the uppermost step above the base that at least `min_images` images have, or None."""
    step = max(steps.values(), key=lambda step: len(step.needs), default=None)
    while step and times[step.digest] < max(2, min_images):
        step = steps[step.below[0]] if step.below else None
    return step.digest if step and step.command != "from" else None


def _index_by_digest(steps: Iterable[BuildStep]) -> Steps:
    """Return the steps by digest, each at its first occurrence."""
    by_digest: dict[str, BuildStep] = {}
    for step in steps:
        by_digest.setdefault(step.digest, step)
    return by_digest


def _format_prefix(dockerfile: str, step: BuildStep) -> str:
    """Return the part of a Dockerfile with a step and what it is built from, and nothing else."""
    instruction = dockerfile[step.start : step.end]
    preceding = {"from": "", "link": f"{dockerfile[: step.begin]}FROM scratch\n"}
    return preceding.get(step.command, dockerfile[: step.start]) + instruction


def _choose_shared_steps(
    images: Mapping[K, Steps], times: Counter[str], exported: set[str]
) -> Mapping[K, frozenset[str]]:
    """Return the steps of each image that are built first, `exported` among them.

    A step is built first if images differ on top of it. Building it first makes a build that ends with it,
    which may in turn lack a step that others have on top of one of its own. So this repeats until it finds no
    more steps.
    """
    steps = {digest: step for image_steps in images.values() for digest, step in image_steps.items()}
    pairs = _find_stacked_pairs(steps, times)
    first_steps: dict[K, frozenset[str]] = {key: frozenset() for key in images}
    branching_steps = frozenset[str]()
    new_steps = {below for below, above in pairs if times[below] > times[above]} | exported
    while not new_steps <= branching_steps:
        branching_steps |= new_steps
        first_steps = {
            key: _add_waiting_steps(branching_steps.intersection(image_steps), image_steps, times, exported)
            for key, image_steps in images.items()
        }
        builds = {
            digest: steps[digest].needs | {digest} for digest in chain.from_iterable(first_steps.values())
        }
        new_steps = {
            below
            for below, above in pairs
            for digest, parts in builds.items()
            if below in parts and above not in parts and digest != below
        }
    return first_steps


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
    slow_steps = {digest for digest in branching if steps[digest].command != "from"}
    if not slow_steps:
        return branching
    large_steps = exported & slow_steps
    immediate = large_steps | {digest for digest in slow_steps if not steps[digest].needs & slow_steps}
    started_with = immediate.union(*(steps[digest].needs for digest in immediate))
    min_images = min((times[digest] for digest in large_steps), default=times.total())
    waiting = {
        digest
        for digest, step in steps.items()
        if step.command == "run"
        and times[digest] > 1
        and (not step.needs & slow_steps or times[digest] >= min_images)
    }
    waiting -= started_with
    return branching | waiting.difference(*(steps[digest].needs for digest in waiting))
