"""The order in which cells are built: first those with the most new stages.

Shared stages are thus fetched and compiled early and in parallel, and a failing stage fails at the beginning.
"""

from __future__ import annotations

import heapq

from imagematrix.render.dockerfile import stages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["leaders_first"]


def leaders_first(dockerfiles: Mapping[str, str]) -> list[str]:
    """Return the names of `dockerfiles`: the next is always the one with the most new stages.

    Ties keep the order of `dockerfiles`.
    """
    own = {name: frozenset(stages(text)) for name, text in dockerfiles.items()}
    seen: set[str] = set()
    # The number of new stages only decreases, so the first file whose number is current is the next.
    heap = [(-len(own[name]), place, name) for place, name in enumerate(own)]
    heapq.heapify(heap)
    names = []
    while heap:
        was, place, name = heapq.heappop(heap)
        now = -len(own[name] - seen)
        if now == was:
            seen |= own[name]
            names.append(name)
        else:
            heapq.heappush(heap, (now, place, name))
    return names
