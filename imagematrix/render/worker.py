"""The process that renders templates with Jinja, isolated from the rest.

Templates come with the matrix, perhaps from a pull request. They run in Jinja's sandbox and see only text
and mappings of text. A sandbox cannot limit how long a loop runs or how much memory a filter uses, so this
process has limits on CPU time and memory, and ends if a template exceeds them.

It reads requests from stdin and writes one answer for each to stdout, in order, as lines of JSON.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
import time
from functools import lru_cache

import jinja2
import jinja2.sandbox

from imagematrix.matrix.folders import inside

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping
    from typing import Any

__all__ = ["OUTPUT", "Templates", "main"]

OUTPUT = 1 << 20  # characters of one Dockerfile
MEMORY = 1 << 30  # bytes of address space
# Jinja's objects that change while a template is rendered; no template gets one without writing its name.
STATE = re.compile(r"\b(namespace|cycler|joiner)\b")


def main() -> None:
    """Answer requests about the templates of a folder, each within a limit of CPU seconds."""
    folder, seconds = sys.argv[1:]
    _limit(resource.RLIMIT_AS, MEMORY)
    _limit(resource.RLIMIT_CORE, 0)
    templates = Templates(folder)
    for line in sys.stdin:
        # The kernel ends this process when the limit is reached.
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + int(seconds))
        sys.stdout.write(f"{json.dumps(templates.answer(**json.loads(line)))}\n")
        sys.stdout.flush()


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


class Templates:
    """The templates of one folder; each is compiled once for all its cells."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._stateful = False
        self._environment = _Environment(
            loader=jinja2.FunctionLoader(self._source),
            undefined=_Unknown,
            finalize=_present,
            autoescape=False,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            auto_reload=False,
        )
        self._environment.tests["none"] = lambda value: value is None or isinstance(value, _NoValue)
        # The same cell must always give the same Dockerfile.
        del self._environment.filters["random"], self._environment.globals["lipsum"]

    def answer(
        self, template: str, values: Mapping[str, str | None], images: Mapping[str, str], names: list[str]
    ) -> dict[str, Any]:
        """Return the Dockerfile that a template gives for a cell's `values`, under "text".

        `images` has the known references of other images, `names` the names of all. If the template needs
        another one, its name is under "image". If it fails, "error" is the message with file and line, "name"
        the variable that caused it, if any, and "empty" whether that has no value in this cell.
        """
        try:
            return {"text": self._rendered(template, _named(values), _Images(images, names))}
        except _UnresolvedError as asked:
            return {"image": asked.name}
        except jinja2.TemplateNotFound as error:
            return {"error": f"{self._path(template)}: template {error.name!r} not found"}
        except jinja2.TemplateSyntaxError as error:
            where = f"{error.filename or self._path(template)}:{error.lineno}"
            return {"error": f"{where}: {error.message}"}
        except Exception as error:  # noqa: BLE001 - a template can cause any exception
            return {"error": self._with_position(error, template), "of_cell": True, **_blamed(error)}

    def _rendered(self, template: str, values: Mapping[str, object], images: _Images) -> str:
        if self._stateful:
            # Jinja evaluates an imported template once, so that its objects would remember other cells.
            for compiled in (self._environment.cache or {}).values():
                compiled._module = None  # noqa: SLF001 - there is no other way
        text = self._environment.get_template(template).render(values, images=images)
        if len(text) > OUTPUT:
            raise jinja2.TemplateRuntimeError(f"the output exceeds {OUTPUT:,} characters")
        return text

    def _source(self, name: str) -> tuple[str, str, None] | None:
        path = inside(self._folder, name)
        if path is None or not os.path.isfile(path):  # noqa: PTH113 - pathlib is slow to load
            return None
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - as above
            text = file.read()
        self._stateful = self._stateful or STATE.search(text) is not None
        return text, self._path(name), None

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _with_position(self, error: Exception, template: str) -> str:
        """Return an error with file and line of the innermost template frame."""
        place = self._path(template)
        trace = error.__traceback__
        while trace:
            file = trace.tb_frame.f_code.co_filename
            if file.startswith(self._folder):
                place = f"{file}:{trace.tb_lineno}"
            trace = trace.tb_next
        if isinstance(error, MemoryError):
            return f"{place}: it needs too much memory"
        return f"{place}: {error}"


def _blamed(error: Exception) -> dict[str, Any]:
    words = str(error).split("'")
    if isinstance(error, jinja2.UndefinedError) and len(words) > 1:
        return {"name": words[1], "empty": isinstance(error, _NoValueError)}
    return {}


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a plain dictionary for the globals.

    Jinja copies them for every rendering, and copying its ChainMap takes a quarter of the rendering time.
    """

    def make_globals(self, d: MutableMapping[str, Any] | None) -> MutableMapping[str, Any]:
        return {**self.globals, **(d or {})}


class _UnresolvedError(Exception):
    """A template needs the reference of an image that is not known yet."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Images:
    """The variable `images` of templates: a read-only mapping."""

    __slots__ = ("_names", "_references")

    def __init__(self, references: Mapping[str, str], names: list[str]) -> None:
        self._references = references
        self._names = names

    def __getitem__(self, name: str) -> str:
        if name in self._references:
            return self._references[name]
        raise _UnresolvedError(str(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __repr__(self) -> str:
        raise TypeError('images cannot be listed: write one, such as images["base"]')


class _NoValueError(jinja2.UndefinedError):
    """A variable without a value in this cell was used."""


class _Unknown(jinja2.StrictUndefined):
    """An unknown variable: any use of it, or of a list that contains it, is an error."""

    __slots__ = ()
    __repr__ = jinja2.Undefined._fail_with_undefined_error  # noqa: SLF001 - what jinja's own kinds do


class _NoValue(jinja2.Undefined):
    """A variable without a value in this cell: a template can test it, but not print it or compute with it.

    None would not work: `"x" ~ cuda` would print xNone.
    """

    __slots__ = ()
    __str__ = __repr__ = __iter__ = __len__ = jinja2.Undefined._fail_with_undefined_error  # noqa: SLF001

    def __eq__(self, other: object) -> bool:
        return other is None or isinstance(other, _NoValue)

    def __hash__(self) -> int:
        return hash(None)


@lru_cache(maxsize=64)
def _no_value(name: str) -> _NoValue:
    return _NoValue(hint=f"'{name}' has no value here", name=name, exc=_NoValueError)


def _named(values: Mapping[str, str | None]) -> dict[str, object]:
    """Return `values` with each None replaced by an object that knows the variable's name."""
    return {name: _no_value(name) if value is None else value for name, value in values.items()}


def _present(value: object) -> object:
    if type(value) is str:  # the usual case, tested first for speed
        return value
    if value is None:  # from the template itself, such as a missing key of a dict
        raise jinja2.TemplateRuntimeError("this would write None")
    if not isinstance(value, (str, int, float, list, tuple, dict, jinja2.Undefined)):
        # Python would print its address, which differs each time.
        raise jinja2.TemplateRuntimeError(f"a value of type {type(value).__name__} cannot be written")
    return value
