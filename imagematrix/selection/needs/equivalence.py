"""Equivalence classes of the values of facts: the rules do not tell apart the values of one ValueClass.

A Vocabulary has the facts that a scheduler is told of a node.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from operator import itemgetter

from imagematrix.hardware.vendors import versions
from imagematrix.images.catalog.catalog import MOST_MIB

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
    from collections.abc import Set as AbstractSet
    from typing import Any, Protocol

    Version = tuple[int, ...]
    Interval = tuple[Version, Version | None, tuple[str, str]]

    class Scale(Protocol):
        """The values of one fact."""

        def make_value_classes(self, compared: AbstractSet[Hashable]) -> tuple[ValueClass, ...]:
            """Return all values, in value classes that comparisons with some values do not tell apart."""

        def find_representatives(
            self, compared: AbstractSet[Hashable], sample: Hashable
        ) -> tuple[Hashable, ...]:
            """Return the representatives of the sample's equivalence class under the rules' comparisons."""


TOP = 999  # the greatest possible capability, times ten
OLDEST: Version = (100, 0)  # lower versions are Tegra drivers, which are compared only as strings
LEAST, PARTS = 2, 4  # numbers in a driver version
GREATEST = 9999  # the greatest number in one
UNKNOWN_COMPUTE = -1  # among capabilities: an unknown one
UNKNOWN_MEMORY = -1  # among amounts of memory: an unknown one
NEWEST = 9999  # in place of a driver branch: the newest driver supports the GPU
REST = "none of these"  # a value that no rule compares with


@dataclass(frozen=True, slots=True, eq=False)
class ValueClass:
    """Values that no rule tells apart: `shown` as in a Need, and `samples` as in a Host, as their stand-ins.

    Of numbers, `shown` are the first and the last. There are several samples if a scheduler is not told the
    difference between values that rules tell apart: all of them have to fit.
    """

    shown: tuple[Any, ...]
    samples: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class NameScale:
    """Names without an order. `unknown` and `other` are what is told of no name and of further ones."""

    names: tuple[str, ...]
    unknown: str | None = None
    other: str | None = None

    def make_value_classes(self, compared: AbstractSet[Hashable]) -> tuple[ValueClass, ...]:
        """Return a value class for each compared name, one for the rest, and those that are told alike."""
        further = tuple(sorted(str(name) for name in compared if name not in self.names))
        rest = tuple(name for name in self.names if name not in compared)
        merged: dict[Hashable, list[Hashable]] = {self.other: [REST, *further]}
        if self.unknown is not None or self.other is None:
            merged.setdefault(self.unknown, []).append(None)
        return (
            *(ValueClass((name,), (name,)) for name in self.names if name in compared),
            *((ValueClass(rest, (REST,)),) if rest else ()),
            *(ValueClass((shown,), tuple(samples)) for shown, samples in merged.items()),
        )

    def find_representatives(self, compared: AbstractSet[Hashable], sample: Hashable) -> tuple[Hashable, ...]:
        """Return the sample if it is compared or unknown, else a name that is not compared."""
        return (sample if sample is None or sample in compared else REST,)


@dataclass(frozen=True, kw_only=True)
class NumberScale:
    """Numbers up to `last`. `starts` returns where comparisons with a value change, `value` a number's value.

    None is an unknown number, shown as `unknown`, or without that the last one.
    """

    starts: Callable[[Hashable], Iterable[int]]
    value: Callable[[int], Hashable]
    last: int
    unknown: int | None = None

    def make_value_classes(self, compared: AbstractSet[Hashable]) -> tuple[ValueClass, ...]:
        """Return a value class for each interval, and one for an unknown number."""
        starts, values = _split_numbers(self, frozenset(compared))
        ends = [*starts[1:], self.last + 1]
        return (
            *((ValueClass((self.unknown, self.unknown), (None,)),) if self.unknown is not None else ()),
            *(
                ValueClass((start, end - 1), (value,))
                for start, end, value in zip(starts, ends, values, strict=True)
            ),
        )

    def find_representatives(self, compared: AbstractSet[Hashable], sample: Hashable) -> tuple[Hashable, ...]:
        """Return the first value of the sample's interval."""
        starts, values = _split_numbers(self, frozenset(compared))
        if sample is None or sample in values:
            return (sample,)
        return (values[bisect_right(starts, next(iter(self.starts(sample)))) - 1],)


@lru_cache(maxsize=256)
def _split_numbers(
    scale: NumberScale, compared: frozenset[Hashable]
) -> tuple[tuple[int, ...], tuple[Hashable, ...]]:
    """Return the first number of each interval that comparisons do not divide, and their values."""
    starts = {start for value in compared for start in scale.starts(value)}
    # Without a word of its own, an unknown number is told as the last one, which is then a value class, too.
    always = {0} if scale.unknown is not None else {0, scale.last}
    numbers = sorted(always | {start for start in starts if start <= scale.last})
    return tuple(numbers), tuple(map(scale.value, numbers))


@dataclass(frozen=True, kw_only=True)
class TruthScale:
    """True and False; `samples` are their stand-ins, in this order."""

    samples: tuple[Hashable, Hashable] = (True, False)

    def make_value_classes(self, _: AbstractSet[Hashable]) -> tuple[ValueClass, ...]:
        """Return both, True first."""
        return tuple(
            ValueClass((value,), (sample,)) for value, sample in zip((True, False), self.samples, strict=True)
        )

    def find_representatives(self, _: AbstractSet[Hashable], sample: Hashable) -> tuple[Hashable, ...]:
        """Return the sample."""
        return (sample,)


