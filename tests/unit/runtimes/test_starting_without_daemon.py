"""Namespaces, mounts and the start of a runtime, without the kernel's part: tests/engine has that."""

import contextlib
import ctypes
import errno
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from machines import wait_until

from imagematrix.errors import EngineError, UnknownImageError, UsageError
from imagematrix.image_store.folder import ImageStore, Lease, StoredImage
from imagematrix.record import replace
from imagematrix.runtimes import binds as runtime_binds
from imagematrix.runtimes import (
    bubblewrap,
    charliecloud,
    image_root,
    keeper,
    namespace,
    oci,
    program,
    session,
    start,
)
from imagematrix.runtimes.container import ContainerSpec
from imagematrix.runtimes.options import Bind
from imagematrix.site import RUNTIMES

DIGEST = f"sha256:{'1' * 64}"
BARE = ContainerSpec(
    name="n", args=("sh",), environment={"PATH": "/bin"}, folder="/", binds=(), devices=(), annotations={}
)


def stored(root, kind="folder"):
    """Return an image in a store with its files at `root`."""
    return StoredImage(
        digest=DIGEST,
        kind=kind,
        root=str(root),
        size=0,
        references=(),
        config={},
        image="t",
        version="v1",
        variant={},
        terms={},
    )


class Kernel:
    """unshare(2) and mount(2), which fail with `code` if that is set."""

    def __init__(self, code=0):
        self.code = code
        self.calls = []

    def __getattr__(self, name):
        def call(*words):
            self.calls.append((name, *words))
            return -1 if self.code else 0

        return call


@pytest.fixture
def kernel(monkeypatch):
    """Call it with an error number to get the Kernel of this test."""

    def made(code=0):
        found = Kernel(code)
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: found)
        monkeypatch.setattr(ctypes, "get_errno", lambda: code)
        return found

    return made


def test_the_caller_is_root_in_its_namespace(kernel, monkeypatch):
    written: dict[str, str] = {}
    monkeypatch.setattr(namespace, "_write", written.__setitem__)
    calls = kernel().calls
    namespace.enter()
    assert written == {
        "setgroups": "deny",
        "uid_map": f"0 {os.geteuid()} 1",
        "gid_map": f"0 {os.getegid()} 1",
    }
    assert [call[0] for call in calls] == ["unshare", "mount"]


@pytest.mark.parametrize(
    ("code", "settings", "remedy"),
    [
        (errno.EPERM, {"apparmor": "1"}, "apparmor_restrict_unprivileged_userns=0"),
        (errno.ENOSPC, {}, "user.max_user_namespaces"),
        (errno.EPERM, {"limit": "0"}, "user.max_user_namespaces"),
        (errno.EPERM, {"limit": "9"}, "unprivileged_userns_clone"),
        (errno.EPERM, {"apparmor": "?"}, "unprivileged_userns_clone"),
    ],
)
def test_a_refused_namespace_has_the_remedy(kernel, monkeypatch, tmp_path, code, settings, remedy):
    for name, constant in (("apparmor", "APPARMOR"), ("limit", "LIMIT")):
        path = tmp_path / name
        if name in settings:
            path.write_text(settings[name])
        monkeypatch.setattr(namespace, constant, str(path))
    kernel(code)
    with pytest.raises(EngineError, match="may not create a user namespace") as caught:
        namespace.enter()
    assert remedy in caught.value.remedy


