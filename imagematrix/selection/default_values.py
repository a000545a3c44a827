"""Default values that are not the first of their order: which ones were passed over, and why."""

from __future__ import annotations

from imagematrix.selection.candidate import find_failing_results
from imagematrix.selection.rule import RuleWarning, select_relevant
from imagematrix.selection.variant_index import VariantIndex, get_first

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from imagematrix.selection.query import Query
    from imagematrix.selection.selection_target import Target
    from imagematrix.selection.verdicts import VariantSet

KIND = "default"  # of the warning


def warn_of_later_default(
    query: Query, chosen: VariantSet, targets: Iterable[Target]
) -> Iterator[RuleWarning]:
    """Yield a warning if the `chosen` variants, which have equal values, do not have the first defaults.

    It has the reason why the nearest variant with the first values does not fit the first of the `targets`
    that none of them fits.
    """
    index = query.index
    (variant,) = index.list_members(get_first(chosen))
    values = dict(variant.axes)
    later = {axis: order[0] for axis, order in query.default_order if values[axis] != order[0]}
    if not later:
        return
    taken = ", ".join(f"{axis} {values[axis]}" for axis in later)
    first = ", ".join(later.values())
    members = tuple(
        other
        for other in index.list_members(index.everything)
        if all(dict(other.axes)[axis] == order[0] for axis, order in query.default_order)
    )
    if not members:
        yield RuleWarning(kind=KIND, text=f"{taken}: there is no variant with {first}")
        return
    passed_over = VariantIndex(members, index.criteria)
    target = next((target for target in targets if not passed_over.find_fitting(target)), None)
    if target is None:  # of several hosts, each fits another one of them
        yield RuleWarning(kind=KIND, text=f"{taken}: no single variant with {first} fits all hosts")
        return
    why = select_relevant(find_failing_results(target, passed_over.find_nearest(target)))[0].why
    yield RuleWarning(kind=KIND, text=f"{taken}: {first} does not fit: {why}")
