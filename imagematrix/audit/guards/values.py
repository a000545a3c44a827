"""What an expression in a Python source may be, as far as the source alone shows it.

Only constants, texts and capabilities are followed. A text has an asterisk for each part that is not known.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import product
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

MOST = 8  # values that are told apart
LONGEST = 512  # characters of a text
WIDEST = 32  # elements of a tuple
WITHIN = 8  # elements of a tuple in another, which has none in it
LARGEST = 1 << 63
COMBINED = 30  # from here on, a number that a capability is compared with is 10 * major + minor


class Line(NamedTuple):
    """A line in a module, which is named by its path in the package."""

    path: str
    line: int


class ComputeCapability(NamedTuple):
    """The compute capability of a GPU, as programs get it."""

    major: int
    minor: int

    @property
    def number(self) -> int:
        """The capability as one number, such as 90 for 9.0."""
        return 10 * self.major + self.minor

    @property
    def text(self) -> str:
        """The capability as a text, such as 9.0."""
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True, slots=True)
class _Any:
    """An unknown element of a tuple."""


ANY = _Any()


@dataclass(frozen=True, slots=True)
class ConstantTable:
    """A dictionary of constants."""

    items: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, slots=True)
class PossibleValue:
    """What an expression may be: one of its `options`, or anything if they are None.

    `question` is the line of the first question for the capability on which it depends. `hints` are the texts
    from which an unknown value was made.
    """

    options: frozenset[Any] | None = None
    question: Line | None = None
    hints: frozenset[str] = field(default=frozenset())

    @property
    def texts(self) -> frozenset[str]:
        """The texts that it may be or contain."""
        texts = [text for option in self.options or () for text in _list_texts(option)]
        return self.hints.union(texts)


UNKNOWN_VALUE = PossibleValue()


def make_constant(option: object, question: Line | None = None) -> PossibleValue:
    """Return the value that is one constant."""
    return PossibleValue(frozenset([option]), question)


def make_unknown(*sources: PossibleValue) -> PossibleValue:
    """Return an unknown value that was made from others."""
    hints: frozenset[str] = frozenset().union(*(source.texts for source in sources))
    question = next((source.question for source in sources if source.question), None)
    return PossibleValue(
        None, question, hints if len(hints) <= MOST * 4 else frozenset(sorted(hints)[: MOST * 4])
    )


def join_values(values: Iterable[PossibleValue]) -> PossibleValue:
    """Return the value that is one of several."""
    listed = list(values)
    if any(value.options is None for value in listed):
        return make_unknown(*listed)
    options: frozenset[Any] = frozenset().union(*(value.options or () for value in listed))
    if not options or len(options) > MOST:
        return make_unknown(*listed)
    return replace(make_unknown(*listed), options=options)


def make_tuple(values: Iterable[PossibleValue]) -> PossibleValue:
    """Return a tuple of values; those with several options are unknown elements."""
    listed = list(values)
    if len(listed) > WIDEST:
        return make_unknown(*listed)
    elements = tuple([_get_constant(value) for value in listed])
    return replace(make_unknown(*listed), options=frozenset([elements]))


def _get_constant(value: PossibleValue) -> object:
    """Return the single constant of a value as an element; what nests deeper is unknown."""
    if value.options is None or len(value.options) != 1:
        return ANY
    (option,) = value.options
    nested = isinstance(option, tuple) and (
        len(option) > WITHIN or any(isinstance(element, tuple) for element in option)
    )
    return ANY if nested or isinstance(option, ConstantTable) else option


def make_table(keys: Sequence[PossibleValue], elements: Sequence[PossibleValue]) -> PossibleValue:
    """Return a dictionary; unknown if a key or an element is."""
    pairs = [
        (_get_constant(key), _get_constant(element)) for key, element in zip(keys, elements, strict=True)
    ]
    if len(pairs) > WIDEST or any(ANY in pair for pair in pairs):
        return make_unknown(*elements)
    return replace(make_unknown(*elements), options=frozenset([ConstantTable(tuple(pairs))]))


def get_item(value: PossibleValue, index: object) -> PossibleValue:
    """Return the element of a tuple or table at an index."""
    items = [_get_option_item(option, index) for option in value.options or ()]
    if not items or ANY in items:
        return make_unknown(value)
    return join_values([make_constant(item, value.question) for item in items])


def _get_option_item(option: Any, index: Any) -> object:
    try:
        if isinstance(option, ConstantTable):
            return dict(option.items).get(index, ANY)
        return option[index] if isinstance(option, tuple | str) else ANY
    except (TypeError, IndexError):
        return ANY


def get_truth(value: PossibleValue) -> bool | None:
    """Return whether a value counts as true, None if it may be either."""
    if value.options is None:
        return None
    truths = {None if option is ANY else bool(option) for option in value.options}
    return truths.pop() if len(truths) == 1 else None


def make_text(value: PossibleValue) -> list[str]:
    """Return the texts of a value in another text."""
    if value.options is None:
        return ["*"]
    return [
        "*" if isinstance(option, tuple | ConstantTable | _Any) else str(option) for option in value.options
    ]


def _list_texts(option: object) -> list[str]:
    if isinstance(option, str):
        return [option]
    if isinstance(option, tuple):
        return [text for element in option for text in _list_texts(element)]
    if isinstance(option, ConstantTable):
        return [text for _, element in option.items for text in _list_texts(element)]
    return []


def _combine(
    left: PossibleValue, right: PossibleValue, function: Callable[[Any, Any], object]
) -> PossibleValue:
    """Return the results of a function of two constants, for all pairs of options."""
    unknown = make_unknown(left, right)
    if left.options is None or right.options is None:
        return unknown
    results = {function(*pair) for pair in product(left.options, right.options)}
    if ANY in results or len(results) > MOST:
        return unknown
    return replace(unknown, options=frozenset(results), hints=frozenset())


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "Div": operator.truediv,
}


def calculate(name: str, left: PossibleValue, right: PossibleValue) -> PossibleValue:
    """Return the result of an operation, by its name in `ast`. A slash also joins paths."""
    has_text = any(isinstance(option, str) for side in (left, right) for option in side.options or ())
    if name not in ("Div", "Add") or not has_text:
        return _combine(left, right, lambda first, second: _calculate_constant(name, first, second))
    if name == "Div":
        texts = [f"{start.rstrip('/')}/{end}" for start in make_text(left) for end in make_text(right)]
    else:
        texts = [start + end for start in make_text(left) for end in make_text(right)]
    unknown = make_unknown(left, right)
    if len(texts) > MOST or any(len(text) > LONGEST for text in texts):
        return unknown
    return replace(unknown, options=frozenset(texts), hints=frozenset())


def _calculate_constant(name: str, left: Any, right: Any) -> object:
    left, right = (
        operand.number if isinstance(operand, ComputeCapability) else operand for operand in (left, right)
    )
    if name == "Add" and isinstance(left, tuple) and isinstance(right, tuple):
        return left + right if len(left) + len(right) <= WITHIN else ANY
    if name not in OPERATIONS or not all(isinstance(operand, int | float) for operand in (left, right)):
        return ANY
    try:
        result = OPERATIONS[name](left, right)
    except (ArithmeticError, ValueError):
        return ANY
    return result if abs(result) < LARGEST else ANY


def compare(name: str, left: PossibleValue, right: PossibleValue) -> PossibleValue:
    """Return the result of a comparison, by its name in `ast`."""
    return _combine(left, right, lambda first, second: _compare_constants(name, first, second))


ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
}
NEGATED = {"NotIn": "In", "IsNot": "Is", "NotEq": "Eq"}


MIRRORED = {"Lt": "Gt", "LtE": "GtE", "Gt": "Lt", "GtE": "LtE"}
SINGLE = (None, True, False)  # what programs compare with `is`


def _compare_constants(name: str, left: Any, right: Any) -> object:
    if name in NEGATED:
        result = _compare_constants(NEGATED[name], left, right)
        return result if result is ANY else not result
    if name in ("Is", "In"):
        is_known = left in SINGLE or right in SINGLE
        return _contains(right, left) if name == "In" else left is right if is_known else ANY
    if isinstance(right, ComputeCapability) and not isinstance(left, ComputeCapability):
        return _compare_constants(MIRRORED.get(name, name), right, left)
    if isinstance(left, ComputeCapability) and not isinstance(right, tuple):
        return _compare_capability(name, left, right)
    return _compare_order(name, left, right)


def _compare_order(name: str, left: Any, right: Any) -> object:
    if is_vague(left) or is_vague(right) or name not in ORDERS:
        return ANY
    try:
        return bool(ORDERS[name](left, right))
    except TypeError:
        return ANY


def _compare_capability(name: str, capability: ComputeCapability, value: object) -> object:
    """Compare a capability with what one program or another makes of it."""
    if isinstance(value, str):
        prefixes = ("", "sm", "sm_", "compute_")
        words = {capability.text, *(f"{prefix}{capability.number}" for prefix in prefixes)}
        return value in words if name == "Eq" and "*" not in value else ANY
    if isinstance(value, float):
        return ORDERS[name](float(capability.text), value)
    if isinstance(value, int) and value >= COMBINED:
        return ORDERS[name](capability.number, value)
    return False if value is None and name == "Eq" else ANY


def _contains(container: object, member: object) -> object:
    if isinstance(container, ConstantTable):
        container = tuple(key for key, _ in container.items)
    if isinstance(container, str) and isinstance(member, str):
        return ANY if "*" in container + member else member in container
    if not isinstance(container, tuple):
        return ANY
    results = [_compare_constants("Eq", member, element) for element in container]
    return True if True in results else ANY if ANY in results else False


def is_followed(option: object) -> bool:
    """Whether a constant is one of those that are followed, and small."""
    if isinstance(option, str | tuple):
        return len(option) <= (LONGEST if isinstance(option, str) else WIDEST)
    if isinstance(option, int):
        return abs(option) < LARGEST
    return option is None or isinstance(option, float)


def is_vague(option: object) -> bool:
    """Whether a part of a constant is unknown, or is none of those that are followed."""
    if isinstance(option, tuple):
        return any(map(is_vague, option))
    plain = option is None or isinstance(option, bool | int | float | str)
    return not plain or (isinstance(option, str) and "*" in option)


def names_file(pattern: str, path: str) -> bool:
    """Whether a text names a file by its path, or by the end of its path."""
    folder, _, name = pattern.rpartition("/")
    if not name.strip("*"):
        return False
    return fnmatchcase(path, pattern if folder else f"*/{name}") or fnmatchcase(path, f"*/{pattern}")
