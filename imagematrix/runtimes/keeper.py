"""A process that keeps the lease on an image while a container runs from it.

The process that took the lease becomes the runtime, and cannot give the signs of life that other machines
need to see (see `imagematrix.image_store.folder.Lease`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Never

    from imagematrix.image_store.folder import Lease

__all__ = ["keep"]

PR_SET_PDEATHSIG = 1  # of prctl(2)
RENEW_S = 30.0  # another machine believes in a lease for 120 s after a sign of life
DESCRIPTORS = 1 << 16  # more than a process has open


def keep(lease: Lease) -> None:
    """Start a process that renews `lease` until this one ends, whatever program that is by then."""
    if lease.path is None:
        return
    parent = os.getpid()
    if os.fork() == 0:
        _renew(lease, parent)


def _renew(lease: Lease, parent: int) -> Never:
    # The terminal's signals are for the container, and its pipes end with it.
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for descriptor in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    os.closerange(3, DESCRIPTORS)
    try:
        signal.signal(signal.SIGTERM, _ended)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        while os.getppid() == parent:  # it may have ended before prctl
            time.sleep(RENEW_S)
            lease.renew()
    except SystemExit:
        pass
    finally:
        lease.release()
        os._exit(0)


def _ended(*_: object) -> Never:
    raise SystemExit
