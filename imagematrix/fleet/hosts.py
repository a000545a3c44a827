"""Reading many saved hosts: from files, from folders of them, and from a stream.

Nodes of one kind differ only in UUIDs and PCI addresses, and nodes of many kinds have the same CPU. So the
list of CPU flags, which is most of a document, and all else but these identities are parsed once.
"""

from __future__ import annotations

import itertools
import os
import re
from functools import partial
from pathlib import Path

from imagematrix import documents
from imagematrix.errors import UsageError
from imagematrix.node.host import Host
from imagematrix.record import replace
from imagematrix.text import shortened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import BinaryIO

    from imagematrix.node.host import Accelerator, Cpu, Gpu, MigDevice

__all__ = ["STREAM", "HostReader", "load_hosts"]

STREAM = Path("-")
STREAM_NAME = "stdin"
SUFFIX = ".json"
OF_LINES = (".ndjson", ".jsonl")  # suffixes of files with a host on each line
# Whole strings in a document without backslashes, where no quotes are inside another string. Of addresses,
# those that are written as a Host has them.
IDENTITY = re.compile(rb'"((?:GPU|MIG)-[0-9A-Za-z/-]{8,64}|[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])"')
FLAGS = b'"flags"'
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
    for name, read in _sources(map(_path, paths), stream, reader):
        try:
            host = read()
        except UsageError as error:
            errors.append(error)
            continue
        if name in hosts:
            errors.append(UsageError(f"duplicate host name: {name}"))
        hosts[name] = host
    if errors:
        raise _joined(errors)
    return hosts


class HostReader:
    """Reads Host documents, and caches what it reads for documents that differ only in flags or identities.

    Identities are the UUIDs and PCI addresses of GPUs, MIG devices and other accelerators.
    """

    __slots__ = ("_cache", "_cpus", "_flags")

    def __init__(self) -> None:
        self._cache: dict[tuple[bytes, ...], tuple[Host, tuple[str, ...]]] = {}
        self._cpus: dict[Cpu, Cpu] = {}
        self._flags: dict[bytes, frozenset[str]] = {}

    def read(self, raw: bytes, where: str) -> Host:
        """Return the Host that the document `raw` describes; `where` names it in a UsageError."""
        if len(raw) > documents.LIMIT:
            raise UsageError(f"{where}: longer than {documents.LIMIT // 2**20} MiB", remedy=ADVICE)
        try:
            return self._in_parts(raw, where)
        except UsageError:  # the whole document has the precise error
            return self.share(Host.from_json(_parsed(raw, where), where))

    def share(self, host: Host) -> Host:
        """Return `host` with the Cpu object of an earlier equal host: the flags are most of its memory."""
        return replace(host, cpu=self._cpus.setdefault(host.cpu, host.cpu))

    def _in_parts(self, raw: bytes, where: str) -> Host:
        """Return the Host of a document, its flags read apart; raise UsageError if that may be wrong."""
        before, _, after = raw.partition(FLAGS)
        colon, opening, listed = after.partition(b"[")
        flags, closing, after = listed.partition(b"]")
        if colon.strip() != b":" or not closing or FLAGS in after or b"\\" in raw or not raw.isascii():
            raise UsageError(f"{where}: the flags are not a plain list")
        host = self._without_flags(b"".join([before, FLAGS, colon, opening, closing, after]), where)
        return self.share(replace(host, cpu=replace(host.cpu, flags=self._listed(flags.lower()))))

    def _without_flags(self, raw: bytes, where: str) -> Host:
        """Return the Host of a document without backslashes that has no flags."""
        parts = IDENTITY.split(raw)
        kind, own = tuple(parts[::2]), parts[1::2]
        cached = self._cache.get(kind)
        # An identity that occurs twice is an error, which only reading the whole document reports.
        if cached is not None and len({one.lower() for one in own}) == len(own):
            host, known = cached
            return _renamed(host, dict(zip(known, map(bytes.decode, own), strict=True))) if own else host
        data = _parsed(raw, where)
        host = Host.from_json(data, where)
        if not isinstance(data, dict) or data["cpu"].get("flags") != []:
            raise UsageError(f"{where}: the flags are those of something else")
        if cached is None:
            self._store(kind, host, tuple(map(bytes.decode, own)))
        return host

    def _listed(self, raw: bytes) -> frozenset[str]:
        """Return the flags in a list in lower case."""
        flags = self._flags.get(raw)
        if flags is None:
            if len(self._flags) >= LISTS:
                self._flags.clear()
            fields = documents.Fields({"flags": documents.parse(b"[%b]" % raw, "cpu")}, "cpu")
            flags = self._flags[raw] = frozenset(fields.texts("flags"))
        return flags

    def _store(self, kind: tuple[bytes, ...], host: Host, own: tuple[str, ...]) -> None:
        """Cache a host if each string that looks like an identity is one."""
        expected = [one for one in _identities(host) if one and IDENTITY.fullmatch(f'"{one}"'.encode())]
        if len(set(own)) == len(own) and sorted(own) == sorted(expected):
            if len(self._cache) >= CACHED:
                self._cache.clear()
            self._cache[kind] = host, own


