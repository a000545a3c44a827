"""Choosing for several hosts at once: one variant for all, or variants that are alike.

The answer depends on the hosts and the catalog only, so that each rank of a job can compute it by itself. For
a single host it is what `select` returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import or_

from imagematrix.common.groups import group_values
from imagematrix.common.record import Record, replace
from imagematrix.common.text import format_count, quote_word, shorten_lines
from imagematrix.errors import UsageError
from imagematrix.hardware.gpu_request.choice import merge_gpus
from imagematrix.hardware.gpu_request.spec import NONE, find_candidates
from imagematrix.hardware.host.host import Host
from imagematrix.selection.candidate import find_failing_results
from imagematrix.selection.decision import explain_ambiguity, find_indistinguishable
from imagematrix.selection.gang import compatibility
from imagematrix.selection.gang.gang import ExcludedHosts, Gang, GangMember, NothingFitsAll
from imagematrix.selection.hardware_key import (
    get_gpu_kind,
    keep_distinct_gpus,
    make_gpu_facts_getter,
    make_hardware_key,
    make_order_key,
)
from imagematrix.selection.rule import Remedy, suggest_arguments
from imagematrix.selection.selection_target import Target
from imagematrix.selection.selector import find_variant_gpu_sets, get_cached_selector
from imagematrix.selection.variant_index import VariantIndex, get_first

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
    from imagematrix.selection.rule import RuleResult, RuleWarning
    from imagematrix.selection.selector import Selector
    from imagematrix.selection.verdicts import VariantSet

    Positions = tuple[int, ...]  # of GPUs in a Choice
    Cell = tuple[int, VariantSet]  # the index of a target, and the variants that fit it
    Row = list[Cell]  # one for each kind of hosts

SHOWN = 20  # hosts that a message lists
WHOM = "all hosts"

# How a gang is chosen. Hosts of equal hardware are a kind. Variants that may run together are a class: one
# variant alone, or with `alike` all that have the same versions. A class is a possible answer if it has a
# variant for each kind.
#
# Each such class is a row with a cell for each kind: the first target (a choice of the hosts' GPUs) that a
# variant of the class fits, and all variants of the class that fit it. By each criterion of the order, a row
# is as good as its worst cell: only the best rows stay, and in their cells only the best variants. So no host
# fares better at the expense of the one that fares worst.


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
    query = selector.query
    names = compatibility.parse_alike(alike, query.catalog.variants)
    if isinstance(hosts, Host | str) or not isinstance(hosts, Iterable):
        raise UsageError(f"{hosts!r:.80} are not hosts by name", remedy="read hosts with load_hosts(path)")
    if isinstance(hosts, Mapping):
        by_name = dict(sorted(hosts.items()))
    else:
        by_name = {str(number): host for number, host in enumerate(hosts, 1)}
    for host in by_name.values():
        if not isinstance(host, Host):
            raise UsageError(f"{host!r:.80} is not a Host", remedy="read one with Host.load(path)")
    if not by_name:
        raise UsageError("a gang of no hosts", remedy="read hosts with load_hosts(path)")

    kinds = _group_by_hardware(by_name, selector, gpus, allow_cpu=allow_cpu)
    serving = _find_serving_classes(_group_compatible_variants(query, names), kinds)
    places = {name: place for place, name in enumerate(by_name)}
    if not serving:
        raise _make_refusal(query, names, kinds, places)
    return Gang(
        catalog=query.catalog,
        alike=names,
        members=_choose_members(query, serving, kinds, places),
        warnings=_warn_of_defaults(query, serving, kinds),
    )


def _warn_of_defaults(
    query: Query, serving: Sequence[VariantSet], kinds: Sequence[_HostKind]
) -> tuple[RuleWarning, ...]:
    """Return the warning that the gang's values are not the first defaults, if so."""
    if not query.default_order:
        return ()
    from imagematrix.selection.default_values import warn_of_later_default

    chosen = query.index.keep_first_defaults(reduce(or_, serving))
    return tuple(warn_of_later_default(query, chosen, [kind.targets[0] for kind in kinds]))


