"""Read the instructions of a Dockerfile: its stages, and the images that it names.

It is parsed as by BuildKit (frontend/dockerfile, parser and shell, in its sources). Syntax that BuildKit's
releases parse differently is rejected, and so are image names with quotes or escapes: a base that is
overlooked would be in the image but not in its identity. All faults of a Dockerfile are found at once, up to
one after which it is unclear where the next instruction begins.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from imagematrix.build.matrix.problems import Mark
from imagematrix.common.suggestions import SLIP, suggest_nearest
from imagematrix.common.text import SPACE, quote_word
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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
INSTRUCTIONS = tuple(map(str.upper, ("from", "onbuild", *WITH_HEREDOCS, *WITHOUT_IMAGES)))
# A line that continues in the next. Two backslashes at its end continue it in some releases only.
GOES_ON = re.compile(r"\\[ \t]*$")
UNCLEAR = re.compile(r"\\\\[ \t]*$")
BLANKS = re.compile(r"[\t\v\f\r ]+")
BETWEEN_WORDS = re.compile(f"[{SPACE}]+")
MOST = 100  # faults of a kind that are reported; what is no Dockerfile has one in each line
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

    `start` is its offset, `copied` are the paths in the context that it reads, as they are written: perhaps
    patterns, or with variables. `arguments` is the text after its name if it is ARG, else "". `platform` is
    what a FROM names as the stage's platform, else "".
    """

    start: int
    command: str
    names: tuple[Name, ...] = ()
    stage: str | None = None
    copied: tuple[Name, ...] = ()
    arguments: str = ""
    platform: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong at an offset of a Dockerfile, in one sentence, and what to do about it."""

    message: str
    at: int
    remedy: str

    def locate(self, dockerfile: str) -> Mark:
        """Return its line and column in the Dockerfile."""
        before = dockerfile[: self.at]
        return Mark(before.count("\n") + 1, self.at - before.rfind("\n"))


class DockerfileError(UsageError):
    """The Dockerfile `dockerfile` has `faults`: it cannot be built, or not parsed reliably."""

    def __init__(self, dockerfile: str, faults: Iterable[Fault]) -> None:
        ordered = sorted(faults, key=lambda fault: fault.at)
        lines = (f"line {fault.locate(dockerfile).line}: {fault.message}" for fault in ordered)
        super().__init__(*lines, remedy=ordered[0].remedy)
        self.dockerfile = dockerfile
        self.faults = tuple(ordered)


class _FaultyError(UsageError):
    """An instruction has a fault, at the text `where` in it, if there is such a text."""

    def __init__(self, message: str, remedy: str, where: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.where = where

    def make_fault(self, raw: str, start: int) -> Fault:
        """Return the fault of an instruction with the text `raw` at the offset `start`."""
        begin = len(raw) - len(raw.lstrip(SPACE))
        at = raw.find(self.where) if self.where else begin
        return Fault(str(self), start + (begin if at < 0 else at), self.remedy or "")


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a Dockerfile: its instructions, faults, and whether it ends inside an instruction."""

    instructions: tuple[Instruction, ...]
    faults: tuple[Fault, ...]
    cut: bool

    @classmethod
    def from_results(cls, results: Sequence[Instruction | Fault], *, cut: bool) -> _Part:
        """Return the part with these instructions and faults."""
        instructions = tuple([result for result in results if isinstance(result, Instruction)])
        if len(instructions) == len(results):  # almost always
            return cls(instructions, (), cut)
        return cls(instructions, tuple(result for result in results if isinstance(result, Fault)), cut)


def read_instructions(dockerfile: str) -> tuple[Instruction, ...]:
    """Return the instructions of a Dockerfile; raise DockerfileError if they have faults."""
    instructions, faults = parse_instructions(dockerfile)
    if faults:
        raise DockerfileError(dockerfile, faults)
    return instructions


def parse_instructions(dockerfile: str) -> tuple[tuple[Instruction, ...], tuple[Fault, ...]]:
    """Return the instructions of a Dockerfile that have no faults, and the faults of the others."""
    part = _parse_part(dockerfile)
    return part.instructions, part.faults


