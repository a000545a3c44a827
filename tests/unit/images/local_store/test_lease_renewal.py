"""The process that renews a lease for another one, which knows nothing of it."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from imagematrix.images.local_store import lease_renewal
from imagematrix.images.local_store.folder import ImageStore, Lease
from imagematrix.images.local_store.holder import Holder
from imagematrix.images.local_store.lease_renewal import renew_while_alive

DIGEST = f"sha256:{'1' * 64}"


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(lease_renewal, "RENEW_S", 0.05)


@pytest.fixture
def step():
    """A process for which an image is leased."""
    with subprocess.Popen(["sleep", "300"]) as process:
        yield process
        process.kill()


@pytest.fixture
def lease(tmp_path, step):
    Path(tmp_path, "leases").mkdir()
    return ImageStore(tmp_path).take_lease(DIGEST, step.pid)


def children():
    return {*Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


def started(lease, step):
    """Let the lease be renewed; return the process that does it."""
    before = children()
    renew_while_alive(lease, step.pid)
    (own,) = children() - before
    return int(own)


def renewed(path):
    """Wait for a sign of life."""
    os.utime(path, (0, 0))
    deadline = time.monotonic() + 30
    while not path.stat().st_mtime:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_lease_is_renewed_until_its_process_ends(lease, step):
    path = Path(lease.path)
    own = started(lease, step)
    renewed(path)
    step.kill()
    step.wait()
    os.waitpid(own, 0)
    assert not path.exists()


def test_it_ends_with_the_lease(lease, step):
    own = started(lease, step)
    renewed(Path(lease.path))
    lease.release()
    assert os.waitpid(own, 0) == (own, 0)


def test_it_has_nothing_of_the_process_that_starts_it_and_no_signal_ends_it(lease, step):
    own = started(lease, step)
    renewed(Path(lease.path))
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(own, one)
    renewed(Path(lease.path))
    assert {str(one.readlink()) for one in Path(f"/proc/{own}/fd").iterdir()} == {os.devnull}
    lease.release()
    os.waitpid(own, 0)


def test_a_store_that_cannot_be_written_to_has_nothing_to_renew(step):
    before = children()
    renew_while_alive(Lease(path=None, holder=Holder.from_pid()), step.pid)
    assert children() == before