class _HostKind(Record):
    """Hosts of equal hardware, by name, each with the GPUs that it may pass.

    `targets` are the possible choices of GPUs, the preferred one first: usually it is the only one.
    `positions` are the places of their GPUs. `fitting` are the variants that fit each target and no earlier
    one.
    """

    hosts: dict[str, tuple[Host, Choice]]
    targets: tuple[Target, ...]
    positions: tuple[Positions, ...]
    fitting: tuple[VariantSet, ...]

    @property
    def variants(self) -> VariantSet:
        """The variants that fit one of the targets."""
        return sum(self.fitting)

    def find_cell(self, pool: VariantSet) -> Cell:
        """Return the first target that variants of a set fit, and these variants."""
        return next((index, fits & pool) for index, fits in enumerate(self.fitting) if fits & pool)

    def choose_gpus(self, name: str, target: int) -> tuple[Host, tuple[Gpu, ...]]:
        """Return a host with the GPUs of a target."""
        host, choice = self.hosts[name]
        return host, merge_gpus(choice.gpus[position] for position in self.positions[target])


def _group_by_hardware(
    hosts: Mapping[str, Host], selector: Selector, gpus: int | str | None, *, allow_cpu: bool
) -> list[_HostKind]:
    """Return the kinds of hardware among the hosts, in the order of their first names; raise UsageError."""
    allow_cpu = allow_cpu or gpus == NONE
    # Hosts of a gang may all differ, so only what the catalog's variants need tells kinds apart.
    index = selector.query.index
    flags, get_gpu_facts = index.flags, make_gpu_facts_getter(index.facts)
    kinds: dict[Hashable, _HostKind] = {}
    errors: list[tuple[str, UsageError]] = []
    for name, host in hosts.items():
        try:
            choice = find_candidates(host.gpus, gpus)
        except UsageError as error:
            errors.append((name, error))
            continue
        hardware = make_hardware_key(
            host, choice.gpus, allow_cpu=allow_cpu, flags=flags, get_gpu_facts=get_gpu_facts
        )
        key = choice.count, hardware
        if key not in kinds:
            kinds[key] = _make_kind(selector, host, choice, allow_cpu=allow_cpu)
        kinds[key].hosts[name] = host, choice
    if errors:
        first, *rest = [f"{name}: {error}" for name, error in errors]
        raise UsageError(
            first, *shorten_lines(rest, SHOWN - 1, more="and {} more hosts"), remedy=errors[0][1].remedy
        )
    return list(kinds.values())


def _make_kind(selector: Selector, host: Host, choice: Choice, *, allow_cpu: bool) -> _HostKind:
    """Return the kind of a host, without any hosts yet."""
    index = selector.query.index
    targets: list[Target] = []
    kept_positions: list[Positions] = []
    fitting: list[VariantSet] = []
    variants = 0
    for positions in _find_positions(selector, host, choice, allow_cpu=allow_cpu):
        gpus = tuple([choice.gpus[position] for position in positions])
        target = keep_distinct_gpus(Target(host=host, gpus=gpus, allow_cpu=allow_cpu))
        # A choice of GPUs is of use only for variants that fit no earlier one.
        fits = index.find_fitting(target) & ~variants
        if fits or not targets:
            targets.append(target)
            kept_positions.append(positions)
            fitting.append(fits)
            variants |= fits
    return _HostKind(
        hosts={}, targets=tuple(targets), positions=tuple(kept_positions), fitting=tuple(fitting)
    )


def _find_positions(selector: Selector, host: Host, choice: Choice, *, allow_cpu: bool) -> list[Positions]:
    """Return the choices of GPUs that may differ in the variants that fit: first what `select` would pass.

    A variant that fits several GPUs of the host, but not all, gets the first of those.
    """
    if choice.count == len(choice.gpus) or len(set(map(get_gpu_kind, choice.gpus))) == 1:
        return [tuple(range(choice.count))]
    index = selector.query.index
    position_by_id = {id(gpu): position for position, gpu in enumerate(choice.gpus)}
    preferred = [
        tuple(position_by_id[id(gpu)] for gpu in narrowed.gpus[: choice.count])
        for narrowed in selector.find_feasible_gpu_sets(host, choice)
    ]
    sufficient = sorted(
        tuple(sorted(gpus)[: choice.count])
        for gpus in find_variant_gpu_sets(
            index, host, choice.gpus, among=index.everything, allow_cpu=allow_cpu
        )
        if len(gpus) >= choice.count
    )
    return list(dict.fromkeys([*preferred, *sufficient]))


