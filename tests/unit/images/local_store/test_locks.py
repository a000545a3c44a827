"""Locks that processes of several machines share: one holds it, and a dead one holds nothing."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.common.record import replace
from imagematrix.images.local_store import holder, locks
from imagematrix.images.local_store.holder import Holder
from imagematrix.images.local_store.locks import hold_lock, remove_dead_files

HOLD = """
import sys, time
from pathlib import Path
from imagematrix.images.local_store.locks import hold_lock
with hold_lock(Path(sys.argv[1])) as held:
    print(held, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def lock(tmp_path):
    return tmp_path / "lock"


@pytest.fixture
def hold(lock):
    """Call it to hold the lock in another process, which is returned."""
    started = []

    def call():
        process = subprocess.Popen([sys.executable, "-c", HOLD, lock], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"True\n"
        return process

    yield call
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def elsewhere(lock, *, quiet_s):
    """Make a lock of a process of another machine that was last seen `quiet_s` ago."""
    other = replace(Holder.from_pid(), boot="another", host="node7")
    lock.write_bytes(other.to_bytes())
    seen = time.time() - quiet_s
    os.utime(lock, (seen, seen))


def test_a_lock_is_held_and_then_free(lock):
    with hold_lock(lock) as held, hold_lock(lock, wait=False) as again:
        assert (held, again) == (True, False)
        assert lock.exists()
    assert [*lock.parent.iterdir()] == []


def test_a_lock_is_free_after_an_error(lock):
    with pytest.raises(KeyboardInterrupt), hold_lock(lock):
        raise KeyboardInterrupt
    assert [*lock.parent.iterdir()] == []


def test_whoever_waits_is_told_for_whom_once(lock, hold):
    process = hold()
    told: list[Holder] = []
    with hold_lock(lock, told.append, lambda: len(told) > 0 and time.sleep(0.1) is None) as held:
        assert not held
    assert [(one.pid, str(one)) for one in told] == [
        (process.pid, f"process {process.pid} on {os.uname().nodename}")
    ]


def test_whoever_waits_long_is_told_again(lock, hold, monkeypatch):
    monkeypatch.setattr(locks, "TOLD_S", 0.05)
    hold()
    told: list[Holder] = []
    with hold_lock(lock, told.append, lambda: len(told) > 2) as held:
        assert not held
    assert len(told) == 3


def test_what_the_last_holder_did_before_it_let_go_is_not_missed(lock):
    """It ends between the question and the next attempt to get the lock."""
    answers = iter([False, True])
    with hold_lock(lock, until=lambda: next(answers)) as held:
        assert not held
    assert not lock.exists()


def test_a_killed_process_holds_nothing(lock, hold):
    process = hold()
    with hold_lock(lock, wait=False) as held:
        assert not held
    process.send_signal(signal.SIGKILL)
    process.wait()
    told: list[Holder] = []
    with hold_lock(lock, told.append) as held:
        assert (held, told) == (True, [])
    remove_dead_files(lock.parent)
    assert [*lock.parent.iterdir()] == []


def test_a_pid_that_another_process_has_now_holds_nothing(lock):
    lock.write_bytes(replace(Holder.from_pid(), started="1").to_bytes())
    with hold_lock(lock, wait=False) as held:
        assert held


@pytest.mark.parametrize(
    ("quiet_s", "free"), [(0, False), (holder.DEAD_S - 20, False), (holder.DEAD_S + 20, True)]
)
def test_a_process_of_another_machine_holds_it_while_it_gives_signs_of_life(lock, quiet_s, free):
    elsewhere(lock, quiet_s=quiet_s)
    with hold_lock(lock, wait=False) as held:
        assert held == free


def test_a_holder_gives_signs_of_life(lock, monkeypatch):
    monkeypatch.setattr(locks, "BEAT_S", 0.01)
    with hold_lock(lock):
        os.utime(lock, (0, 0))
        deadline = time.monotonic() + 20
        while not lock.stat().st_mtime and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lock.stat().st_mtime


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"host": 1}', b"\xff", b"[" * 9000, b'{"a":1,"a":2}']
)
def test_a_damaged_lock_is_broken_when_nobody_has_touched_it_for_long(lock, content):
    lock.write_bytes(content)
    with hold_lock(lock, wait=False) as held:
        assert not held
    os.utime(lock, (0, 0))
    with hold_lock(lock, wait=False) as held:
        assert held


