"""A process that keeps the lease on an image while a container runs from it.

The process that took the lease becomes the runtime, and cannot give the signs of life that other machines
need to see (see `imagematrix.image_store.folder.Lease`).
"""

from __future__ import annotations

import ctypes
import os
import signal

from imagematrix.launcher.foreground import PR_SET_PDEATHSIG

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Never

    from imagematrix.image_store.folder import Lease

__all__ = ["keep"]

RENEW_S = 30.0  # another machine believes in a lease for 120 s after a sign of life
DESCRIPTORS = 1 << 16  # more than a process has open


def keep(lease: Lease) -> None:
    """Start a process that renews `lease` until this one ends, whatever program that is by then."""
    if lease.path is None:
        return
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        if os.fork() == 0:
            _renew(lease, parent)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _renew(lease: Lease, parent: int) -> Never:
    """Renew the lease until SIGTERM, and release it; all signals are blocked.

    The kernel sends SIGTERM once for each thread of the parent that ends, so no handler may raise an error.
    """
    try:
        # The terminal's signals are for the container, and its pipes end with it.
        os.setsid()
        for descriptor in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        os.closerange(3, DESCRIPTORS)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # one that is ignored cannot be waited for
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        while os.getppid() == parent:  # it may have ended before prctl
            if signal.sigtimedwait({signal.SIGTERM}, RENEW_S):
                break
            lease.renew()
        lease.release()
    finally:
        os._exit(0)