def _group_compatible_variants(query: Query, names: Sequence[str] | None) -> list[VariantSet]:
    """Return the classes: the sets of variants that may run together."""
    return query.index.group_by_need(lambda variant: compatibility.make_compatibility_key(variant, names))


def _choose_members(
    query: Query,
    classes: Sequence[VariantSet],
    kinds: Sequence[_HostKind],
    places: Mapping[str, int],
    *,
    take_first: bool = False,
) -> tuple[GangMember, ...]:
    """Return the members of the best of the classes, each of which serves all kinds, by their `places`.

    Raises UsageError if nothing tells the best variants apart.
    With `take_first`, the first of them is taken.
    """
    index = query.index
    # Kinds that differ only in what neither a rule nor a criterion reads get the same variants.
    groups = group_values(((kind.fitting, tuple(map(make_order_key, kind.targets))), kind) for kind in kinds)
    kinds = [group[0] for group in groups.values()]

    # The first default values come before the preferred choices of GPUs, and these before all criteria.
    # All variants of a class have equal values.
    chosen = index.keep_first_defaults(reduce(or_, classes))
    classes = [variants for variants in classes if variants & chosen]
    rows = [[kind.find_cell(variants) for kind in kinds] for variants in classes]
    least = min(max(target for target, _ in row) for row in rows)
    rows = [row for row in rows if max(target for target, _ in row) == least]
    differing = index.find_differing_axes(reduce(or_, (pool for row in rows for _, pool in row)))
    for criterion in index.criteria:
        rows = _narrow_rows(index, criterion, rows, kinds)
    # The variants are numbered in the order of their references.
    # Sorted first: the columns are in the order of the hosts' names, which must not decide.
    best = min(rows, key=lambda row: (sorted(firsts := [get_first(pool) for _, pool in row]), firsts))

    members = []
    for column, (group, (target, pool)) in enumerate(zip(groups.values(), best, strict=True)):
        (variant,) = index.list_members(get_first(pool))
        equals = index.list_members(reduce(or_, (row[column][1] for row in rows)))
        twins = find_indistinguishable([variant, *(equal for equal in equals if equal is not variant)])
        if not take_first and (differing or len(twins) > 1):
            why, remedy = explain_ambiguity(query.catalog, differing, equals if differing else twins, WHOM)
            raise UsageError(why, remedy=remedy.words, shown=remedy.shown)
        for kind in group:
            for name in kind.hosts:
                host, gpus = kind.choose_gpus(name, target)
                members.append(GangMember(name=name, host=host, variant=variant, chosen_gpus=gpus))
    return tuple(sorted(members, key=lambda member: places[member.name]))


def _narrow_rows(
    index: VariantIndex, criterion: Criterion, rows: list[Row], kinds: Sequence[_HostKind]
) -> list[Row]:
    """Return the rows whose worst score by a criterion is the best, with the best variants for each kind."""
    # Score all variants of a column at once: rows share many of them.
    pools: dict[tuple[int, int], VariantSet] = {}  # by column and target
    for row in rows:
        for column, (target, pool) in enumerate(row):
            pools[column, target] = pools.get((column, target), 0) | pool
    scores: dict[tuple[int, int], list[tuple[Any, VariantSet]]] = {}
    for (column, target), pool in pools.items():
        merged: dict[Any, VariantSet] = {}
        for score, members in index.compute_scores(criterion, kinds[column].targets[target], pool):
            merged[score] = merged.get(score, 0) | members
        scores[column, target] = sorted(merged.items())

    narrowed: list[tuple[Any, Row]] = []
    for row in rows:
        best = [
            next((score, members) for score, members in scores[column, target] if members & pool)
            for column, (target, pool) in enumerate(row)
        ]
        cells = [(target, members & pool) for (target, pool), (_, members) in zip(row, best, strict=True)]
        narrowed.append((max(score for score, _ in best), cells))
    least = min(worst for worst, _ in narrowed)
    return [row for worst, row in narrowed if worst == least]


