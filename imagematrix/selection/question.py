"""Questions: which variants of a catalog are considered, by their axes, for any host."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache

from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.hardware.vendors.versions import natural
from imagematrix.images.catalog.catalog import HARDWARE
from imagematrix.selection.index import Index
from imagematrix.selection.order import order
from imagematrix.selection.rule import Remedy, to_ask
from imagematrix.selection.rules.device_code import served

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from imagematrix.images.catalog.catalog import Catalog, Variant

    # Conditions by axis, or texts such as "python=3.13,cuda>=12".
    Where = Mapping[str, str | int | Sequence[str | int]] | str | Sequence[str]
    Asked = tuple[tuple[str, tuple[str, ...]], ...]  # the same, as a key

__all__ = ["Question", "asked", "axes", "choosing", "narrowed", "parse", "values"]

EXAMPLE = 'write conditions such as {"python": "3.13"} or "python=3.13"'
QUESTIONS = 8  # questions kept, which selections from other processes share


class Question:
    """The variants of a catalog that match `where` and the catalog's defaults.

    `wanted` has the accepted values of each axis that is in `where` or has a default.
    """

    def __init__(self, whole: Catalog, where: Asked) -> None:
        self._whole = whole
        self._where = where
        self.wanted = _wanted(whole, where)
        self.catalog = _left(whole, self.wanted)
        self.index = Index(self.catalog.variants, order(whole.prefer))

    def __reduce__(self) -> tuple[Callable[[Catalog, Asked], Question], tuple[Catalog, Asked]]:
        return _shared, (self._whole, self._where)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Question):
            return NotImplemented
        return self is other or (self._where == other._where and self._whole == other._whole)

    def __hash__(self) -> int:
        return hash((self._whole.image, self._whole.version, self._where))

    @cached_property
    def left_out(self) -> Index:
        """The variants of the catalog that were not requested."""
        kept = frozenset(variant.reference for variant in self.catalog.variants)
        others = tuple(variant for variant in self._whole.variants if variant.reference not in kept)
        return Index(others, order(self._whole.prefer))

    @property
    def words(self) -> str:
        """The conditions, as words to append to "variants" in a sentence."""
        wanted = [f"{axis} {' or '.join(sorted(these, key=natural))}" for axis, these in self.wanted.items()]
        return f" with {', '.join(wanted)}" if wanted else ""

    def remedy(self, variant: Variant) -> Remedy:
        """Return how to request an excluded variant."""
        own = values(variant)
        differing = [axis for axis, these in self.wanted.items() if not these & {*own.get(axis, ())}]
        if all(axis in own for axis in differing):
            return choosing("pass {}", {axis: own[axis][0] for axis in differing})
        return Remedy(words=f"select it by its reference: {variant.reference}")


@lru_cache(maxsize=QUESTIONS)
def _shared(whole: Catalog, where: Asked) -> Question:
    """Return the same question for equal ones, so that selections from a pool's workers share it."""
    return Question(whole, where)


def choosing(words: str, where: Mapping[str, str]) -> Remedy:
    """Return the remedy to choose these values of axes; `words` have {} in their place."""
    option = " ".join(f"--where {axis}={value}" for axis, value in where.items())
    return to_ask(words, option, where=dict(where))


def parse(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the conditions in the values of `--where`; raise UsageError if one is invalid."""
    if not texts:
        return {}
    # Most questions have no conditions, and need not load the parser.
    from imagematrix.images.catalog.axis_conditions import ConditionError, parse_only

    try:
        return parse_only(",".join(texts))
    except ConditionError as error:
        raise UsageError(str(error)) from error


def asked(where: Where | None) -> Asked:
    """Return hashable conditions on axes; raise UsageError if `where` has another form.

    Each axis has a word or several, in the syntax of `--only`. A text, or a list of texts, has conditions
    such as "python=3.13".
    """
    if not where:
        return ()
    if isinstance(where, str | list | tuple):
        where = parse(_words(where, "a condition"))
    if not isinstance(where, Mapping):
        raise UsageError(f"invalid conditions {where!r:.80}", remedy=EXAMPLE)
    return tuple(
        sorted((_words(axis, "an axis")[0], _words(words, "a value")) for axis, words in where.items())
    )


def _words(given: object, what: str) -> tuple[str, ...]:
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


def narrowed(catalog: Catalog, where: Where | None) -> Catalog:
    """Return a catalog with only the variants that match `where`, whatever the defaults.

    Raises UsageError, which lists the existing ones, if no variant has such an axis or value.
    """
    return _left(catalog, _conditions(catalog, asked(where)))


def values(variant: Variant) -> dict[str, tuple[str, ...]]:
    """Return a variant's values on each axis; on axes of hardware, they are written as in matrix.yaml.

    A CPU-only variant has no compute capability and no driver.
    """
    driver = variant.driver
    hardware = {
        "platform": (variant.platform,),
        "cuda": (variant.cuda or "none",),
        "compute": tuple(map(_compute, served(variant))),
        "march": (variant.march,) if variant.march else (),
        "driver": (driver.version or driver.mode,) if driver else (),
    }
    own = {axis: (value,) for axis, value in variant.axes}
    return own | {axis: value for axis, value in hardware.items() if value}


def _compute(target: str) -> str:
    """Return the compute capability that a target such as "90a" is for."""
    digits = target.rstrip("af")
    return f"{digits[:-1]}.{digits[-1]}{target[len(digits) :]}"


def _wanted(catalog: Catalog, where: Asked) -> dict[str, frozenset[str]]:
    accepted = _conditions(catalog, where)
    for axis, value in catalog.defaults:
        # A default decides an axis only if the question leaves it open.
        if value in accepted.get(axis, (value,)):
            accepted[axis] = frozenset([value])
    return accepted


def _conditions(catalog: Catalog, where: Asked) -> dict[str, frozenset[str]]:
    if not where:
        return {}
    from imagematrix.images.catalog.axis_conditions import ConditionError, among

    name = f"{catalog.image}:{catalog.version}"
    try:
        return among(axes(catalog.variants), dict(where), name)
    except ConditionError as error:
        raise UsageError(str(error)) from error


def _left(catalog: Catalog, wanted: Mapping[str, frozenset[str]]) -> Catalog:
    if not wanted:
        return catalog
    remaining = []
    for variant in catalog.variants:
        own = values(variant)
        if all(not these.isdisjoint(own.get(axis, ())) for axis, these in wanted.items()):
            remaining.append(variant)
    return replace(catalog, variants=tuple(remaining))


def axes(variants: Iterable[Variant]) -> dict[str, tuple[str, ...]]:
    """Return the axes of all variants with their values, the image's own first."""
    by_axis: dict[str, set[str]] = {}
    for variant in variants:
        for axis, these in values(variant).items():
            by_axis.setdefault(axis, set()).update(these)
    own = sorted(by_axis.keys() - {*HARDWARE})
    return {axis: tuple(sorted(by_axis[axis], key=natural)) for axis in (*own, *HARDWARE) if axis in by_axis}