def test_a_map_that_cannot_be_written_is_the_same_error(kernel, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    kernel()
    monkeypatch.setattr(namespace, "_write", refuse)
    with pytest.raises(EngineError, match="may not create a user namespace: Operation not permitted"):
        namespace.enter()


def test_what_is_mounted_read_only_is_so_with_all_in_it(kernel, tmp_path):
    made = kernel()
    file = tmp_path / "file"
    file.write_text("")
    for source, name in ((tmp_path, "folder"), (file, "copy")):
        at = namespace.bound(str(source), str(tmp_path / name))
        assert Path(at).is_dir() == source.is_dir()
    assert [call[0] for call in made.calls] == ["mount", "syscall"] * 2
    number, _, _, recursive, (attribute, *_), _ = made.calls[1][1:]
    assert (number, recursive, attribute) == (442, 0x8000, 1)
    failing = kernel(errno.ENOSYS)
    with pytest.raises(OSError, match="not implemented"):
        namespace.bound(str(file), str(tmp_path / "another"))
    assert failing.calls


def test_charliecloud_s_read_only_folders_are_mounted_before(kernel, tmp_path):
    kernel()
    binds = (
        Bind(source=str(tmp_path), target="/a"),
        Bind(source=str(tmp_path), target="/b", read_only=True),
        Bind(source="/etc/hosts", target="/etc/hosts", read_only=True),
    )
    found = runtime_binds.read_only(replace(BARE, binds=binds), str(tmp_path))
    assert [bind.source for bind in found.binds] == [str(tmp_path), f"{tmp_path}/1", "/etc/hosts"]


def test_containers_are_mounted_in_a_folder_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = Path(image_root.mount_point())
    assert path == tmp_path / "imagematrix" / "containers"
    assert path.stat().st_mode & 0o777 == 0o700
    assert image_root.mount_point() == str(path)
    path.rmdir()
    path.symlink_to(tmp_path)
    with pytest.raises(EngineError, match="belongs to another user"):
        image_root.mount_point()
    path.parent.joinpath("containers").unlink()
    path.parent.rmdir()
    path.parent.write_text("")
    with pytest.raises(EngineError, match="belongs to another user"):
        image_root.mount_point()


def test_a_writable_image_has_its_changes_in_memory(kernel, tmp_path):
    made = kernel()
    (tmp_path / "files").mkdir()
    os.chown(tmp_path / "files", image_root.OWNER, -1) if os.geteuid() == 0 else pytest.skip("needs root")
    root, held = image_root.mounted(stored(tmp_path / "files"), str(tmp_path), read_only=False)
    assert (root, held) == (str(tmp_path / "root"), None)
    kinds = [call[3] for call in made.calls]
    assert kinds == [b"tmpfs", b"overlay"]
    assert made.calls[-1][-1].endswith(b",userxattr")
    assert (tmp_path / "lower").readlink() == tmp_path / "files"


def test_a_read_only_image_is_used_as_it_is(kernel, tmp_path):
    kernel()
    root = image_root.mounted(stored(tmp_path), str(tmp_path), read_only=True)
    assert root == (str(tmp_path), None)


def test_a_folder_of_another_user_can_only_be_read(kernel, monkeypatch, tmp_path):
    kernel()
    monkeypatch.setattr(image_root, "OWNER", 12345)
    with pytest.raises(EngineError, match="belongs to another user") as caught:
        image_root.mounted(stored(tmp_path), str(tmp_path), read_only=False)
    assert "--read-only" in caught.value.remedy


def test_a_kernel_that_mounts_nothing_is_an_error(kernel, tmp_path):
    kernel(errno.EINVAL)
    with pytest.raises(EngineError, match=r"cannot mount .*: Invalid argument"):
        image_root.mounted(stored(tmp_path), str(tmp_path), read_only=False)
    with pytest.raises(EngineError, match="cannot mount an empty image"):
        image_root.prepare(str(tmp_path))


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Call it with the text of a script by its name, to have only these programs."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def write(**scripts):
        for name, text in scripts.items():
            path = folder / name.replace("_ll", "_ll")
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)
        return folder

    return write


def test_a_squashfs_is_mounted_by_the_first_program(kernel, programs, tmp_path, monkeypatch):
    kernel()
    monkeypatch.setattr(image_root, "fuse_works", lambda: True)
    programs(squashfuse=f"echo $* > {tmp_path}/asked")
    root, held = image_root.mounted(stored("/image", "squashfs"), str(tmp_path), read_only=True)
    os.close(held)
    assert root == str(tmp_path / "lower")
    assert (tmp_path / "asked").read_text() == f"-o timeout=1 /image {root}\n"


@pytest.mark.parametrize(
    ("scripts", "works", "message"),
    [
        ({}, True, "squashfuse not found"),
        ({}, False, "/dev/fuse cannot be opened"),
        ({"squashfuse_ll": "exit 1"}, True, "squashfuse_ll cannot mount /image"),
    ],
)
def test_a_squashfs_that_cannot_be_mounted_is_an_error(
    kernel, programs, tmp_path, monkeypatch, scripts, works, message
):
    kernel()
    monkeypatch.setattr(image_root, "fuse_works", lambda: works)
    programs(**scripts)
    with pytest.raises(EngineError, match=message):
        image_root.mounted(stored("/image", "squashfs"), str(tmp_path), read_only=True)


@pytest.mark.parametrize(
    ("installed", "hybrid", "found"),
    [
        (RUNTIMES, False, "runc"),
        (("crun", "bwrap"), False, "crun"),
        (("crun", "bwrap"), True, "bwrap"),
    ],
)
def test_the_first_runtime_that_works_is_taken(programs, monkeypatch, tmp_path, installed, hybrid, found):
    programs(**dict.fromkeys(installed, ""))
    monkeypatch.setattr(start, "HYBRID", str(tmp_path if hybrid else tmp_path / "none"))
    assert start.runtime_of("oci", None) == found
    assert start.runtime_of("oci", "crun") == "crun"


