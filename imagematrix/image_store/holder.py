"""The process that holds a lock or a lease in a store, which other machines may see, too."""
# os is imported faster than pathlib.
# ruff: noqa: PTH115, PTH123

from __future__ import annotations

import json
import os

from imagematrix.documents import Fields
from imagematrix.errors import UsageError
from imagematrix.record import Record
from imagematrix.text import line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

__all__ = ["BEAT_S", "DEAD_S", "Holder", "read"]

BEAT_S = 10.0  # between two signs of life
DEAD_S = 120.0  # without one, a holder on another machine is dead; NFS may show times that are 60 s old
LIMIT = 4096  # bytes of a file
BOOT = "/proc/sys/kernel/random/boot_id"
ENDED = ("Z", "X")  # states of processes that have ended, and whose parents do not know it yet
STARTED = 19  # place of the start time in /proc/PID/stat, after the name (proc_pid_stat(5))


class Holder(Record):
    """A process: `started` is its start time in clock ticks after the boot.

    `boot` differs for each boot of each machine, `namespace` for each PID namespace of it. `host` is a name
    for messages. `token` differs for each file of a holder.
    """

    host: str
    pid: int
    started: str
    boot: str
    namespace: str
    token: str

    @classmethod
    def of(cls, pid: int | None = None) -> Self:
        """Return this process, or the one with a `pid`, with a new token."""
        pid = pid or os.getpid()
        return cls(
            host=os.uname().nodename,
            pid=pid,
            started=_started(pid) or "",
            boot=_text(BOOT),
            namespace=_namespace(),
            token=os.urandom(8).hex(),
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"

    def to_bytes(self) -> bytes:
        """Return the content of the holder's file."""
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()

    def alive(self, quiet_s: float, dead_s: float = DEAD_S) -> bool:
        """Whether the process may still run, of which the last sign of life was seen `quiet_s` ago.

        What runs on this machine is looked up. Processes of other machines, and of other PID namespaces,
        have to give signs of life, the last less than `dead_s` ago.
        """
        if self.boot and (self.boot, self.namespace) == (_text(BOOT), _namespace()):
            return _started(self.pid) == self.started
        return quiet_s < dead_s


def read(descriptor: int) -> Holder | None:
    """Return the holder in an open file, None if it is damaged."""
    raw = os.pread(descriptor, LIMIT, 0)
    try:
        fields = Fields(json.loads(raw), "holder")
        token = fields.text("token")
        return Holder(
            host=line(fields.text("host")),
            pid=fields.integer("pid"),
            started=fields.text("started"),
            boot=fields.text("boot"),
            namespace=fields.text("namespace"),
            token=token if token.isalnum() else "damaged",
        )
    except (ValueError, RecursionError, UsageError):
        return None


def _started(pid: int) -> str | None:
    words = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    ended = len(words) <= STARTED or words[0] in ENDED
    return None if ended else words[STARTED]


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(LIMIT).strip()
    except OSError:
        return ""
