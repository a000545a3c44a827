"""The process that holds a lock or a lease in a store, which other machines may see, too.

Processes may be hidden from each other (`hidepid` of proc(5)). Whether a process lives is then told by
kill(2), which answers EPERM for a process of another user and ESRCH for none. What cannot be known is alive:
an image that is kept too long harms nobody, and one that is removed below a container does.
"""
# os is imported faster than pathlib.
# ruff: noqa: PTH115, PTH123, PTH208

from __future__ import annotations

import json
import os

from imagematrix.common.json_documents import Fields
from imagematrix.common.record import Record, replace
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

BEAT_S = 10.0  # between two signs of life
RENEW_S = 30.0  # between two signs of life of a lease, in which other machines believe for a multiple of this
DEAD_S = 120.0  # without one, a holder on another machine is dead; NFS may show times that are 60 s old
LIMIT = 4096  # bytes of a file
BOOT = "/proc/sys/kernel/random/boot_id"
ENDED = ("Z", "X")  # states of processes that have ended, and whose parents do not know it yet
STARTED = 19  # place of the start time in /proc/PID/stat, after the name (proc_pid_stat(5))
NUMBERS = range(1, 1 << 22)  # of processes (PID_MAX_LIMIT of the kernel)
NOBODY = 65534  # whom root's files on NFS belong to (root_squash of exports(5))


class NodeProcess(Record):
    """A process of this machine: `started` is its start time in clock ticks after the boot."""

    pid: int
    started: str

    @classmethod
    def from_pid(cls, pid: int) -> Self:
        """Return the process with a `pid`, which runs."""
        return cls(pid=pid, started=_read_start_time(pid) or "")

    def is_running(self, owner: int | None = None) -> bool:
        """Whether it runs, as far as can be known; if an `owner` is given, as this user's process.

        One that is hidden counts, though its number may belong to another process by now.
        """
        if not _exists(self.pid):
            return False
        if _is_hidden(self.pid):
            return True
        return _read_start_time(self.pid) == self.started and (owner is None or _belongs_to(self.pid, owner))

    @property
    def is_hidden(self) -> bool:
        """Whether there is a process with this number of which this user cannot see since when it runs."""
        return _exists(self.pid) and _is_hidden(self.pid)


