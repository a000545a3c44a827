"""Locks shared by all users of a node: the kernel releases them, and no user can break them."""

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ordinary_user import AS_USER

from imagematrix.errors import GpusBusyError, ProbeError
from imagematrix.launcher.gpu_claims import locks as module
from imagematrix.launcher.gpu_claims.locks import Locks, inherit_locks, locate_locks, release_locks

HOLD = """
import sys, time
from imagematrix.launcher.gpu_claims.locks import Locks
with Locks(sys.argv[1]) as locks:
    held = locks.take(*sys.argv[2:])
    print("held", flush=True)
    time.sleep(60)
"""
EXEC = """
import os, sys
from imagematrix.launcher.gpu_claims.locks import Locks, inherit_locks
inherit_locks(Locks(sys.argv[1]).take("nvidia0"))
print("held", flush=True)
os.execvp("sleep", ["sleep", "60"])
"""


@pytest.fixture
def start(start_python):
    """Starts a Python program, waits until it reports that it holds its locks, and returns the process."""

    def run(program, *words):
        process = start_python(program, *words)
        assert process.stdout.readline() == "held\n"
        return process

    return run


def test_a_lock_has_one_holder(locks):
    held = locks.take("nvidia0")
    assert locks.take("nvidia0") is None
    assert locks.take("nvidia1", "nvidia0") is None
    assert locks.find_holders() == {"nvidia0": os.getpid()}  # the partial result is released
    release_locks(held)
    assert locks.find_holders() == {}
    again = locks.take("nvidia0", "nvidia1")
    assert set(locks.find_holders()) == {"nvidia0", "nvidia1"}
    release_locks(again)


def test_a_name_is_created_once_with_its_lock_held(locks, folder):
    held = locks.hold("share-1", "4096 nvidia0")
    assert locks.read_held_text("share-1") == "4096 nvidia0"
    assert locks.take("share-1") is None
    with pytest.raises(ProbeError, match="share-1"):
        locks.hold("share-1", "1 nvidia0")
    locks.create("share-1")
    release_locks(held)
    assert locks.read_held_text("share-1") is None
    assert Path(folder, "share-1").read_text() == "4096 nvidia0"
    assert locks.list_names() == ["share-1"]


def test_a_killed_process_leaves_no_lock(locks, folder, start):
    process = start(HOLD, folder, "nvidia0")
    assert locks.find_holders() == {"nvidia0": process.pid}
    assert locks.take("nvidia0") is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    release_locks(locks.take("nvidia0"))


def test_a_lock_survives_exec(locks, folder, start):
    process = start(EXEC, folder)
    while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
        time.sleep(0.01)
    assert locks.take("nvidia0") is None
    assert locks.find_holders() == {"nvidia0": process.pid}
    process.send_signal(signal.SIGKILL)
    process.wait()
    release_locks(locks.take("nvidia0"))


def test_children_inherit_only_on_request(locks):
    held = locks.take("nvidia0")
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        release_locks(held)
        release_locks(locks.take("nvidia0"))
        held = locks.take("nvidia0")
        inherit_locks(held)
        with subprocess.Popen(["sleep", "60"], close_fds=False) as heir:
            release_locks(held)
            assert locks.take("nvidia0") is None
            heir.kill()
        child.kill()
    release_locks(locks.take("nvidia0"))


def test_all_users_may_lock_and_only_owners_remove(locks, folder):
    old = os.umask(0o077)
    try:
        release_locks(locks.take("nvidia0"))
        with Locks(f"{folder}/other"):
            pass
    finally:
        os.umask(old)
    assert stat.S_IMODE(Path(folder).stat().st_mode) == 0o1777
    assert stat.S_IMODE(Path(folder, "other").stat().st_mode) == 0o1777
    assert stat.S_IMODE(Path(folder, "nvidia0").stat().st_mode) == 0o444
    assert sorted(path.name for path in Path(folder).iterdir()) == ["nvidia0", "other"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")
def test_a_lock_of_root_holds_for_another_user(locks, monkeypatch, folder):
    held = locks.take("nvidia0")
    monkeypatch.chdir(folder)  # the parent folders are private to their owner
    os.seteuid(65534)
    try:
        with Locks(".") as theirs:
            assert theirs.take("nvidia0") is None
            second = theirs.take("nvidia1")
            theirs.remove("nvidia0")
    finally:
        os.seteuid(0)
    assert locks.list_names() == ["nvidia0", "nvidia1"]
    assert locks.take("nvidia1") is None
    release_locks([*held, *second])


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_opened_as_locks(locks, folder, tmp_path, kind):
    path = Path(folder, "nvidia0")
    target = tmp_path / "target"
    if kind == "link":
        path.symlink_to(target)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(ProbeError, match="nvidia0") as caught:
        locks.take("nvidia0")
    assert "remove" in caught.value.remedy
    assert not target.exists()
    with pytest.raises(ProbeError, match="nvidia0"):
        locks.take("nvidia1", "nvidia0")
    assert locks.find_holders() == {}


@pytest.fixture
def mounted(tmp_path):
    """Call it with options of tmpfs to get a folder in one, with a grant and the lock of the turn."""
    folder = tmp_path / "tmpfs"
    folder.mkdir()

    def mount(options):
        words = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=1777", "tmpfs", folder]
        if subprocess.run(words, check=False, capture_output=True).returncode:
            pytest.skip("this machine permits no mounts")
        with Locks(str(folder)) as locks:
            locks.write("grant-1", "{}")
            locks.create("turn")
        subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)
        return str(folder)

    yield mount
    subprocess.run(["umount", folder], check=False, capture_output=True)


