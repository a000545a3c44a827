"""What several images share, to be built once.

As long as a build goes on that ran a step, BuildKit does not find the cached results of steps on top of it,
and runs them again for the next image (seen with Docker 28.5.2). So a step that more images share than those
on top of it is built first, in a build of its own. All images then have it from the cache.
"""

from __future__ import annotations

from collections import Counter

from imagematrix.planning.backend import Beginning
from imagematrix.render.dockerfile import built

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from imagematrix.render.dockerfile import Built

__all__ = ["beginnings"]


def beginnings(dockerfiles: Mapping[str, str]) -> dict[str, tuple[Beginning, ...]]:
    """Return what to build before the images of `dockerfiles`, by their keys."""
    steps = {key: built(text) for key, text in dockerfiles.items()}
    # How many images have a step.
    times = Counter(digest for own in steps.values() for digest in {step.digest for step in own})
    return {key: tuple(_first(text, steps[key], times)) for key, text in dockerfiles.items()}


def _first(dockerfile: str, steps: Sequence[Built], times: Mapping[str, int]) -> Iterator[Beginning]:
    needed: set[str] = set()  # by a step that several images run, though not as many
    for step in steps:
        if step.runs and times[step.digest] > 1:
            needed.update(digest for digest in step.needs if times[digest] > times[step.digest])
    # What is built with another one, which as many images have, does not come first by itself.
    implied = {
        digest
        for step in steps
        if step.digest in needed
        for digest in step.needs
        if times[digest] == times[step.digest]
    }
    first = needed - implied
    for digest, step in {step.digest: step for step in steps}.items():
        if digest in first:
            yield Beginning(digest, dockerfile[: step.end], step.needs & first)
