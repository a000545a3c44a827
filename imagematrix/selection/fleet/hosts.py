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
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
    from typing import Any, BinaryIO

    from imagematrix.hardware.host.host import Accelerator, Cpu, Gpu, MigDevice

    Kind = tuple[Host | None, tuple[str | int, ...]]

STREAM = Path("-")
STREAM_NAME = "stdin"
SUFFIX = ".json"
OF_LINES = (".ndjson", ".jsonl")  # suffixes of files with a host on each line
# In a document without backslashes, where no quotes are inside a string: UUIDs, PCI addresses as a Host has
# them, minor numbers and amounts of memory. A document is valid with any of them, unless two GPUs share one.
# Only a UUID or only an address may be in a place: the dash of the former, as a group, tells which it was.
# Most quotes have none behind them, as their first character tells: to look at it takes less than to try.
VARYING = re.compile(
    rb'"(?=[mGM0-9a-f])(?:((?:minor|memory_mib)": ?)(0|[1-9][0-9]{0,8})(?![0-9.eE])'
    rb'|((?:GPU|MIG)(-)[0-9A-Za-z/-]{8,64}|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")'
)
# The parts that VARYING splits a document into.
REST, NAMES, NUMBERS, TEXTS, DASHES = (slice(place, None, 5) for place in range(5))
UNKNOWN = None, ()
FLAGS, MINOR = b'"flags"', b"minor"
LONGEST = 64 * 1024  # bytes of a document that is cached
CACHED = 4096  # kinds of documents
LISTS = 1024  # lists of flags
WORDS = 1024  # flags
BUFFER = 256 * 1024  # bytes of a file that are read at a time
SHOWN = 20  # invalid documents that are listed; further ones are counted
ADVICE = "write one host per line, as `jq -c . FILE...` does"


def load_hosts(*paths: str | Path, stream: BinaryIO | None = None) -> dict[str, Host]:
    """Return the saved hosts in `paths`, by name.

    A path is a file or a folder with such files; with `stream`, "-" is the stream, which has one host on each
    line or a JSON list of them. A file that ends in .ndjson or .jsonl has one on each line, any other file is
    one host. The name of a host is the path without .json, or NAME:N for the host on line N or at position N
    of a list. Duplicate paths count once. Raises UsageError that lists every unreadable host, or names a
    folder, a file of lines or a stream without any.
    """
    hosts: dict[str, Host] = {}
    errors: list[UsageError] = []
    for name, host in _read_hosts(paths, stream):
        if isinstance(host, UsageError):
            errors.append(host)
            continue
        if name in hosts:
            errors.append(UsageError(f"duplicate host name: {name}"))
        hosts[name] = host
    if len(errors) == 1:
        raise errors[0]
    if errors:
        remedy = next((error.remedy for error in errors if error.remedy), None)
        lines = shorten_lines([*map(str, errors)], SHOWN)
        raise UsageError(f"cannot read {len(errors)} hosts:", *lines, remedy=remedy)
    return hosts


# How a HostReader is fast. A document is split by VARYING into what all nodes of a kind have in common and
# facts such as UUIDs. The common part is the key of the kind. When it is seen a second time, it is parsed
# with stand-ins for the varying facts; where these turn up in the Host shows which fact is which. From then
# on, a document of the kind is a copy of that Host with its own facts in place of the stand-ins.


