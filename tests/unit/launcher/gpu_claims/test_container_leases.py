"""The GPUs of containers whose keepers were killed: taken as long as the container lives, and no longer."""

import json
import os
import subprocess

import pytest

from imagematrix.common.record import replace
from imagematrix.images.local_store.holder import Holder
from imagematrix.launcher.gpu_claims.container_leases import (
    ContainerLease,
    compute_lease_usage,
    find_live_leases,
    hold_container_lease,
)
from imagematrix.launcher.gpu_claims.locks import Locks, release_locks
from imagematrix.launcher.gpu_claims.survey import compute_locked_usage

LEASE = ContainerLease(keys=("nvidia1",))


@pytest.fixture
def locks(tmp_path):
    with Locks(str(tmp_path / "locks")) as made:
        yield made


@pytest.fixture
def first():
    """A container's first process."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_a_container_keeps_its_gpus_when_its_keeper_is_dead(locks, first):
    name, held = hold_container_lease(locks, LEASE, Holder.from_pid(first.pid))
    release_locks(held)
    ((lease, holder),) = find_live_leases(locks)
    assert (lease, holder.pid) == (LEASE, first.pid)
    (consumer,) = compute_locked_usage(locks)["nvidia1"]
    assert (consumer.kind, consumer.pid) == ("lease", first.pid)
    first.kill()
    first.wait()
    assert find_live_leases(locks) == []
    assert name not in locks.list_names()


def test_a_file_stays_while_its_keeper_lives(locks, first):
    name, held = hold_container_lease(locks, LEASE, Holder.from_pid(first.pid))
    first.kill()
    first.wait()
    assert find_live_leases(locks) == []
    assert name in locks.list_names()
    release_locks(held)


def test_a_container_elsewhere_lives_as_long_as_its_keeper(locks):
    name, held = hold_container_lease(locks, LEASE, replace(Holder.from_pid(), boot="another"))
    os.utime(f"{locks.path}/{name}", (0, 0))
    assert len(find_live_leases(locks)) == 1
    release_locks(held)
    assert find_live_leases(locks) == []
    assert name not in locks.list_names()


def test_who_does_not_see_a_container_leaves_its_lease_to_others(locks, first, monkeypatch):
    """As a device plugin or DRA driver in a pod, which has the lock folder but not the processes."""
    holder = Holder.from_pid(first.pid)
    name, held = hold_container_lease(locks, LEASE, holder)
    release_locks(held)
    os.utime(f"{locks.path}/{name}", (0, 0))
    monkeypatch.setattr("imagematrix.images.local_store.holder._read_pid_namespace", lambda: "pid:[1]")
    assert find_live_leases(locks) == []
    monkeypatch.undo()
    assert [lease for lease, _ in find_live_leases(locks)] == [LEASE]


@pytest.mark.parametrize(
    "text", ["", "[", "{}", json.dumps({"gpus": {"keys": ["nvidia1"], "common": False}, "holder": "{}"})]
)
def test_damaged_files_are_removed(locks, text):
    locks.write("container-x", text)
    assert find_live_leases(locks) == []
    assert "container-x" not in locks.list_names()


@pytest.mark.parametrize(
    ("lease", "common", "excludes"),
    [
        (LEASE, False, True),
        (LEASE, True, True),
        (replace(LEASE, common=True), True, False),
        (replace(LEASE, common=True), False, True),
        (replace(LEASE, vram_mib=100), False, False),
        (replace(LEASE, keys=("nvidia10",)), False, False),
        (replace(LEASE, keys=("nvidia1-gi1-ci0",)), False, True),
    ],
)
def test_who_else_may_have_a_gpu(lease, common, excludes):
    assert lease.is_excluding(["nvidia1"], common=common) is excludes


def test_a_share_is_used_with_its_size(first):
    share = replace(LEASE, vram_mib=100, share="share-1")
    (consumer,) = compute_lease_usage([(share, Holder.from_pid(first.pid))])["nvidia1"]
    assert (consumer.vram_mib, consumer.owner_ids) == (100, frozenset({"share-1"}))
    assert share.is_held((), {"nvidia1": (consumer,)})
    assert not share.is_held((), {})
