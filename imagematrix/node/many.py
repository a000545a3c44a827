"""Reading very many Host documents: those of nodes of one kind differ in UUIDs, and all else is read once."""

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

# A whole JSON string: within another one the quotes have backslashes.
UUID = re.compile(rb'"((?:GPU|MIG)-[0-9A-Za-z/-]{8,64})"')
KNOWN = 4096  # kinds of documents that are kept
SHOWN = 20  # documents that can't be read which are named before how many more there are
ADVICE = "write one host on each line, as `jq -c . FILE...` does"


class Reader:
    """Reads Host documents, and keeps what it made of those that differ in nothing but UUIDs."""

    __slots__ = ("_cpus", "_known")

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, ...], tuple[Host, tuple[int, ...]]] = {}
        self._cpus: dict[Cpu, Cpu] = {}

    def read(self, raw: bytes, where: str) -> Host:
        """Return the Host that the document `raw` describes; raise UsageError, in which `where` names it."""
        if len(raw) > documents.LIMIT:
            raise UsageError(f"{where}: longer than {documents.LIMIT // 2**20} MiB", remedy=ADVICE)
        parts = UUID.split(raw)
        kind, uuids = tuple(parts[::2]), parts[1::2]
        known = self._known.get(kind)
        if known is not None and len(set(uuids)) == len(uuids):
            host, places = known
            return _with(host, [uuids[place].decode() for place in places]) if uuids else host
        host = self.share(Host.from_json(_parsed(raw, where), where))
        if known is None:
            self._keep(kind, host, [uuid.decode() for uuid in uuids])
        return host

    def share(self, host: Host) -> Host:
        """Return `host` with a CPU that all hosts with an equal one have: its flags are most of a host."""
        return replace(host, cpu=self._cpus.setdefault(host.cpu, host.cpu))

    def _keep(self, kind: tuple[bytes, ...], host: Host, uuids: list[str]) -> None:
        """Keep a host where each of the strings that look like UUIDs is one of a GPU or of a MIG device."""
        own = _uuids(host)
        if len(set(uuids)) == len(uuids) and sorted(uuids) == sorted(uuid for uuid in own if uuid):
            if len(self._known) >= KNOWN:
                self._known.clear()
            self._known[kind] = host, tuple(uuids.index(uuid) for uuid in own if uuid)


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
    """Yield each line that is not empty, as NAME:NUMBER and its bytes, of which there may be one too many."""
    for number, line in enumerate(iter(partial(file.readline, documents.LIMIT + 1), b""), 1):
        rest = line
        while len(rest) > documents.LIMIT and not rest.endswith(b"\n"):
            rest = file.readline(documents.LIMIT + 1)
        if line.strip():
            yield f"{name}:{number}", line.rstrip(b"\r\n")


def joined(errors: list[UsageError]) -> UsageError:
    """Return one error for all; each keeps a line of its own."""
    if len(errors) == 1:
        return errors[0]
    told = [f"{len(errors)} hosts can't be read:", *map(str, errors[:SHOWN])]
    if len(errors) > SHOWN:
        told.append(f"and {len(errors) - SHOWN} more")
    return UsageError("\n  ".join(told), remedy=next((one.remedy for one in errors if one.remedy), None))


def _parsed(raw: bytes, where: str) -> object:
    try:
        return documents.parse(raw, where)
    except UsageError as error:
        raise UsageError(str(error), remedy=ADVICE) from error


def _uuids(host: Host) -> list[str | None]:
    """Return the UUIDs of a host's GPUs, each before those of its MIG devices."""
    return [uuid for gpu in host.gpus for uuid in (gpu.uuid, *(device.uuid for device in gpu.mig or ()))]


def _with(host: Host, uuids: list[str]) -> Host:
    """Return `host` with other UUIDs, wherever it has some."""
    left = iter(uuids)

    def own(one: Gpu) -> Gpu:
        gpu = replace(one, uuid=next(left)) if one.uuid else one
        return replace(gpu, mig=tuple(map(device, gpu.mig))) if gpu.mig else gpu

    def device(one: MigDevice) -> MigDevice:
        return replace(one, uuid=next(left)) if one.uuid else one

    return replace(host, gpus=tuple([own(gpu) for gpu in host.gpus]))
