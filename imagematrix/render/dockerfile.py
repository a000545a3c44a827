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
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = [
    "bases",
    "beginning",
    "has_stage",
    "replaced",
    "require_known_inputs",
    "require_no_files",
    "stages",
    "through_stage",
    "with_environment",
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
DIRECTIVE = re.compile(r"#\s*([a-zA-Z][a-zA-Z0-9]*)\s*=\s*(\S+)", re.ASCII)
DIRECTIVES = ("syntax", "escape", "check")
# A line that continues in the next. Two backslashes at its end continue it in some releases only.
GOES_ON = re.compile(r"\\[ \t]*$")
UNCLEAR = re.compile(r"\\\\[ \t]*$")
BLANKS = re.compile(r"[\t\v\f\r ]+")
SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
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


def bases(dockerfile: str) -> tuple[str, ...]:
    """Return the external images that `dockerfile` names, in order, each once.

    Raises UsageError if a FROM contains a variable, because the base is part of an image's identity and must
    be written out (a template can do that), for inputs that no identity can contain, and for syntax that
    cannot be parsed reliably.
    """
    return tuple(dict.fromkeys(name.text for name in _external(dockerfile, _steps(dockerfile))))


def has_stage(dockerfile: str, stage: str) -> bool:
    """Whether `dockerfile` has a stage named `stage`."""
    return any(step.stage == stage for step in _steps(dockerfile))


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


def require_no_files(dockerfile: str) -> None:
    """Raise UsageError if an instruction of `dockerfile`, whose image has no context, reads files of it."""
    for step in _steps(dockerfile):
        if step.copying:
            raise UsageError(
                f"the image has no context, which this instruction reads: {step.copying}",
                remedy="name the folder with its files in matrix.yaml, such as context: src",
            )


def require_known_inputs(triggers: Iterable[str], base: str) -> None:
    """Raise UsageError if an ONBUILD trigger of a base image brings inputs from elsewhere.

    The other inputs of triggers are in the base and in the context, and so in the identity.
    """
    for trigger in triggers:
        source = _imported(trigger)
        if source:
            raise UsageError(
                f"the base image {base} brings {source} into every build, by ONBUILD {trigger.strip()}",
                remedy="build on an image without it, and write the instruction into the template",
            )


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


def with_environment(dockerfile: str, environment: Mapping[str, str]) -> str:
    """Return `dockerfile` with variables set at its end, so that no earlier line replaces them.

    The values are plain words. Raises UsageError if the last instruction is not complete.
    """
    lines = (line for line in reversed(dockerfile.splitlines()) if line.strip(SPACE)[:1] not in ("", "#"))
    if GOES_ON.search(next(lines, "")):
        raise _unreadable("a last instruction that goes on", "remove the backslash at its end")
    words = " ".join(f"{name}={value}" for name, value in environment.items())
    return f"{dockerfile.rstrip()}\n\nENV {words}\n"


@dataclass(frozen=True, slots=True)
class _Name:
    """The name of an image or a stage, and its offset. If `numbered`, a number refers to a stage."""

    text: str
    at: int
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class _Step:
    """An instruction that names images, begins a stage ("" for an unnamed one) or reads the context.

    `start` is its offset, `copying` its text if it reads the context.
    """

    start: int
    names: tuple[_Name, ...] = ()
    stage: str | None = None
    copying: str | None = None


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
    for index, paragraph in enumerate(paragraphs):
        part = _paragraph(paragraph)
        if part.cut:  # an instruction contains an empty line: parse the rest as a whole
            yield from _read("\n\n".join(paragraphs[index:])).steps
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
        source = _imported(rest[0]) if rest else None
        if source:
            remedy = "write the instruction into the templates that build on this image"
            raise UsageError(f"ONBUILD brings {source} into later builds: {raw.strip()}", remedy=remedy)
        inner, *more = BLANKS.split(rest[0].strip(SPACE), maxsplit=1) if rest else [""]
        return [], _heredocs(inner.lower(), rest[0] if rest else "", more[0] if more else "")
    if command != "from" and command not in WITH_HEREDOCS:
        raise _unreadable(f"{word!r}, which is not an instruction", "see the Dockerfile reference")
    if command == "run" and "--" not in text and "<<" not in text:  # most instructions
        return [], []
    flags, arguments = _flags(rest[0] if rest else "")
    if command == "from":
        return [_stage(arguments, raw, start)], []
    remote = _fetched(flags, arguments) if command == "add" else None
    if remote:
        raise UsageError(
            f"the content of {remote} is not fixed: {raw.strip()}",
            remedy="add --checksum=sha256:..., name a commit of a git repository (URL.git#...), or use COPY",
        )
    names = tuple(_sources(flags, raw, start))
    step = _Step(start, names, copying=raw.strip() if _reads_context(command, flags, arguments) else None)
    return [step] if names or step.copying else [], _heredocs(command, text, arguments)


def _imported(trigger: str) -> str | None:
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
    for field in next(csv.reader([mount]), []):
        key, _, value = field.partition("=")
        yield key.lower(), value


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
