"""Choosing for several hosts at once: one variant for all, or variants that are alike.

The answer depends on the hosts and the catalog only, so that each rank of a job can compute it by itself. For
a single host it is what `select` returns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from imagematrix.common.record import Record, replace
from imagematrix.common.text import format_count, quote_word, shorten_lines
from imagematrix.errors import UsageError
from imagematrix.hardware.gpu_request.choice import merge_gpus as joined
from imagematrix.hardware.gpu_request.spec import NONE, find_candidates
from imagematrix.hardware.host.host import Host
from imagematrix.selection.candidate import find_failing_results
from imagematrix.selection.decision import explain_ambiguity, find_indistinguishable
from imagematrix.selection.gang import compatibility as alikeness
from imagematrix.selection.gang.gang import ExcludedHosts, Gang, GangMember, NothingFitsAll
from imagematrix.selection.hardware_key import (
    get_gpu_kind,
    keep_distinct_gpus,
    make_hardware_key,
    make_order_key,
)
from imagematrix.selection.rule import Remedy, suggest_arguments
from imagematrix.selection.selection_target import Target
from imagematrix.selection.selector import get_cached_selector
from imagematrix.selection.variant_index import VariantIndex, split_mask

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from typing import Any

    from imagematrix.hardware.gpu_request.choice import Choice
    from imagematrix.hardware.host.host import Gpu
    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.selection.gang.compatibility import Alike
    from imagematrix.selection.order import Criterion
    from imagematrix.selection.query import Query, Where
    from imagematrix.selection.rule import RuleResult
    from imagematrix.selection.selector import Selector

    Positions = tuple[int, ...]  # of GPUs in a Choice

SHOWN = 20  # hosts that a message lists
WHOM = "all hosts"


def select_gang(
    hosts: Mapping[str, Host] | Iterable[Host],
    catalog: Catalog,
    *,
    gpus: int | str | None = None,
    allow_cpu: bool = False,
    where: Where | None = None,
    alike: Alike = None,
) -> Gang:
    """Return what `hosts` run together: one variant that fits all of them, and the best of these.

    `hosts` are by name, as `load_hosts` returns them; those of a list are named by their places, from 1.
    `gpus`, `allow_cpu` and `where` are as for `select`, for each host. With `alike`, such as "cuda,nccl",
    each host may get another variant: they have the same versions of these libraries, the same platform and
    the same values of the image's own axes. By each criterion of the order, the host that fares worst counts.

    Raises NothingFitsAll with the largest set of hosts that works. Raises UsageError if a host has no such
    GPUs, if `where` or `alike` is invalid, and if variants that fit differ in one of the image's own axes.
    """
    selector = get_cached_selector(catalog, where)
    question = selector.query
    names = alikeness.parse_alike(alike, question.catalog.variants)
    kinds = _group_by_hardware(_require_named_hosts(hosts), selector, gpus, allow_cpu=allow_cpu)
    serving = _find_serving_classes(_group_compatible_variants(question, names), kinds)
    if not serving:
        raise _make_refusal(selector, names, kinds)
    return Gang(catalog=question.catalog, alike=names, members=_choose_members(question, serving, kinds))


class _HostKind(Record):
    """Hosts of equal hardware, by name, each with the GPUs that it may pass.

    `targets` are the possible choices of GPUs, the preferred one first: usually it is the only one.
    `positions` are the places of their GPUs. `fitting` are the variants that fit each target and no earlier
    one.
    """

    hosts: dict[str, tuple[Host, Choice]]
    targets: tuple[Target, ...]
    positions: tuple[Positions, ...]
    fitting: tuple[int, ...]

    @property
    def served(self) -> int:
        """The variants that fit one of the targets."""
        return sum(self.fitting)

    def first(self, pool: int) -> tuple[int, int]:
        """Return the first target that variants of a set fit, and these variants."""
        return next((number, own & pool) for number, own in enumerate(self.fitting) if own & pool)

    def member(self, name: str, number: int) -> tuple[Host, tuple[Gpu, ...]]:
        """Return a host with the GPUs of a target."""
        host, choice = self.hosts[name]
        return host, joined(choice.gpus[place] for place in self.positions[number])


def _require_named_hosts(hosts: object) -> dict[str, Host]:
    if isinstance(hosts, Host | str) or not isinstance(hosts, Iterable):
        raise UsageError(f"{hosts!r:.80} are not hosts by name", remedy="read hosts with load_hosts(path)")
    pairs = hosts.items() if isinstance(hosts, Mapping) else ((str(n), one) for n, one in enumerate(hosts, 1))
    named = dict(pairs)
    for host in named.values():
        if not isinstance(host, Host):
            raise UsageError(f"{host!r:.80} is not a Host", remedy="read one with Host.load(path)")
    if not named:
        raise UsageError("a gang of no hosts", remedy="read hosts with load_hosts(path)")
    return {name: named[name] for name in sorted(named)}


def _group_by_hardware(
    hosts: Mapping[str, Host], selector: Selector, gpus: int | str | None, *, allow_cpu: bool
) -> list[_HostKind]:
    """Return the kinds of hardware among the hosts, in the order of their first names; raise UsageError."""
    allow_cpu = allow_cpu or gpus == NONE
    flags = selector.query.index.flags
    found: dict[Hashable, _HostKind] = {}
    errors: list[tuple[str, UsageError]] = []
    for name, host in hosts.items():
        try:
            choice = find_candidates(host.gpus, gpus)
        except UsageError as error:
            errors.append((name, error))
            continue
        key = choice.count, make_hardware_key(host, choice.gpus, allow_cpu=allow_cpu, flags=flags)
        if key not in found:
            found[key] = _make_kind(selector, host, choice, allow_cpu=allow_cpu)
        found[key].hosts[name] = host, choice
    if errors:
        first, *others = [f"{name}: {error}" for name, error in errors]
        raise UsageError(
            first, *shorten_lines(others, SHOWN - 1, more="and {} more hosts"), remedy=errors[0][1].remedy
        )
    return list(found.values())


def _make_kind(selector: Selector, host: Host, choice: Choice, *, allow_cpu: bool) -> _HostKind:
    index = selector.query.index
    several = _find_positions(selector, host, choice, allow_cpu=allow_cpu)
    targets: list[Target] = []
    positions: list[Positions] = []
    fitting: list[int] = []
    seen = 0
    for places in several:
        gpus = tuple([choice.gpus[one] for one in places])
        target = keep_distinct_gpus(Target(host=host, gpus=gpus, allow_cpu=allow_cpu))
        fits = index.find_fitting(target) & ~seen
        if fits or not targets:
            targets.append(target)
            positions.append(places)
            fitting.append(fits)
            seen |= fits
    return _HostKind(hosts={}, targets=tuple(targets), positions=tuple(positions), fitting=tuple(fitting))


def _find_positions(selector: Selector, host: Host, choice: Choice, *, allow_cpu: bool) -> list[Positions]:
    """Return the choices of GPUs that may differ in the variants that fit: first what `select` would pass.

    A variant that fits several GPUs of the host, but not all, gets the first of those.
    """
    every = tuple(range(choice.count))
    if choice.count == len(choice.gpus) or len(set(map(get_gpu_kind, choice.gpus))) == 1:
        return [every]
    index = selector.query.index
    places = {id(gpu): place for place, gpu in enumerate(choice.gpus)}
    usual = [
        tuple(places[id(gpu)] for gpu in narrowed.gpus[: choice.count])
        for narrowed in selector.find_feasible_gpu_sets(host, choice)
    ]
    kinds = list(map(get_gpu_kind, choice.gpus))
    examples = dict(zip(kinds, choice.gpus, strict=True))
    fits = {
        which: index.find_fitting(Target(host=host, gpus=(gpu,), allow_cpu=allow_cpu))
        for which, gpu in examples.items()
    }
    together = {
        frozenset(which for which, variants in fits.items() if variants & variant)
        for variant in split_mask(index.everything)
    }
    others = (
        tuple(place for place, which in enumerate(kinds) if which in some)[: choice.count]
        for some in together
    )
    enough = sorted(some for some in others if len(some) == choice.count)
    return list(dict.fromkeys([*usual, *enough]))


def _group_compatible_variants(question: Query, names: Sequence[str] | None) -> list[int]:
    """Return the sets of variants that may run together."""
    return question.index.group_by_need(lambda variant: alikeness.make_compatibility_key(variant, names))


def _choose_members(
    question: Query, classes: Sequence[int], kinds: Sequence[_HostKind], *, settled: bool = False
) -> tuple[GangMember, ...]:
    """Return the members of the best of the classes, each of which serves all kinds; raise UsageError.

    If it is `settled` which class is the answer, the first of the best variants is taken.
    """
    index = question.index
    groups: dict[Hashable, list[_HostKind]] = {}
    for one in kinds:
        groups.setdefault((one.fitting, tuple(map(make_order_key, one.targets))), []).append(one)
    kinds = [group[0] for group in groups.values()]
    rows = [[one.first(own) for one in kinds] for own in classes]
    least = min(max(number for number, _ in row) for row in rows)
    rows = [row for row in rows if max(number for number, _ in row) == least]
    differing = index.find_differing_axes(_unite_masks(pool for row in rows for _, pool in row))
    for criterion in index.criteria:
        rows = _narrow_rows(index, criterion, rows, kinds)
    # The variants are numbered in the order of their references.
    row = min(rows, key=lambda row: [pool & -pool for _, pool in row])
    members = []
    for place, (group, (number, pool)) in enumerate(zip(groups.values(), row, strict=True)):
        (variant,) = index.list_members(pool & -pool)
        leading = index.list_members(_unite_masks(row[place][1] for row in rows))
        same = find_indistinguishable([variant, *(other for other in leading if other is not variant)])
        if not settled and (differing or len(same) > 1):
            why, remedy = explain_ambiguity(question.catalog, differing, leading if differing else same, WHOM)
            raise UsageError(why, remedy=remedy.words, shown=remedy.shown)
        for one in group:
            for name in one.hosts:
                host, gpus = one.member(name, number)
                members.append(GangMember(name=name, host=host, variant=variant, chosen_gpus=gpus))
    return tuple(sorted(members, key=lambda member: member.name))


def _narrow_rows(
    index: VariantIndex,
    criterion: Criterion,
    rows: list[list[tuple[int, int]]],
    kinds: Sequence[_HostKind],
) -> list[list[tuple[int, int]]]:
    """Return the rows whose worst place by a criterion is the best, with the best variants for each kind."""
    places: dict[tuple[int, int], list[tuple[Any, int]]] = {}
    pools: dict[tuple[int, int], int] = {}
    for row in rows:
        for which, (number, pool) in enumerate(row):
            pools[which, number] = pools.get((which, number), 0) | pool
    for (which, number), pool in pools.items():
        merged: dict[Any, int] = {}
        for place, members in index.compute_scores(criterion, kinds[which].targets[number], pool):
            merged[place] = merged.get(place, 0) | members
        places[which, number] = sorted(merged.items())
    scored: list[tuple[Any, list[tuple[int, int]]]] = []
    for row in rows:
        placed = [
            next(one for one in places[which, number] if one[1] & pool)
            for which, (number, pool) in enumerate(row)
        ]
        narrowed = [
            (number, members & pool) for (number, pool), (_, members) in zip(row, placed, strict=True)
        ]
        scored.append((max(place for place, _ in placed), narrowed))
    best = min(worst for worst, _ in scored)
    return [narrowed for worst, narrowed in scored if worst == best]


def _make_refusal(
    selector: Selector, names: tuple[str, ...] | None, kinds: Sequence[_HostKind]
) -> NothingFitsAll:
    """Return the error for hosts that no class serves, with the largest gang."""
    question = selector.query
    largest, served = _find_largest_class(question, names, kinds)
    inside = [one for one in kinds if one.served & largest]
    outside = [one for one in kinds if not one.served & largest]
    unknown = alikeness.count_unknown_versions(question.catalog.variants, names or ())
    gang = Gang(
        catalog=question.catalog,
        alike=names,
        members=_choose_members(question, [largest], inside, settled=True) if inside else (),
        left=tuple(
            _group_excluded_hosts(question, largest if inside else question.index.everything, outside)
        ),
        unknown=tuple(unknown.items()),
    )
    number = served + sum(len(left.hosts) for left in gang.left)
    remedy = _find_remedy(question, gang, kinds)
    return NothingFitsAll(
        _explain_exclusion(gang, number), gang=gang, remedy=remedy.words, shown=remedy.shown
    )


def _find_largest_class(
    question: Query, names: tuple[str, ...] | None, kinds: Iterable[_HostKind]
) -> tuple[int, int]:
    """Return the class that serves the most hosts, and how many; of equals that of the first reference."""
    hosts: dict[int, int] = {}
    for one in kinds:
        hosts[one.served] = hosts.get(one.served, 0) + len(one.hosts)
    best = (0, 0)
    for own in sorted(_group_compatible_variants(question, names), key=lambda own: own & -own):
        served = sum(count for mask, count in hosts.items() if mask & own)
        best = max(best, (own, served), key=lambda each: each[1])
    return best


def _group_excluded_hosts(question: Query, variants: int, kinds: Iterable[_HostKind]) -> list[ExcludedHosts]:
    """Return the hosts that a set of variants leaves out, by the rules that the nearest of them fails."""
    index = question.index
    if not index.everything:
        return [
            ExcludedHosts(hosts=tuple(name for one in kinds for name in one.hosts), nearest=None, rules=())
        ]
    among = VariantIndex(tuple(index.list_members(variants)), index.criteria)
    found: dict[Hashable, tuple[str, tuple[RuleResult, ...], list[str]]] = {}
    for one in kinds:
        nearest = among.find_nearest(one.targets[0])
        host, gpus = one.member(next(iter(one.hosts)), 0)
        target = replace(one.targets[0], host=host, gpus=gpus)
        failing = find_failing_results(target, nearest)
        found.setdefault((nearest.reference, failing), (nearest.reference, failing, []))[2].extend(one.hosts)
    return [
        ExcludedHosts(hosts=tuple(sorted(names)), nearest=reference, rules=failing)
        for reference, failing, names in found.values()
    ]


def _explain_exclusion(gang: Gang, hosts: int) -> str:
    name = f"{gang.catalog.image}:{gang.catalog.version}"
    same = f" that are alike in {', '.join(gang.alike)}" if gang.alike else ""
    what = f"no variants of {name}{same} fit" if gang.alike is not None else f"no variant of {name} fits"
    if not gang.members:
        return f"{what} any of the {format_count(hosts, 'host')}"
    variant = gang.members[0].variant
    shared = alikeness.describe_shared_libraries(variant, gang.alike or ())
    most = f"those with {shared} fit" if shared else "the best fit"
    most = f"{variant.reference} fits" if gang.alike is None else most
    return f"{what} all {hosts} hosts: {most} {len(gang.members)}, but not"


def _find_remedy(question: Query, gang: Gang, kinds: Sequence[_HostKind]) -> Remedy:
    if gang.unknown:
        told = ", ".join(
            f"{name} is unknown of {format_count(number, 'variant')}" for name, number in gang.unknown
        )
        return Remedy(
            words=f"{told}, which are like no other: build them again, or adopt them, which reads their bytes"
        )
    if gang.alike is None and _find_serving_classes(
        _group_compatible_variants(question, alikeness.USUAL), kinds
    ):
        usual = ",".join(alikeness.USUAL)
        return suggest_arguments("{} lets hosts run different variants", f"--alike {usual}", alike=usual)
    name = f"{gang.catalog.image}:{gang.catalog.version}"
    return Remedy(words=f"see with `imagematrix explain {quote_word(name)} --host FILE` what a host needs")


def _find_serving_classes(classes: Iterable[int], kinds: Sequence[_HostKind]) -> list[int]:
    """Return the classes that have a variant for each kind."""
    served = {one.served for one in kinds}
    return [own for own in classes if all(mask & own for mask in served)]


def _unite_masks(masks: Iterable[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union