def _path(path: str | Path) -> Path:
    try:
        return Path(path)
    except TypeError as error:
        raise UsageError(f"{path!r:.80} is not the path of a file") from error


def _sources(
    paths: Iterable[Path], stream: BinaryIO | None, reader: HostReader
) -> Iterator[tuple[str, Callable[[], Host]]]:
    """Yield each host's name with a function that reads the host."""
    seen: set[Path] = set()
    for path in paths:
        if stream is not None and path == STREAM:
            yield from _streamed(stream, STREAM_NAME, reader)
            continue
        for file in _files(path):
            if file.absolute() in seen:
                continue
            seen.add(file.absolute())
            if file.suffix in OF_LINES:
                with _opened(file) as opened:
                    yield from _streamed(opened, str(file), reader)
            else:
                yield str(file).removesuffix(SUFFIX), partial(_saved, file, reader)


def _files(path: Path) -> list[Path]:
    if not os.path.isdir(path):  # noqa: PTH112 - pathlib raises for overlong names
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in (SUFFIX, *OF_LINES))
    if not files:
        raise UsageError(f"{path}: no *{SUFFIX} file found")
    return files


def _opened(file: Path) -> BinaryIO:
    try:
        return file.open("rb")
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from error
    except ValueError as error:  # a null character
        raise UsageError(f"{str(file)!r:.80} is not the path of a file") from error


def _saved(file: Path, reader: HostReader) -> Host:
    return reader.share(Host.load(file))


def _streamed(stream: BinaryIO, name: str, reader: HostReader) -> Iterator[tuple[str, Callable[[], Host]]]:
    parsed = _lines(stream, name)
    first = next(parsed, None)
    if first is None:  # most likely, what should have written them failed
        raise UsageError(f"{name}: no hosts found")
    if first[1].lstrip().startswith(b"["):
        yield from _listed(first[1] + stream.read(documents.LIMIT), name, reader)
        return
    for where, raw in itertools.chain([first], parsed):
        yield where, partial(reader.read, raw, where)


def _lines(stream: BinaryIO, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield each non-empty line as NAME:NUMBER and its bytes; an oversized one is cut after LIMIT + 1."""
    for number, line in enumerate(iter(partial(stream.readline, documents.LIMIT + 1), b""), 1):
        rest = line
        while len(rest) > documents.LIMIT and not rest.endswith(b"\n"):
            rest = stream.readline(documents.LIMIT + 1)
        if line.strip():
            yield f"{name}:{number}", line.rstrip(b"\r\n")


def _listed(raw: bytes, name: str, reader: HostReader) -> Iterator[tuple[str, Callable[[], Host]]]:
    if len(raw) > documents.LIMIT:
        raise UsageError(f"{name}: longer than {documents.LIMIT // 2**20} MiB", remedy=ADVICE)
    items = documents.parse(raw, name)
    for number, item in enumerate(items if isinstance(items, list) else (), 1):
        where = f"{name}:{number}"
        yield where, partial(_item, item, where, reader)


def _item(item: object, where: str, reader: HostReader) -> Host:
    return reader.share(Host.from_json(item, where))


def _parsed(raw: bytes, where: str) -> object:
    try:
        return documents.parse(raw, where)
    except UsageError as error:
        raise UsageError(str(error), remedy=ADVICE) from error


def _joined(errors: list[UsageError]) -> UsageError:
    """Return one error for all, with a line for each."""
    if len(errors) == 1:
        return errors[0]
    listed = shortened([*map(str, errors)], SHOWN, "\n  ", "\n  and {} more")
    remedy = next((error.remedy for error in errors if error.remedy), None)
    return UsageError(f"cannot read {len(errors)} hosts:\n  {listed}", remedy=remedy)


def _identities(host: Host) -> list[str | None]:
    """Return the identities of a host's GPUs, each followed by those of its MIG devices, then the others."""
    of_gpus = (
        one
        for gpu in host.gpus
        for one in (gpu.uuid, gpu.pci_bus_id, *(device.uuid for device in gpu.mig or ()))
    )
    return [*of_gpus, *(sign.where for sign in host.accelerators)]


def _renamed(host: Host, names: Mapping[str | None, str]) -> Host:
    """Return `host` with other identities, by those that it has."""

    def new_gpu(old: Gpu) -> Gpu:
        return replace(
            old,
            uuid=names.get(old.uuid, old.uuid),
            pci_bus_id=names.get(old.pci_bus_id, old.pci_bus_id),
            mig=old.mig and tuple(map(new_device, old.mig)),
        )

    def new_device(old: MigDevice) -> MigDevice:
        return replace(old, uuid=names.get(old.uuid, old.uuid))

    def new_sign(old: Accelerator) -> Accelerator:
        return replace(old, where=names.get(old.where, old.where))

    return replace(
        host,
        gpus=tuple([new_gpu(gpu) for gpu in host.gpus]),
        accelerators=tuple([new_sign(sign) for sign in host.accelerators]),
    )
