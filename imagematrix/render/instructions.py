"""Read the instructions of a Dockerfile: its stages, and the images that it names.

It is parsed as by BuildKit (frontend/dockerfile, parser and shell, in its sources). Syntax that BuildKit's
releases parse differently is rejected, and so are image names with quotes or escapes: a base that is
overlooked would be in the image but not in its identity.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from imagematrix.errors import UsageError
from imagematrix.text import SPACE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "GOES_ON",
    "WITH_HEREDOCS",
    "Instruction",
    "Name",
    "by_paragraph",
    "imported",
    "read",
    "says_nothing",
    "unreadable",
]

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
# A line that continues in the next. Two backslashes at its end continue it in some releases only.
GOES_ON = re.compile(r"\\[ \t]*$")
UNCLEAR = re.compile(r"\\\\[ \t]*$")
BLANKS = re.compile(r"[\t\v\f\r ]+")
BETWEEN_WORDS = re.compile(f"[{SPACE}]+")
QUOTED = re.compile(r"""["'\\]""")
PLAIN_WORD = re.compile(rf"""[^{SPACE}"'\\]*(?=[{SPACE}]|\Z)""")
FLAG_VALUE = r"""(?:(?<=--mount=)|(?<=--mount=["'])|(?<![^\s,"'-]))from=["']?({})(?=[\s,"'\\]|$)"""
# Sources of ADD that are fetched. A git repository is one by its scheme, or as USER@HOST:PATH.
SCHEMES = ("http://", "https://", "git://", "ssh://")
GIT = re.compile(r"(?:git|ssh)://|[\w-]+@[\w.${}-]+:|[\w-]+@\$|https?://[^#]*\.git(?:#|\Z)", re.ASCII)
COMMIT = re.compile(r"#(?:[0-9a-f]{40}|[0-9a-f]{64})(?::[^$]*)?\Z", re.ASCII)
CHECKSUM = re.compile(
    r"--checksum=(?:sha256:[0-9a-f]{64}|sha384:[0-9a-f]{96}|sha512:[0-9a-f]{128}|[0-9a-f]{40}|[0-9a-f]{64})",
    re.ASCII,
)
HEREDOC = re.compile(r"(\d*)<<(-?)([^<]*)")
# A variable that all releases parse alike; with others, releases differ in whether they look for heredocs.
VARIABLE = re.compile(r"""\$\{\w+(?::?[-+?][^\s"'$<{}\\]*)?\}""", re.ASCII)


@dataclass(frozen=True, slots=True)
class Name:
    """The name of an image or a stage, and its offset. If `numbered`, a number refers to a stage."""

    text: str
    at: int
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction, the images that it names, and the stage that it begins ("" for an unnamed one).

    `start` is its offset, `copying` its text if it reads the context.
    """

    start: int
    command: str
    names: tuple[Name, ...] = ()
    stage: str | None = None
    copying: str | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a Dockerfile: its instructions, and whether it ends inside an instruction."""

    instructions: tuple[Instruction, ...]
    cut: bool


def read(dockerfile: str) -> tuple[Instruction, ...]:
    """Return the instructions of a Dockerfile; raise UsageError for syntax that cannot be parsed reliably."""
    return _part(dockerfile).instructions


def by_paragraph(dockerfile: str) -> Iterator[Instruction]:
    """Yield the instructions of a Dockerfile that name images, begin stages or read the context.

    It is parsed by paragraph, because Dockerfiles of a matrix share most of them. Offsets are those in a
    paragraph.
    """
    paragraphs = dockerfile.split("\n\n")
    for index, paragraph in enumerate(paragraphs):
        part = _paragraph(paragraph)
        if part.cut:  # an instruction contains an empty line: parse the rest as a whole
            rest = _part("\n\n".join(paragraphs[index:]))
            yield from filter(_matters, rest.instructions)
            return
        yield from part.instructions


@lru_cache(maxsize=4096)
def _paragraph(text: str) -> _Part:
    part = _part(text, whole=False)
    return replace(part, instructions=tuple(filter(_matters, part.instructions)))


