"""p-median by branch and bound: at most `limit` members that minimise the total cost over all rows.

Each row uses the cheapest of the chosen members. That is a p-median problem (Hakimi 1964). Bounds come from
its Lagrangian relaxation (Cornuejols, Fisher and Nemhauser 1977), in integers, so that every machine gets the
same result.
"""

from __future__ import annotations

import contextlib
import heapq
from dataclasses import dataclass, replace

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


# How the search works. A row of the table saves what the best of the chosen members saves in it. Subproblems
# are sets of choices: some members are chosen, and up to `slots` more can be, from the `open` ones.
#
# - Bound. Give each row a price. Whatever members are chosen, they save at most the sum of all prices, and
#   what each saves beyond the prices. So the prices and the best `slots` amounts beyond them bound what any
#   choice of the subproblem saves. A row that several of these members cover has too low a price, and one
#   that none covers too high a price: moving the prices accordingly, round by round, lowers the bound (a
#   subgradient).
# - Branch. The subproblem with the highest bound is split in two: with and without its best open member. If
#   its bound is not higher than what the best choice so far saves, that choice is optimal.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subproblem:
    """The choices with the `chosen` members, and up to `slots` more of the `open` ones.

    `floor` is what each row saves by the chosen members; `prices` are where the rounds of the bound begin.
    """

    chosen: frozenset[int]
    slots: int
    open: tuple[int, ...]
    floor: tuple[int, ...]
    prices: tuple[int, ...]