class HostReader:
    """Reads Host documents; those that differ only in varying facts and in flags are parsed once."""

    __slots__ = ("_cpus", "_flags", "_kinds", "_words")

    def __init__(self) -> None:
        self._kinds: dict[Hashable, Kind | None] = {}  # None for a kind of which there was one document
        self._cpus: dict[Cpu, Cpu] = {}
        self._flags: dict[bytes, frozenset[str]] = {}
        self._words = _Words()

    def read(self, raw: bytes, where: str) -> Host:
        """Return the Host that the document `raw` describes; `where` names it in a UsageError."""
        if len(raw) > json_documents.LIMIT:
            raise UsageError(f"{where}: longer than {json_documents.LIMIT // 2**20} MiB", remedy=ADVICE)
        host = self._read_known(raw)
        if host:
            return host
        try:
            data = json_documents.parse_json(raw, where)
        except UsageError as error:
            raise UsageError(str(error), remedy=ADVICE) from error
        return self.share(Host.from_json(data, where))

    def share(self, host: Host) -> Host:
        """Return `host` with the Cpu object of an earlier equal host: the flags are most of its memory."""
        return replace(host, cpu=self._cpus.setdefault(host.cpu, host.cpu))

    def _read_known(self, raw: bytes) -> Host | None:
        """Return the Host of a document of a known kind, or None, as for any that may be invalid."""
        if len(raw) > LONGEST:
            return None
        before, _, after = raw.partition(FLAGS)
        colon, opening, flags_text = after.partition(b"[")
        flags, closing, after = flags_text.partition(b"]")
        if colon.strip() != b":" or not closing or FLAGS in after or b"\\" in raw or not raw.isascii():
            return None
        parts = VARYING.split(b"".join([before, FLAGS, colon, opening, closing, after]))
        host, stand_ins = self._find_kind(parts)
        flag_set = self._parse_flags(flags.lower()) if host else None
        if host is None or flag_set is None:
            return None
        facts: list[int | str] = []
        unique = []  # among the GPUs of a host
        for name, number, text in zip(parts[NAMES], parts[NUMBERS], parts[TEXTS], strict=True):
            facts.append(int(number) if name else text.decode())
            if not name or name.startswith(MINOR):
                unique.append(number if name else text.lower())
        if len({*unique}) < len(unique):
            return None
        cpu = replace(host.cpu, flags=flag_set)
        cpu = self._cpus.setdefault(cpu, cpu)
        return _replace_facts(host, cpu, dict(zip(stand_ins, facts, strict=True)))

    def _find_kind(self, parts: Sequence[bytes]) -> Kind:
        """Return what is known of a kind of documents: nothing if this is the first."""
        key = *parts[REST], *parts[NAMES], *parts[DASHES]
        if key not in self._kinds:  # many documents are the only ones of their kind
            if len(self._kinds) >= CACHED:
                self._kinds.clear()
            self._kinds[key] = None
            return UNKNOWN
        kind = self._kinds[key] = self._kinds[key] or _parse_kind(parts)
        return kind

    def _parse_flags(self, text: bytes) -> frozenset[str] | None:
        """Return the flags in a list, or None if it is not a list of strings."""
        flags = self._flags.get(text)
        if flags is None:
            try:
                # A comma inside a string leaves parts that are none.
                flags = frozenset(map(self._words.__getitem__, text.split(b",") if text else ()))
            except (ValueError, TypeError, RecursionError):
                return None
            if len(self._flags) >= LISTS:
                self._flags.clear()
            self._flags[text] = flags
        return flags


class _Words(dict[bytes, str]):
    """Flags by their text in a JSON list: nodes have most of them in common, and each is parsed once."""

    def __missing__(self, text: bytes) -> str:
        word = intern(json.loads(text.decode()))  # of bytes, json would guess the encoding
        if len(self) >= WORDS:
            self.clear()
        self[text] = word
        return word


def _parse_kind(parts: Sequence[bytes]) -> Kind:
    """Return a Host of a kind with stand-ins for its varying facts, of which no two are equal, and these.

    The Host is None if the document is invalid, or has such facts elsewhere, as one written in another way.
    """
    stand_ins: list[str | int] = []
    document = [parts[0]]
    varying = zip(parts[NAMES], parts[TEXTS], parts[REST][1:], strict=True)
    for number, (name, text, rest) in enumerate(varying):
        if name:
            stand_ins.append(number)
            document += [b'"', name, str(number).encode(), rest]
        else:
            stand_in = f"GPU-{number:08}" if text.startswith((b"GPU", b"MIG")) else f"{number:04x}:ff:ff.7"
            stand_ins.append(stand_in)
            document += [b'"', stand_in.encode(), b'"', rest]
    try:
        data = json_documents.parse_json(b"".join(document), "")
        host = Host.from_json(data)
    except UsageError:
        return UNKNOWN
    expected = Counter(stand_ins)
    counts = Counter(fact for fact in _list_varying_facts(host) if fact in expected)
    unique = {fact for gpu in host.gpus for fact in (gpu.minor, gpu.pci_bus_id) if fact is not None}
    flags = data["cpu"].get("flags") if isinstance(data, dict) else None
    is_known = counts == expected and unique <= expected.keys() and flags == []
    return (host, tuple(stand_ins)) if is_known else UNKNOWN


def _list_varying_facts(host: Host) -> Iterator[str | int | None]:
    """Yield what a host has of the facts that VARYING describes."""
    for gpu in host.gpus:
        yield from (gpu.uuid, gpu.pci_bus_id, gpu.minor, gpu.memory_mib)
        for device in gpu.mig or ():
            yield from (device.uuid, device.memory_mib)
    yield from (accelerator.where for accelerator in host.accelerators)


