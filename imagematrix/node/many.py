"""Reading very many Host documents: nodes of one kind differ only in UUIDs, so the rest is parsed once."""

from __future__ import annotations

import re
from functools import partial

from imagematrix import documents
from imagematrix.errors import UsageError
from imagematrix.node.host import Host
from imagematrix.record import replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

    from imagematrix.node.host import Cpu, Gpu, MigDevice

__all__ = ["ADVICE", "Reader", "joined", "lines", "load_all"]

# A whole JSON string: inside another string the quotes are escaped.
UUID = re.compile(rb'"((?:GPU|MIG)-[0-9A-Za-z/-]{8,64})"')
CACHED = 4096  # kinds of documents
SHOWN = 20  # invalid documents that are listed; further ones are counted
ADVICE = "write one host per line, as `jq -c . FILE...` does"


class Reader:
    """Reads Host documents, and caches the result for documents that differ only in UUIDs."""

    __slots__ = ("_cache", "_cpus")

    def __init__(self) -> None:
        self._cache: dict[tuple[bytes, ...], tuple[Host, tuple[int, ...]]] = {}
        self._cpus: dict[Cpu, Cpu] = {}

    def read(self, raw: bytes, where: str) -> Host:
        """Return the Host that the document `raw` describes; `where` names it in a UsageError."""
        if len(raw) > documents.LIMIT:
            raise UsageError(f"{where}: longer than {documents.LIMIT // 2**20} MiB", remedy=ADVICE)
        parts = UUID.split(raw)
        kind, uuids = tuple(parts[::2]), parts[1::2]
        cached = self._cache.get(kind)
        if cached is not None and len(set(uuids)) == len(uuids):
            host, positions = cached
            return _with_uuids(host, [uuids[position].decode() for position in positions]) if uuids else host
        host = self.share(Host.from_json(_parsed(raw, where), where))
        if cached is None:
            self._store(kind, host, [uuid.decode() for uuid in uuids])
        return host

    def share(self, host: Host) -> Host:
        """Return `host` with the Cpu object of an earlier equal host: the flags are most of its memory."""
        return replace(host, cpu=self._cpus.setdefault(host.cpu, host.cpu))

    def _store(self, kind: tuple[bytes, ...], host: Host, uuids: list[str]) -> None:
        """Cache a host if each string that looks like a UUID is that of a GPU or of a MIG device."""
        expected = _uuids(host)
        if len(set(uuids)) == len(uuids) and sorted(uuids) == sorted(uuid for uuid in expected if uuid):
            if len(self._cache) >= CACHED:
                self._cache.clear()
            self._cache[kind] = host, tuple(uuids.index(uuid) for uuid in expected if uuid)


def load_all(path: str | Path, bad: list[UsageError] | None = None) -> Iterator[Host]:
    """Yield the Host that each line of the file `path` describes; see `Host.load_all`."""
    try:
        file = open(path, "rb")  # noqa: PTH123, SIM115 - pathlib is slow to import; closed below
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    errors: list[UsageError] = [] if bad is None else bad
    with file:
        reader = Reader()
        for name, raw in lines(file, str(path)):
            try:
                yield reader.read(raw, name)
            except UsageError as error:
                errors.append(error)
    if bad is None and errors:
        raise joined(errors)


def lines(file: BinaryIO, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield each non-empty line as NAME:NUMBER and its bytes; an oversized one is cut after LIMIT + 1."""
    for number, line in enumerate(iter(partial(file.readline, documents.LIMIT + 1), b""), 1):
        rest = line
        while len(rest) > documents.LIMIT and not rest.endswith(b"\n"):
            rest = file.readline(documents.LIMIT + 1)
        if line.strip():
            yield f"{name}:{number}", line.rstrip(b"\r\n")


def joined(errors: list[UsageError]) -> UsageError:
    """Return one error for all, with a line for each."""
    if len(errors) == 1:
        return errors[0]
    text = [f"cannot read {len(errors)} hosts:", *map(str, errors[:SHOWN])]
    if len(errors) > SHOWN:
        text.append(f"and {len(errors) - SHOWN} more")
    return UsageError(
        "\n  ".join(text), remedy=next((error.remedy for error in errors if error.remedy), None)
    )


def _parsed(raw: bytes, where: str) -> object:
    try:
        return documents.parse(raw, where)
    except UsageError as error:
        raise UsageError(str(error), remedy=ADVICE) from error


def _uuids(host: Host) -> list[str | None]:
    """Return the UUIDs of a host's GPUs, each followed by those of its MIG devices."""
    return [uuid for gpu in host.gpus for uuid in (gpu.uuid, *(device.uuid for device in gpu.mig or ()))]


def _with_uuids(host: Host, uuids: list[str]) -> Host:
    """Return `host` with its UUIDs replaced, in order."""
    following = iter(uuids)

    def new_gpu(old: Gpu) -> Gpu:
        gpu = replace(old, uuid=next(following)) if old.uuid else old
        return replace(gpu, mig=tuple(map(new_device, gpu.mig))) if gpu.mig else gpu

    def new_device(old: MigDevice) -> MigDevice:
        return replace(old, uuid=next(following)) if old.uuid else old

    return replace(host, gpus=tuple([new_gpu(gpu) for gpu in host.gpus]))