def test_a_link_or_a_file_instead_of_the_folder_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").touch()
    for name in ("link", "file", "nowhere/deep"):
        with pytest.raises(ProbeError, match="cannot use the GPU locks") as caught:
            Locks(str(tmp_path / name))
        assert "mkdir -m 1777" in caught.value.remedy
        assert "remove" not in caught.value.remedy


@pytest.mark.parametrize(
    ("options", "remedy"), [("ro", "remount it read-write"), ("nr_inodes=3", "free space there, or inodes")]
)
def test_the_remedy_for_a_folder_without_room_keeps_what_is_in_it(mounted, options, remedy):
    """It has the GPUs that running tasks hold."""
    with Locks(mounted(options)) as locks:
        for action in (locks.require_writable, lambda: locks.hold("wait-1", "1"), lambda: locks.take("new")):
            with pytest.raises(ProbeError, match="cannot use the GPU locks") as caught:
                action()
            assert remedy in caught.value.remedy
            assert not {"remove", "rm", "mv"}.intersection(caught.value.remedy.split())
        assert locks.list_names() == ["grant-1", "turn"]
        with locks.hold_mutex(0.0):
            pass


def test_a_world_writable_folder_without_the_sticky_bit_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ProbeError, match="any user can remove the locks of others") as caught:
        Locks(str(tmp_path))
    assert caught.value.remedy == f"chmod 1777 {tmp_path}"


def test_the_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("IMAGEMATRIX_LOCKS", raising=False)
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", f"{tmp_path}/run")
    monkeypatch.setattr(module, "SHARED", f"{tmp_path}/imagematrix")
    assert locate_locks() == f"{tmp_path}/imagematrix"
    monkeypatch.setattr(module, "SHARED", "/nowhere/imagematrix")  # cannot be created
    assert locate_locks() == f"{tmp_path}/run/imagematrix"
    monkeypatch.setattr(os, "geteuid", lambda: (tmp_path / "run").stat().st_uid + 1)  # after `su`
    assert locate_locks() == "/nowhere/imagematrix"
    monkeypatch.setenv("IMAGEMATRIX_LOCKS", "/mine")
    assert locate_locks() == "/mine"


def test_a_turn_has_one_holder_and_is_released(locks, folder, start, monkeypatch):
    with locks.hold_mutex():
        assert locks.take("turn") is None
    process = start(HOLD, folder, "turn")
    monkeypatch.setattr(module, "MUTEX_S", 0.1)
    with (
        pytest.raises(GpusBusyError, match=rf"GPUs for 0\.1 seconds: process python.* \(pid {process.pid}, "),
        locks.hold_mutex(),
    ):
        pass


def test_a_turn_takes_no_longer_than_the_launch_would_wait(locks, folder, start):
    process = start(HOLD, folder, "turn")
    begin = time.monotonic()
    with (
        pytest.raises(GpusBusyError, match=rf"for 0\.05 seconds: process python.* \(pid {process.pid}, "),
        locks.hold_mutex(0.05),
    ):
        pass
    assert time.monotonic() - begin < module.MUTEX_S / 2
    process.kill()
    process.wait()
    with locks.hold_mutex(0.0):
        pass


def test_a_folder_for_a_group(tmp_path):
    old = os.umask(0)
    try:
        with Locks(f"{tmp_path}/locks", os.getgid()) as locks:
            release_locks(locks.take("nvidia0"))
    finally:
        os.umask(old)
    status = Path(tmp_path, "locks").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o3770, os.getgid())


