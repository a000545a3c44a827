"""Choosing the image for a host: the same host and the same catalog always give the same answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.hardware.gpu_request.spec import ALL, NONE, find_candidates
from imagematrix.hardware.host.host import Host
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.selection.decision import Decision
from imagematrix.selection.hardware_key import get_gpu_kind, make_hardware_key
from imagematrix.selection.query import Query, normalize_where
from imagematrix.selection.selection import NothingFits, Selection, require_selected
from imagematrix.selection.selection_target import Target
from imagematrix.selection.variant_index import split_mask

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from typing import TypeVar

    from imagematrix.hardware.gpu_request.choice import Choice
    from imagematrix.hardware.gpu_request.spec import Wanted
    from imagematrix.hardware.host.host import Gpu
    from imagematrix.selection.query import Where, WhereKey
    from imagematrix.selection.variant_index import VariantIndex
    from imagematrix.selection.verdicts import VariantSet

    T = TypeVar("T")

CATALOGS = 8  # selectors kept by the functions below
DECISIONS = 10_000  # kinds of hardware that a selector keeps decisions for, by default


def select(
    host: Host,
    catalog: Catalog,
    *,
    gpus: Wanted = None,
    allow_cpu: bool = False,
    where: Where | None = None,
    vram_mib: int | None = None,
) -> Selection:
    """Return the variant that fits `host` best.

    `gpus` says which GPUs to pass: a count, a value of `--gpus`, or a list of GPUs of the host; None passes
    all. Of a count, the first GPUs that a variant fits are passed, which are those that `run` takes if all
    are free. A host with any sign of an accelerator gets a CPU-only variant only with `allow_cpu`, or if
    `gpus` is "none". `where` has conditions on axes, such as {"python": "3.13"}, each a word or several in
    the syntax of `--only`, or one text such as "python=3.13,cuda>=12": only variants that meet them are
    considered. The catalog's defaults decide about axes that it leaves open. `vram_mib` is the share of each
    GPU's memory that a container gets, which images that state a need of memory have to fit; None for all.

    Raises NothingFits with every reason if none fits. Raises UsageError if the host has no such GPUs, if no
    variant has such an axis or value, and if variants that fit still differ in one of the image's own axes.
    """
    return get_cached_selector(catalog, where).select(host, gpus=gpus, allow_cpu=allow_cpu, vram_mib=vram_mib)


def explain(
    host: Host,
    catalog: Catalog,
    *,
    gpus: Wanted = None,
    allow_cpu: bool = False,
    where: Where | None = None,
    vram_mib: int | None = None,
) -> Selection:
    """Return what `select` finds, with `selected` None if nothing fits or the question leaves it open."""
    return get_cached_selector(catalog, where).explain(
        host, gpus=gpus, allow_cpu=allow_cpu, vram_mib=vram_mib
    )


def select_many(
    hosts: Iterable[Host] | Mapping[str, Host],
    catalog: Catalog,
    *,
    gpus: int | str | None = None,
    allow_cpu: bool = False,
    where: Where | None = None,
) -> list[Selection | NothingFits | UsageError]:
    """Return for each host, in their order, what `select` returns or raises.

    Of hosts by name, as `load_hosts` returns them, the names play no part.
    """
    selector = get_cached_selector(catalog, where)
    if isinstance(hosts, Host):
        raise UsageError(
            "a single host instead of several", remedy="give a list of hosts, or call imagematrix.select"
        )
    if isinstance(hosts, Mapping):
        hosts = hosts.values()
    if isinstance(hosts, str) or not isinstance(hosts, Iterable):
        raise UsageError(f"{hosts!r:.80} is not a list of hosts", remedy="read hosts with load_hosts(path)")
    answers: list[Selection | NothingFits | UsageError] = []
    for host in hosts:
        try:
            answers.append(selector.select(host, gpus=gpus, allow_cpu=allow_cpu))
        except (NothingFits, UsageError) as error:
            answers.append(error)
    return answers


def find_feasible_gpu_sets(
    host: Host, catalog: Catalog, choice: Choice, where: Where | None = None, *, vram_mib: int | None = None
) -> tuple[Choice, ...]:
    """Narrow a choice of the host's GPUs to the choices for which a single GPU variant fits.

    Whatever GPUs are taken from one of these choices, a variant fits them together; GPUs that one variant
    fits together are in one of the choices. The choice with the first GPUs comes first. If nothing fits, or
    `choice` takes all its GPUs, it is returned alone. `vram_mib` is as for `select`.
    """
    return get_cached_selector(catalog, where).find_feasible_gpu_sets(host, choice, vram_mib=vram_mib)


class Selector:
    """Selects from a catalog for many hosts; decides once for each kind of hardware.

    It caches the decisions for `keep` kinds.
    """

    __slots__ = ("_decisions", "_gpu_sets", "_keep", "query")

    def __init__(self, catalog: Catalog, where: WhereKey = (), *, keep: int = DECISIONS) -> None:
        self.query = Query(catalog, where)
        self._decisions: dict[Hashable, Decision] = {}
        self._gpu_sets: dict[Hashable, tuple[tuple[int, ...], ...]] = {}
        self._keep = keep

    def select(
        self, host: Host, *, gpus: Wanted = None, allow_cpu: bool = False, vram_mib: int | None = None
    ) -> Selection:
        """Return the variant that fits `host` best; see the function `select`."""
        return require_selected(self.explain(host, gpus=gpus, allow_cpu=allow_cpu, vram_mib=vram_mib))

    def explain(
        self, host: Host, *, gpus: Wanted = None, allow_cpu: bool = False, vram_mib: int | None = None
    ) -> Selection:
        """Return what `select` finds, with `selected` None if it raises; see the function `explain`."""
        if not isinstance(host, Host):
            raise UsageError(f"{host!r:.80} is not a Host", remedy="read one with Host.load(path) or probe()")
        chosen = host.gpus  # the usual case if many hosts are decided on
        if gpus is not None:
            if gpus == ALL and not (host.gpus or host.accelerators):  # these refuse an image without GPUs
                raise UsageError(
                    "all GPUs are requested, and the host has none",
                    remedy="leave out gpus, or pass gpus='none', for an image that needs none",
                    shown="leave out --gpus, or pass --gpus none, for an image that needs none",
                )
            choice = find_candidates(host.gpus, gpus)
            chosen = self.find_feasible_gpu_sets(host, choice, vram_mib=vram_mib)[0].first
        allow_cpu = allow_cpu or gpus == NONE  # the word consents to leaving accelerators unused
        key = make_hardware_key(host, chosen, allow_cpu=allow_cpu, vram_mib=vram_mib)
        decision = self._decisions.get(key)
        if decision is None:
            target = Target(host=host, gpus=chosen, allow_cpu=allow_cpu, vram_mib=vram_mib)
            decision = self._keep_in(self._decisions, key, Decision(self.query, target))
        return Selection(host=host, chosen_gpus=chosen, decision=decision)

    def explain_or_refuse(self, host: Host, *, gpus: Wanted, allow_cpu: bool) -> Selection | UsageError:
        """Return what `explain` returns or raises."""
        try:
            return self.explain(host, gpus=gpus, allow_cpu=allow_cpu)
        except UsageError as error:
            return error

    def find_feasible_gpu_sets(
        self, host: Host, choice: Choice, *, vram_mib: int | None = None
    ) -> tuple[Choice, ...]:
        """Narrow a choice of GPUs; see the function `find_feasible_gpu_sets`."""
        gpus = choice.gpus
        # Usually all GPUs are taken, or it makes no difference which ones are.
        if choice.count == len(gpus) or len(set(map(get_gpu_kind, gpus))) == 1:
            return (choice,)
        key = choice.count, make_hardware_key(host, gpus, allow_cpu=False, vram_mib=vram_mib)
        gpu_sets = self._gpu_sets.get(key)
        if gpu_sets is None:
            gpu_sets = self._keep_in(self._gpu_sets, key, self._compute_gpu_sets(host, choice, vram_mib))
        return tuple(replace(choice, gpus=tuple(gpus[index] for index in indices)) for indices in gpu_sets)

    def _compute_gpu_sets(
        self, host: Host, choice: Choice, vram_mib: int | None
    ) -> tuple[tuple[int, ...], ...]:
        """Return the choices that `find_feasible_gpu_sets` returns, as indices of the choice's GPUs."""
        index, gpu_sets = self.query.index, set[frozenset[int]]()
        for group in index.default_groups:  # the first default that fits enough GPUs decides which these are
            gpu_sets = find_variant_gpu_sets(index, host, choice.gpus, among=group, vram_mib=vram_mib)
            if any(len(gpus) >= choice.count for gpus in gpu_sets):
                break
        all_gpus = tuple(range(len(choice.gpus)))
        if choice.count == 1:
            return (tuple(sorted(frozenset[int]().union(*gpu_sets))) or all_gpus,)
        # Only the largest are of use.
        largest = [
            tuple(sorted(gpus))
            for gpus in gpu_sets
            if len(gpus) >= choice.count and not any(gpus < larger for larger in gpu_sets)
        ]
        return tuple(sorted(largest)) or (all_gpus,)

    def _keep_in(self, cache: dict[Hashable, T], key: Hashable, value: T) -> T:
        if len(cache) >= self._keep:
            cache.clear()
        cache[key] = value
        return value


