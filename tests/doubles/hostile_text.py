"""Text that tries to be a command to a CI system, and documents that have it in one place."""

import copy
import re
from functools import reduce
from operator import getitem

MARK = "Zq7"  # in whatever of the text is printed
FORGED = "imagematrix forged this"
TEXT = (
    f"::error::{MARK}\n::error::{MARK}\r##[error]{MARK} ##vso[task.x]{MARK}\n \t::warning::{MARK}\n{FORGED}"
)
# What a runner obeys; the lines are those of any program that reads a log.
LINES = re.compile("[\n\v\f\r\x85\u2028\u2029]")
OBEYED = re.compile(r"\s*::\w|.*##\w*\[|.*\r", re.DOTALL)


def obeyed(output):
    """Return what of an output a CI system would obey or a person would take for another message."""
    lone = ["a carriage return"] if re.search(r"\r(?!\n)", output) else []
    return lone + [
        line for line in LINES.split(output) if OBEYED.match(line) or line.strip().startswith(FORGED)
    ]


def places(document):
    """Yield the way to each string in a document, as keys; of a list, only to those in its first element."""
    if isinstance(document, str):
        yield ()
    elif isinstance(document, list) and document:
        yield from ((0, *way) for way in places(document[0]))
    elif isinstance(document, dict):
        for key, value in document.items():
            yield from ((key, *way) for way in places(value))


def names(document):
    """Yield the way to each key in a document; see `places`."""
    if isinstance(document, list) and document:
        yield from ((0, *way) for way in names(document[0]))
    elif isinstance(document, dict):
        for key, value in document.items():
            yield (key,)
            yield from ((key, *way) for way in names(value))


def with_value(document, way, text):
    """Return a copy of a document with `text` instead of one string."""
    if not way:
        return text
    made = copy.copy(document)
    made[way[0]] = with_value(document[way[0]], way[1:], text)
    return made


def with_name(document, way, text):
    """Return a copy of a document with `text` instead of one key, in the same place."""
    key, *rest = way
    if rest:
        made = copy.copy(document)
        made[key] = with_name(document[key], rest, text)
        return made
    return {text if one == key else one: value for one, value in document.items()}


def hostile(document):
    """Yield a document, and copies with hostile text in one place each, after the place in words.

    The text replaces the string, or follows it: some are only read if they begin in a certain way.
    """

    yield "", document
    for way in places(document):
        where = "/".join(map(str, way))
        for text in (TEXT, reduce(getitem, way, document) + TEXT):
            yield where, with_value(document, way, text)
    for way in names(document):
        for text in (TEXT, way[-1] + TEXT):
            yield f"key {'/'.join(map(str, way))}", with_name(document, way, text)