@lru_cache(maxsize=4)  # several questions about a Dockerfile follow each other
def parse_by_paragraph(dockerfile: str) -> tuple[Instruction, ...]:
    """Return the instructions of a Dockerfile that are ARG, name images, begin stages or read the context.

    It is parsed by paragraph, because Dockerfiles of a matrix share most of them. Offsets are those in a
    paragraph. Raises DockerfileError with all faults of the instructions.
    """
    paragraphs = dockerfile.split("\n\n")
    instructions: list[Instruction] = []
    for index, paragraph in enumerate(paragraphs):
        part = _parse_paragraph(paragraph)
        if part.cut or part.faults:  # an instruction contains an empty line: parse the rest as a whole
            rest = _parse_part("\n\n".join(paragraphs[index:]))
            if rest.faults:
                raise DockerfileError(dockerfile, parse_instructions(dockerfile)[1])
            return (*instructions, *filter(_is_relevant, rest.instructions))
        instructions += part.instructions
    return tuple(instructions)


@lru_cache(maxsize=4096)
def _parse_paragraph(text: str) -> _Part:
    part = _parse_part(text, whole=False)
    return replace(part, instructions=tuple(filter(_is_relevant, part.instructions)))


def _is_relevant(instruction: Instruction) -> bool:
    return bool(
        instruction.names or instruction.copied or instruction.arguments or instruction.stage is not None
    )


def _parse_part(text: str, *, whole: bool = True) -> _Part:
    """Read a Dockerfile, or a part of one that begins with an instruction."""
    results: list[Instruction | Fault] = []
    faults = 0  # in `results`
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
        if is_blank_or_comment(raw) or faults == MOST:
            continue
        if not parts:
            start = begin
        line = (raw if parts else raw.lstrip(SPACE)).removesuffix("\r")
        if UNCLEAR.search(line):
            unclear = _make_unreadable_error(
                f"a line that ends in two backslashes: {line}", "write it otherwise"
            )
            return _Part.from_results([*results, unclear.make_fault(raw, begin)], cut=False)
        ahead = GOES_ON.sub("", line)
        parts.append(ahead)
        if ahead != line:
            continue
        instruction, parts = "".join(parts), []
        try:
            heredocs = _find_heredocs(instruction)
        except _FaultyError as error:
            return _Part.from_results([*results, error.make_fault(text[start:offset], start)], cut=False)
        results.append(_parse_or_fault(instruction, text[start:offset], start))
        faults += isinstance(results[-1], Fault)
    if parts and whole:
        results.append(_parse_or_fault("".join(parts), text[start:], start))
    return _Part.from_results(results, cut=bool(parts or heredocs))


def _parse_or_fault(text: str, raw: str, start: int) -> Instruction | Fault:
    """Return an instruction, whose text in the file is `raw`, or its fault."""
    try:
        return _parse_instruction(text, raw, start)
    except _FaultyError as error:
        return error.make_fault(raw, start)


def is_blank_or_comment(line: str) -> bool:
    """Whether a line of a Dockerfile is empty or a comment."""
    return line.lstrip(SPACE)[:1] in ("", "#")


@lru_cache(maxsize=1024)  # cells of a matrix have most instructions in common, at few offsets
def _parse_instruction(text: str, raw: str, start: int) -> Instruction:
    """Return the instruction in a text without continued lines; `raw` is its text in the file."""
    word, arguments = _split_command(text)
    command = word.lower()
    if command == "arg":
        return Instruction(start, command, arguments=arguments)
    if command in WITHOUT_IMAGES:
        return Instruction(start, command)
    if command == "onbuild":  # it applies to later builds
        source = find_trigger_input(arguments)
        if source:
            remedy = "write the instruction into the templates that build on this image"
            raise _FaultyError(f"ONBUILD brings {source} into later builds", remedy, source)
        return Instruction(start, command)
    if command != "from" and command not in WITH_HEREDOCS:
        remedy = suggest_nearest(word.upper(), INSTRUCTIONS, likeness=SLIP) or "see the Dockerfile reference"
        raise _make_unreadable_error(f"{word!r}, which is not an instruction", remedy)
    if command == "run" and "--" not in text:  # most instructions
        return Instruction(start, command)
    flags, arguments = _split_flags(arguments)
    if command == "from":
        words = BLANKS.split(arguments.strip(SPACE))
        if len(words) not in (1, 3) or not words[0] or (len(words) > 1 and words[1].lower() != "as"):
            raise _make_unreadable_error(
                f"FROM {arguments}".strip(), "write FROM IMAGE, or FROM IMAGE AS NAME"
            )
        base = _parse_name(words[0], rf"(?<=\s)({re.escape(words[0])})(?=\s|\\|$)", raw, start)
        stage = words[2].lower() if len(words) > 1 else ""
        platforms = [flag.partition("=")[2] for flag in flags if flag.startswith("--platform=")]
        return Instruction(start, command, (base,), stage, platform=platforms[-1] if platforms else "")
    if command == "add":
        _require_fixed(flags, arguments)
    names = tuple(_find_sources(command, flags, raw, start))
    copied = tuple(
        Name(path, _locate_word(path, raw, start)) for path in _list_copied_paths(command, flags, arguments)
    )
    return Instruction(start, command, names, copied=copied)


