"""Reading a fleet: saved hosts from files, from folders of them, and from a stream."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from imagematrix import documents
from imagematrix.errors import UsageError
from imagematrix.probe.host import Host
from imagematrix.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import BinaryIO

    from imagematrix.probe.host import Cpu

__all__ = ["STREAM", "load"]

STREAM = Path("-")
STREAM_NAME = "stdin"
SUFFIX = ".json"
SHOWN = 20  # hosts that can't be read which are named before how many more there are
ADVICE = "send one host on each line, as `jq -c . FILE...` writes them, or a JSON list of hosts"


def load(paths: Iterable[Path], stream: BinaryIO) -> dict[str, Host]:
    """Return the saved hosts that `paths` name, by their names.

    A path is a file, a folder with files that end in .json, or "-" for `stream`: one host on each line, or a
    JSON list of hosts. A file's host has the path without .json as its name, one of the stream is "stdin:N",
    N being its line or its place in the list. A file that is named twice counts once. Raises UsageError that
    tells of every host which can't be read.
    """
    found: dict[str, Host] = {}
    errors: list[UsageError] = []
    cpus: dict[Cpu, Cpu] = {}
    for name, read in _sources(paths, stream):
        try:
            host = read()
        except UsageError as error:
            errors.append(error)
            continue
        if name in found:
            errors.append(UsageError(f"there are two hosts called {name}"))
        # A fleet has few kinds of CPU, and their flags are most of what a host takes in memory.
        found[name] = replace(host, cpu=cpus.setdefault(host.cpu, host.cpu))
    if errors:
        raise _joined(errors)
    return found


def _sources(paths: Iterable[Path], stream: BinaryIO) -> Iterator[tuple[str, Callable[[], Host]]]:
    """Yield for each host its name and what reads it."""
    seen: set[Path] = set()
    for path in paths:
        if path == STREAM:
            yield from _streamed(stream)
            continue
        for file in _files(path):
            if file.absolute() not in seen:
                seen.add(file.absolute())
                yield str(file).removesuffix(SUFFIX), partial(Host.load, file)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob(f"*{SUFFIX}"))
    if not files:
        raise UsageError(f"{path}: there is no file *{SUFFIX} in this folder")
    return files


def _streamed(stream: BinaryIO) -> Iterator[tuple[str, Callable[[], Host]]]:
    for number, line in enumerate(iter(partial(stream.readline, documents.LIMIT + 1), b""), 1):
        if len(line) > documents.LIMIT:
            raise _too_long(f"{STREAM_NAME}:{number}")
        if number == 1 and line.lstrip().startswith(b"["):
            yield from _listed(line + stream.read(documents.LIMIT))
            return
        if line.strip():
            name = f"{STREAM_NAME}:{number}"
            yield name, partial(_line, line, name)


def _listed(raw: bytes) -> Iterator[tuple[str, Callable[[], Host]]]:
    if len(raw) > documents.LIMIT:
        raise _too_long(STREAM_NAME)
    items = documents.parse(raw, STREAM_NAME)
    for number, item in enumerate(items if isinstance(items, list) else (), 1):
        name = f"{STREAM_NAME}:{number}"
        yield name, partial(Host.from_json, item, name)


def _line(raw: bytes, name: str) -> Host:
    try:
        data = documents.parse(raw, name)
    except UsageError as error:
        raise UsageError(str(error), remedy=ADVICE) from error
    return Host.from_json(data, name)


def _too_long(where: str) -> UsageError:
    return UsageError(f"{where}: longer than {documents.LIMIT // 2**20} MiB", remedy=ADVICE)


def _joined(errors: list[UsageError]) -> UsageError:
    """Return one error for all; each keeps a line of its own."""
    if len(errors) == 1:
        return errors[0]
    lines = [f"{len(errors)} hosts can't be read:", *map(str, errors[:SHOWN])]
    if len(errors) > SHOWN:
        lines.append(f"and {len(errors) - SHOWN} more")
    return UsageError("\n  ".join(lines), remedy=next((one.remedy for one in errors if one.remedy), None))