def find_variant_gpu_sets(
    index: VariantIndex,
    host: Host,
    gpus: Sequence[Gpu],
    *,
    among: VariantSet,
    allow_cpu: bool = False,
    vram_mib: int | None = None,
) -> set[frozenset[int]]:
    """Return the sets of GPUs that a variant `among` these fits, as indices of `gpus`.

    A variant that fits each GPU fits all of them: no rule compares GPUs.
    """
    kinds = list(map(get_gpu_kind, gpus))
    fitting = {
        kind: index.find_fitting(Target(host=host, gpus=(gpu,), allow_cpu=allow_cpu, vram_mib=vram_mib))
        for kind, gpu in dict(zip(kinds, gpus, strict=True)).items()
    }
    return {
        frozenset(position for position, kind in enumerate(kinds) if fitting[kind] & variant)
        for variant in split_mask(among)
    }


def get_cached_selector(catalog: Catalog, where: Where | None) -> Selector:
    """Return a selector from a catalog under conditions; it is kept for the next call. Raise UsageError."""
    if not isinstance(catalog, Catalog):
        raise UsageError(
            f"{catalog!r:.80} is not a Catalog",
            remedy="open one with open_catalog(name)",
        )
    return _make_selector(_IdentityHashedCatalog(catalog), normalize_where(where))


class _IdentityHashedCatalog:
    """A catalog compared by identity: comparing a thousand variants takes longer than deciding."""

    __slots__ = ("catalog",)

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IdentityHashedCatalog) and self.catalog is other.catalog

    def __hash__(self) -> int:
        return id(self.catalog)


@lru_cache(maxsize=CATALOGS)
def _make_selector(hashed: _IdentityHashedCatalog, where: WhereKey) -> Selector:
    return Selector(hashed.catalog, where)
