"""The process that renders templates, with jinja2: what a template does to it costs nobody else.

Templates come with the matrix, perhaps from a pull request. They run in jinja's sandbox and see nothing but
text and mappings of text. No sandbox can tell how long a loop goes on, or how much a filter makes: that is
what this process is for, which has limits of its own and ends with what exceeds them.

It reads requests from stdin and answers each on stdout, in order, as lines of JSON.
"""

from __future__ import annotations

import json
import os
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


def main() -> None:
    """Answer requests about the templates of a folder, in so many seconds of processor time each."""
    folder, seconds = sys.argv[1:]
    _limit(resource.RLIMIT_AS, MEMORY)
    _limit(resource.RLIMIT_CORE, 0)
    templates = Templates(folder)
    for line in sys.stdin:
        # The kernel ends this process when it is through with them, whatever it is at.
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + int(seconds))
        sys.stdout.write(f"{json.dumps(templates.answer(**json.loads(line)))}\n")
        sys.stdout.flush()


def _limit(kind: int, value: int) -> None:
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))


class Templates:
    """The templates of one folder; each is compiled once for all its cells."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
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
        # The same cell is to give the same Dockerfile each time.
        del self._environment.filters["random"], self._environment.globals["lipsum"]

    def answer(
        self, template: str, values: Mapping[str, str | None], images: Mapping[str, str], names: list[str]
    ) -> dict[str, Any]:
        """Return what a template makes of a cell's `values`, under "text".

        `images` are the references of other images that are known; `names` those of all. Where it asks for
        another, that is under "image"; where it goes wrong, "error" says how and where, and "name" which name
        is to blame, if one is, and "empty" whether that is one without a value in this cell.
        """
        try:
            return {"text": self._rendered(template, _named(values), _Images(images, names))}
        except _AskedError as asked:
            return {"image": asked.name}
        except jinja2.TemplateNotFound as error:
            return {"error": f"{self._path(template)}: template {error.name!r} not found"}
        except jinja2.TemplateSyntaxError as error:
            where = f"{error.filename or self._path(template)}:{error.lineno}"
            return {"error": f"{where}: {error.message}"}
        except Exception as error:  # noqa: BLE001 - what a template does can end in any of Python's errors
            return {"error": self._told(error, template), "of_cell": True, **_blamed(error)}

    def _rendered(self, template: str, values: Mapping[str, object], images: _Images) -> str:
        text = self._environment.get_template(template).render(values, images=images)
        if len(text) > OUTPUT:
            raise jinja2.TemplateRuntimeError(f"the output exceeds {OUTPUT:,} characters")
        return text

    def _source(self, name: str) -> tuple[str, str, None] | None:
        found = inside(self._folder, name)
        if found is None or not os.path.isfile(found):  # noqa: PTH113 - pathlib is slow to load
            return None
        with open(found, encoding="utf-8") as file:  # noqa: PTH123 - as above
            return file.read(), self._path(name), None

    def _path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _told(self, error: Exception, template: str) -> str:
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
    """Jinja's sandbox, where a template's globals are a plain dictionary.

    Jinja copies them for every rendering, and to copy its own ChainMap takes a quarter of all the time.
    """

    def make_globals(self, d: MutableMapping[str, Any] | None) -> MutableMapping[str, Any]:
        return {**self.globals, **(d or {})}


class _AskedError(Exception):
    """A template asks for an image that is not known yet."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class _Images:
    """What a template sees as `images`: a mapping, and nothing else of it."""

    __slots__ = ("_known", "_names")

    def __init__(self, known: Mapping[str, str], names: list[str]) -> None:
        self._known = known
        self._names = names

    def __getitem__(self, name: str) -> str:
        if name in self._known:
            return self._known[name]
        raise _AskedError(str(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __repr__(self) -> str:
        raise TypeError('images cannot be listed: write one, such as images["base"]')


class _NoValueError(jinja2.UndefinedError):
    """What has no value in this cell was used as if it had one."""


class _Unknown(jinja2.StrictUndefined):
    """A name that templates don't have: nothing can be done with it, nor with a list that holds it."""

    __slots__ = ()
    __repr__ = jinja2.Undefined._fail_with_undefined_error  # noqa: SLF001 - what jinja's own kinds do


class _NoValue(jinja2.Undefined):
    """A name without a value in this cell: a template may ask for it, but can't write it or compute with it.

    None would not do: `"x" ~ cuda` would write xNone.
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


def _named(found: Mapping[str, str | None]) -> dict[str, object]:
    """Return `found` with something that knows its name in place of each None."""
    return {name: _no_value(name) if value is None else value for name, value in found.items()}


def _present(value: object) -> object:
    if type(value) is str:  # as nearly always: a Dockerfile has dozens, and a matrix thousands of Dockerfiles
        return value
    if value is None:  # a template's own, such as what a dict has not
        raise jinja2.TemplateRuntimeError("this would write None")
    if not isinstance(value, (str, int, float, list, tuple, dict, jinja2.Undefined)):
        # Python would write where in memory it is, which is another place each time.
        raise jinja2.TemplateRuntimeError(f"a value of type {type(value).__name__} cannot be written")
    return value