def test_a_folder_that_is_there_keeps_its_mode(monkeypatch, tmp_path):
    """Users who start containers without a daemon write there too, whatever group has the engine's socket."""
    monkeypatch.setattr(module, "SHARED", f"{tmp_path}/locks")
    with Locks(f"{tmp_path}/locks"):
        assert stat.S_IMODE(Path(tmp_path, "locks").stat().st_mode) == 0o1777
    with Locks(f"{tmp_path}/locks", os.getgid()):
        assert stat.S_IMODE(Path(tmp_path, "locks").stat().st_mode) == 0o1777
    other = tmp_path / "other"
    other.mkdir(mode=0o755)
    with Locks(str(other), os.getgid()):
        assert stat.S_IMODE(other.stat().st_mode) == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")
def test_the_remedy_opens_a_folder_for_users_of_all_engines(tmp_path):
    path = tmp_path / "locks"
    path.mkdir(mode=0o700)
    for above in (tmp_path, *(parent for parent in tmp_path.parents if "pytest" in parent.name)):
        above.chmod(0o755)
    code = (
        "import sys; from imagematrix.launcher.gpu_claims.locks import Locks; Locks(sys.argv[1]).take('turn')"
    )
    command = [*AS_USER, sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert "Permission denied" in done.stderr
    remedy = f"as root, run `chown root:root {path}` and `chmod 1777 {path}`: users of all engines"
    with Locks(str(path)) as locks, pytest.raises(ProbeError) as caught, locks._convert_errors("turn"):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    assert caught.value.remedy.startswith(remedy)
    subprocess.run(["sh", "-c", f"chown root:root {path} && chmod 1777 {path}"], check=True)
    subprocess.run(command, check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner")
@pytest.mark.parametrize(("user", "name"), [(65534, "nobody"), (54321, "54321")])
def test_a_folder_owned_by_a_user_outside_the_group_is_refused(tmp_path, user, name):
    (tmp_path / "locks").mkdir(mode=0o1777)
    os.chown(tmp_path / "locks", user, -1)
    with pytest.raises(ProbeError, match=f"is owned by user {name}, who may not start containers") as caught:
        Locks(f"{tmp_path}/locks", 0)
    assert caught.value.remedy == (
        f"as root, run `chown root:root {tmp_path}/locks` and `chmod 1777 {tmp_path}/locks`"
    )
    with Locks(f"{tmp_path}/locks"):
        pass  # without such a group, all users may start containers


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")
def test_users_outside_the_group_cannot_hold_locks(tmp_path):
    tmp_path.chmod(0o755)
    for above in tmp_path.parents:
        if "pytest" in above.name:
            above.chmod(0o755)
    path = f"{tmp_path}/locks"
    with Locks(path, 0) as locks:
        release_locks(locks.take("turn"))
        code = f"open({path!r} + '/turn')"
        done = subprocess.run(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3", "-c", code],
            check=False,
            capture_output=True,
            text=True,
        )
    assert "PermissionError" in done.stderr


def test_a_user_outside_the_group_leaves_no_folder_that_others_cannot_use(monkeypatch, tmp_path):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(
        ProbeError, match="belong to the group that may start containers, and this user is not"
    ):
        Locks(f"{tmp_path}/locks", 0)
    assert not (tmp_path / "locks").exists()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_folder_that_another_user_is_just_creating_is_waited_for(folder, monkeypatch):
    opened, refusals = os.open, iter([True, True])

    def refuse(path, *words, **named):
        if path == folder and next(refusals, False):
            raise PermissionError(13, "Permission denied")
        return opened(path, *words, **named)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(module, "SETTLE_S", 60)
    with Locks(folder):
        assert next(refusals, None) is None
    refusals = iter(lambda: True, None)
    monkeypatch.setattr(module, "SETTLE_S", 0.05)
    with pytest.raises(ProbeError, match="Permission denied"):
        Locks(folder)


def test_the_age_of_a_lock_file(locks, folder):
    release_locks(locks.hold("share-1", ""))
    assert locks.measure_age("share-1") < 60
    for when in (0, time.time() + 10_000):
        os.utime(f"{folder}/share-1", (when, when))
        assert locks.measure_age("share-1") > 1000
    assert locks.measure_age("share-2") == float("inf")


def test_without_proc_locks_no_holder_is_known(locks, monkeypatch):
    held = locks.take("nvidia0")
    monkeypatch.setattr(module, "read_proc_lines", lambda _: [])  # there is no such file
    assert locks.find_holders() == {}
    release_locks(held)


def test_many_quick_turns_do_not_time_out(locks, monkeypatch):
    monkeypatch.setattr(module, "MUTEX_S", 0.05)
    holders = iter([{"turn": 1}, {"turn": 2}, {"turn": 2}, {"turn": 3}])
    monkeypatch.setattr(locks, "find_holders", lambda: next(holders))
    held = locks.take("turn")
    waiting = threading.Timer(0.08, release_locks, [held])
    waiting.start()
    with locks.hold_mutex():
        assert locks.take("turn") is None
    waiting.join()
