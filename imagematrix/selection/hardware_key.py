"""What identifies a kind of hardware: the facts of a host that a rule or a criterion of the order reads.

It is the cache key of decisions, derived from what rules and criteria declare, so that no fact is forgotten.
"""

from __future__ import annotations

from operator import attrgetter

from imagematrix.common.record import replace
from imagematrix.selection.order import BY_NAME
from imagematrix.selection.rules import RULES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable
    from typing import Any

    from imagematrix.hardware.host.host import Gpu, Host
    from imagematrix.selection.selection_target import Target

RANKED = frozenset(fact for criterion in BY_NAME.values() for fact in criterion.facts)
LABEL = frozenset({"gpus.index", "gpus.name"})  # any reason may read these, through `Gpu.label`
FACTS = frozenset(fact for some in (RULES, BY_NAME.values()) for one in some for fact in one.facts)
DRIVER, GPUS = "driver.", "gpus."
FLAGS = "cpu.flags"
SIGNS = "accelerators"


def _make_facts_getter(names: Iterable[str], owner: str = "") -> Callable[[Any], Hashable]:
    """Return a function that returns the facts in `names` of a host's driver, a GPU or the host."""
    own = sorted(name.removeprefix(owner) for name in names if name.startswith(owner))
    return attrgetter(*own) if own else lambda _: None


def _make_host_facts_getter(names: Iterable[str]) -> Callable[[Any], Hashable]:
    return _make_facts_getter(name for name in names if not name.startswith((DRIVER, GPUS)))


_host = _make_host_facts_getter(FACTS - {FLAGS})
_driver = _make_facts_getter(FACTS, DRIVER)
_gpu = _make_facts_getter(FACTS | LABEL, GPUS)
# Everything that rules and criteria read of a GPU: GPUs of one kind get the same verdicts.
kind: Callable[[Gpu], Hashable] = _make_facts_getter(FACTS, GPUS)


_ranked_host, _ranked_driver, _ranked_gpu = (
    _make_host_facts_getter(RANKED),
    _make_facts_getter(RANKED, DRIVER),
    _make_facts_getter(RANKED, GPUS),
)


def make_hardware_key(
    host: Host, gpus: tuple[Gpu, ...], *, allow_cpu: bool, flags: frozenset[str] | None = None
) -> Hashable:
    """Return everything that a decision about a Target and its reasons depend on.

    `flags` are the CPU flags that a catalog's variants need; without them, all flags of the host count.
    """
    driver, own = host.driver, host.cpu.flags
    has = own if flags is None else _reduce_flags(own, flags)
    return _host(host), has, driver and _driver(driver), tuple(map(_gpu, gpus)), allow_cpu


def make_fact_key(facts: Iterable[str], flags: frozenset[str]) -> Callable[[Target], Hashable]:
    """Return a function that returns what rules with these facts, and these `flags`, can tell of a target.

    As their `thresholds` say, they compare no flags but these, and see only whether there are `accelerators`.
    """
    some = frozenset(facts)
    single = _make_host_facts_getter(some - {FLAGS, SIGNS})
    driver, gpu = _make_facts_getter(some, DRIVER), _make_facts_getter(some, GPUS)
    of_gpus = any(fact.startswith(GPUS) for fact in some)

    def read(target: Target) -> Hashable:
        host, loaded = target.host, target.host.driver
        return (
            target.allow_cpu,
            single(host),
            FLAGS in some and _reduce_flags(host.cpu.flags, flags),
            SIGNS in some and bool(host.accelerators),
            loaded and driver(loaded),
            of_gpus and tuple(map(gpu, target.gpus)),
        )

    return read


def _reduce_flags(flags: frozenset[str], among: frozenset[str]) -> Hashable:
    """Return whether there are flags at all, and which are missing `among` these: usually few."""
    return bool(flags), among - flags


def make_order_key(target: Target) -> Hashable:
    """Return what the criteria of the order read of a target: on equal ones, variants rank alike."""
    driver = target.host.driver
    return _ranked_host(target.host), driver and _ranked_driver(driver), tuple(map(_ranked_gpu, target.gpus))


def keep_distinct_gpus(target: Target) -> Target:
    """Return a target with one GPU of each kind, for which every rule has the same verdict."""
    return replace(target, gpus=tuple({kind(gpu): gpu for gpu in target.gpus}.values()))