def _read_hosts(
    paths: Iterable[str | Path], stream: BinaryIO | None
) -> Iterator[tuple[str, Host | UsageError]]:
    """Yield the name of each host with the host, or why it cannot be read."""
    reader = HostReader()
    read_files: set[Path] = set()
    for text in paths:
        try:
            path = Path(text)
        except TypeError as error:
            raise UsageError(f"{text!r:.80} is not the path of a file") from error
        if stream is not None and path == STREAM:
            yield from _read_stream(stream, STREAM_NAME, reader)
            continue
        for file in _list_files(path):
            try:
                place = file.absolute()
            except OSError as error:  # the current folder was removed
                raise UsageError(f"{file}: {error.strerror}") from error
            if place in read_files:
                continue
            read_files.add(place)
            if file.suffix in OF_LINES:
                with _open_file(file) as lines:
                    yield from _read_stream(lines, str(file), reader)
                continue
            host: Host | UsageError
            try:
                host = reader.share(Host.load(file))
            except UsageError as error:
                host = error
            yield str(file).removesuffix(SUFFIX), host


def _list_files(path: Path) -> list[Path]:
    if not os.path.isdir(path):  # noqa: PTH112 - pathlib raises for overlong names
        return [path]
    try:
        files = sorted(file for file in path.iterdir() if file.suffix in (SUFFIX, *OF_LINES))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if not files:
        raise UsageError(f"{path}: no *{SUFFIX} file found")
    return files


def _open_file(file: Path) -> BinaryIO:
    try:
        return file.open("rb", buffering=BUFFER)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from error
    except ValueError as error:  # a null character
        raise UsageError(f"{str(file)!r:.80} is not the path of a file") from error


def _read_stream(stream: BinaryIO, name: str, reader: HostReader) -> Iterator[tuple[str, Host | UsageError]]:
    """Yield the hosts of a stream, which are on lines of their own or a JSON list."""
    lines = _read_lines(stream, name)
    first = next(lines, None)
    nothing = UsageError(f"{name}: no hosts found")  # most likely, what should have written them failed
    if first is None:
        raise nothing
    host: Host | UsageError
    if not first[1].lstrip().startswith(b"["):
        for where, raw in chain([first], lines):
            try:
                host = reader.read(raw, where)
            except UsageError as error:
                host = error
            yield where, host
        return

    document = first[1] + stream.read(json_documents.LIMIT)
    if len(document) > json_documents.LIMIT:
        raise UsageError(f"{name}: longer than {json_documents.LIMIT // 2**20} MiB", remedy=ADVICE)
    items = json_documents.parse_json(document, name)
    if not items or not isinstance(items, list):
        raise nothing
    for number, item in enumerate(items, 1):
        where = f"{name}:{number}"
        try:
            host = reader.share(Host.from_json(item, where))
        except UsageError as error:
            host = error
        yield where, host


def _read_lines(stream: BinaryIO, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield each non-empty line as NAME:NUMBER and its bytes; an oversized one is cut after LIMIT + 1."""
    for number, line in enumerate(iter(partial(stream.readline, json_documents.LIMIT + 1), b""), 1):
        rest = line
        while len(rest) > json_documents.LIMIT and not rest.endswith(b"\n"):
            rest = stream.readline(json_documents.LIMIT + 1)
        if line.strip():
            yield f"{name}:{number}", line.rstrip(b"\r\n")


def _replace_facts(host: Host, cpu: Cpu, values: Mapping[str | int | None, Any]) -> Host:
    """Return `host` with another CPU, and with the `values` in place of the facts that it has."""

    def replace_gpu(gpu: Gpu) -> Gpu:
        return replace(
            gpu,
            uuid=values.get(gpu.uuid, gpu.uuid),
            pci_bus_id=values.get(gpu.pci_bus_id, gpu.pci_bus_id),
            minor=values.get(gpu.minor, gpu.minor),
            memory_mib=values.get(gpu.memory_mib, gpu.memory_mib),
            mig=gpu.mig and tuple(map(replace_device, gpu.mig)),
        )

    def replace_device(device: MigDevice) -> MigDevice:
        uuid = values.get(device.uuid, device.uuid)
        return replace(device, uuid=uuid, memory_mib=values.get(device.memory_mib, device.memory_mib))

    def replace_accelerator(accelerator: Accelerator) -> Accelerator:
        return replace(accelerator, where=values.get(accelerator.where, accelerator.where))

    gpus, accelerators = host.gpus, host.accelerators
    if values:
        gpus, accelerators = tuple(map(replace_gpu, gpus)), tuple(map(replace_accelerator, accelerators))
    return replace(host, cpu=cpu, gpus=gpus, accelerators=accelerators)
