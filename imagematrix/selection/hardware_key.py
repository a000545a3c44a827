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
FACTS = frozenset(
    fact for readers in (RULES, BY_NAME.values()) for reader in readers for fact in reader.facts
)
DRIVER, GPUS = "driver.", "gpus."
FLAGS = "cpu.flags"
SIGNS = "accelerators"


def _make_facts_getter(names: Iterable[str], owner: str = "") -> Callable[[Any], Hashable]:
    """Return a function that returns the facts in `names` of a host's driver, a GPU or the host."""
    attributes = sorted(name.removeprefix(owner) for name in names if name.startswith(owner))
    return attrgetter(*attributes) if attributes else lambda _: None


def _make_host_facts_getter(names: Iterable[str]) -> Callable[[Any], Hashable]:
    return _make_facts_getter(name for name in names if not name.startswith((DRIVER, GPUS)))


# What any rule or criterion reads, and what a reason may show.
_get_host_facts = _make_host_facts_getter(FACTS - {FLAGS})
_get_driver_facts = _make_facts_getter(FACTS, DRIVER)
_get_gpu_facts = _make_facts_getter(FACTS | LABEL, GPUS)
# Everything that rules and criteria read of a GPU: GPUs of one kind get the same verdicts.
get_gpu_kind: Callable[[Gpu], Hashable] = _make_facts_getter(FACTS, GPUS)
# What the criteria of the order read.
_get_ranked_host_facts = _make_host_facts_getter(RANKED)
_get_ranked_driver_facts = _make_facts_getter(RANKED, DRIVER)
_get_ranked_gpu_facts = _make_facts_getter(RANKED, GPUS)


def make_gpu_facts_getter(facts: frozenset[str]) -> Callable[[Gpu], Hashable]:
    """Return a function that returns what rules with these facts, criteria and reasons read of a GPU."""
    return _make_facts_getter(facts | RANKED | LABEL, GPUS)


def make_hardware_key(
    host: Host,
    gpus: tuple[Gpu, ...],
    *,
    allow_cpu: bool,
    vram_mib: int | None = None,
    flags: frozenset[str] | None = None,
    get_gpu_facts: Callable[[Gpu], Hashable] = _get_gpu_facts,
) -> Hashable:
    """Return everything that a decision about a Target and its reasons depend on.

    `flags` are the CPU flags that a catalog's variants need; without them, all flags of the host count.
    `get_gpu_facts` is `make_gpu_facts_getter` of the facts that matter to them; without it, all facts count.
    """
    driver, cpu_flags = host.driver, host.cpu.flags
    flags_key = cpu_flags if flags is None else _reduce_flags(cpu_flags, flags)
    driver_facts = driver and _get_driver_facts(driver)
    question = allow_cpu, vram_mib
    return _get_host_facts(host), flags_key, driver_facts, tuple(map(get_gpu_facts, gpus)), question


def make_fact_key(facts: Iterable[str], flags: frozenset[str]) -> Callable[[Target], Hashable]:
    """Return a function that returns what rules with these facts, and these `flags`, can tell of a target.

    As their `thresholds` say, they compare no flags but these, and see only whether there are `accelerators`.
    """
    names = frozenset(facts)
    get_host_facts = _make_host_facts_getter(names - {FLAGS, SIGNS})
    get_driver_facts, get_gpu_facts = _make_facts_getter(names, DRIVER), _make_facts_getter(names, GPUS)
    has_gpu_facts = any(fact.startswith(GPUS) for fact in names)

    def make_key(target: Target) -> Hashable:
        host, driver = target.host, target.host.driver
        return (
            target.allow_cpu,
            has_gpu_facts and target.vram_mib,
            get_host_facts(host),
            FLAGS in names and _reduce_flags(host.cpu.flags, flags),
            SIGNS in names and bool(host.accelerators),
            driver and get_driver_facts(driver),
            has_gpu_facts and tuple(map(get_gpu_facts, target.gpus)),
        )

    return make_key


def _reduce_flags(flags: frozenset[str], among: frozenset[str]) -> Hashable:
    """Return whether there are flags at all, and which are missing `among` these: usually few."""
    return bool(flags), among - flags


def make_order_key(target: Target) -> Hashable:
    """Return what the criteria of the order read of a target: on equal ones, variants rank alike."""
    host, driver = target.host, target.host.driver
    gpu_facts = tuple(map(_get_ranked_gpu_facts, target.gpus))
    return _get_ranked_host_facts(host), driver and _get_ranked_driver_facts(driver), gpu_facts


def keep_distinct_gpus(target: Target) -> Target:
    """Return a target with one GPU of each kind, for which every rule has the same verdict."""
    return replace(target, gpus=tuple({get_gpu_kind(gpu): gpu for gpu in target.gpus}.values()))
