"""Reading many saved hosts: from files, from folders of them, and from a stream.

Nodes of one kind differ only in what names their GPUs, and nodes of many kinds have the same CPU. So the list
of CPU flags, which is most of a document, is parsed apart, and all else but such facts once.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from functools import partial
from itertools import chain
from pathlib import Path
from sys import intern

from imagematrix.common import json_documents
from imagematrix.common.record import replace
from imagematrix.common.text import shorten_lines
from imagematrix.errors import UsageError
from imagematrix.hardware.host.host import Host

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
    from typing import Any, BinaryIO

    from imagematrix.hardware.host.host import Accelerator, Cpu, Gpu, MigDevice

    Kind = tuple[Host | None, tuple[str | int, ...]]

STREAM = Path("-")
STREAM_NAME = "stdin"
SUFFIX = ".json"
OF_LINES = (".ndjson", ".jsonl")  # suffixes of files with a host on each line
# In a document without backslashes, where no quotes are inside a string: UUIDs, PCI addresses as a Host has
# them, minor numbers and amounts of memory. A document is valid with any of them, unless two GPUs share one.
OWN = re.compile(
    rb'"(?:((?:minor|memory_mib)": ?)(0|[1-9][0-9]{0,8})(?![0-9.eE])'
    rb'|((?:GPU|MIG)-[0-9A-Za-z/-]{8,64}|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")'
)
# The parts that OWN splits a document into.
REST, NAMES, NUMBERS, TEXTS = (slice(place, None, 4) for place in range(4))
UNKNOWN = None, ()
FLAGS, MINOR = b'"flags"', b"minor"
LONGEST = 64 * 1024  # bytes of a document that is cached
CACHED = 4096  # kinds of documents
LISTS = 1024  # lists of flags
SHOWN = 20  # invalid documents that are listed; further ones are counted
ADVICE = "write one host per line, as `jq -c . FILE...` does"


def load_hosts(*paths: str | Path, stream: BinaryIO | None = None) -> dict[str, Host]:
    """Return the saved hosts in `paths`, by name.

    A path is a file or a folder with such files; with `stream`, "-" is the stream, which has one host on each
    line or a JSON list of them. A file that ends in .ndjson or .jsonl has one on each line, any other file is
    one host. The name of a host is the path without .json, or NAME:N for the host on line N or at position N
    of a list. Duplicate paths count once. Raises UsageError that lists every unreadable host, or names a file
    of lines without any.
    """
    hosts: dict[str, Host] = {}
    errors: list[UsageError] = []
    reader = HostReader()
    for name, read in _list_sources(map(_require_path, paths), stream, reader):
        try:
            host = read()
        except UsageError as error:
            errors.append(error)
            continue
        if name in hosts:
            errors.append(UsageError(f"duplicate host name: {name}"))
        hosts[name] = host
    if errors:
        raise _join_errors(errors)
    return hosts


class HostReader:
    """Reads Host documents, and caches what it reads for those that differ only in flags and facts of OWN."""

    __slots__ = ("_cpus", "_flags", "_kinds")

    def __init__(self) -> None:
        self._kinds: dict[Hashable, Kind | None] = {}  # None for a kind of which there was one document
        self._cpus: dict[Cpu, Cpu] = {}
        self._flags: dict[bytes, frozenset[str]] = {}

    def read(self, raw: bytes, where: str) -> Host:
        """Return the Host that the document `raw` describes; `where` names it in a UsageError."""
        if len(raw) > json_documents.LIMIT:
            raise UsageError(f"{where}: longer than {json_documents.LIMIT // 2**20} MiB", remedy=ADVICE)
        return self._known(raw) or self.share(Host.from_json(_parse_document(raw, where), where))

    def share(self, host: Host) -> Host:
        """Return `host` with the Cpu object of an earlier equal host: the flags are most of its memory."""
        return replace(host, cpu=self._shared(host.cpu))

    def _shared(self, cpu: Cpu) -> Cpu:
        return self._cpus.setdefault(cpu, cpu)

    def _known(self, raw: bytes) -> Host | None:
        """Return the Host of a document of a known kind, or None, as for any that may be invalid."""
        if len(raw) > LONGEST:
            return None
        before, _, after = raw.partition(FLAGS)
        colon, opening, flags_text = after.partition(b"[")
        flags, closing, after = flags_text.partition(b"]")
        if colon.strip() != b":" or not closing or FLAGS in after or b"\\" in raw or not raw.isascii():
            return None
        parts = OWN.split(b"".join([before, FLAGS, colon, opening, closing, after]))
        host, known = self._kind(parts)
        words = self._words(flags.lower()) if host else None
        if host is None or words is None:
            return None
        own = []
        unique = []  # among the GPUs of a host
        for name, number, text in zip(parts[NAMES], parts[NUMBERS], parts[TEXTS], strict=True):
            own.append(int(number) if name else text.decode())
            if not name or name.startswith(MINOR):
                unique.append(number if name else text.lower())
        if len({*unique}) < len(unique):
            return None
        return _replace_facts(
            host, self._shared(replace(host.cpu, flags=words)), dict(zip(known, own, strict=True))
        )

    def _kind(self, parts: Sequence[bytes]) -> Kind:
        """Return what is known of a kind of documents: nothing if this is the first."""
        key = *parts[REST], *parts[NAMES]
        if key not in self._kinds:  # many documents are the only ones of their kind
            if len(self._kinds) >= CACHED:
                self._kinds.clear()
            self._kinds[key] = None
            return UNKNOWN
        kind = self._kinds[key] = self._kinds[key] or _parse_kind(parts)
        return kind

    def _words(self, text: bytes) -> frozenset[str] | None:
        """Return the words in a list, or None if it is not a list of strings."""
        words = self._flags.get(text)
        if words is None:
            try:
                words = frozenset(map(intern, json.loads(b"[%b]" % text)))
            except (ValueError, TypeError, RecursionError):
                return None
            if len(self._flags) >= LISTS:
                self._flags.clear()
            self._flags[text] = words
        return words


def _parse_kind(parts: Sequence[bytes]) -> Kind:
    """Return a Host of a kind with facts of OWN of which no two are equal, and these facts.

    The Host is None if the document is invalid, or has such facts elsewhere.
    """
    known: list[str | int] = []
    written = [parts[0]]
    for number, (name, text, rest) in enumerate(zip(parts[NAMES], parts[TEXTS], parts[4::4], strict=True)):
        if name:
            known.append(number)
            written += [b'"', name, str(number).encode(), rest]
        else:
            instead = f"GPU-{number:08}" if text.startswith((b"GPU", b"MIG")) else f"{number:04x}:ff:ff.7"
            known.append(instead)
            written += [b'"', instead.encode(), b'"', rest]
    try:
        data = json_documents.parse_json(b"".join(written), "")
        host = Host.from_json(data)
    except UsageError:
        return UNKNOWN
    own = {*known}
    found = Counter(fact for fact in _list_own_facts(host) if fact in own)
    flags = data["cpu"].get("flags") if isinstance(data, dict) else None
    return (host, tuple(known)) if found == Counter(known) and flags == [] else UNKNOWN


def _list_own_facts(host: Host) -> Iterator[str | int | None]:
    """Yield what a host has of the facts that OWN describes."""
    for gpu in host.gpus:
        yield from (gpu.uuid, gpu.pci_bus_id, gpu.minor, gpu.memory_mib)
        for device in gpu.mig or ():
            yield from (device.uuid, device.memory_mib)
    yield from (sign.where for sign in host.accelerators)


def _require_path(path: str | Path) -> Path:
    try:
        return Path(path)
    except TypeError as error:
        raise UsageError(f"{path!r:.80} is not the path of a file") from error


def _list_sources(
    paths: Iterable[Path], stream: BinaryIO | None, reader: HostReader
) -> Iterator[tuple[str, Callable[[], Host]]]:
    """Yield each host's name with a function that reads the host."""
    seen: set[Path] = set()
    for path in paths:
        if stream is not None and path == STREAM:
            yield from _read_stream(stream, STREAM_NAME, reader)
            continue
        for file in _list_files(path):
            if file.absolute() in seen:
                continue
            seen.add(file.absolute())
            if file.suffix in OF_LINES:
                with _open_file(file) as opened:
                    yield from _read_stream(opened, str(file), reader)
            else:
                yield str(file).removesuffix(SUFFIX), partial(_read_saved, file, reader)