def _matters(instruction: Instruction) -> bool:
    return bool(instruction.names or instruction.copying or instruction.stage is not None)


def _part(text: str, *, whole: bool = True) -> _Part:
    """Read a Dockerfile, or a part of one that begins with an instruction."""
    instructions: list[Instruction] = []
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
        if says_nothing(raw):
            continue
        if not parts:
            start = begin
        line = (raw if parts else raw.lstrip(SPACE)).removesuffix("\r")
        if UNCLEAR.search(line):
            raise unreadable(f"a line that ends in two backslashes: {line}", "write it otherwise")
        ahead = GOES_ON.sub("", line)
        parts.append(ahead)
        if ahead != line:
            continue
        instruction, parts = "".join(parts), []
        step, heredocs = _instruction(instruction, text[start:offset], start)
        instructions.append(step)
    if parts and whole:
        instructions.append(_instruction("".join(parts), text[start:], start)[0])
    return _Part(tuple(instructions), cut=bool(parts or heredocs))


def says_nothing(line: str) -> bool:
    """Whether a line of a Dockerfile is empty or a comment."""
    return line.lstrip(SPACE)[:1] in ("", "#")


def _instruction(text: str, raw: str, start: int) -> tuple[Instruction, list[tuple[str, str]]]:
    """Return the step for an instruction and its heredocs; `raw` is its text in the file."""
    word, *rest = BLANKS.split(text.strip(SPACE), maxsplit=1)
    command = word.lower()
    if command in WITHOUT_IMAGES:
        return Instruction(start, command), []
    if command == "onbuild":  # it applies to later builds, but its heredocs are here
        source = imported(rest[0]) if rest else None
        if source:
            remedy = "write the instruction into the templates that build on this image"
            raise UsageError(f"ONBUILD brings {source} into later builds: {raw.strip()}", remedy=remedy)
        inner, *more = BLANKS.split(rest[0].strip(SPACE), maxsplit=1) if rest else [""]
        arguments = rest[0] if rest else ""
        return Instruction(start, command), _heredocs(inner.lower(), arguments, more[0] if more else "")
    if command != "from" and command not in WITH_HEREDOCS:
        raise unreadable(f"{word!r}, which is not an instruction", "see the Dockerfile reference")
    if command == "run" and "--" not in text and "<<" not in text:  # most instructions
        return Instruction(start, command), []
    flags, arguments = _flags(rest[0] if rest else "")
    if command == "from":
        return _stage(arguments, raw, start), []
    remote = _fetched(flags, arguments) if command == "add" else None
    if remote:
        raise UsageError(
            f"the content of {remote} is not fixed: {raw.strip()}",
            remedy="add --checksum=sha256:..., name a commit of a git repository (URL.git#...), or use COPY",
        )
    names = tuple(_sources(flags, raw, start))
    copying = raw.strip() if _reads_context(command, flags, arguments) else None
    return Instruction(start, command, names, copying=copying), _heredocs(command, text, arguments)


def imported(trigger: str) -> str | None:
    """Return an image or a remote source that the instruction of an ONBUILD names; None if there is none."""
    word, *rest = BLANKS.split(trigger.strip(SPACE), maxsplit=1)
    command = word.lower()
    if command not in WITH_HEREDOCS or not rest:
        return None
    flags, arguments = _flags(rest[0])
    return next(_named_sources(flags), None) or (_fetched(flags, arguments) if command == "add" else None)


def _fetched(flags: Iterable[str], arguments: str) -> str | None:
    """Return a remote source of an ADD whose content may change; None if it has none.

    A checksum fixes it, as does a commit in the URL of a git repository. A variable could be a URL, or an
    empty checksum.
    """
    if any(CHECKSUM.fullmatch(flag) for flag in flags):
        return None
    words = json.loads(arguments) if _is_json(arguments) else BLANKS.split(arguments.strip(SPACE))
    sources = (re.sub(r"[\"'\\]", "", word) for word in words[:-1])
    return next(filter(_changes, sources), None)


def _changes(source: str) -> bool:
    """Whether a source of ADD is fetched without a commit that fixes its content."""
    return _is_remote(source) and not (GIT.match(source) and COMMIT.search(source))


