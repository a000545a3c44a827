"""Choosing the image for a host: the same host and the same catalog always give the same answer."""

from __future__ import annotations

from functools import lru_cache

from imagematrix.errors import UsageError
from imagematrix.gpus.spec import NONE, choose
from imagematrix.record import replace
from imagematrix.selection.decision import Decision
from imagematrix.selection.hardware import hardware, kind
from imagematrix.selection.question import Question, asked
from imagematrix.selection.selection import NothingFits, Selection
from imagematrix.selection.target import Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from imagematrix.catalog.catalog import Catalog
    from imagematrix.gpus.choice import Choice
    from imagematrix.gpus.spec import Wanted
    from imagematrix.node.host import Host
    from imagematrix.selection.question import Asked, Where

__all__ = ["Selector", "explain", "select", "select_many", "serving"]

CATALOGS = 8  # selectors kept by the functions below
DECISIONS = 10_000  # kinds of hardware that a selector keeps decisions for, by default


def select(
    host: Host,
    catalog: Catalog,
    *,
    gpus: Wanted = None,
    allow_cpu: bool = False,
    where: Where | None = None,
) -> Selection:
    """Return the variant that fits `host` best.

    `gpus` says which GPUs to pass: a count, a value of `--gpus`, or GPUs of the host; None passes all. A
    host with any sign of an accelerator gets a CPU-only variant only with `allow_cpu`, or if `gpus` is
    "none". `where` has conditions on axes, such as {"python": "3.13"}, each a word or several in the
    syntax of `--only`: only variants that meet them are considered. The catalog's defaults decide about
    axes that it leaves open.

    Raises NothingFits with every reason if none fits. Raises UsageError if the host has no such GPUs, if no
    variant has such an axis or value, and if variants that fit still differ in one of the image's own axes.
    """
    return _selector(_Same(catalog), asked(where)).select(host, gpus=gpus, allow_cpu=allow_cpu)


def explain(
    host: Host,
    catalog: Catalog,
    *,
    gpus: Wanted = None,
    allow_cpu: bool = False,
    where: Where | None = None,
) -> Selection:
    """Return what `select` finds, with `selected` None if nothing fits or the question leaves it open."""
    return _selector(_Same(catalog), asked(where)).explain(host, gpus=gpus, allow_cpu=allow_cpu)


def select_many(
    hosts: Iterable[Host],
    catalog: Catalog,
    *,
    gpus: int | str | None = None,
    allow_cpu: bool = False,
    where: Where | None = None,
) -> list[Selection | NothingFits | UsageError]:
    """Return for each host, in their order, what `select` returns or raises."""
    selector = _selector(_Same(catalog), asked(where))
    answers: list[Selection | NothingFits | UsageError] = []
    for host in hosts:
        try:
            answers.append(selector.select(host, gpus=gpus, allow_cpu=allow_cpu))
        except (NothingFits, UsageError) as error:
            answers.append(error)
    return answers


def serving(host: Host, catalog: Catalog, choice: Choice, where: Where | None = None) -> tuple[Choice, ...]:
    """Narrow a choice of the host's GPUs to the choices for which a single GPU variant fits.

    Whatever GPUs are taken from one of these choices, a variant fits them together; GPUs that one variant
    fits together are in one of the choices. The choice with the first GPUs comes first. If nothing fits, or
    `choice` takes all its GPUs, it is returned alone.
    """
    return _selector(_Same(catalog), asked(where)).serving(host, choice)


class Selector:
    """Selects from a catalog for many hosts; decides once for each kind of hardware.

    It caches the decisions for `keep` kinds.
    """

    __slots__ = ("_decisions", "_keep", "question")

    def __init__(self, catalog: Catalog, where: Asked = (), *, keep: int = DECISIONS) -> None:
        self.question = Question(catalog, where)
        self._decisions: dict[Hashable, Decision] = {}
        self._keep = keep

    def select(self, host: Host, *, gpus: Wanted = None, allow_cpu: bool = False) -> Selection:
        """Return the variant that fits `host` best; see the function `select`."""
        selection = self.explain(host, gpus=gpus, allow_cpu=allow_cpu)
        miss = selection.miss
        if miss is None:
            return selection
        if selection.decision.ambiguity:
            raise UsageError(miss.why, remedy=miss.fix)
        raise NothingFits(miss.why, selection=selection, remedy=miss.fix)

    def explain(self, host: Host, *, gpus: Wanted = None, allow_cpu: bool = False) -> Selection:
        """Return what `select` finds, with `selected` None if it raises; see the function `explain`."""
        chosen = choose(host, gpus)
        allow_cpu = allow_cpu or gpus == NONE
        key = hardware(host, chosen, allow_cpu=allow_cpu)
        decision = self._decisions.get(key)
        if decision is None:
            if len(self._decisions) >= self._keep:
                self._decisions.clear()
            target = Target(host=host, gpus=chosen, allow_cpu=allow_cpu)
            decision = self._decisions[key] = Decision(self.question, target)
        return Selection(host=host, chosen_gpus=chosen, decision=decision)

    def serving(self, host: Host, choice: Choice) -> tuple[Choice, ...]:
        """Narrow a choice of GPUs; see the function `serving`."""
        gpus, count = choice.gpus, choice.count
        examples = {kind(gpu): gpu for gpu in gpus}
        if count == len(gpus) or len(examples) == 1:
            return (choice,)
        # A variant that fits each GPU fits all of them: no rule compares GPUs.
        index = self.question.index
        fitting = {which: index.fitting(Target(host=host, gpus=(gpu,))) for which, gpu in examples.items()}
        if count == 1:
            served_at_all = tuple(gpu for gpu in gpus if fitting[kind(gpu)])
            return (replace(choice, gpus=served_at_all or gpus),)
        served = {
            frozenset(which for which, some in fitting.items() if some & one)
            for one in (1 << number for number in range(len(self.question.catalog.variants)))
        }
        choices = [
            replace(choice, gpus=tuple(gpu for gpu in gpus if kind(gpu) in some))
            for some in served
            if not any(some < other for other in served)
        ]
        enough = [one for one in choices if one.enough]
        return tuple(sorted(enough, key=lambda one: [gpus.index(gpu) for gpu in one.gpus])) or (choice,)


class _Same:
    """A catalog compared by identity: comparing a thousand variants takes longer than deciding."""

    __slots__ = ("catalog",)

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.catalog is other.catalog

    def __hash__(self) -> int:
        return id(self.catalog)


@lru_cache(maxsize=CATALOGS)
def _selector(same: _Same, where: Asked) -> Selector:
    return Selector(same.catalog, where)