@pytest.mark.parametrize(
    ("installed", "found", "root"),
    [
        (("runc", "ch-run", "bwrap"), "bwrap", False),
        (("runc", "ch-run"), "ch-run", False),
        (("runc",), "runc", True),
    ],
)
def test_a_process_keeps_its_user_s_number_where_a_runtime_lets_it(programs, installed, found, root):
    programs(**dict.fromkeys(installed, ""))
    assert start.runtime_of("oci", None, of_user=True) == found
    assert start.runtime_of("oci", "runc", of_user=True) == "runc"
    assert start.runtime_of("oci", None) == "runc"
    assert start.as_root(found) is root


@pytest.mark.parametrize(
    ("engine", "wanted", "missing", "package"),
    [
        ("oci", None, "runc, crun, bwrap", "runc"),
        ("oci", "bwrap", "bwrap", "bubblewrap"),
        ("oci", "crun", "crun", "crun"),
        ("charliecloud", None, "ch-run", "charliecloud-runtime"),
    ],
)
def test_a_missing_runtime_has_a_remedy(programs, engine, wanted, missing, package):
    programs()
    with pytest.raises(EngineError, match=f"{missing} not found") as caught:
        start.runtime_of(engine, wanted)
    assert f"`apt install {package}`" in caught.value.remedy


class Store(ImageStore):
    """A store that has an image or not, and grants a lease on it."""

    def __init__(self, *, found=True):
        super().__init__("/store")
        self.found = found

    def lease(self, *_):
        return Lease(path=None)

    def find(self, _):
        return stored("/image") if self.found else None


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Call it with a container and a runtime to get the command that is executed, and its variables."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root/data").mkdir()
    called = []

    def execute(_, words, environment):
        called.append((words, dict(environment)))
        raise SystemExit

    monkeypatch.setattr(start, "mount_point", lambda: str(tmp_path))
    monkeypatch.setattr(namespace, "enter", lambda: None)
    monkeypatch.setattr(namespace, "folder", lambda at, name: f"{at}/{name}")
    monkeypatch.setattr(start, "mounted", lambda *_, **__: (str(tmp_path / "root"), None))
    monkeypatch.setattr(program, "require", lambda *_: None)
    monkeypatch.setattr(charliecloud, "own_devices", lambda paths, at: called.append((tuple(paths), at)))
    monkeypatch.setattr(start, "_arrange", called.append)
    monkeypatch.setattr(os, "execvpe", execute)

    def call(container, runtime, *leases):
        with pytest.raises(SystemExit):
            start.start(replace(container, interactive=True), stored("/image"), runtime, Store(), leases)
        return called

    return call


def test_an_oci_runtime_replaces_this_process_and_passes_the_leases_on(started, tmp_path):
    leases, (words, environment) = started(BARE, "runc", 5, 6)
    assert leases == (5, 6)
    assert words == oci.command("runc", str(tmp_path), "n", 2)
    assert environment.keys() == {"PATH"}
    assert (tmp_path / "config.json").exists()


def test_charliecloud_gets_a_dev_of_its_own_and_places_for_folders(started, tmp_path):
    (tmp_path / "file").write_text("")
    binds = (
        Bind(source=str(tmp_path), target="/new/folder"),
        Bind(source=str(tmp_path / "file"), target="/new/file"),
        Bind(source=str(tmp_path), target="/data"),
        Bind(source="/etc/hosts", target="/etc/hosts"),
    )
    container = replace(BARE, devices=("/dev/nvidia0",), binds=binds)
    devices, (words, environment) = started(container, "ch-run")
    assert devices == (("/dev/nvidia0",), f"{tmp_path}/dev")
    assert words[:2] == ["ch-run", "--write"]
    assert words.count("--bind") == 3
    assert environment["USER"]
    assert (tmp_path / "root/new/folder").is_dir()
    assert (tmp_path / "root/new/file").is_file()


def test_apptainer_gets_places_for_folders_and_no_variable_of_the_caller(started, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "isatty", lambda _: True)
    monkeypatch.setenv("APPTAINER_NV", "1")
    container = replace(
        BARE, terminal=True, binds=(Bind(source=str(tmp_path), target="/new/folder"),), folder="/work"
    )
    ((words, environment),) = started(container, "apptainer")
    assert words == start.command_of(container, "apptainer")
    assert environment.keys() == {"PATH", "APPTAINERENV_PATH"}
    assert (tmp_path / "root/new/folder").is_dir()
    assert (tmp_path / "root/work").is_dir()


@pytest.mark.usefixtures("started")
def test_without_a_terminal_signals_for_apptainer_pass_through_this_process(monkeypatch):
    asked = []
    monkeypatch.setattr(session, "run", lambda *words: asked.append(words) or 9)
    container = replace(BARE, interactive=True)
    assert start.start(container, stored("/image"), "apptainer", Store()) == 9
    assert asked[0][0][0] == "apptainer"


def test_bubblewrap_keeps_the_terminal(started, monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda _: True)
    ((words, environment),) = started(replace(BARE, terminal=True), "bwrap")
    assert words[0] == "bwrap"
    assert environment == {"PATH": "/bin"}