def _split_command(text: str) -> tuple[str, str]:
    """Return the name of an instruction, and the text after it."""
    word, *rest = BLANKS.split(text.strip(SPACE), maxsplit=1)
    return word, rest[0] if rest else ""


def _locate_word(word: str, raw: str, start: int) -> int:
    """Return the offset of a word of an instruction with the text `raw` at the offset `start`."""
    match = re.search(rf"""(?<=[\s"=,]){re.escape(word)}(?=[\s",]|\Z)""", raw)
    return start + (match.start() if match else len(raw) - len(raw.lstrip(SPACE)))


def find_trigger_input(trigger: str) -> str | None:
    """Return an image or a remote source that the instruction of an ONBUILD names; None if there is none."""
    word, rest = _split_command(trigger)
    command = word.lower()
    if command not in WITH_HEREDOCS:
        return None
    flags, arguments = _split_flags(rest)
    return next(_parse_source_flags(flags), None) or (
        _find_changing_source(flags, arguments) if command == "add" else None
    )


def _require_fixed(flags: Iterable[str], arguments: str) -> None:
    """Raise _FaultyError if the content of a remote source of an ADD may change."""
    source = _find_changing_source(flags, arguments)
    if source is None:
        return
    message = f"the content of {source} may change, but not the identity of the image"
    if "$" in source:
        remedy = "write the address without variables of the build, and add --checksum=sha256:DIGEST"
    elif GIT.match(source):
        address = source.partition("#")[0]
        remedy = f"add #COMMIT to it, such as the commit that `git ls-remote {quote_word(address)}` prints"
    else:
        digest = f"`curl -fsSL {quote_word(source)} | sha256sum`"
        remedy = f"add --checksum=sha256:DIGEST, with the digest that {digest} prints"
    raise _FaultyError(message, remedy, source)


def _find_changing_source(flags: Iterable[str], arguments: str) -> str | None:
    """Return a remote source of an ADD whose content may change; None if it has none.

    A checksum fixes it, as does a commit in the URL of a git repository. A variable could be a URL, or an
    empty checksum.
    """
    if any(CHECKSUM.fullmatch(flag) for flag in flags):
        return None
    words = json.loads(arguments) if _is_json(arguments) else BLANKS.split(arguments.strip(SPACE))
    for word in words[:-1]:
        source = re.sub(r"[\"'\\]", "", word)
        if _is_remote(source) and not (GIT.match(source) and COMMIT.search(source)):
            return source
    return None


def _is_remote(source: str) -> bool:
    """Whether a source of ADD is fetched, or may be."""
    beginning, variable, _ = source.partition("$")
    may_be_url = any(scheme.startswith(beginning) for scheme in SCHEMES) if variable else False
    return may_be_url or source.startswith(SCHEMES) or bool(GIT.match(source))


def _list_copied_paths(command: str, flags: Sequence[str], arguments: str) -> list[str]:
    """Return the paths in the context that an instruction reads, as they are written."""
    if command == "run":
        mounts = [dict(_parse_mount(flag.partition("=")[2])) for flag in flags if flag.startswith("--mount=")]
        bind_mounts = [
            mount for mount in mounts if mount.get("type", "bind") == "bind" and not mount.get("from")
        ]
        return [mount.get("source") or mount.get("src") or "." for mount in bind_mounts]
    if any(flag.startswith("--from=") for flag in flags):
        return []
    words = json.loads(arguments) if _is_json(arguments) else split_words(arguments, raw=True)
    return [
        source
        for source in words[:-1]
        if not (HEREDOC.fullmatch(source) or (command == "add" and _is_remote(source)))
    ]