def _is_remote(source: str) -> bool:
    """Whether a source of ADD is fetched, or may be."""
    beginning, variable, _ = source.partition("$")
    may_be_url = any(scheme.startswith(beginning) for scheme in SCHEMES) if variable else False
    return may_be_url or source.startswith(SCHEMES) or bool(GIT.match(source))


def _reads_context(command: str, flags: Sequence[str], arguments: str) -> bool:
    """Whether an instruction reads files of the context."""
    if command == "run":
        mounts = [dict(_fields(flag.partition("=")[2])) for flag in flags if flag.startswith("--mount=")]
        return any(mount.get("type", "bind") == "bind" and not mount.get("from") for mount in mounts)
    if any(flag.startswith("--from=") for flag in flags):
        return False
    words = json.loads(arguments) if _is_json(arguments) else _words(arguments, raw=True)
    return not all(
        HEREDOC.fullmatch(source) or (command == "add" and _is_remote(source)) for source in words[:-1]
    )


def _fields(mount: str) -> Iterator[tuple[str, str]]:
    """Yield the keys of a mount, in lower case, with their values."""
    for option in next(csv.reader([mount]), []):
        key, _, value = option.partition("=")
        yield key.lower(), value


def _stage(arguments: str, raw: str, start: int) -> Instruction:
    words = BLANKS.split(arguments.strip(SPACE))
    if len(words) not in (1, 3) or not words[0] or (len(words) > 1 and words[1].lower() != "as"):
        raise unreadable(f"FROM {arguments}", "write FROM IMAGE, or FROM IMAGE AS NAME")
    return Instruction(
        start,
        "from",
        (_named(words[0], rf"(?<=\s)({re.escape(words[0])})(?=\s|\\|$)", raw, start),),
        words[2].lower() if len(words) > 1 else "",
    )


def _sources(flags: Iterable[str], raw: str, start: int) -> Iterator[Name]:
    """Yield the images and stages that flags of COPY and RUN name as sources."""
    at = 0
    for flag in flags:
        for name in _named_sources([flag]):
            numbered = flag.startswith("--from=")
            pattern = FLAG_VALUE.format(re.escape(name))
            place = _named(name, pattern, raw[at:], start + at, numbered=numbered)
            at = place.at + len(name) - start
            yield place


def _named_sources(flags: Iterable[str]) -> Iterator[str]:
    for flag in flags:
        key, _, value = flag.partition("=")
        if key == "--from" and value:
            yield value
        elif key == "--mount":
            yield from (source for name, source in _fields(value) if name == "from" and source)


def _named(name: str, pattern: str, raw: str, start: int, *, numbered: bool = False) -> Name:
    """Return a name with its offset; raise UsageError if it is not a plain name."""
    if "$" in name:
        remedy = "write the base with the template's variables, not with ARG"
        raise UsageError(f"the Dockerfile takes a base image from a variable: {raw.strip()}", remedy=remedy)
    match = re.search(pattern, raw)
    if match is None or set(name) & set("\"'\\"):
        raise unreadable(
            f"the image {name} in a different spelling: {raw.strip()}", "write its name unchanged"
        )
    return Name(name, start + match.start(1), numbered)


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
    plain = PLAIN_WORD.match(text)
    if plain:  # almost every flag
        return plain[0], text[plain.end() :]
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
        raise unreadable(f"a heredoc beside such a variable: {text}", "give the variable to another line")
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
        raise unreadable(f"a heredoc after a list: {arguments}", "write the command without brackets")
    return all(isinstance(word, str) for word in value)


def _words(text: str, *, raw: bool) -> list[str]:
    """Return the words of a line, with quotes and escapes kept if `raw`; empty if a quote is not closed."""
    if not QUOTED.search(text):  # almost every line
        return [word for word in BETWEEN_WORDS.split(text) if word]
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


def unreadable(what: str, remedy: str) -> UsageError:
    """Return the error for a Dockerfile that cannot be parsed reliably, because it has `what`."""
    return UsageError(f"the Dockerfile has {what}", remedy=remedy)
