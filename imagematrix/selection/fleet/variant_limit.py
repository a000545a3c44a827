"""The few variants that serve the most hosts of a fleet, and then lose least."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, dataclass, replace

from imagematrix.errors import UsageError
from imagematrix.selection.fleet.loss import LossCounts, measure_losses
from imagematrix.selection.fleet.p_median import WORK, find_median

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from imagematrix.selection.decision import Decision

SMALL = 20  # numbers of variants of which each is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDemand:
    """Hosts of one kind, and the variants that fit them, best first, each with the loss of one host."""

    hosts: tuple[str, ...]
    fits: tuple[tuple[str, LossCounts], ...]

    def find_loss(self, variants: Collection[str]) -> LossCounts | None:
        """Return what a host loses if there are only these variants, or None if none of them fits."""
        return next((loss for reference, loss in self.fits if reference in variants), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedChoice:
    """At most `limit` variants: the `variants` to keep, by reference, and what all hosts lose with them.

    No choice of so many loses less than `least`, which is proved; if the search ended early, it is less than
    `loss`. `left_out` are the names of the hosts that would get a variant of the others, sorted. `worse` is
    the number of hosts that get a variant by which they lose something.
    """

    limit: int
    variants: tuple[str, ...]
    loss: LossCounts
    least: LossCounts
    left_out: tuple[str, ...]
    worse: int

    @property
    def exact(self) -> bool:
        """Whether no choice loses less."""
        return self.loss == self.least

    def to_json(self) -> dict[str, object]:
        """Return one element of a document's `by_number`."""
        return {
            "limit": self.limit,
            "variants": list(self.variants),
            "loss": self.loss.to_json(),
            "least": self.least.to_json(),
            "exact": self.exact,
            "left_out": list(self.left_out),
            "worse": self.worse,
        }


def make_demand(hosts: Iterable[str], decision: Decision) -> HostDemand:
    """Return what hosts of one kind demand, as a decision about them finds it."""
    return HostDemand(hosts=tuple(hosts), fits=tuple(measure_losses(decision)))


def choose_at_most(
    demands: Sequence[HostDemand], limit: int, *, always: Collection[str] = (), work: int = WORK
) -> LimitedChoice:
    """Return at most `limit` variants, the ones in `always` counted, that serve most hosts and lose least.

    The search is bounded by `work`, so that every machine finds the same. Raises UsageError if `always` has
    more than `limit`.
    """
    if limit < len(always):
        raise UsageError(
            f"at most {limit} are too few: {len(always)} variants are for plain pulls",
            remedy=f"allow at least {len(always)}",
        )
    demands = [demand for demand in demands if demand.fits]
    order = _order_variants(demands, always)
    index = {reference: number for number, reference in enumerate(order)}
    scale = _LossScale(demands)
    counts: Counter[tuple[tuple[str, LossCounts], ...]] = (
        Counter()
    )  # hosts that lose the same by each variant
    for demand in demands:
        counts[demand.fits] += len(demand.hosts)
    median = find_median(
        [
            {index[reference]: scale.encode(loss.multiply(hosts)) for reference, loss in fits}
            for fits, hosts in counts.items()
        ],
        [scale.encode(LossCounts(left_out=hosts)) for hosts in counts.values()],
        limit,
        kept=[index[reference] for reference in always],
        work=work,
    )

    kept = {order[member] for member in median.members}
    losses = [(demand.hosts, demand.find_loss(kept)) for demand in demands]
    return LimitedChoice(
        limit=limit,
        variants=tuple(reference for reference in order if reference in kept),
        loss=scale.decode(median.cost),
        least=scale.decode(max(0, median.least)),
        left_out=tuple(sorted({name for hosts, loss in losses if loss is None for name in hosts})),
        worse=len({name for hosts, loss in losses if loss for name in hosts if loss != LossCounts()}),
    )


def choose_for_each_number(
    demands: Sequence[HostDemand],
    answer: LimitedChoice | None = None,
    *,
    always: Collection[str] = (),
    work: int = WORK,
) -> tuple[LimitedChoice, ...]:
    """Return the best choice for each number of variants, until more would not help.

    Of large numbers, only some are tried. `answer` is one of the choices, if it is known. All others share
    the steps of one search.
    """
    demands = [demand for demand in demands if demand.fits]
    fewest = max(1, len(always))
    most = max(fewest, len({demand.fits[0][0] for demand in demands}.union(always)))
    numbers = _list_limits(fewest, most, answer.limit if answer else fewest)
    points: list[LimitedChoice] = []
    for limit in numbers:
        if answer and answer.limit == limit:
            point = answer
        else:
            point = choose_at_most(demands, limit, always=always, work=work // len(numbers))
        if points and points[-1].loss < point.loss:  # a search that ended early
            point = replace(points[-1], limit=limit, least=min(point.least, points[-1].loss))
        points.append(point)
        if point.loss == LossCounts():
            break
    return tuple(points)


def _list_limits(fewest: int, most: int, requested: int) -> list[int]:
    """Return the numbers to try: all small ones, then each a fifth more than the one before."""
    numbers = {number for number in (fewest, most, requested) if fewest <= number <= most}
    number = fewest
    while number < most:
        numbers.add(number)
        number += 1 if number < SMALL else number // 5
    return sorted(numbers)


class _LossScale:
    """Losses as numbers that have the same order, also after they are summed over all hosts.

    The number has a digit for each field of a loss, the worst first; the base of a digit is greater than the
    most that all hosts together can lose of that field.
    """

    def __init__(self, demands: Sequence[HostDemand]) -> None:
        most = LossCounts(left_out=sum(len(demand.hosts) for demand in demands))
        for demand in demands:
            losses = [astuple(loss) for _, loss in demand.fits]
            most += LossCounts.from_amounts(*map(max, zip(*losses, strict=True))).multiply(len(demand.hosts))
        self._bases = [amount + 1 for amount in astuple(most)]

    def encode(self, loss: LossCounts) -> int:
        number = 0
        for base, amount in zip(self._bases, astuple(loss), strict=True):
            number = number * base + amount
        return number

    def decode(self, number: int) -> LossCounts:
        amounts = []
        for base in reversed(self._bases[1:]):
            number, amount = divmod(number, base)
            amounts.append(amount)
        return LossCounts.from_amounts(number, *reversed(amounts))


def _order_variants(demands: Sequence[HostDemand], always: Collection[str]) -> list[str]:
    """Return all variants: those first that most hosts choose now, then by reference."""
    hosts = dict.fromkeys(always, 0)
    for demand in demands:
        for reference, _ in demand.fits:
            hosts.setdefault(reference, 0)
        hosts[demand.fits[0][0]] += len(demand.hosts)
    return sorted(hosts, key=lambda reference: (-hosts[reference], reference))