def _list_files(path: Path) -> list[Path]:
    if not os.path.isdir(path):  # noqa: PTH112 - pathlib raises for overlong names
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in (SUFFIX, *OF_LINES))
    if not files:
        raise UsageError(f"{path}: no *{SUFFIX} file found")
    return files


def _open_file(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from error
    except ValueError as error:  # a null character
        raise UsageError(f"{str(file)!r:.80} is not the path of a file") from error


def _read_saved(file: Path, reader: HostReader) -> Host:
    return reader.share(Host.load(file))


def _read_stream(stream: BinaryIO, name: str, reader: HostReader) -> Iterator[tuple[str, Callable[[], Host]]]:
    parsed = _read_lines(stream, name)
    first = next(parsed, None)
    if first is None:  # most likely, what should have written them failed
        raise UsageError(f"{name}: no hosts found")
    if first[1].lstrip().startswith(b"["):
        yield from _read_list(first[1] + stream.read(json_documents.LIMIT), name, reader)
        return
    for where, raw in chain([first], parsed):
        yield where, partial(reader.read, raw, where)


def _read_lines(stream: BinaryIO, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield each non-empty line as NAME:NUMBER and its bytes; an oversized one is cut after LIMIT + 1."""
    for number, line in enumerate(iter(partial(stream.readline, json_documents.LIMIT + 1), b""), 1):
        rest = line
        while len(rest) > json_documents.LIMIT and not rest.endswith(b"\n"):
            rest = stream.readline(json_documents.LIMIT + 1)
        if line.strip():
            yield f"{name}:{number}", line.rstrip(b"\r\n")


def _read_list(raw: bytes, name: str, reader: HostReader) -> Iterator[tuple[str, Callable[[], Host]]]:
    if len(raw) > json_documents.LIMIT:
        raise UsageError(f"{name}: longer than {json_documents.LIMIT // 2**20} MiB", remedy=ADVICE)
    items = json_documents.parse_json(raw, name)
    for number, item in enumerate(items if isinstance(items, list) else (), 1):
        where = f"{name}:{number}"
        yield where, partial(_read_item, item, where, reader)


def _read_item(item: object, where: str, reader: HostReader) -> Host:
    return reader.share(Host.from_json(item, where))


def _parse_document(raw: bytes, where: str) -> object:
    try:
        return json_documents.parse_json(raw, where)
    except UsageError as error:
        raise UsageError(str(error), remedy=ADVICE) from error


def _join_errors(errors: list[UsageError]) -> UsageError:
    """Return one error for all, with a line for each."""
    if len(errors) == 1:
        return errors[0]
    remedy = next((error.remedy for error in errors if error.remedy), None)
    told = shorten_lines([*map(str, errors)], SHOWN)
    return UsageError(f"cannot read {len(errors)} hosts:", *told, remedy=remedy)


def _replace_facts(host: Host, cpu: Cpu, values: Mapping[str | int | None, Any]) -> Host:
    """Return `host` with another CPU, and with other facts, by those that it has."""

    def gpu(old: Gpu) -> Gpu:
        return replace(
            old,
            uuid=values.get(old.uuid, old.uuid),
            pci_bus_id=values.get(old.pci_bus_id, old.pci_bus_id),
            minor=values.get(old.minor, old.minor),
            memory_mib=values.get(old.memory_mib, old.memory_mib),
            mig=old.mig and tuple(map(device, old.mig)),
        )

    def device(old: MigDevice) -> MigDevice:
        uuid, memory = values.get(old.uuid, old.uuid), values.get(old.memory_mib, old.memory_mib)
        return replace(old, uuid=uuid, memory_mib=memory)

    def sign(old: Accelerator) -> Accelerator:
        return replace(old, where=values.get(old.where, old.where))

    gpus, accelerators = host.gpus, host.accelerators
    if values:
        gpus, accelerators = tuple(map(gpu, gpus)), tuple(map(sign, accelerators))
    return replace(host, cpu=cpu, gpus=gpus, accelerators=accelerators)