def _parse_mount(mount: str) -> Iterator[tuple[str, str]]:
    """Yield the keys of a mount, in lower case, with their values."""
    for option in next(csv.reader([mount]), []):
        key, _, value = option.partition("=")
        yield key.lower(), value


def _find_sources(command: str, flags: Iterable[str], raw: str, start: int) -> Iterator[Name]:
    """Yield the images and stages that flags of COPY and RUN name as sources."""
    at = 0
    for flag in flags:
        for name in _parse_source_flags([flag]):
            if "$" in name:
                message = f"{command.upper()} takes its source from a variable, which no build can: {name}"
                remedy = "begin a stage with FROM IMAGE AS NAME, and name the stage"
                raise _FaultyError(message, remedy, name)
            numbered = flag.startswith("--from=")
            pattern = FLAG_VALUE.format(re.escape(name))
            source = _parse_name(name, pattern, raw[at:], start + at, numbered=numbered)
            at = source.at + len(name) - start
            yield source


def _parse_source_flags(flags: Iterable[str]) -> Iterator[str]:
    for flag in flags:
        key, _, value = flag.partition("=")
        if key == "--from" and value:
            yield value
        elif key == "--mount":
            yield from (source for name, source in _parse_mount(value) if name == "from" and source)


def _parse_name(name: str, pattern: str, raw: str, start: int, *, numbered: bool = False) -> Name:
    """Return a name with its offset; raise _FaultyError if it is not written plainly."""
    match = re.search(pattern, raw)
    if match is None or set(name) & set("\"'\\"):
        raise _make_unreadable_error(f"the image {name} in a different spelling", "write its name unchanged")
    return Name(name, start + match.start(1), numbered)


def _split_flags(text: str) -> tuple[list[str], str]:
    """Split the text after an instruction's name into its flags, unquoted and unescaped, and the rest."""
    flags: list[str] = []
    while (text := text.lstrip(SPACE)).startswith("--"):
        plain = PLAIN_WORD.match(text)
        flag, quote, at = (plain[0], "", plain.end()) if plain else ("", "", 0)
        # Almost every flag is plain, and already read.
        while not plain and at < len(text) and (quote or text[at] not in SPACE):
            char = text[at]
            if char == quote or (not quote and char in "\"'"):
                quote = "" if quote else char
            else:
                at += char == "\\"
                flag += text[at : at + 1]
            at += 1
        text = text[at:]
        if flag == "--":
            break
        flags.append(flag)
    return flags, text


def _find_heredocs(text: str) -> list[tuple[str, str]]:
    """Return the heredocs of an instruction: "-" or nothing, and the line that ends each."""
    if "<<" not in text:
        return []
    word, arguments = _split_command(text)
    if word.lower() == "onbuild":  # it applies to later builds, but its heredocs are here
        text = arguments
        word, arguments = _split_command(text)
    else:
        arguments = _split_flags(arguments)[1]
    if word.lower() not in WITH_HEREDOCS or _is_json(arguments):
        return []
    words = (HEREDOC.fullmatch(word) for word in split_words(text, raw=True))
    marks = [(word[2], split_words(word[3], raw=False)) for word in words if word]
    heredocs = [(dash, names[0]) for dash, names in marks if len(names) == 1]
    if heredocs and "${" in VARIABLE.sub("", text):
        raise _make_unreadable_error(
            f"a heredoc beside such a variable: {text}", "give the variable to another line"
        )
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
        raise _make_unreadable_error(
            f"a heredoc after a list: {arguments}", "write the command without brackets"
        )
    return all(isinstance(word, str) for word in value)


def split_words(text: str, *, raw: bool) -> list[str]:
    """Return the words of a line, with quotes and escapes kept if `raw`; none if a quote is not closed."""
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


def _make_unreadable_error(what: str, remedy: str) -> _FaultyError:
    """Return the error for an instruction that cannot be parsed reliably, because it has `what`."""
    return _FaultyError(f"the Dockerfile has {what}", remedy)
