"""The values that a Dockerfile's ARGs before its first FROM give to its FROMs.

They are written out before anything else reads the Dockerfile, so that its bases, and its identity, are those
of a Dockerfile without variables.
"""

from __future__ import annotations

import re
from itertools import takewhile
from types import MappingProxyType

from imagematrix.build.dockerfile.instructions import (
    DockerfileError,
    parse_by_paragraph,
    parse_instructions,
    split_words,
)
from imagematrix.build.matrix.axis_values import ARGUMENT, BUILDKITS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from imagematrix.build.dockerfile.instructions import Instruction

# BuildKit has more operators, but not in all releases. Anything else that a shell interprets also matches.
VARIABLE = re.compile(
    r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:(:?[-+])([^\s\"'${}\\]*))?\})|[$\"'\\\s]", re.ASCII
)
QUOTED = re.compile(r"""(["'])([^"'\\]*)\1""")
BY_PLATFORM = re.compile(r"(TARGET|BUILD)(PLATFORM|OS|OSVERSION|ARCH|VARIANT|STAGE)", re.ASCII)


def with_bases_written_out(dockerfile: str, arguments: Mapping[str, str | None]) -> str:
    """Return `dockerfile` with the values of variables in the images of FROM; those without a value stay.

    `arguments` are the build arguments, which replace the values in the Dockerfile; None if it is not known
    which value one will have.
    """
    try:
        if not any("$" in name.text for step in parse_by_paragraph(dockerfile) for name in step.names):
            return dockerfile
    except DockerfileError:  # whoever reads the bases reports it, with variables that have no value
        pass
    parts: list[str] = []
    end = 0
    steps = parse_instructions(dockerfile)[0]
    values = find_values(steps, arguments)
    for step in steps:
        for image in step.names if step.stage is not None else ():
            text = expand_word(image.text, values)
            if text:
                parts += [dockerfile[end : image.at], text]
                end = image.at + len(image.text)
    return "".join([*parts, dockerfile[end:]])


def find_values(
    steps: Iterable[Instruction],
    arguments: Mapping[str, str | None],
    given: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str | None]:
    """Return the values that the ARGs before the first FROM have in FROMs; None if a value is not known.

    `arguments` are as in `with_bases_written_out`, `given` as in `expand_word`.
    """
    values: dict[str, str | None] = {}
    for step in takewhile(lambda step: step.stage is None, steps):
        for name, default in parse_declarations(step.arguments):
            if name in arguments:
                values[name] = arguments[name]
            elif default is not None:
                values[name] = expand_word(default, values, given)
    return values


def parse_declarations(arguments: str) -> Iterator[tuple[str, str | None]]:
    """Yield the names in the text after ARG, each with its value as it is written, or None."""
    for word in split_words(arguments, raw=True):
        name, equals, value = word.partition("=")
        if ARGUMENT.fullmatch(name):
            yield name, value if equals else None


class _UnknownError(Exception):
    """The value of a word is not known."""


def expand_word(
    text: str, values: Mapping[str, str | None], given: Mapping[str, str] = MappingProxyType({})
) -> str | None:
    """Return a word without quotes, and with the values of its variables; None if it is not known.

    `given` are the values of variables to which BuildKit itself gives them.
    """
    quoted = QUOTED.fullmatch(text)
    if quoted and quoted[1] == "'":  # in which a variable is none
        return None if "$" in text else quoted[2]

    def look_up(match: re.Match[str]) -> str:
        name, operator, word = match[1] or match[2], match[3] or "", match[4] or ""
        value = given.get(name) or values.get(name)
        if not name or (name in values and value is None):
            raise _UnknownError
        if name not in given and (BUILDKITS.fullmatch(name) or BY_PLATFORM.fullmatch(name)):
            raise _UnknownError
        is_set = bool(value) if operator.startswith(":") else value is not None
        if operator.endswith("+"):
            return word if is_set else ""
        if not is_set and not operator:
            raise _UnknownError
        return value or "" if is_set else word

    try:
        return VARIABLE.sub(look_up, quoted[2] if quoted else text)
    except _UnknownError:
        return None
