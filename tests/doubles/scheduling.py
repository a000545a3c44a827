"""What a scheduler and an API server do with our documents: node affinity, and CEL by a real library."""

from __future__ import annotations

from typing import Any

import celpy
from celpy import celtypes

LIMIT = 2**63


def admitted(terms, labels):
    """Whether one of some node selector terms matches a node: as nodeaffinity.go of Kubernetes has it."""
    return any(term and all(matches(one, labels) for one in term) for term in terms)


def matches(requirement, labels):
    """Whether a label meets one requirement: as labels/selector.go of Kubernetes has it."""
    value, values = labels.get(requirement["key"]), requirement.get("values", [])
    found, bound = number(value), number(values[0]) if values else None
    return {
        "In": value is not None and value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
        "Gt": found is not None and bound is not None and found > bound,
        "Lt": found is not None and bound is not None and found < bound,
    }[requirement["operator"]]


def number(text):
    """Return a label's value as strconv.ParseInt reads it, or None."""
    digits = (text or "").removeprefix("-").removeprefix("+")
    if not digits.isdecimal() or not digits.isascii():
        return None
    return int(text) if -LIMIT <= int(text) < LIMIT else None


class Semver(tuple[int, ...]):
    """A semantic version, as Kubernetes' CEL has them."""

    __slots__ = ()


def semver(text):
    return Semver(int(part) for part in str(text).split("."))


def compare_to(one, other):
    return celtypes.IntType((one > other) - (one < other))


def lower_ascii(text):
    return celtypes.StringType(str(text).lower())


FUNCTIONS: dict[str, Any] = {"semver": semver, "compareTo": compare_to, "lowerAscii": lower_ascii}


class Cel:
    """Evaluates CEL expressions with the functions that Kubernetes adds; each is compiled once."""

    def __init__(self):
        self._programs = {}
        celpy.Environment()  # raises the recursion limit, once

    def __call__(self, expression, **values):
        program = self._programs.get(expression)
        if program is None:
            environment = celpy.Environment()
            program = environment.program(environment.compile(expression), functions=dict(FUNCTIONS))
            self._programs[expression] = program
        return program.evaluate(values)
