"""The values that a Dockerfile's ARGs before its first FROM give to its FROMs.

They are written out before anything else reads the Dockerfile, so that its bases, and its identity, are those
of a Dockerfile without variables.
"""

from __future__ import annotations

import re

from imagematrix.build.dockerfile.instructions import (
    DockerfileError,
    parse_by_paragraph,
    parse_instructions,
    split_words,
)
from imagematrix.build.matrix.axis_values import ARGUMENT, BUILDKITS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
    values: dict[str, str | None] = {}  # None if a value is not known
    parts: list[str] = []
    end, in_stage = 0, False
    for step in parse_instructions(dockerfile)[0]:
        in_stage = in_stage or step.stage is not None
        for name, default in () if in_stage else parse_declarations(step.arguments):
            if name in arguments:
                values[name] = arguments[name]
            elif default is not None:
                values[name] = _expand_word(default, values)
        for image in step.names if step.stage is not None else ():
            text = _expand_word(image.text, values)
            if text:
                parts += [dockerfile[end : image.at], text]
                end = image.at + len(image.text)
    return "".join([*parts, dockerfile[end:]])


def parse_declarations(arguments: str) -> Iterator[tuple[str, str | None]]:
    """Yield the names in the text after ARG, each with its value as it is written, or None."""
    for word in split_words(arguments, raw=True):
        name, equals, value = word.partition("=")
        if ARGUMENT.fullmatch(name):
            yield name, value if equals else None


class _UnknownError(Exception):
    """The value of a word is not known."""


def _expand_word(text: str, values: Mapping[str, str | None]) -> str | None:
    """Return a word without quotes, and with the values of its variables; None if it is not known."""
    quoted = QUOTED.fullmatch(text)
    if quoted and quoted[1] == "'":  # in which a variable is none
        return None if "$" in text else quoted[2]

    def look_up(match: re.Match[str]) -> str:
        name, operator, word = match[1] or match[2], match[3] or "", match[4] or ""
        value = values.get(name)
        if not name or (name in values and value is None):
            raise _UnknownError
        if BUILDKITS.fullmatch(name) or BY_PLATFORM.fullmatch(name):  # BuildKit itself gives them values
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
