"""Minimum hitting set by branch and bound: the fewest members such that every demand contains one.

A demand is the set of members that meet it. A set is an integer with bit i for member i.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from imagematrix.selection.variant_index import split_mask

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

WORK = 10_000_000  # comparisons of sets, a few seconds
DEEPEST = 400  # members, which is the depth of the recursion


@dataclass(frozen=True, slots=True, kw_only=True)
class Cover:
    """A set with a member of every demand. Every such set has at least `least` members."""

    members: int
    least: int

    @property
    def exact(self) -> bool:
        """Whether no smaller set exists."""
        return self.members.bit_count() == self.least


def find_cover(demands: Iterable[int], *, work: int = WORK) -> Cover:
    """Return the smallest set with a member of every demand; of equal members the lowest is taken.

    The search is limited to `work` comparisons of sets. If that does not suffice, the result is the best set
    found so far, at worst the greedy one. The order of the demands does not matter.
    """
    rows = sorted(set(demands))
    if not all(rows):
        raise ValueError("nothing meets an empty demand")
    budget = _Budget(work)
    try:
        members, rows = _reduce_rows(rows, budget)
    except _OutOfWorkError:
        members = 0
    least = members.bit_count()
    for part in _split_independent_rows(rows):
        part_cover = _Search(part, budget).result()
        members |= part_cover.members
        least += part_cover.least
    return Cover(members=members, least=least)


class _OutOfWorkError(Exception):
    pass


class _Budget:
    """The comparisons that are left."""

    __slots__ = ("_left",)

    def __init__(self, work: int) -> None:
        self._left = work

    def spend(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise _OutOfWorkError


class _Search:
    """The search for the smallest cover of rows, which are sorted by their number of members."""

    __slots__ = ("_best", "_budget", "_rows")

    def __init__(self, rows: list[int], budget: _Budget) -> None:
        self._rows = rows
        self._best = _find_greedy_cover(rows)
        self._budget = budget

    def result(self) -> Cover:
        try:
            self._descend(self._rows, 0)
        except _OutOfWorkError:
            return Cover(members=self._best, least=_compute_lower_bound(self._rows))
        return Cover(members=self._best, least=self._best.bit_count())

    def _descend(self, rows: list[int], chosen: int) -> None:
        """Look for covers of `rows` that, together with `chosen`, are smaller than the best one."""
        if chosen.bit_count() > DEEPEST:
            raise _OutOfWorkError
        forced, rows = _reduce_rows(rows, self._budget)
        chosen |= forced
        if chosen.bit_count() + _compute_lower_bound(rows) >= self._best.bit_count():
            return
        if not rows:
            self._best = chosen
            return
        while all(rows):
            # Every cover contains a member of the first row: each is tried, and then left out.
            member = _find_most_useful(rows, among=rows[0])
            self._descend([row for row in rows if not row & member], chosen | member)
            rows = [row & ~member for row in rows]


def _reduce_rows(rows: list[int], budget: _Budget) -> tuple[int, list[int]]:
    """Return members that belong to a smallest cover, and the remaining rows, sorted by number of members."""
    forced = 0
    while True:
        rows = _drop_implied_rows(rows, budget)
        only = sum(row for row in rows if row.bit_count() == 1)
        forced |= only
        rows = [row for row in rows if not row & only]
        useful = _drop_dominated_members(rows, budget)
        trimmed = [row & useful for row in rows]
        if trimmed == rows:
            return forced, rows
        rows = trimmed


def _drop_implied_rows(rows: list[int], budget: _Budget) -> list[int]:
    """Return the rows that contain no other row; a member that meets the other meets them, too."""
    kept: list[int] = []
    for row in sorted(set(rows), key=lambda row: (row.bit_count(), row)):
        budget.spend(len(kept) + 1)
        if not any(kept_row & row == kept_row for kept_row in kept):
            kept.append(row)
    return kept


def _drop_dominated_members(rows: list[int], budget: _Budget) -> int:
    """Return the members that no other member can replace: none is in all of the same rows."""
    rows_of: dict[int, int] = {}  # of each member, the mask of the rows that contain it
    for index, row in enumerate(rows):
        for member in split_mask(row):
            rows_of[member] = rows_of.get(member, 0) | 1 << index
    kept: list[int] = []
    useful = 0
    for member in sorted(rows_of, key=lambda member: (-rows_of[member].bit_count(), member)):
        budget.spend(len(kept) + 1)
        if not any(kept_rows & rows_of[member] == rows_of[member] for kept_rows in kept):
            kept.append(rows_of[member])
            useful |= member
    return useful


def _split_independent_rows(rows: list[int]) -> list[list[int]]:
    """Return the rows grouped so that groups share no member, in the order of their first rows."""
    parts: list[tuple[int, list[int]]] = []
    for row in rows:
        touching = [part for part in parts if part[0] & row]
        parts = [part for part in parts if not part[0] & row]
        union, members = row, [row]
        for mask, part_rows in touching:
            union |= mask
            members = part_rows + members
        parts.append((union, members))
    return [sorted(members, key=lambda row: (row.bit_count(), row)) for _, members in parts]


def _find_greedy_cover(rows: list[int]) -> int:
    """Return the greedy cover, which always takes the member that meets most rows."""
    members = 0
    while rows:
        member = _find_most_useful(rows)
        members |= member
        rows = [row for row in rows if not row & member]
    return members


def _find_most_useful(rows: list[int], *, among: int = -1) -> int:
    counts = Counter(member for row in rows for member in split_mask(row & among))
    return min(counts, key=lambda member: (-counts[member], member))


def _compute_lower_bound(rows: list[int]) -> int:
    """Return a lower bound for the size of any cover: the number of rows that are pairwise disjoint."""
    taken = count = 0
    for row in rows:
        if not row & taken:
            taken |= row
            count += 1
    return count
