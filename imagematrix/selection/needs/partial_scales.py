"""Scales of facts that a system is told in part, or not at all: values that look alike share one ValueClass.

All samples of a class have to fit, so what is derived with these scales holds for every value that the system
cannot tell from another.
"""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.hardware.vendors import cuda, versions
from imagematrix.selection.needs.equivalence import OLDEST, ValueClass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable
    from collections.abc import Set as AbstractSet

    from imagematrix.selection.needs.equivalence import Scale, Version

TEGRA = "540.4.0"  # a driver in no order with others, which a system that is told of no driver may have


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialScale:
    """The scale of all values of a fact, of which the subclasses tell less."""

    scale: Scale

    def find_representatives(self, compared: AbstractSet[Hashable], sample: Hashable) -> tuple[Hashable, ...]:
        """Return the representatives of a sample, as on the scale of all values."""
        return self.scale.find_representatives(compared, sample)


@dataclass(frozen=True, kw_only=True, eq=False)
class AlikeScale(PartialScale):
    """A fact of which nothing is told: all its values look alike."""

    def make_value_classes(self, compared: AbstractSet[Hashable]) -> tuple[ValueClass, ...]:
        """Return one value class with the samples of all."""
        return (ValueClass((), _join_samples(self.scale.make_value_classes(compared))),)


@dataclass(frozen=True, kw_only=True, eq=False)
class AssumedScale(PartialScale):
    """A fact of which nothing is told, and that is assumed to have the value `shown`."""

    shown: Hashable

    def make_value_classes(self, compared: AbstractSet[Hashable]) -> tuple[ValueClass, ...]:
        """Return the value class that has this value."""
        return tuple(
            value_class
            for value_class in self.scale.make_value_classes(compared)
            if self.shown in value_class.shown
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenScale(PartialScale):
    """A fact that follows from another one: it has one of these `values`, as in a Host."""

    values: tuple[Hashable, ...]

    def make_value_classes(self, _: AbstractSet[Hashable]) -> tuple[ValueClass, ...]:
        """Return one value class with the values as samples."""
        return (ValueClass((), self.values),)


@dataclass(frozen=True, kw_only=True, eq=False)
class AlikeDriverScale(PartialScale):
    """Driver versions of which nothing is told: all drivers look alike, also one of Tegra."""

    def make_value_classes(self, compared: AbstractSet[Hashable]) -> tuple[ValueClass, ...]:
        """Return one value class with the samples of all."""
        samples = _join_samples(self.scale.make_value_classes(compared))
        return (ValueClass((OLDEST, None), (*samples, TEGRA)),)


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleaseScale(PartialScale):
    """Driver versions of which the CUDA release is told: the drivers of one release look alike.

    Drivers of no known release have no value class: a condition on the release leaves them out.
    """

    def make_value_classes(self, compared: AbstractSet[Hashable]) -> tuple[ValueClass, ...]:
        """Return a value class for each release, from the first driver of it to that of the next one."""
        firsts = cuda.list_first_drivers()
        samples: dict[str, list[str]] = {name: [] for name in firsts}
        for value_class in self.scale.make_value_classes(compared | {*firsts.values()}):
            release = cuda.get_newest_cuda(value_class.samples[0])
            if release:
                samples[release] += value_class.samples
        starts = [versions.make_sort_key(first) for first in firsts.values()]
        return tuple(
            ValueClass((start, end), tuple(dict.fromkeys(samples[name])))
            for name, start, end in zip(firsts, starts, [*starts[1:], None], strict=True)
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundedScale(PartialScale):
    """Driver versions up to a `branch`: the last one that supports a GPU, which thus has no newer driver."""

    branch: int

    def make_value_classes(self, compared: AbstractSet[Hashable]) -> tuple[ValueClass, ...]:
        """Return the value classes without newer versions; the last one has no end."""
        end: Version = (self.branch + 1, 0)
        kept = []
        for value_class in self.scale.make_value_classes(compared | {f"{self.branch + 1}.0"}):
            samples = tuple(sample for sample in value_class.samples if versions.make_sort_key(sample) < end)
            first, last = value_class.shown
            is_last = not isinstance(first, str) and (last is None or last >= end)
            if samples:
                kept.append(ValueClass((first, None) if is_last else (first, last), samples))
        return tuple(kept)


def _join_samples(value_classes: Iterable[ValueClass]) -> tuple[Hashable, ...]:
    return tuple(dict.fromkeys(sample for value_class in value_classes for sample in value_class.samples))
