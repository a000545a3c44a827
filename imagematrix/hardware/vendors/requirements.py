"""NVIDIA's requirement expressions in variables of images such as NVIDIA_REQUIRE_CUDA.

"cuda>=12.4 brand=tesla,driver>=535,driver<536" holds if one of its alternatives, separated by blanks, holds;
an alternative holds if all its conditions, separated by commas, do. Source: NVIDIA's container toolkit,
libnvidia-container, src/cli/dsl.c.
"""

from __future__ import annotations

import re
from functools import lru_cache

from imagematrix.common.record import Record
from imagematrix.errors import UsageError
from imagematrix.hardware.vendors import versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

CONDITION = re.compile(r"(cuda|driver|arch|brand)(=|!=|<|<=|>|>=)([A-Za-z0-9.]+)", re.ASCII)
NUMBERS = re.compile(r"\d{1,9}(\.\d{1,9})*\.?", re.ASCII)


class Condition(Record):
    """One condition on `name`, one of cuda, driver, arch (a compute capability) and brand.

    The `value` of a brand is in lower case, as hosts name theirs: NVIDIA's runtime ignores case.
    """

    name: str
    compare: str
    value: str

    def __str__(self) -> str:
        return f"{self.name}{self.compare}{self.value}"

    def is_met(self, value: str) -> bool:
        """Whether a value meets the condition."""
        if self.name == "brand":
            return bool(versions.COMPARISONS[self.compare](value.lower(), self.value))
        return bool(versions.COMPARISONS[self.compare](_make_sort_key(value), _make_sort_key(self.value)))


Expression = tuple[tuple[Condition, ...], ...]


@lru_cache(maxsize=1024)
def parse_requirement(expression: str) -> Expression:
    """Return the alternatives of an expression, each with its conditions; raise UsageError."""
    return tuple(
        tuple(_parse_condition(word, expression) for word in alternative.split(","))
        for alternative in expression.split()
    )


def list_conditions(expressions: Iterable[str]) -> Iterator[Condition]:
    """Yield all conditions of some expressions."""
    for expression in expressions:
        for alternative in parse_requirement(expression):
            yield from alternative


def format_requirement(expression: Expression) -> str:
    """Return the text of an expression."""
    return " ".join(",".join(map(str, alternative)) for alternative in expression)


def is_met(expression: Expression, met: Callable[[Condition], bool]) -> bool:
    """Whether an expression holds, given which conditions are met; an empty one does."""
    return not expression or any(all(map(met, alternative)) for alternative in expression)


def _parse_condition(word: str, expression: str) -> Condition:
    match = CONDITION.fullmatch(word)
    if not match or (match[2] not in ("=", "!=") if match[1] == "brand" else not NUMBERS.fullmatch(match[3])):
        raise UsageError(f"invalid requirement {word[:80]!r} in {expression[:200]!r}")
    value = match[3].lower() if match[1] == "brand" else match[3]
    return Condition(name=match[1], compare=match[2], value=value)


def _make_sort_key(version: str) -> tuple[int, ...]:
    """Return the sort key of a version, without trailing zeros."""
    numbers = list(versions.make_sort_key(version.rstrip(".")))
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
