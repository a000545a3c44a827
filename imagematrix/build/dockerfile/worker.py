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
from functools import cached_property, lru_cache

import jinja2
import jinja2.ext
import jinja2.lexer
import jinja2.sandbox

from imagematrix.build.matrix.folders import resolve_inside
from imagematrix.common.process_limits import set_limit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
    from typing import Any

OUTPUT = 1 << 20  # characters of one Dockerfile
MEMORY = 1 << 30  # bytes of address space
# Jinja's objects that change while a template is rendered; no template gets one without writing its name.
STATE = re.compile(r"\b(namespace|cycler|joiner)\b")
# Raw blocks with their content, tags, comments and expressions. A quoted end of a tag does not end it.
MARKUP = re.compile(
    r"""{%[-+]?\s*raw\s*[-+]?%}(?P<raw>.*?){%[-+]?\s*endraw\s*[-+]?%}|{%(?:"[^"]*"|'[^']*'|[^"'])*?%}"""
    r"""|{#.*?#}|(?P<value>{{.*?}})""",
    re.DOTALL,
)
# In texts that are rendered once more to see where they come from: before each line, its template, by the
# place in a list, and its number.
LINE = "\ue000{}:{}\ue001"
LINES = re.compile("\ue000([0-9]{1,9}):([0-9]{1,9})\ue001")
LEADING = re.compile(f"(?:{LINES.pattern})*")


def main() -> None:
    """Answer requests about the templates of a folder, each within a limit of CPU seconds."""
    folder, seconds = sys.argv[1:]
    set_limit(resource.RLIMIT_AS, MEMORY)
    set_limit(resource.RLIMIT_CORE, 0)
    templates = Templates(folder)
    for line in sys.stdin:
        # The kernel ends this process when the limit is reached.
        set_limit(resource.RLIMIT_CPU, int(time.process_time()) + int(seconds))
        sys.stdout.write(f"{json.dumps(templates.answer(**json.loads(line)))}\n")
        sys.stdout.flush()


