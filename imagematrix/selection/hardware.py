"""What identifies a kind of hardware: the facts of a host that a rule or a criterion of the order reads.

It is the cache key of decisions, derived from what rules and criteria declare, so that no fact is forgotten.
"""

from __future__ import annotations

from operator import attrgetter

from imagematrix.record import replace
from imagematrix.selection.order import BY_NAME
from imagematrix.selection.rules import RULES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
    from typing import Any

    from imagematrix.node.host import Gpu, Host
    from imagematrix.selection.target import Target

__all__ = ["FACTS", "FLAGS", "LABEL", "hardware", "kind", "ranking", "reading", "sample"]

RANKED = frozenset(fact for criterion in BY_NAME.values() for fact in criterion.facts)
LABEL = frozenset({"gpus.index", "gpus.name"})  # any reason may read these, through `Gpu.label`
FACTS = frozenset(fact for some in (RULES, BY_NAME.values()) for one in some for fact in one.facts)
DRIVER, GPUS = "driver.", "gpus."
FLAGS = "cpu.flags"
SETS = frozenset({FLAGS, "accelerators"})  # facts with members, of which only those count that rules name


def _facts(names: Iterable[str], owner: str = "") -> Callable[[Any], Hashable]:
    """Return a function that returns the facts in `names` of a host's driver, a GPU or the host."""
    own = sorted(name.removeprefix(owner) for name in names if name.startswith(owner))
    return attrgetter(*own) if own else lambda _: None


def _host_facts(names: Iterable[str]) -> Callable[[Any], Hashable]:
    return _facts(name for name in names if not name.startswith((DRIVER, GPUS)))


_host = _host_facts(FACTS - {FLAGS})
_driver = _facts(FACTS, DRIVER)
_gpu = _facts(FACTS | LABEL, GPUS)
# Everything that rules and criteria read of a GPU: GPUs of one kind get the same verdicts.
kind: Callable[[Gpu], Hashable] = _facts(FACTS, GPUS)


_ranked_host, _ranked_driver, _ranked_gpu = _host_facts(RANKED), _facts(RANKED, DRIVER), _facts(RANKED, GPUS)


def hardware(
    host: Host, gpus: tuple[Gpu, ...], *, allow_cpu: bool, flags: frozenset[str] | None = None
) -> Hashable:
    """Return everything that a decision about a Target and its reasons depend on.

    `flags` are the CPU flags that a catalog's variants need; without them, all flags of the host count.
    """
    driver, own = host.driver, host.cpu.flags
    has = own if flags is None else _counted(own, flags)
    return _host(host), has, driver and _driver(driver), tuple(map(_gpu, gpus)), allow_cpu


def reading(facts: Iterable[str], named: Mapping[str, frozenset[str]]) -> Callable[[Target], Hashable]:
    """Return a function that returns what rules with these facts can tell about a target.

    `named` are the members that they name of facts that are sets, as in `turns`.
    """
    some = frozenset(facts)
    host, driver, gpu = _host_facts(some - SETS), _facts(some, DRIVER), _facts(some, GPUS)
    sets = [(attrgetter(fact), named.get(fact, frozenset())) for fact in sorted(some & SETS)]
    about_gpus = any(fact.startswith(GPUS) for fact in some)

    def read(target: Target) -> Hashable:
        own = target.host
        counted = tuple([_counted(members(own), those) for members, those in sets])
        loaded = own.driver and driver(own.driver)
        return target.allow_cpu, host(own), counted, loaded, about_gpus and tuple(map(gpu, target.gpus))

    return read


def _counted(members: Collection[str], named: frozenset[str]) -> Hashable:
    """Return whether a set has members, and which of those that are named it lacks, which are usually few."""
    return bool(members), named and named.difference(members)


def ranking(target: Target) -> Hashable:
    """Return what the criteria of the order read of a target: on equal ones, variants rank alike."""
    driver = target.host.driver
    return _ranked_host(target.host), driver and _ranked_driver(driver), tuple(map(_ranked_gpu, target.gpus))


def sample(target: Target) -> Target:
    """Return a target with one GPU of each kind, for which every rule has the same verdict."""
    return replace(target, gpus=tuple({kind(gpu): gpu for gpu in target.gpus}.values()))
