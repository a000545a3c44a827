"""How a scheduler and an API server evaluate our documents: node affinity, and CEL with a real library."""

from __future__ import annotations

import json
from typing import Any

import celpy
from celpy import celtypes
from celpy.adapter import CELJSONEncoder, json_to_cel

LIMIT = 2**63


def admitted(terms, labels):
    """Whether one of these node selector terms matches a node, as in nodeaffinity.go of Kubernetes."""
    return any(term and all(matches(one, labels) for one in term) for term in terms)


def matches(requirement, labels):
    """Whether a label meets one requirement, as in labels/selector.go of Kubernetes."""
    value, values = labels.get(requirement["key"]), requirement.get("values", [])
    found, bound = number(value), number(values[0]) if values else None
    return {
        "In": value is not None and value in values,
        "NotIn": value not in values,
        "Exists": value is not None,
        "DoesNotExist": value is None,
        "Gt": found is not None and bound is not None and found > bound,
        "Lt": found is not None and bound is not None and found < bound,
    }.get(requirement["operator"], False)


def number(text):
    """Return a label's value as strconv.ParseInt reads it, or None."""
    digits = (text or "").removeprefix("-").removeprefix("+")
    if not digits.isdecimal() or not digits.isascii():
        return None
    return int(text) if -LIMIT <= int(text) < LIMIT else None


class Semver(tuple[int, ...]):
    """A semantic version in Kubernetes' CEL."""

    __slots__ = ()


def semver(text):
    return Semver(int(part) for part in str(text).split("."))


def quantity(text):
    """Return an amount such as 16384Mi in bytes."""
    return celtypes.IntType(int(str(text).removesuffix("Mi")) * 1024 * 1024)


def compare_to(one, other):
    return celtypes.IntType((one > other) - (one < other))


def join(texts, separator):
    return celtypes.StringType(str(separator).join(map(str, texts)))


def lower_ascii(text):
    return celtypes.StringType(str(text).lower())


FUNCTIONS: dict[str, Any] = {
    "semver": semver,
    "quantity": quantity,
    "compareTo": compare_to,
    "lowerAscii": lower_ascii,
    "join": join,
}


class Cel:
    """Evaluates CEL expressions with the functions that Kubernetes adds; each is compiled once."""

    def __init__(self, **types):
        self._programs = {}
        self._environment = celpy.Environment(annotations=types)  # it raises the recursion limit

    def __call__(self, expression, **values):
        program = self._programs.get(expression)
        if program is None:
            compiled = self._environment.compile(expression)
            program = self._environment.program(compiled, functions=dict(FUNCTIONS))
            self._programs[expression] = program
        return program.evaluate(values)


class ApiServer:
    """Evaluates admission policies as an API server does: conditions, variables, then expressions."""

    def __init__(self, objects):
        self._mutating = [one for one in objects if one["kind"] == "MutatingAdmissionPolicy"]
        self._validating = [one for one in objects if one["kind"] == "ValidatingAdmissionPolicy"]
        self._cel = Cel(JSONPatch=celtypes.MessageType)

    def mutate(self, pod, before=None):
        """Return the JSON patch of all policies for a pod that is created, or changed from `before`."""
        patch = []
        for one in self._mutating:
            values = self._values(one["spec"], pod, before)
            for mutation in one["spec"]["mutations"] if values else ():
                patch += self._cel(mutation["jsonPatch"]["expression"], **values)
        return json.loads(json.dumps(patch, cls=CELJSONEncoder))

    def refuse(self, pod, before=None):
        """Return the message of the first validation that fails, or None."""
        for one in self._validating:
            values = self._values(one["spec"], pod, before)
            for validation in one["spec"]["validations"] if values else ():
                if not self._cel(validation["expression"], **values):
                    return str(self._cel(validation["messageExpression"], **values))
        return None

    def _values(self, spec, pod, before):
        values = {
            "object": json_to_cel(pod),
            "oldObject": json_to_cel(before),
            "request": json_to_cel({"operation": "UPDATE" if before else "CREATE"}),
        }
        if not all(self._cel(one["expression"], **values) for one in spec["matchConditions"]):
            return None
        found = values["variables"] = celtypes.MapType()
        for one in spec["variables"]:
            found[celtypes.StringType(one["name"])] = self._cel(one["expression"], **values)
        return values


def patched(document, patch):
    """Return a document with a JSON patch of `add` and `replace` (RFC 6902) applied."""
    result = json.loads(json.dumps(document))
    for operation in patch:
        *path, last = operation["path"].split("/")[1:]
        place = result
        for step in path:
            place = place[int(step)] if isinstance(place, list) else place[step]
        if isinstance(place, list):
            assert operation["op"] == "add"
            place.insert(len(place) if last == "-" else int(last), operation["value"])
        else:
            assert operation["op"] == "add" or last in place
            place[last] = operation["value"]
    return result