class Holder(Record):
    """A process: `started` is its start time in clock ticks after the boot.

    `boot` differs for each boot of each machine, `namespace` for each PID namespace of it. `host` is a name
    for messages. `token` differs for each file of a holder. The lease of a container names the container's
    first process; its `keeper` is the process that ends the lease, and as long as either runs, it lasts.
    `mounts` is the container's mount namespace, where other processes than the first may be left in it.
    """

    host: str
    pid: int
    started: str
    boot: str
    namespace: str
    token: str
    keeper: NodeProcess | None = None
    mounts: str = ""

    @classmethod
    def from_pid(cls, pid: int | None = None) -> Self:
        """Return this process, or the one with a `pid`, with a new token."""
        pid = pid or os.getpid()
        return cls(
            host=os.uname().nodename,
            pid=pid,
            started=_read_start_time(pid) or "",
            boot=_read_text(BOOT),
            namespace=_read_pid_namespace(),
            token=os.urandom(8).hex(),
        )

    def __str__(self) -> str:
        if self.is_here and self.process.is_hidden:
            return f"process {self.pid}, which is hidden from this user; if it is another, root frees this"
        return f"process {self.pid} on {self.host}"

    @property
    def process(self) -> NodeProcess:
        """The process itself."""
        return NodeProcess(pid=self.pid, started=self.started)

    def with_container(self, pid: int, mounts: str = "") -> Self:
        """Return the holder with the first process of a container, kept by the process that it was."""
        first = NodeProcess.from_pid(pid)
        return replace(
            self, pid=first.pid, started=first.started, keeper=self.keeper or self.process, mounts=mounts
        )

    def to_bytes(self) -> bytes:
        """Return the content of the holder's file."""
        values = {name: getattr(self, name) for name in self.__slots__}
        if self.keeper:
            values["keeper"] = {"pid": self.keeper.pid, "started": self.keeper.started}
        return json.dumps(values).encode()

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine since its last boot, in a PID namespace that is seen."""
        return bool(self.boot) and (self.boot, self.namespace) == (_read_text(BOOT), _read_pid_namespace())

    @property
    def is_out_of_sight(self) -> bool:
        """Whether it is of this boot of this machine, in another PID namespace: others may see it alive."""
        return bool(self.boot) and self.boot == _read_text(BOOT) and not self.is_here

    def is_alive(self, quiet_s: float, dead_s: float = DEAD_S, owner: int | None = None) -> bool:
        """Whether the process may still run, of which the last sign of life was seen `quiet_s` ago.

        What runs on this machine is looked up, as processes of the user `owner` if that is given. Processes
        of other machines, and of other PID namespaces, have to give signs of life, the last less than
        `dead_s` ago.
        """
        if not self.is_here:
            return quiet_s < dead_s
        if any(process.is_running(owner) for process in (self.process, self.keeper) if process):
            return True
        return bool(self.mounts) and self._has_left(owner, unknown=quiet_s < dead_s)

    def _has_left(self, owner: int | None, *, unknown: bool) -> bool:
        """Whether any process is in the mount namespace; `unknown` if it may be one that nobody tells of."""
        doubtful = not os.path.exists("/proc/1")  # noqa: PTH110 - others' processes are hidden
        for pid in (int(name) for name in os.listdir("/proc") if name.isdecimal()):
            mounts = read_mount_namespace(pid)
            if mounts == self.mounts:
                return True
            # The processes of a container are younger than its first.
            start = None if mounts else _read_start_time(pid)
            is_younger = start is not None and int(start) >= int(self.started or 0)
            if is_younger and (owner is None or _belongs_to(pid, owner)):
                doubtful = True
        return doubtful and unknown


def read_holder(descriptor: int) -> Holder | None:
    """Return the holder in an open file, None if it is damaged."""
    return parse_holder(os.pread(descriptor, LIMIT, 0))


def parse_holder(raw: bytes | str) -> Holder | None:
    """Return the holder in the content of a file, None if it is damaged."""
    try:
        fields = Fields(json.loads(raw), "holder")
        token = fields.get_text("token")
        keeper = fields.get_object_or_empty("keeper") if fields.has("keeper") else None
        started = fields.get_text("started")
        if started and not (started.isascii() and started.isdecimal()):
            return None
        return Holder(
            host=fields.get_text("host"),
            pid=fields.get_integer("pid"),
            started=started,
            boot=fields.get_text("boot"),
            namespace=fields.get_text("namespace"),
            token=token if token.isalnum() else "damaged",
            keeper=NodeProcess(pid=keeper.get_integer("pid"), started=keeper.get_text("started"))
            if keeper
            else None,
            mounts=fields.get_text("mounts") if fields.has("mounts") else "",
        )
    except (ValueError, RecursionError, UsageError):
        return None


def read_mount_namespace(pid: int | str, proc: str = "/proc") -> str:
    """Return the mount namespace of a process as /proc names it, "" if it has ended or may not be asked."""
    try:
        return os.readlink(f"{proc}/{pid}/ns/mnt")
    except OSError:
        return ""


def _exists(pid: int) -> bool:
    if pid not in NUMBERS:  # such as -1, which kill(2) takes for all processes
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _is_hidden(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}/stat")  # noqa: PTH110


def _read_start_time(pid: int) -> str | None:
    words = _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    ended = len(words) <= STARTED or words[0] in ENDED
    return None if ended else words[STARTED]


def _belongs_to(pid: int, owner: int) -> bool:
    """Whether a process is a user's, as the owner of a file tells who that is; True if it is not known."""
    uids = [
        row.split()[1] for row in _read_text(f"/proc/{pid}/status").splitlines() if row.startswith("Uid:")
    ]
    return not uids or int(uids[0]) == owner or (uids[0] == "0" and owner == NOBODY)


def _read_pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(LIMIT).strip()
    except OSError:
        return ""
