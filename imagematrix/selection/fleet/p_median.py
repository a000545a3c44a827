"""p-median by branch and bound: at most `limit` members that minimise the total cost over all rows.

Each row uses the cheapest of the chosen members. That is a p-median problem (Hakimi 1964). Bounds come from
its Lagrangian relaxation (Cornuejols, Fisher and Nemhauser 1977), in integers, so that every machine gets the
same result.
"""

from __future__ import annotations

import contextlib
import heapq
from dataclasses import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

WORK = 10_000_000  # costs looked at, a few seconds
FIRST_ROUNDS = 100  # of improving the bound, before the first branch
ROUNDS = 12  # at each branch
PATIENCE = 4  # rounds without a better bound before the steps are halved


@dataclass(frozen=True, slots=True, kw_only=True)
class Median:
    """The chosen members and what all rows cost with them. No choice costs less than `least`."""

    members: frozenset[int]
    cost: int
    least: int

    @property
    def exact(self) -> bool:
        """Whether no choice costs less."""
        return self.cost == self.least


def find_median(
    rows: Sequence[Mapping[int, int]],
    without: Sequence[int],
    limit: int,
    *,
    kept: Collection[int] = (),
    work: int = WORK,
) -> Median:
    """Choose at most `limit` members, including the `kept` ones, that minimise the total cost over all rows.

    A row has the cost of each member that it can use, and one in `without` if none of these is chosen. The
    search looks at `work` costs at most. If that does not suffice, the result is the best choice found so
    far, at worst the greedy one. No member is chosen that saves nothing, unless it is kept.
    """
    if limit < len(kept):
        raise ValueError("the limit is below the number of members that are kept")
    base = [
        min([nothing, *(row[member] for member in kept if member in row)])
        for row, nothing in zip(rows, without, strict=True)
    ]
    savings: dict[int, dict[int, int]] = {}
    for place, row in enumerate(rows):
        for member, cost in row.items():
            if cost < base[place]:
                savings.setdefault(member, {})[place] = base[place] - cost
    search = _MedianSearch(savings, len(rows), limit - len(kept), work)
    most = search.run()
    members = _drop_redundant_members(search.best, savings)
    return Median(members=members.union(kept), cost=sum(base) - search.saved, least=sum(base) - most)


class _StepsSpentError(Exception):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """A part of the choices: those with `chosen`, and `left` more of `open`.

    `floor` is what each row saves by `chosen`; `prices` are the multipliers of the bound. `branch` is the
    member to decide on next.
    """

    chosen: frozenset[int]
    left: int
    open: tuple[int, ...]
    floor: tuple[int, ...]
    prices: tuple[int, ...]
    branch: int


