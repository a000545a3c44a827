"""A process that renews the lease on an image while another process lives.

Whoever takes a lease for another process ends soon, and that process knows nothing of leases (see `Lease`).
"""

from __future__ import annotations

import os
import signal
import time

from imagematrix.images.local_store.holder import RENEW_S, Holder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Never

    from imagematrix.images.local_store.folder import Lease

DESCRIPTORS = 1 << 16  # more than a process has open


def renew_while_alive(lease: Lease, pid: int) -> Lease:
    """Start a process that renews `lease`, which is one for the process `pid`, until that ends.

    It releases it then, and ends, too, when somebody else has done so. Returns the lease, which names it: a
    lease for a process of another user, such as root, does not count. Raises EngineError if that cannot be
    written.
    """
    if lease.path is None:
        return lease
    holder = Holder.from_pid(pid)
    # A signal is for the processes of the user, such as the notice of a batch system that a job will end.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        renewing = os.fork()
        if renewing == 0:
            _run_renewal(lease, holder)
        return lease.with_container(renewing)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _run_renewal(lease: Lease, holder: Holder) -> Never:
    try:
        # Nobody waits for its output, and no terminal ends it.
        os.setsid()
        for descriptor in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        os.closerange(3, DESCRIPTORS)
        while holder.is_alive(quiet_s=0) and lease.renew():
            time.sleep(RENEW_S)
        lease.release()
    finally:
        os._exit(0)