@pytest.mark.usefixtures("started")
def test_without_a_terminal_bubblewrap_s_exit_code_is_returned(monkeypatch):
    monkeypatch.setattr(bubblewrap, "run", lambda *_: 9)
    container = replace(BARE, interactive=True)
    assert start.start(container, stored("/image"), "bwrap", Store()) == 9


def test_a_read_only_image_needs_places_for_folders(started):
    there = Bind(source="/x", target="/data")
    network = Bind(source="/etc/hosts", target="/etc/hosts")
    container = replace(BARE, read_only=True, binds=(there, network))
    started(container, "runc")
    container = replace(container, interactive=True, binds=(Bind(source="/x", target="/none"),))
    with pytest.raises(UsageError, match="the image has no /none to mount a folder on"):
        start.start(container, stored("/image"), "runc", Store())


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("runtime", ["runc", "bwrap"])
def test_a_runtime_that_cannot_start_is_an_error(monkeypatch, runtime):
    def refuse(*_, **__):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(os, "execvpe", refuse)
    monkeypatch.setattr(bubblewrap, "run", refuse)
    with pytest.raises(EngineError, match=f"cannot start {runtime}: No such file"):
        start.start(replace(BARE, interactive=True), stored("/image"), runtime, Store())


def test_a_terminal_needs_one(monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda _: False)
    with pytest.raises(UsageError, match="--tty: the input is no terminal"):
        start.start(replace(BARE, terminal=True), stored("/image"), "runc", Store())


def test_an_image_that_was_removed_meanwhile_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(start, "mount_point", lambda: str(tmp_path))
    with pytest.raises(UnknownImageError, match="was removed from /store"):
        start.start(BARE, stored("/image"), "runc", Store(found=False))


def test_the_printed_commands_are_those_that_start(monkeypatch, tmp_path):
    monkeypatch.setattr(start, "mount_point", lambda: str(tmp_path))
    assert start.command_of(BARE, "runc")[:2] == ["runc", "--root"]
    assert start.command_of(BARE, "bwrap")[0] == "bwrap"
    assert start.command_of(BARE, "ch-run")[0] == "ch-run"


def test_leases_get_the_numbers_that_a_runtime_passes_on():
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return
    try:
        ends = [os.pipe()[1] for _ in range(3)]
        identities = [os.fstat(end).st_ino for end in ends]
        start._arrange(ends)
        assert [os.fstat(number).st_ino for number in (3, 4, 5)] == identities
        assert all(os.get_inheritable(number) for number in (3, 4, 5))
        os._exit(0)
    finally:
        os._exit(1)


def test_signals_reach_the_process_that_bubblewrap_tells_of(programs, tmp_path):
    folder = programs(
        bwrap=f"""\
fd=$2
exec {sys.executable} -c '
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
os.write('$fd', b"{{\\"child-pid\\": %d}}" % os.getpid())
os.close('$fd')
open("{tmp_path}/ready", "w").close()
time.sleep(60)
'
"""
    )
    child = os.fork()
    if child == 0:
        try:
            os._exit(bubblewrap.run([f"{folder}/bwrap"], {"PATH": "/bin:/usr/bin"}))
        finally:
            os._exit(99)
    while not (tmp_path / "ready").exists():
        time.sleep(0.02)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


def test_a_bubblewrap_that_tells_nothing_still_has_an_exit_code(programs):
    folder = programs(bwrap="exit 4")
    assert bubblewrap.run([f"{folder}/bwrap"], {}) == 4
    programs(bwrap="kill -KILL $$")
    assert bubblewrap.run([f"{folder}/bwrap"], {}) == 137


def test_a_lease_is_kept_until_the_process_ends(tmp_path, monkeypatch):
    path = tmp_path / "lease"
    path.write_text("")
    os.utime(path, (0, 0))
    monkeypatch.setattr(keeper, "RENEW_S", 0.05)
    child = os.fork()
    if child == 0:
        keeper.keep(Lease(path=str(path)))
        time.sleep(60)
    deadline = time.monotonic() + 30
    while path.stat().st_mtime == 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_lease_ends_though_the_end_is_told_many_times(tmp_path):
    """The kernel tells it for each thread of the process."""
    for number in range(20):
        path = tmp_path / f"lease{number}"
        path.write_text("")
        child = os.fork()
        if child == 0:
            keeper.keep(Lease(path=str(path)))
            time.sleep(60)
        children = Path(f"/proc/{child}/task/{child}/children")
        wait_until(children.read_text, "the keeper", 30)
        (kept,) = children.read_text().split()
        for _ in range(3000):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(kept), signal.SIGTERM)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        wait_until(lambda path=path: not path.exists(), "no lease", 30)