class VersionScale:
    """Driver versions: the intervals between those that rules compare with.

    A version that a rule compares with has an interval of its own, with the versions of the same numbers.
    Because rules may also compare texts, the versions that they compare with are value classes as well. An
    interval shows where it starts, and where the next one does or None. A text shows itself, and its numbers,
    or None if it has no order.
    """

    def make_value_classes(self, compared: AbstractSet[Hashable]) -> tuple[ValueClass, ...]:
        """Return a value class for each interval, without the texts that are compared, and for each text."""
        texts = _list_texts(frozenset(compared))
        return (
            *(ValueClass((start, end), samples) for start, end, samples in _split_versions(texts)),
            *(
                ValueClass((text, None if versions.is_tegra(text) else versions.make_sort_key(text)), (text,))
                for text in texts
                if versions.DRIVER.fullmatch(text)
            ),
        )

    def find_representatives(self, compared: AbstractSet[Hashable], sample: Hashable) -> tuple[Hashable, ...]:
        """Return a text that is compared or unordered, else the first and last version of its interval.

        Both have to fit: a rule may compare a driver's branch with the last one of a GPU.
        """
        texts, version = _list_texts(frozenset(compared)), str(sample)
        if version in texts or versions.is_tegra(version):
            return (version,)
        intervals = _split_versions(texts)
        place = bisect_right(intervals, versions.make_sort_key(version), key=itemgetter(0)) - 1
        return intervals[max(0, place)][-1]


@lru_cache(maxsize=256)
def _list_texts(compared: frozenset[Hashable]) -> tuple[str, ...]:
    return tuple(sorted({str(version).rstrip(".") for version in compared}))


@lru_cache(maxsize=256)
def _split_versions(texts: tuple[str, ...]) -> tuple[Interval, ...]:
    """Return where each interval and the next one start, and its first and last version.

    These are texts that no rule compares with.
    """
    bounds = {bound for text in texts for bound in _list_version_bounds(versions.make_sort_key(text))}
    starts = sorted({OLDEST} | {bound for bound in bounds if bound > OLDEST})
    intervals: list[Interval] = []
    for start, end in zip_longest(starts, starts[1:]):
        last = (GREATEST,) * PARTS if end is None else find_version_before(end)
        intervals.append((start, end, (_make_distinct_text(start, texts), _make_distinct_text(last, texts))))
    return tuple(intervals)


def _make_distinct_text(version: Version, texts: tuple[str, ...]) -> str:
    """Return a version as a text that is neither among some texts nor one of a Tegra driver."""
    first, *rest = version
    # Leading zeros change the text of a version, and not its order.
    written = (".".join([str(first), *(f"{part:0{width}d}" for part in rest)]) for width in (2, 3, PARTS))
    return next(text for text in written if text not in texts and not versions.is_tegra(text))


def _list_version_bounds(version: Version) -> Iterator[Version]:
    """Yield the versions at which comparisons with one may change, with and without trailing zeros."""
    parts = [*version[:PARTS]]
    while len(parts) > 1 and not parts[-1]:
        parts.pop()
    # Versions compare as tuples: (550, 54) is less than (550, 54, 0), although both have the same numbers.
    for start in (
        (*parts, *[0] * (LEAST - len(parts))),
        version[:PARTS],
        (*version[:PARTS], 0),
        (*parts, *[0] * (PARTS - len(parts) - 1), 1) if len(parts) < PARTS else (*parts[:-1], parts[-1] + 1),
    ):
        bound = _find_least_valid_version(start)
        if bound and LEAST <= len(bound) <= PARTS:
            yield bound


def _find_least_valid_version(version: Version) -> Version | None:
    """Return the least version not below this one that a driver can have; None if there is none."""
    for index, part in enumerate(version):
        if part > GREATEST:
            raised = (*version[: index - 1], version[index - 1] + 1) if index else ()
            return _find_least_valid_version(raised if len(raised) != 1 else (*raised, 0)) if raised else None
    return version


def find_version_before(end: Version) -> Version:
    """Return the last version below one."""
    if end[-1]:
        return (*end[:-1], end[-1] - 1, *[GREATEST] * (PARTS - len(end)))
    return end[:-1] if len(end) > LEAST else (end[0] - 1, *[GREATEST] * (PARTS - 1))


def _list_capability_bounds(value: Hashable) -> tuple[int, int]:
    """Return the first capability that is not below one, and the first above it, times ten."""
    major, minor, *_ = (*versions.make_sort_key(str(value).rstrip(".")), 0)
    start = 10 * major + min(minor, 10)
    return start, start + 1


COMPUTES = NumberScale(
    starts=_list_capability_bounds,
    value=lambda code: f"{code // 10}.{code % 10}",
    last=TOP,
    unknown=UNKNOWN_COMPUTE,
)
# A GPU whose support ends between two branches that rules compare is treated as one of the older branch.
BRANCHES = NumberScale(
    starts=lambda branch: (int(str(branch)),),
    value=lambda branch: None if branch == NEWEST else branch,
    last=NEWEST,
)
MEMORY = NumberScale(
    starts=lambda mib: (int(str(mib)),), value=lambda mib: mib, last=MOST_MIB, unknown=UNKNOWN_MEMORY
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """What a scheduler is told of a node: an architecture, CPU flags and further facts.

    `carrier` names for messages what tells it, in the plural. `scales` has the values of the further facts,
    `flags` returns the flags that nodes of an architecture tell.
    """

    carrier: str
    scales: Mapping[str, Scale]
    flags: Callable[[str], frozenset[str]]
