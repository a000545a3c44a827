"""Queries: which variants of a catalog are considered, by their axes, for any host."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache

from imagematrix.errors import UsageError
from imagematrix.hardware.vendors.versions import make_natural_key
from imagematrix.images.catalog.catalog import HARDWARE
from imagematrix.selection.order import order_criteria
from imagematrix.selection.rule import Remedy, suggest_axis_values
from imagematrix.selection.rules.device_code import get_served_targets
from imagematrix.selection.variant_index import VariantIndex

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from imagematrix.images.catalog.catalog import Catalog, Variant

    # Conditions by axis, or texts such as "python=3.13,cuda>=12".
    Where = Mapping[str, str | int | Sequence[str | int]] | str | Sequence[str]
    WhereKey = tuple[tuple[str, tuple[str, ...]], ...]  # the same, as a key

EXAMPLE = 'write conditions such as {"python": "3.13"} or "python=3.13"'
QUERIES = 8  # queries kept, which selections from other processes share


class Query:
    """The variants of a catalog that match `where` and the catalog's defaults.

    `wanted` has the accepted values of each axis that is in `where` or has a default, and `default_order`
    those of axes with several default values that it leaves open, in order.
    """

    def __init__(self, full_catalog: Catalog, where: WhereKey) -> None:
        self._full_catalog = full_catalog
        self._where = where
        self.wanted = _resolve_conditions(full_catalog, where)
        self.default_order = tuple(self._apply_defaults())
        self.catalog = _filter_catalog(full_catalog, self.wanted)
        criteria = order_criteria(full_catalog.prefer, self.default_order)
        self.index = VariantIndex(self.catalog.variants, criteria, self.default_order)

    def _apply_defaults(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Decide axes that the query leaves open; yield those for which several values remain, in order."""
        ordered = dict(self._full_catalog.default_order)
        for axis, first in self._full_catalog.defaults:
            listed = ordered.get(axis, (first,))
            values = tuple([value for value in listed if value in self.wanted.get(axis, listed)])
            if values:
                self.wanted[axis] = frozenset(values)
            if len(values) > 1:
                yield axis, values

    def __reduce__(self) -> tuple[Callable[[Catalog, WhereKey], Query], tuple[Catalog, WhereKey]]:
        return _share_query, (self._full_catalog, self._where)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Query):
            return NotImplemented
        return self is other or (self._where == other._where and self._full_catalog == other._full_catalog)

    def __hash__(self) -> int:
        return hash((self._full_catalog.image, self._full_catalog.version, self._where))

    @cached_property
    def excluded(self) -> VariantIndex:
        """The variants of the catalog that were not requested."""
        requested = frozenset(variant.reference for variant in self.catalog.variants)
        variants = tuple(
            variant for variant in self._full_catalog.variants if variant.reference not in requested
        )
        # The best of those that fit has the next default value.
        return VariantIndex(
            variants, order_criteria(self._full_catalog.prefer, self._full_catalog.default_order)
        )

    @property
    def words(self) -> str:
        """The conditions, as words to append to "variants" in a sentence: " with python 3.13 or 3.14"."""
        conditions = [
            f"{axis} {' or '.join(sorted(values, key=make_natural_key))}"
            for axis, values in self.wanted.items()
        ]
        return f" with {', '.join(conditions)}" if conditions else ""

    def suggest_remedy(self, variant: Variant) -> Remedy:
        """Return how to request an excluded variant."""
        present = read_axis_values(variant)
        differing = [axis for axis, values in self.wanted.items() if not values & {*present.get(axis, ())}]
        # Words of an axis are one condition, in which a negation always wins.
        negated = {axis for axis, words in self._where for word in words if word.startswith("!")}
        if all(axis in present and axis not in negated for axis in differing):
            return suggest_axis_values("pass {}", {axis: present[axis][0] for axis in differing})
        return Remedy(words=f"select it by its reference: {variant.reference}")


@lru_cache(maxsize=QUERIES)
def _share_query(full_catalog: Catalog, where: WhereKey) -> Query:
    """Return the same Query for equal arguments, so that selections from a pool's workers share it."""
    return Query(full_catalog, where)