@given(st.binary(max_size=200))
def test_any_content_of_a_lock_is_read(content):
    descriptor = os.memfd_create("lock")
    try:
        os.write(descriptor, content)
        assert holder.read_holder(descriptor) is None or content
    finally:
        os.close(descriptor)


def test_the_lock_on_breaking_a_lock_may_be_of_a_dead_process_too(lock):
    dead = replace(Holder.from_pid(), started="1")
    breaker = replace(dead, token="0123")  # noqa: S106 - no password
    lock.write_bytes(dead.to_bytes())
    lock.with_name(f"lock.{dead.token}").write_bytes(breaker.to_bytes())
    with hold_lock(lock) as held:
        assert held
    assert [*lock.parent.iterdir()] == []


def test_a_lock_that_another_process_breaks_just_now_is_waited_for(lock):
    dead = replace(Holder.from_pid(), started="1")
    lock.write_bytes(dead.to_bytes())
    right = lock.with_name(f"lock.{dead.token}")
    right.write_bytes(Holder.from_pid().to_bytes())
    asked = []

    def until():
        asked.append(lock.exists())
        if len(asked) == 3:  # the other process has done it
            lock.unlink()
            right.unlink()
        return False

    with hold_lock(lock, until=until) as held:
        assert held
    assert asked[:3] == [True, True, True]


def test_what_a_process_left_that_was_killed_while_it_broke_a_lock_is_swept(lock):
    dead = replace(Holder.from_pid(), started="1")
    left, kept = lock.with_name("lock.0123"), lock.with_name("lock.4567")
    left.write_bytes(dead.to_bytes())
    kept.write_bytes(Holder.from_pid().to_bytes())
    remove_dead_files(lock.parent)
    assert [*lock.parent.iterdir()] == [kept]


def test_the_successor_of_a_dead_holder_keeps_its_lock(lock):
    """Whoever comes late with the right to break the lock of a dead process finds another's there."""
    dead = replace(Holder.from_pid(), started="1")
    with hold_lock(lock), locks._make_own_file(lock.parent) as mine:
        locks._break_lock(lock, dead, mine)
        assert lock.exists()
    assert [*lock.parent.iterdir()] == []


def test_files_of_living_processes_are_not_swept(lock, hold):
    process = hold()
    before = sorted(lock.parent.iterdir())
    remove_dead_files(lock.parent)
    assert sorted(lock.parent.iterdir()) == before
    assert len(before) == 2
    process.kill()
    process.wait()
    remove_dead_files(lock.parent)
    assert [*lock.parent.iterdir()] == [lock]


CROWD = """
import os, sys, time
from pathlib import Path
from imagematrix.images.local_store.locks import hold_lock
lock, log = Path(sys.argv[1]), Path(sys.argv[2])
children = []
for number in range(40):
    child = os.fork()
    if not child:
        with hold_lock(lock):
            with log.open("a") as file:
                file.write(f"{number} in\\n")
            time.sleep(0.001)
            if number % 4 == 0:
                os.kill(os.getpid(), 9)
            with log.open("a") as file:
                file.write(f"{number} out\\n")
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
"""


def test_many_processes_of_which_some_are_killed_hold_it_one_after_the_other(lock, tmp_path):
    log = tmp_path / "log"
    subprocess.run([sys.executable, "-c", CROWD, lock, log], check=True, timeout=300)
    lines = [line.split() for line in log.read_text().splitlines()]
    inside = None
    for number, what in lines:
        if what == "in":
            assert inside is None or int(inside) % 4 == 0  # which was killed
            inside = number
        else:
            assert inside == number
            inside = None
    assert sorted(int(number) for number, what in lines if what == "in") == [*range(40)]


@pytest.mark.parametrize(("stale", "gone"), [(1, False), (1, True), (locks.TRIES, False)])
def test_a_lock_that_is_removed_while_it_is_read_is_none(lock, monkeypatch, stale, gone):
    elsewhere(lock, quiet_s=0)
    mine = lock.with_name("mine")
    mine.write_text("")
    tries = []
    read = holder.read_holder

    def reading(descriptor):
        tries.append(descriptor)
        if len(tries) > stale:
            return read(descriptor)
        if gone:
            lock.unlink()
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(holder, "read_holder", reading)
    if stale == locks.TRIES:
        with pytest.raises(OSError, match="Stale"):
            locks._find_holder(lock, mine)
    else:
        found = locks._find_holder(lock, mine)
        assert found is None if gone else found[0].host == "node7"
