"""How fast the client of a TCP connection is, by the kernel's own counts, whatever is above TCP."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from dataclasses import dataclass
from typing import Literal

COUNTS = struct.Struct("@QQ")  # tcpi_bytes_acked and tcpi_bytes_received of linux/tcp.h
COUNTS_AT = 120
QUEUED = struct.Struct("@i")

Debt = Literal["bytes", "reading"]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What was sent to a client and received from it, and what is still queued for it, in bytes.

    What is sent counts when the client's kernel has acknowledged it.
    """

    sent: int
    received: int
    queued: int

    @classmethod
    def measure(cls, connection: socket.socket) -> Traffic:
        """Return the traffic of a connection; raises OSError if it is closed."""
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, COUNTS_AT + COUNTS.size)
        sent, received = COUNTS.unpack_from(info, COUNTS_AT)
        queue = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(QUEUED.size))
        return cls(sent, received, QUEUED.unpack(queue)[0])


@dataclass(frozen=True, slots=True)
class Pace:
    """Since when a client is slow in what it owes, and how many bytes it had moved by then.

    A client that owes nothing is never slow.
    """

    owed: Debt | None
    since: float
    moved: int

    @classmethod
    def start(cls, owed: Debt | None, now: float, traffic: Traffic) -> Pace:
        """Return the pace of a client that is not slow at the time `now`, in seconds."""
        return cls(owed, now, traffic.sent if owed == "reading" else traffic.received)

    def update(self, now: float, traffic: Traffic, *, asking: bool, least: float) -> Pace:
        """Return the pace at a later look.

        A client owes the reading of what is queued for it, or else, while it is `asking`, the rest of its
        request. It is not slow if it has moved `least` bytes/s since it was slow.
        """
        owed: Debt | None = "reading" if traffic.queued else "bytes" if asking else None
        current = Pace.start(owed, now, traffic)
        if owed is None or owed != self.owed or current.moved - self.moved >= least * (now - self.since):
            return current
        return self

    def get_slow_s(self, now: float) -> float:
        """Return for how many seconds the client has been slow."""
        return now - self.since