class Templates:
    """The templates of one folder; each is compiled once for all its cells."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._stateful = False
        self._environment = self._make_environment()

    @cached_property
    def _marking_environment(self) -> _Environment:
        return self._make_environment(_LineMarks)

    def _make_environment(self, *extensions: type[jinja2.ext.Extension]) -> _Environment:
        environment = _Environment(
            loader=jinja2.FunctionLoader(self._load_source),
            extensions=extensions,
            undefined=_Unknown,
            finalize=_require_printable,
            autoescape=False,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            auto_reload=False,
        )
        environment.tests["none"] = lambda value: value is None or isinstance(value, _NoValue)
        # The same cell must always give the same Dockerfile.
        del environment.filters["random"], environment.globals["lipsum"]
        return environment

    def answer(
        self,
        template: str,
        values: Mapping[str, str | None],
        images: Mapping[str, str],
        names: list[str],
        *,
        origins: bool = False,
    ) -> dict[str, Any]:
        """Return the Dockerfile that a template gives for a cell's `values`, under "text".

        `images` has the known references of other images, `names` the names of all. If the template needs
        another one, its name is under "image". If it fails, "error" is the message with file and line, "name"
        the variable that caused it, if any, and "empty" whether that has no value in this cell. With
        `origins`, "origins" has the template and the number of the line that each line comes from.
        """
        try:
            variables = _wrap_missing_values(values), _Images(images, names)
            if not origins:
                return {"text": self._render(self._environment, template, *variables)}
            text = self._render(self._marking_environment, template, *variables)
            return {
                "text": LINES.sub("", text),
                "origins": [*_parse_origins(self._marking_environment.marked, text)],
            }
        except _UnresolvedError as unresolved:
            return {"image": unresolved.name}
        except jinja2.TemplateNotFound as error:
            return {"error": f"{self._get_path(template)}: template {error.name!r} not found"}
        except jinja2.TemplateSyntaxError as error:
            where = f"{error.filename or self._get_path(template)}:{error.lineno}"
            return {"error": f"{where}: {error.message}"}
        except Exception as error:  # noqa: BLE001 - a template can cause any exception
            answer = {"error": self._locate_error(error, template), "of_cell": True}
            words = str(error).split("'")
            if isinstance(error, jinja2.UndefinedError) and len(words) > 1:
                answer.update(name=words[1], empty=isinstance(error, _NoValueError))
            return answer

    def _render(
        self, environment: _Environment, template: str, values: Mapping[str, object], images: _Images
    ) -> str:
        if self._stateful:
            # Jinja evaluates an imported template once, so that its objects would remember other cells.
            for compiled in (environment.cache or {}).values():
                compiled._module = None  # noqa: SLF001 - there is no other way
        text = environment.get_template(template).render(values, images=images)
        if len(text) > OUTPUT:
            raise jinja2.TemplateRuntimeError(f"the output exceeds {OUTPUT:,} characters")
        return text

    def _load_source(self, name: str) -> tuple[str, str, None] | None:
        path = resolve_inside(self._folder, name)
        if path is None or not os.path.isfile(path):  # noqa: PTH113 - pathlib is slow to load
            return None
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - as above
            text = file.read()
        self._stateful = self._stateful or STATE.search(text) is not None
        return _keep_line_ends(text), self._get_path(name), None

    def _get_path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    def _locate_error(self, error: Exception, template: str) -> str:
        """Return an error with file and line of the innermost template frame."""
        position = self._get_path(template)
        trace = error.__traceback__
        while trace:
            file = trace.tb_frame.f_code.co_filename
            if file.startswith(self._folder):
                position = f"{file}:{trace.tb_lineno}"
            trace = trace.tb_next
        if isinstance(error, MemoryError):
            return f"{position}: it needs too much memory"
        return f"{position}: {error}"


def _parse_origins(templates: Sequence[str], marked: str) -> Iterator[tuple[str, int]]:
    """Yield the template and the number of the line that each line of a text with marks comes from.

    The last of several marks counts, as those before it are of lines that leave no text.
    """
    origin = "0", "1"
    for line in marked.split("\n"):
        leading = LEADING.match(line)
        origin = (LINES.findall(leading[0] if leading else "") or [origin])[-1]
        yield templates[min(int(origin[0]), len(templates) - 1)], int(origin[1])
        origin = (LINES.findall(line) or [origin])[-1]


def _keep_line_ends(text: str) -> str:
    """Return a template in which Jinja keeps the end of each line that has more than tags and comments.

    Jinja removes the line break after every tag, which joins an instruction that ends in `{% endif %}` to
    the next one. A plus sign in the tag keeps the line break.
    """
    parts: list[str] = []
    end, is_blank = 0, True  # whether the line has only blanks, tags and comments so far
    for match in MARKUP.finditer(text):
        for words in (text[end : match.start()], match["value"] or "", match["raw"] or ""):
            is_blank = ("\n" in words or is_blank) and not words.rpartition("\n")[2].strip()
        parts.append(text[end : match.end()])
        end = match.end()
        if not (is_blank or match["value"] or text[end - 3] in "-+") and text[end : end + 1] == "\n":
            parts[-1] = f"{parts[-1][:-2]}+{parts[-1][-2:]}"
    return "".join([*parts, text[end:]])


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a plain dictionary for the globals.

    Jinja copies them for every rendering, and copying its ChainMap takes a quarter of the rendering time.
    `marked` are the templates with marks in their text.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.marked: list[str] = []

    def make_globals(self, d: MutableMapping[str, Any] | None) -> MutableMapping[str, Any]:
        return {**self.globals, **(d or {})}


class _LineMarks(jinja2.ext.Extension):
    """Marks each line of a template's text with the template's name and the number of the line."""

    def filter_stream(self, stream: jinja2.lexer.TokenStream) -> Iterable[jinja2.lexer.Token]:
        """Yield the tokens of a template, with marks in its text."""
        marked: list[str] = self.environment.marked  # type: ignore[attr-defined] # of _Environment
        marked.append(stream.name or "")
        for token in stream:
            if token.type != jinja2.lexer.TOKEN_DATA:
                yield token
                continue
            lines = (
                LINE.format(len(marked) - 1, number) + line
                for number, line in enumerate(token.value.split("\n"), token.lineno)
            )
            yield jinja2.lexer.Token(token.lineno, token.type, "\n".join(lines))


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
def _make_missing_value(name: str) -> _NoValue:
    return _NoValue(hint=f"'{name}' has no value here", name=name, exc=_NoValueError)


def _wrap_missing_values(values: Mapping[str, str | None]) -> dict[str, object]:
    """Return `values` with each None replaced by an object that knows the variable's name."""
    return {name: _make_missing_value(name) if value is None else value for name, value in values.items()}


def _require_printable(value: object) -> object:
    if type(value) is str:  # the usual case, tested first for speed
        return value
    if value is None:  # from the template itself, such as a missing key of a dict
        raise jinja2.TemplateRuntimeError("this would write None")
    if not isinstance(value, (str, int, float, list, tuple, dict, jinja2.Undefined)):
        # Python would print its address, which differs each time.
        raise jinja2.TemplateRuntimeError(f"a value of type {type(value).__name__} cannot be written")
    return value
