"""Choosing the image for a host: the same host and the same catalog always give the same answer."""

from __future__ import annotations

from functools import lru_cache

from imagematrix.errors import NothingFits, UsageError
from imagematrix.select.decision import Decision
from imagematrix.select.gpus import choose
from imagematrix.select.index import Index
from imagematrix.select.node import Node, hardware
from imagematrix.select.order import order
from imagematrix.select.selection import Selection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from imagematrix.catalog.catalog import Catalog
    from imagematrix.probe.host import Host

__all__ = ["Selector", "explain", "select", "select_many"]

CATALOGS = 8  # selectors kept by the functions below
DECISIONS = 10_000  # kinds of hardware a selector keeps decisions for


def select(
    host: Host, catalog: Catalog, *, gpus: int | str | None = None, allow_cpu: bool = False
) -> Selection:
    """Return the variant that fits `host` best.

    `gpus` says which GPUs to pass, a count or what `--gpus` takes; None passes all. A host that passes GPUs
    gets a CPU-only variant only with `allow_cpu`. Raises NothingFits with every reason where none fits, and
    UsageError where the host has no such GPUs.
    """
    return _selector(_Same(catalog)).select(host, gpus=gpus, allow_cpu=allow_cpu)


def explain(
    host: Host, catalog: Catalog, *, gpus: int | str | None = None, allow_cpu: bool = False
) -> Selection:
    """Return what `select` finds, with `selected` None where nothing fits."""
    return _selector(_Same(catalog)).explain(host, gpus=gpus, allow_cpu=allow_cpu)


def select_many(
    hosts: Iterable[Host], catalog: Catalog, *, gpus: int | str | None = None, allow_cpu: bool = False
) -> list[Selection | NothingFits | UsageError]:
    """Return for each host, in their order, what `select` returns or raises."""
    selector = _selector(_Same(catalog))
    answers: list[Selection | NothingFits | UsageError] = []
    for host in hosts:
        try:
            answers.append(selector.select(host, gpus=gpus, allow_cpu=allow_cpu))
        except (NothingFits, UsageError) as error:
            answers.append(error)
    return answers


class Selector:
    """Chooses among the variants of one catalog; decides once for each kind of hardware it meets."""

    __slots__ = ("_decisions", "_index", "catalog")

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._index = Index(catalog.variants, order(catalog.prefer))
        self._decisions: dict[Hashable, Decision] = {}

    def select(self, host: Host, *, gpus: int | str | None = None, allow_cpu: bool = False) -> Selection:
        """Return the variant that fits `host` best; see the function `select`."""
        selection = self.explain(host, gpus=gpus, allow_cpu=allow_cpu)
        if selection.variant is None:
            message, fix = selection.decision.refusal
            raise NothingFits(message, selection=selection, remedy=fix)
        return selection

    def explain(self, host: Host, *, gpus: int | str | None = None, allow_cpu: bool = False) -> Selection:
        """Return what `select` finds, with `selected` None where nothing fits."""
        chosen = choose(host, gpus)
        known = hardware(host, chosen, allow_cpu=allow_cpu)
        decision = self._decisions.get(known)
        if decision is None:
            if len(self._decisions) >= DECISIONS:
                self._decisions.clear()
            decision = Decision(self.catalog, self._index, Node(host=host, gpus=chosen, allow_cpu=allow_cpu))
            self._decisions[known] = decision
        return Selection(host=host, chosen_gpus=chosen, decision=decision)


class _Same:
    """A catalog that equals itself only: to compare a thousand variants takes longer than to decide."""

    __slots__ = ("catalog",)

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.catalog is other.catalog

    def __hash__(self) -> int:
        return id(self.catalog)


@lru_cache(maxsize=CATALOGS)
def _selector(same: _Same) -> Selector:
    return Selector(same.catalog)