def _make_refusal(
    query: Query, names: tuple[str, ...] | None, kinds: Sequence[_HostKind], places: Mapping[str, int]
) -> NothingFitsAll:
    """Return the error for hosts that no class serves, with the largest gang."""
    # The class that serves the most hosts; of equals, that of the first reference.
    hosts: dict[VariantSet, int] = {}
    for kind in kinds:
        hosts[kind.variants] = hosts.get(kind.variants, 0) + len(kind.hosts)
    largest, served = 0, 0
    for variants in sorted(_group_compatible_variants(query, names), key=get_first):
        count = sum(count for mask, count in hosts.items() if mask & variants)
        if count > served:
            largest, served = variants, count

    inside = [kind for kind in kinds if kind.variants & largest]
    outside = [kind for kind in kinds if not kind.variants & largest]
    unknown = compatibility.count_unknown_versions(query.catalog.variants, names or ())
    gang = Gang(
        catalog=query.catalog,
        alike=names,
        members=_choose_members(query, [largest], inside, places, take_first=True) if inside else (),
        left=tuple(_group_excluded_hosts(query, largest if inside else query.index.everything, outside)),
        unknown=tuple(unknown.items()),
    )
    number = served + sum(len(excluded.hosts) for excluded in gang.left)
    remedy = _find_remedy(query, gang, kinds)
    return NothingFitsAll(
        _explain_exclusion(gang, number), gang=gang, remedy=remedy.words, shown=remedy.shown
    )


def _group_excluded_hosts(
    query: Query, variants: VariantSet, kinds: Iterable[_HostKind]
) -> list[ExcludedHosts]:
    """Return the hosts that a set of variants does not serve, by the rules that the nearest of them fails."""
    index = query.index
    if not index.everything:
        hosts = tuple(name for kind in kinds for name in kind.hosts)
        return [ExcludedHosts(hosts=hosts, nearest=None, rules=())]
    members = VariantIndex(tuple(index.list_members(variants)), index.criteria)
    by_reason: dict[tuple[str, tuple[RuleResult, ...]], list[str]] = {}
    for kind in kinds:
        nearest = members.find_nearest(kind.targets[0])
        host, gpus = kind.choose_gpus(next(iter(kind.hosts)), 0)
        target = replace(kind.targets[0], host=host, gpus=gpus)
        failing = find_failing_results(target, nearest)
        by_reason.setdefault((nearest.reference, failing), []).extend(kind.hosts)
    return [
        ExcludedHosts(hosts=tuple(sorted(names)), nearest=reference, rules=failing)
        for (reference, failing), names in by_reason.items()
    ]


def _explain_exclusion(gang: Gang, hosts: int) -> str:
    name = f"{gang.catalog.image}:{gang.catalog.version}"
    alike = f" that are alike in {', '.join(gang.alike)}" if gang.alike else ""
    what = f"no variants of {name}{alike} fit" if gang.alike is not None else f"no variant of {name} fits"
    if not gang.members:
        return f"{what} any of the {format_count(hosts, 'host')}"
    variant = gang.members[0].variant
    shared = compatibility.describe_shared_libraries(variant, gang.alike or ())
    most = f"those with {shared} fit" if shared else "the best fit"
    most = f"{variant.reference} fits" if gang.alike is None else most
    return f"{what} all {hosts} hosts: {most} {len(gang.members)}, but not"


def _find_remedy(query: Query, gang: Gang, kinds: Sequence[_HostKind]) -> Remedy:
    machines = Counter(host.arch for kind in kinds for host, _ in kind.hosts.values())
    if len(machines) > 1:
        counts = " and ".join(
            f"{format_count(count, 'host')} of {machine}" for machine, count in sorted(machines.items())
        )
        return Remedy(words=f"{counts} have no platform in common: choose for each architecture by itself")
    if gang.unknown:
        unknown = ", ".join(
            f"{name} is unknown of {format_count(number, 'variant')}" for name, number in gang.unknown
        )
        return Remedy(
            words=f"{unknown}, which are like no other: "
            "build them again, or adopt them, which reads their bytes"
        )
    usual = compatibility.USUAL
    if gang.alike is None and _find_serving_classes(_group_compatible_variants(query, usual), kinds):
        names = ",".join(usual)
        return suggest_arguments("{} lets hosts run different variants", f"--alike {names}", alike=names)
    name = f"{gang.catalog.image}:{gang.catalog.version}"
    return Remedy(words=f"see with `imagematrix explain {quote_word(name)} --host FILE` what a host needs")


def _find_serving_classes(classes: Iterable[VariantSet], kinds: Sequence[_HostKind]) -> list[VariantSet]:
    """Return the classes that have a variant for each kind."""
    masks = {kind.variants for kind in kinds}
    return [variants for variants in classes if all(mask & variants for mask in masks)]
