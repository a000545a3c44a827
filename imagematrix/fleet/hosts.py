"""Reading a fleet: saved hosts from files, from folders of them, and from a stream."""

from __future__ import annotations

import itertools
import os
from functools import partial
from pathlib import Path

from imagematrix import documents
from imagematrix.errors import UsageError
from imagematrix.node.host import Host
from imagematrix.node.many import ADVICE, Reader, joined, lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import BinaryIO

__all__ = ["STREAM", "load"]

STREAM = Path("-")
STREAM_NAME = "stdin"
SUFFIX = ".json"
OF_LINES = (".ndjson", ".jsonl")  # suffixes of files with a host on each line


def load(paths: Iterable[Path], stream: BinaryIO) -> dict[str, Host]:
    """Return the saved hosts in `paths`, by name.

    A path is a file, a folder with such files, or "-" for `stream`, which has one host on each line or a JSON
    list of them. A file that ends in .ndjson or .jsonl has one on each line, any other file is one host. The
    name of a host is the path without .json, or NAME:N for the host on line N or at position N of a list.
    Duplicate paths count once. Raises UsageError that lists every unreadable host, or names a file of lines
    without any.
    """
    hosts: dict[str, Host] = {}
    errors: list[UsageError] = []
    reader = Reader()
    for name, read in _sources(paths, stream, reader):
        try:
            host = read()
        except UsageError as error:
            errors.append(error)
            continue
        if name in hosts:
            errors.append(UsageError(f"duplicate host name: {name}"))
        hosts[name] = host
    if errors:
        raise joined(errors)
    return hosts


def _sources(
    paths: Iterable[Path], stream: BinaryIO, reader: Reader
) -> Iterator[tuple[str, Callable[[], Host]]]:
    """Yield each host's name with a function that reads the host."""
    seen: set[Path] = set()
    for path in paths:
        if path == STREAM:
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


def _saved(file: Path, reader: Reader) -> Host:
    return reader.share(Host.load(file))


def _streamed(stream: BinaryIO, name: str, reader: Reader) -> Iterator[tuple[str, Callable[[], Host]]]:
    parsed = lines(stream, name)
    first = next(parsed, None)
    if first is None:  # most likely, what should have written them failed
        raise UsageError(f"{name}: no hosts found")
    if first[1].lstrip().startswith(b"["):
        yield from _listed(first[1] + stream.read(documents.LIMIT), name, reader)
        return
    for where, raw in itertools.chain([first], parsed):
        yield where, partial(reader.read, raw, where)


def _listed(raw: bytes, name: str, reader: Reader) -> Iterator[tuple[str, Callable[[], Host]]]:
    if len(raw) > documents.LIMIT:
        raise UsageError(f"{name}: longer than {documents.LIMIT // 2**20} MiB", remedy=ADVICE)
    items = documents.parse(raw, name)
    for number, item in enumerate(items if isinstance(items, list) else (), 1):
        where = f"{name}:{number}"
        yield where, partial(_item, item, where, reader)


def _item(item: object, where: str, reader: Reader) -> Host:
    return reader.share(Host.from_json(item, where))
