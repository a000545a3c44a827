"""Questions: which variants of a catalog are considered, by their axes, for any host."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache

from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.hardware.vendors.versions import make_natural_key
from imagematrix.images.catalog.catalog import HARDWARE
from imagematrix.selection.order import order_criteria
from imagematrix.selection.rule import Remedy, suggest_arguments
from imagematrix.selection.rules.device_code import get_served_targets
from imagematrix.selection.variant_index import VariantIndex

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from imagematrix.images.catalog.catalog import Catalog, Variant

    # Conditions by axis, or texts such as "python=3.13,cuda>=12".
    Where = Mapping[str, str | int | Sequence[str | int]] | str | Sequence[str]
    WhereKey = tuple[tuple[str, tuple[str, ...]], ...]  # the same, as a key

EXAMPLE = 'write conditions such as {"python": "3.13"} or "python=3.13"'
QUERIES = 8  # questions kept, which selections from other processes share


class Query:
    """The variants of a catalog that match `where` and the catalog's defaults.

    `wanted` has the accepted values of each axis that is in `where` or has a default.
    """

    def __init__(self, whole: Catalog, where: WhereKey) -> None:
        self._whole = whole
        self._where = where
        self.wanted = _select_wanted(whole, where)
        self.catalog = _select_excluded(whole, self.wanted)
        self.index = VariantIndex(self.catalog.variants, order_criteria(whole.prefer))

    def __reduce__(self) -> tuple[Callable[[Catalog, WhereKey], Query], tuple[Catalog, WhereKey]]:
        return _share_query, (self._whole, self._where)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Query):
            return NotImplemented
        return self is other or (self._where == other._where and self._whole == other._whole)

    def __hash__(self) -> int:
        return hash((self._whole.image, self._whole.version, self._where))

    @cached_property
    def left_out(self) -> VariantIndex:
        """The variants of the catalog that were not requested."""
        kept = frozenset(variant.reference for variant in self.catalog.variants)
        others = tuple(variant for variant in self._whole.variants if variant.reference not in kept)
        return VariantIndex(others, order_criteria(self._whole.prefer))

    @property
    def words(self) -> str:
        """The conditions, as words to append to "variants" in a sentence."""
        wanted = [
            f"{axis} {' or '.join(sorted(these, key=make_natural_key))}"
            for axis, these in self.wanted.items()
        ]
        return f" with {', '.join(wanted)}" if wanted else ""

    def remedy(self, variant: Variant) -> Remedy:
        """Return how to request an excluded variant."""
        own = read_axis_values(variant)
        differing = [axis for axis, these in self.wanted.items() if not these & {*own.get(axis, ())}]
        if all(axis in own for axis in differing):
            return suggest_axis_values("pass {}", {axis: own[axis][0] for axis in differing})
        return Remedy(words=f"select it by its reference: {variant.reference}")


@lru_cache(maxsize=QUERIES)
def _share_query(whole: Catalog, where: WhereKey) -> Query:
    """Return the same question for equal ones, so that selections from a pool's workers share it."""
    return Query(whole, where)


def suggest_axis_values(words: str, where: Mapping[str, str]) -> Remedy:
    """Return the remedy to choose these values of axes; `words` have {} in their place."""
    option = " ".join(f"--where {axis}={value}" for axis, value in where.items())
    return suggest_arguments(words, option, where=dict(where))


def parse_where(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the conditions in the values of `--where`; raise UsageError if one is invalid."""
    if not texts:
        return {}
    # Most questions have no conditions, and need not load the parser.
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


def _format_words(given: object, what: str) -> tuple[str, ...]:
    """Return a word or a list of words as text.

    A number with a point is refused: YAML reads 3.10 as 3.1, which may be another value.
    """
    words = given if isinstance(given, list | tuple) else (given,)
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
    return _select_excluded(catalog, _resolve_conditions(catalog, normalize_where(where)))


def read_axis_values(variant: Variant) -> dict[str, tuple[str, ...]]:
    """Return a variant's values on each axis; on axes of hardware, they are written as in matrix.yaml.

    A CPU-only variant has no compute capability and no driver.
    """
    driver = variant.driver
    hardware = {
        "platform": (variant.platform,),
        "cuda": (variant.cuda or "none",),
        "compute": tuple(map(_get_capability, get_served_targets(variant))),
        "march": (variant.march,) if variant.march else (),
        "driver": (driver.version or driver.mode,) if driver else (),
    }
    own = {axis: (value,) for axis, value in variant.axes}
    return own | {axis: value for axis, value in hardware.items() if value}


def _get_capability(target: str) -> str:
    """Return the compute capability that a target such as "90a" is for."""
    digits = target.rstrip("af")
    return f"{digits[:-1]}.{digits[-1]}{target[len(digits) :]}"


def _select_wanted(catalog: Catalog, where: WhereKey) -> dict[str, frozenset[str]]:
    accepted = _resolve_conditions(catalog, where)
    for axis, value in catalog.defaults:
        # A default decides an axis only if the question leaves it open.
        if value in accepted.get(axis, (value,)):
            accepted[axis] = frozenset([value])
    return accepted


def _resolve_conditions(catalog: Catalog, where: WhereKey) -> dict[str, frozenset[str]]:
    if not where:
        return {}
    from imagematrix.images.catalog.axis_conditions import ConditionError, match_axes

    name = f"{catalog.image}:{catalog.version}"
    try:
        return match_axes(collect_axes(catalog.variants), dict(where), name)
    except ConditionError as error:
        raise UsageError(str(error)) from error


def _select_excluded(catalog: Catalog, wanted: Mapping[str, frozenset[str]]) -> Catalog:
    if not wanted:
        return catalog
    remaining = []
    for variant in catalog.variants:
        own = read_axis_values(variant)
        if all(not these.isdisjoint(own.get(axis, ())) for axis, these in wanted.items()):
            remaining.append(variant)
    return replace(catalog, variants=tuple(remaining))


def collect_axes(variants: Iterable[Variant]) -> dict[str, tuple[str, ...]]:
    """Return the axes of all variants with their values, the image's own first."""
    by_axis: dict[str, set[str]] = {}
    for variant in variants:
        for axis, these in read_axis_values(variant).items():
            by_axis.setdefault(axis, set()).update(these)
    own = sorted(by_axis.keys() - {*HARDWARE})
    return {
        axis: tuple(sorted(by_axis[axis], key=make_natural_key))
        for axis in (*own, *HARDWARE)
        if axis in by_axis
    }
