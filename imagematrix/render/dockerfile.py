"""Find the images that a rendered Dockerfile names in FROM, COPY --from, RUN --mount and the syntax line.

The Dockerfile is parsed as by BuildKit (frontend/dockerfile, parser and shell, in its sources). Syntax that
BuildKit's releases parse differently is rejected, and so are image names with quotes or escapes: a base that
is overlooked would be in the image but not in its identity.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["bases", "beginning", "replaced", "stages", "through_stage"]

WITHOUT_IMAGES = (
    *(
        "arg",
        "cmd",
        "entrypoint",
        "env",
        "expose",
        "healthcheck",
        "label",
        "maintainer",
        "shell",
        "stopsignal",
    ),
    *("user", "volume", "workdir"),
)
WITH_HEREDOCS = ("add", "copy", "run")
DIRECTIVE = re.compile(r"#\s*([a-zA-Z][a-zA-Z0-9]*)\s*=\s*(\S+)", re.ASCII)
DIRECTIVES = ("syntax", "escape", "check")
# A line that continues in the next. Two backslashes at its end continue it in some releases only.
GOES_ON = re.compile(r"\\[ \t]*$")
UNCLEAR = re.compile(r"\\\\[ \t]*$")
BLANKS = re.compile(r"[\t\v\f\r ]+")
SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
FLAG_VALUE = r"""(?:(?<=--mount=)|(?<=--mount=["'])|(?<![^\s,"'-]))from=["']?({})(?=[\s,"'\\]|$)"""
HEREDOC = re.compile(r"(\d*)<<(-?)([^<]*)")
# A variable that all releases parse alike; with others, releases differ in whether they look for heredocs.
VARIABLE = re.compile(r"""\$\{\w+(?::?[-+?][^\s"'$<{}\\]*)?\}""", re.ASCII)


def bases(dockerfile: str) -> tuple[str, ...]:
    """Return the external images that `dockerfile` names, in order, each once.

    Raises UsageError if a FROM contains a variable, because the base is part of an image's identity and must
    be written out (a template can do that), and for syntax that cannot be parsed reliably.
    """
    return tuple(dict.fromkeys(name.text for name in _external(dockerfile, _steps(dockerfile))))


def through_stage(dockerfile: str, stage: str) -> str | None:
    """Return `dockerfile` up to the end of the stage named `stage`, or None if there is no such stage."""
    inside = False
    for step in _read(dockerfile).steps:
        if step.stage is not None and inside:
            return dockerfile[: step.start]
        inside = inside or step.stage == stage
    return dockerfile if inside else None


def beginning(dockerfile: str) -> str | None:
    """Return the external image that the last stage of `dockerfile` starts from; None for scratch."""
    name, begins = "scratch", {"scratch": "scratch"}
    for step in _read(dockerfile).steps:
        if step.stage is not None:
            base = step.names[0].text
            name = begins.get(base.lower(), base)
            begins[step.stage] = name
    return None if name == "scratch" else name


def stages(dockerfile: str) -> tuple[str, ...]:
    """Return the text of each stage except the last, preceded by the text of the stage that it starts from.

    Dockerfiles with one of these texts in common share that stage.
    """
    begins = [step for step in _read(dockerfile).steps if step.stage is not None]
    texts: dict[str, str] = {}
    for step, following in pairwise(begins):
        text = texts.get(step.names[0].text.lower(), "") + dockerfile[step.start : following.start]
        texts[step.stage or text] = text
    return tuple(texts.values())


def replaced(dockerfile: str, images: Mapping[str, str]) -> str:
    """Return `dockerfile` with the images that `images` maps replaced; names of stages stay."""
    parts: list[str] = []
    end = 0
    for name in _external(dockerfile, _read(dockerfile).steps):
        if name.text in images:
            parts += [dockerfile[end : name.at], images[name.text]]
            end = name.at + len(name.text)
    return "".join([*parts, dockerfile[end:]])


@dataclass(frozen=True, slots=True)
class _Name:
    """The name of an image or a stage, and its offset. If `numbered`, a number refers to a stage."""

    text: str
    at: int
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class _Step:
    """An instruction that names images or begins a stage ("" for an unnamed one), and its offset."""

    start: int
    names: tuple[_Name, ...]
    stage: str | None


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a Dockerfile: its steps, and whether it ends inside an instruction."""

    steps: tuple[_Step, ...]
    cut: bool


def _external(dockerfile: str, steps: Iterable[_Step]) -> Iterator[_Name]:
    """Yield the images that a Dockerfile's syntax line and its steps name, without stages."""
    yield from _syntax(dockerfile)
    steps = list(steps)
    later = {step.stage for step in steps if step.stage}
    internal = {"scratch"}
    for step in steps:
        for name in step.names:
            low = name.text.lower()
            if step.stage is None and low in later and low not in internal:
                raise _unreadable(f"{name.text} as a source before its stage", "put its stage first")
            if low not in internal and not (name.numbered and name.text.isdigit()):
                yield name
        if step.stage:
            internal.add(step.stage)


def _syntax(dockerfile: str) -> Iterator[_Name]:
    """Yield the image of the frontend, if a syntax line names one."""
    at = 0
    if dockerfile.startswith("\ufeff"):
        raise _unreadable("a byte order mark", "save it as UTF-8 without one")
    if dockerfile.startswith("#!"):
        at = dockerfile.find("\n") + 1 or len(dockerfile)
    syntax = None
    while dockerfile.startswith("#", at):
        end = dockerfile.find("\n", at)
        line = DIRECTIVE.match(dockerfile, at, end if end >= 0 else len(dockerfile))
        key = line[1].lower() if line else ""
        if line is None or key not in DIRECTIVES:
            break
        if key == "escape" and line[2] != "\\":
            raise _unreadable(f"the directive escape={line[2]}", "write it with backslashes")
        if key == "syntax" and not syntax:
            syntax = _Name(line[2], line.start(2))
        at = end + 1 if end >= 0 else len(dockerfile)
    if syntax:
        yield syntax


def _steps(dockerfile: str) -> Iterator[_Step]:
    """Yield the steps of a Dockerfile, parsed by paragraph, because Dockerfiles of a matrix share most."""
    paragraphs = dockerfile.split("\n\n")
    for number, paragraph in enumerate(paragraphs):
        part = _paragraph(paragraph)
        if part.cut:  # an instruction contains an empty line: parse the rest as a whole
            yield from _read("\n\n".join(paragraphs[number:])).steps
            return
        yield from part.steps


@lru_cache(maxsize=4096)
def _paragraph(text: str) -> _Part:
    return _read(text, whole=False)


def _read(text: str, *, whole: bool = True) -> _Part:
    """Read a Dockerfile, or a part of one that begins with an instruction."""
    steps: list[_Step] = []
    start = offset = 0
    parts: list[str] = []  # of an instruction that continues in the next line
    heredocs: list[tuple[str, str]] = []  # open ones: "-" or nothing, and the line that ends them
    for raw in text.split("\n"):
        begin, offset = offset, offset + len(raw) + 1
        if heredocs:
            dash, last = heredocs[0]
            if (raw.rstrip("\r").lstrip("\t") if dash else raw.rstrip("\r")) == last:
                heredocs.pop(0)
            continue
        bare = raw.lstrip(SPACE)
        if not bare or bare[0] == "#":
            continue
        if not parts:
            start = begin
        line = (raw if parts else bare).removesuffix("\r")
        if UNCLEAR.search(line):
            raise _unreadable(f"a line that ends in two backslashes: {line}", "write it otherwise")
        ahead = GOES_ON.sub("", line)
        parts.append(ahead)
        if ahead != line:
            continue
        instruction, parts = "".join(parts), []
        step, heredocs = _instruction(instruction, text[start:offset], start)
        steps += step
    if parts and whole:
        steps += _instruction("".join(parts), text[start:], start)[0]
    return _Part(tuple(steps), cut=bool(parts or heredocs))


def _instruction(text: str, raw: str, start: int) -> tuple[list[_Step], list[tuple[str, str]]]:
    """Return the step for an instruction, if any, and its heredocs; `raw` is its text in the file."""
    word, *rest = BLANKS.split(text.strip(SPACE), maxsplit=1)
    command = word.lower()
    if command in WITHOUT_IMAGES:
        return [], []
    if command == "onbuild":  # it applies to later builds, but its heredocs are here
        inner, *more = BLANKS.split(rest[0].strip(SPACE), maxsplit=1) if rest else [""]
        return [], _heredocs(inner.lower(), rest[0] if rest else "", more[0] if more else "")
    if command != "from" and command not in WITH_HEREDOCS:
        raise _unreadable(f"{word!r}, which is not an instruction", "see the Dockerfile reference")
    if command != "from" and "--" not in text and "<<" not in text:  # most instructions
        return [], []
    flags, arguments = _flags(rest[0] if rest else "")
    if command == "from":
        return [_stage(arguments, raw, start)], []
    names = tuple(_sources(flags, raw, start))
    return [_Step(start, names, None)] if names else [], _heredocs(command, text, arguments)


def _stage(arguments: str, raw: str, start: int) -> _Step:
    words = BLANKS.split(arguments.strip(SPACE))
    if len(words) not in (1, 3) or not words[0] or (len(words) > 1 and words[1].lower() != "as"):
        raise _unreadable(f"FROM {arguments}", "write FROM IMAGE, or FROM IMAGE AS NAME")
    return _Step(
        start,
        (_named(words[0], rf"(?<=\s)({re.escape(words[0])})(?=\s|\\|$)", raw, start),),
        words[2].lower() if len(words) > 1 else "",
    )


def _sources(flags: Iterable[str], raw: str, start: int) -> Iterator[_Name]:
    """Yield the images and stages that flags of COPY and RUN name as sources."""
    at = 0
    for flag in flags:
        key, _, value = flag.partition("=")
        if key == "--from":
            sources = [value]
        elif key == "--mount":
            fields = (field.partition("=") for field in next(csv.reader([value]), []))
            sources = [value for key, _, value in fields if key.lower() == "from"]
        else:
            continue
        for name in filter(None, sources):
            place = _named(
                name, FLAG_VALUE.format(re.escape(name)), raw[at:], start + at, numbered=key == "--from"
            )
            at = place.at + len(name) - start
            yield place


def _named(name: str, pattern: str, raw: str, start: int, *, numbered: bool = False) -> _Name:
    """Return a name with its offset; raise UsageError if it is not a plain name."""
    if "$" in name:
        remedy = "write the base with the template's variables, not with ARG"
        raise UsageError(f"the Dockerfile takes a base image from a variable: {raw.strip()}", remedy=remedy)
    match = re.search(pattern, raw)
    if match is None or set(name) & set("\"'\\"):
        raise _unreadable(
            f"the image {name} in a different spelling: {raw.strip()}", "write its name unchanged"
        )
    return _Name(name, start + match.start(1), numbered)


def _flags(text: str) -> tuple[list[str], str]:
    """Split the text after an instruction's name into its flags, unquoted and unescaped, and the rest."""
    flags: list[str] = []
    while (text := text.lstrip(SPACE)).startswith("--"):
        flag, text = _flag(text)
        if flag == "--":
            break
        flags.append(flag)
    return flags, text


def _flag(text: str) -> tuple[str, str]:
    """Return the flag at the beginning of `text`, and the rest."""
    word, quote, at = "", "", 0
    while at < len(text) and (quote or text[at] not in SPACE):
        char = text[at]
        if char == quote or (not quote and char in "\"'"):
            quote = "" if quote else char
        else:
            at += char == "\\"
            word += text[at : at + 1]
        at += 1
    return word, text[at:]


def _heredocs(command: str, text: str, arguments: str) -> list[tuple[str, str]]:
    if command not in WITH_HEREDOCS or "<<" not in text or _is_json(arguments):
        return []
    words = (HEREDOC.fullmatch(word) for word in _words(text, raw=True))
    marks = [(word[2], _words(word[3], raw=False)) for word in words if word]
    heredocs = [(dash, names[0]) for dash, names in marks if len(names) == 1]
    if heredocs and "${" in VARIABLE.sub("", text):
        raise _unreadable(f"a heredoc beside such a variable: {text}", "give the variable to another line")
    return heredocs


def _is_json(arguments: str) -> bool:
    text = arguments.strip(SPACE)
    if not text.startswith("["):
        return False
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return False
    if end < len(text) and "<<" in text:  # older releases read the list, newer ones a command
        raise _unreadable(f"a heredoc after a list: {arguments}", "write the command without brackets")
    return all(isinstance(word, str) for word in value)


def _words(text: str, *, raw: bool) -> list[str]:
    """Return the words of a line, with quotes and escapes kept if `raw`; empty if a quote is not closed."""
    words = [""]
    quote, at = "", 0
    while at < len(text):
        char = text[at]
        at += 1
        if char == quote or (not quote and char in "\"'"):
            quote = "" if quote else char
            words[-1] += char if raw else ""
        elif char == "\\" and quote != "'":
            following = text[at : at + 1]
            at += 1
            words[-1] += ("\\" if raw or (quote and following not in '"$\\') else "") + following
        elif not quote and char in SPACE:
            words += [""] if words[-1] else []
        else:
            words[-1] += char
    return [] if quote else [word for word in words if word]


def _unreadable(what: str, remedy: str) -> UsageError:
    return UsageError(f"the Dockerfile has {what}", remedy=remedy)
