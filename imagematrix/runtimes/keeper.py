"""A process that keeps the lease on an image while a container runs from it.

The process that took the lease becomes the runtime, and cannot give the signs of life that other machines
need to see (see `imagematrix.image_store.folder.Lease`).
"""

from __future__ import annotations

import os
import signal
import time

from imagematrix.launcher.foreground import end_with_parent

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
    if os.fork() == 0:
        _renew(lease, parent)


def _renew(lease: Lease, parent: int) -> Never:
    try:
        # The terminal's signals are for the container, and its pipes end with it.
        os.setsid()
        signal.signal(signal.SIGTERM, _ended)
        for descriptor in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        os.closerange(3, DESCRIPTORS)
        end_with_parent()
        while os.getppid() == parent:  # it may have ended before
            time.sleep(RENEW_S)
            lease.renew()
    except SystemExit:
        pass
    finally:
        lease.release()
        os._exit(0)


def _ended(*_: object) -> Never:
    raise SystemExit