class _MedianSearch:
    """The search for at most `slots` members that save most; `savings` has the rows of each member."""

    def __init__(self, savings: Mapping[int, Mapping[int, int]], rows: int, slots: int, work: int) -> None:
        self._rows = rows
        self._slots = slots
        self._work = work
        self._savings = {member: tuple(by_row.items()) for member, by_row in sorted(savings.items())}
        self.best: frozenset[int] = frozenset()
        self.saved = 0

    def run(self) -> int:
        """Find the `best` members, and return what no members save more than."""
        # A simple bound: every row saves all it can, or the best members do not compete.
        amounts = sorted((sum(saved for _, saved in rows) for rows in self._savings.values()), reverse=True)
        most = min(sum(self._raise_floor(self._savings)), sum(amounts[: self._slots]))
        with contextlib.suppress(_StepsSpentError):
            self._savings = self._drop_dominated_members()
        self._choose_greedily()
        if not self._slots or not self._savings:
            return self.saved
        heap: list[tuple[int, int, _Subproblem, int]] = []
        count = 0
        try:
            self._swap_members()
            # At these prices each row saves all it can: a bound that later ones improve in small steps.
            root = _Subproblem(
                chosen=frozenset(),
                slots=self._slots,
                open=tuple(self._savings),
                floor=(0,) * self._rows,
                prices=tuple(self._raise_floor(self._savings)),
            )
            pending = [root]
            rounds = FIRST_ROUNDS
            while True:
                for subproblem in pending:
                    bounded = self._compute_bound(subproblem, rounds)
                    if bounded:
                        bound, narrowed, member = bounded
                        heapq.heappush(heap, (-bound, count, narrowed, member))
                        count += 1
                rounds = ROUNDS
                if not heap or -heap[0][0] <= self.saved:
                    return self.saved
                negative, _, subproblem, member = heap[0]
                most = min(most, -negative)
                pending = self._split(subproblem, member)
                self._spend(len(pending))
                heapq.heappop(heap)
        except _StepsSpentError:
            return max(self.saved, most)

    def _spend(self, amount: int) -> None:
        self._work -= amount
        if self._work < 0:
            raise _StepsSpentError

    def _split(self, subproblem: _Subproblem, member: int) -> list[_Subproblem]:
        """Return the choices of a subproblem with and without one of its open members."""
        rest = tuple(open_member for open_member in subproblem.open if open_member != member)
        floor = self._raise_floor([member], subproblem.floor)
        return [
            _Subproblem(
                chosen=subproblem.chosen | {member},
                slots=subproblem.slots - 1,
                open=rest,
                floor=tuple(floor),
                prices=tuple(map(max, subproblem.prices, floor)),
            ),
            replace(subproblem, open=rest),
        ]

    def _compute_bound(self, subproblem: _Subproblem, rounds: int) -> tuple[int, _Subproblem, int] | None:
        """Return a bound, the subproblem with only useful members, and the member to decide on next.

        Members are useful if they are in a choice that may be better than the best one so far; return None if
        there is no such choice. For any prices not below the floor, members save at most the prices, and what
        the best `slots` of them save beyond the prices.
        """
        chosen, slots, floor = subproblem.chosen, subproblem.slots, subproblem.floor
        self._remember_best(chosen, sum(floor))
        if not slots or not subproblem.open:
            return None
        prices, least, stale, slowness = list(subproblem.prices), -1, 0, 1
        best: tuple[list[tuple[int, int]], list[int]] = ([], [])
        for _ in range(rounds):
            amounts = self._rank_beyond(subproblem.open, prices)
            bound = sum(prices) + sum(amount for amount, _ in amounts[:slots])
            if least < 0 or bound < least:
                least, best, stale = bound, (amounts, list(prices)), 0
            else:
                stale += 1
            if least <= self.saved:
                return None
            if stale == PATIENCE:
                stale, slowness = 0, slowness * 2
            members = [-member for _, member in amounts[:slots]]
            self._remember_best(chosen.union(members), sum(self._raise_floor(members, floor)))

            # Down where no member covers a row, up where several do; never below the floor.
            steps = [1] * self._rows
            for member in members:
                for row, saved in self._savings[member]:
                    steps[row] -= saved > prices[row]
            steps = [
                0 if step > 0 and price == bottom else step
                for step, price, bottom in zip(steps, prices, floor, strict=True)
            ]
            norm = sum(step * step for step in steps)
            if not norm:
                break
            pace = max(1, (bound - self.saved) // (slowness * norm))
            prices = [
                max(bottom, price - pace * step)
                for price, step, bottom in zip(prices, steps, floor, strict=True)
            ]
        amounts, best_prices = best
        last = amounts[slots - 1][0] if slots <= len(amounts) else 0
        # A member that would replace one of the best only at a loss is in no better choice.
        useful = sorted(-member for amount, member in amounts if least - last + amount > self.saved)
        return least, replace(subproblem, open=tuple(useful), prices=tuple(best_prices)), -amounts[0][1]

    def _rank_beyond(self, members: Iterable[int], prices: Sequence[int]) -> list[tuple[int, int]]:
        """Return what each member saves beyond the prices, with its negative number, the most first."""
        amounts = []
        for member in members:
            rows = self._savings[member]
            self._spend(len(rows))
            amounts.append((sum(saved - prices[row] for row, saved in rows if saved > prices[row]), -member))
        amounts.sort(reverse=True)
        return amounts

    def _raise_floor(self, members: Iterable[int], floor: Sequence[int] = ()) -> list[int]:
        """Return what each row saves with these members, and at least `floor`."""
        rows = list(floor) or [0] * self._rows
        for member in members:
            for row, saved in self._savings[member]:
                rows[row] = max(rows[row], saved)
        return rows

    def _remember_best(self, members: Iterable[int], saved: int) -> None:
        if saved > self.saved:
            self.best, self.saved = frozenset(members), saved

    def _choose_greedily(self) -> None:
        """Begin with the members that each save most beside those before; of equals, the first."""
        chosen: list[int] = []
        floor = [0] * self._rows
        # Amounts only become less, so a member whose amount is up to date is the next if it comes first.
        heap = [(-sum(saved for _, saved in rows), member) for member, rows in self._savings.items()]
        heapq.heapify(heap)
        while heap and len(chosen) < self._slots:
            old_amount, member = heap[0]
            rows = self._savings[member]
            amount = -sum(saved - floor[row] for row, saved in rows if saved > floor[row])
            if amount != old_amount:
                heapq.heapreplace(heap, (amount, member))
                continue
            if not amount:
                break
            heapq.heappop(heap)
            chosen.append(member)
            floor = self._raise_floor([member], floor)
        self._remember_best(chosen, sum(floor))

    def _swap_members(self) -> None:
        """Exchange a chosen member for another one as long as that saves more (Teitz and Bart 1968)."""
        saved = -1
        while saved < self.saved:
            saved = self.saved
            for member in sorted(self.best):
                if member not in self.best:
                    continue
                rest = self.best - {member}
                floor = self._raise_floor(rest)
                amount, negative = self._rank_beyond(self._savings, floor)[0]
                self._remember_best(rest | {-negative}, sum(floor) + amount)

    def _drop_dominated_members(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """Return the members that no other one can replace in every row; of equals, the first is kept."""
        kept: dict[int, tuple[tuple[int, int], ...]] = {}
        kept_rows: list[dict[int, int]] = []
        order = sorted(self._savings.items(), key=lambda item: (-sum(saved for _, saved in item[1]), item[0]))
        for member, rows in order:
            self._spend(len(kept_rows) + 1)
            if not any(all(by_row.get(row, 0) >= saved for row, saved in rows) for by_row in kept_rows):
                kept[member] = rows
                kept_rows.append(dict(rows))
        return dict(sorted(kept.items()))


def _drop_redundant_members(
    members: frozenset[int], savings: Mapping[int, Mapping[int, int]]
) -> frozenset[int]:
    """Return members without those whose rows save as much by the others; the last are left out first."""
    for member in sorted(members, reverse=True):
        rest = members - {member}
        if all(
            any(savings[rest_member].get(row, 0) >= saved for rest_member in rest)
            for row, saved in savings[member].items()
        ):
            members = rest
    return members