class _MedianSearch:
    """The search for the members that save most; `savings` has the rows of each member."""

    def __init__(self, savings: Mapping[int, Mapping[int, int]], rows: int, left: int, work: int) -> None:
        self._rows = rows
        self._left = left
        self._work = work
        self._savings = {member: tuple(own.items()) for member, own in sorted(savings.items())}
        self.best: frozenset[int] = frozenset()
        self.saved = 0

    def run(self) -> int:
        """Find the `best` members, and return what no members save more than."""
        most = self._saved_at_most()
        with contextlib.suppress(_StepsSpentError):
            self._savings = self._undominated()
        self._greedy()
        if not self._left or not self._savings:
            return self.saved
        nodes: list[tuple[int, int, _Node]] = []
        made = 0
        try:
            self._swap()
            nothing = (0,) * self._rows
            # At these prices each row saves all it can: a bound that later ones improve in small steps.
            prices = tuple(self._floor(self._savings))
            pending = [(frozenset[int](), self._left, tuple(self._savings), nothing, prices)]
            rounds = FIRST_ROUNDS
            while True:
                for state in pending:
                    found = self._bounded(*state, rounds)
                    if found:
                        heapq.heappush(nodes, (-found[0], made, found[1]))
                        made += 1
                rounds = ROUNDS
                if not nodes or -nodes[0][0] <= self.saved:
                    return self.saved
                most, node = min(most, -nodes[0][0]), nodes[0][2]
                pending = self._branches(node)
                self._spend(len(pending))
                heapq.heappop(nodes)
        except _StepsSpentError:
            return max(self.saved, most)

    def _spend(self, amount: int) -> None:
        self._work -= amount
        if self._work < 0:
            raise _StepsSpentError

    def _branches(
        self, node: _Node
    ) -> list[tuple[frozenset[int], int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        """Return the parts of a node's choices with and without the member to decide on."""
        others = tuple(member for member in node.open if member != node.branch)
        floor = self._floor([node.branch], node.floor)
        chosen = node.chosen | {node.branch}
        return [
            (chosen, node.left - 1, others, tuple(floor), tuple(map(max, node.prices, floor))),
            (node.chosen, node.left, others, node.floor, node.prices),
        ]

    def _bounded(
        self,
        chosen: frozenset[int],
        left: int,
        members: tuple[int, ...],
        floor: tuple[int, ...],
        prices: tuple[int, ...],
        rounds: int,
    ) -> tuple[int, _Node] | None:
        """Return a bound for what choices save, with their node; None if none is better than the best.

        For any prices not below the floor, members save at most the prices, and what the best `left` of them
        save beyond the prices. The prices follow the subgradient of this bound.
        """
        self._note(chosen, sum(floor))
        if not left or not members:
            return None
        now, least, stale, slowness = list(prices), -1, 0, 1
        best: tuple[list[tuple[int, int]], list[int]] = ([], [])
        for _ in range(rounds):
            beyond = self._beyond(members, now)
            bound = sum(now) + sum(amount for amount, _ in beyond[:left])
            if least < 0 or bound < least:
                least, best, stale = bound, (beyond, list(now)), 0
            else:
                stale += 1
            if least <= self.saved:
                return None
            if stale == PATIENCE:
                stale, slowness = 0, slowness * 2
            taken = [-member for _, member in beyond[:left]]
            self._note(chosen.union(taken), sum(self._floor(taken, floor)))
            steps = [1] * self._rows
            for member in taken:
                for row, saved in self._savings[member]:
                    steps[row] -= saved > now[row]
            steps = [
                0 if step > 0 and price == bottom else step
                for step, price, bottom in zip(steps, now, floor, strict=True)
            ]
            norm = sum(step * step for step in steps)
            if not norm:
                break
            pace = max(1, (bound - self.saved) // (slowness * norm))
            now = [
                max(bottom, price - pace * step)
                for price, step, bottom in zip(now, steps, floor, strict=True)
            ]
        beyond, best_prices = best
        last = beyond[left - 1][0] if left <= len(beyond) else 0
        # A member that would replace one of the best only at a loss is in no better choice.
        remaining = tuple(sorted(-member for amount, member in beyond if least - last + amount > self.saved))
        node = _Node(
            chosen=chosen,
            left=left,
            open=remaining,
            floor=floor,
            prices=tuple(best_prices),
            branch=-beyond[0][1],
        )
        return least, node

    def _beyond(self, members: Iterable[int], prices: Sequence[int]) -> list[tuple[int, int]]:
        """Return what each member saves beyond the prices, with its negative number, the most first."""
        found = []
        for member in members:
            own = self._savings[member]
            self._spend(len(own))
            found.append((sum(saved - prices[row] for row, saved in own if saved > prices[row]), -member))
        found.sort(reverse=True)
        return found

    def _floor(self, members: Iterable[int], floor: Sequence[int] = ()) -> list[int]:
        """Return what each row saves with these members, and at least `floor`."""
        rows = list(floor) or [0] * self._rows
        for member in members:
            for row, saved in self._savings[member]:
                rows[row] = max(rows[row], saved)
        return rows

    def _saved_at_most(self) -> int:
        """Return a simple bound: every row saves all it can, or the best members do not compete."""
        amounts = sorted((sum(saved for _, saved in own) for own in self._savings.values()), reverse=True)
        return min(sum(self._floor(self._savings)), sum(amounts[: self._left]))

    def _note(self, members: Iterable[int], saved: int) -> None:
        if saved > self.saved:
            self.best, self.saved = frozenset(members), saved

    def _greedy(self) -> None:
        """Begin with the members that each save most beside those before; of equals, the first."""
        chosen: list[int] = []
        floor = [0] * self._rows
        # Amounts only become less, so a member whose amount is up to date is the next if it comes first.
        heap = [(-sum(saved for _, saved in own), member) for member, own in self._savings.items()]
        heapq.heapify(heap)
        while heap and len(chosen) < self._left:
            before, member = heap[0]
            own = self._savings[member]
            amount = -sum(saved - floor[row] for row, saved in own if saved > floor[row])
            if amount != before:
                heapq.heapreplace(heap, (amount, member))
                continue
            if not amount:
                break
            heapq.heappop(heap)
            chosen.append(member)
            floor = self._floor([member], floor)
        self._note(chosen, sum(floor))

    def _swap(self) -> None:
        """Exchange a chosen member for another one as long as that saves more (Teitz and Bart 1968)."""
        before = -1
        while before < self.saved:
            before = self.saved
            for member in sorted(self.best):
                if member not in self.best:
                    continue
                others = self.best - {member}
                floor = self._floor(others)
                amount, other = self._beyond(self._savings, floor)[0]
                self._note(others | {-other}, sum(floor) + amount)

    def _undominated(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Return the members that no other one can replace in every row; of equals, the first is kept."""
        kept: dict[int, tuple[tuple[int, int], ...]] = {}
        order = sorted(self._savings.items(), key=lambda item: (-sum(saved for _, saved in item[1]), item[0]))
        others: list[dict[int, int]] = []
        for member, own in order:
            self._spend(len(others) + 1)
            if not any(all(other.get(row, 0) >= saved for row, saved in own) for other in others):
                kept[member] = own
                others.append(dict(own))
        return dict(sorted(kept.items()))


def _drop_redundant_members(
    members: frozenset[int], savings: Mapping[int, Mapping[int, int]]
) -> frozenset[int]:
    """Return members without those whose rows save as much by the others; the last are left out first."""
    for member in sorted(members, reverse=True):
        others = members - {member}
        if all(
            any(savings[other].get(row, 0) >= saved for other in others)
            for row, saved in savings[member].items()
        ):
            members = others
    return members