def parse_where(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the conditions in the values of `--where`; raise UsageError if one is invalid."""
    if not texts:
        return {}
    # Most queries have no conditions, and need not load the parser.
    from imagematrix.images.catalog.axis_conditions import ConditionError, parse_only

    try:
        return parse_only(",".join(texts))
    except ConditionError as error:
        raise UsageError(str(error)) from error


def normalize_where(where: Where | None) -> WhereKey:
    """Return hashable conditions on axes; raise UsageError if `where` has another form.

    Each axis has a word or several, in the syntax of `--only`. A text, or a list of texts, has conditions
    such as "python=3.13".
    """
    if not where:
        return ()
    if isinstance(where, str | list | tuple):
        where = parse_where(_format_words(where, "a condition"))
    if not isinstance(where, Mapping):
        raise UsageError(f"invalid conditions {where!r:.80}", remedy=EXAMPLE)
    return tuple(
        sorted(
            (_format_words(axis, "an axis")[0], _format_words(words, "a value"))
            for axis, words in where.items()
        )
    )


def _format_words(value: object, what: str) -> tuple[str, ...]:
    """Return a word or a list of words as text.

    A number with a point is refused: YAML reads 3.10 as 3.1, which may be another value.
    """
    words = value if isinstance(value, list | tuple) else (value,)
    for word in words:
        if isinstance(word, float):
            raise UsageError(f"{word} as {what} may have lost digits", remedy=f"quote it: {str(word)!r}")
        if isinstance(word, bool) or not isinstance(word, str | int):
            raise UsageError(f"{word!r:.80} is not {what}", remedy=EXAMPLE)
    if not words:
        raise UsageError(f"an empty list is not {what}", remedy=EXAMPLE)
    return tuple(map(str, words))


def narrow_catalog(catalog: Catalog, where: Where | None) -> Catalog:
    """Return a catalog with only the variants that match `where`, whatever the defaults.

    Raises UsageError, which lists the existing ones, if no variant has such an axis or value.
    """
    return _filter_catalog(catalog, _resolve_conditions(catalog, normalize_where(where)))


def read_axis_values(variant: Variant) -> dict[str, tuple[str, ...]]:
    """Return a variant's values on each axis; on axes of hardware, they are written as in matrix.yaml.

    A CPU-only variant has no compute capability and no driver.
    """
    driver = variant.driver
    hardware = {
        "platform": (variant.platform,),
        "cuda": (variant.cuda or "none",),
        "compute": tuple(map(_format_capability, get_served_targets(variant))),
        "march": (variant.march,) if variant.march else (),
        "driver": (driver.version or driver.mode,) if driver else (),
    }
    image_axes = {axis: (value,) for axis, value in variant.axes}
    return image_axes | {axis: values for axis, values in hardware.items() if values}


def _format_capability(target: str) -> str:
    """Return a target such as "90a" as matrix.yaml has it: "9.0a"."""
    digits = target.rstrip("af")
    return f"{digits[:-1]}.{digits[-1]}{target[len(digits) :]}"


def _resolve_conditions(catalog: Catalog, where: WhereKey) -> dict[str, frozenset[str]]:
    """Return the values of each axis that meet the conditions; raise UsageError if none exists."""
    if not where:
        return {}
    from imagematrix.images.catalog.axis_conditions import ConditionError, match_axes

    name = f"{catalog.image}:{catalog.version}"
    try:
        return match_axes(collect_axes(catalog.variants), dict(where), name)
    except ConditionError as error:
        raise UsageError(str(error)) from error


def _filter_catalog(catalog: Catalog, wanted: Mapping[str, frozenset[str]]) -> Catalog:
    """Return a catalog with only the variants that have one of the `wanted` values on each axis."""
    if not wanted:
        return catalog
    matches = []
    for variant in catalog.variants:
        present = read_axis_values(variant)
        if all(not values.isdisjoint(present.get(axis, ())) for axis, values in wanted.items()):
            matches.append(variant)
    return catalog.keep(tuple(matches))


def collect_axes(variants: Iterable[Variant]) -> dict[str, tuple[str, ...]]:
    """Return the axes of all variants with their values, the image's own first."""
    by_axis: dict[str, set[str]] = {}
    for variant in variants:
        for axis, values in read_axis_values(variant).items():
            by_axis.setdefault(axis, set()).update(values)
    image_axes = sorted(by_axis.keys() - {*HARDWARE})
    return {
        axis: tuple(sorted(by_axis[axis], key=make_natural_key))
        for axis in (*image_axes, *HARDWARE)
        if axis in by_axis
    }
