"""The namespace of a launch, without the kernel's part: tests/engine has that."""

import errno
import os
from pathlib import Path

import pytest

from imagematrix.errors import EngineError
from imagematrix.launcher.daemonless import namespace


def test_the_caller_is_root_in_its_namespace(kernel, monkeypatch):
    written: dict[str, str] = {}
    monkeypatch.setattr(namespace, "_write_own", written.__setitem__)
    calls = kernel().calls
    namespace.enter_namespaces()
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
        namespace.enter_namespaces()
    assert remedy in caught.value.remedy


def test_a_map_that_cannot_be_written_is_the_same_error(kernel, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    kernel()
    monkeypatch.setattr(namespace, "_write_own", refuse)
    with pytest.raises(EngineError, match="may not create a user namespace: Operation not permitted"):
        namespace.enter_namespaces()


def test_what_is_mounted_read_only_is_so_with_all_in_it(kernel, tmp_path):
    made = kernel()
    file = tmp_path / "file"
    file.write_text("")
    for source, name in ((tmp_path, "folder"), (file, "copy")):
        at = namespace.bind_read_only(str(source), str(tmp_path / name))
        assert Path(at).is_dir() == source.is_dir()
    assert [call[0] for call in made.calls] == ["mount", "syscall"] * 2
    number, _, _, recursive, (attribute, *_), _ = made.calls[1][1:]
    assert (number, recursive, attribute) == (442, 0x8000, 1)
    failing = kernel(errno.ENOSYS)
    with pytest.raises(OSError, match="not implemented"):
        namespace.bind_read_only(str(file), str(tmp_path / "another"))
    assert failing.calls


def test_a_mount_is_left_for_another_namespace(kernel):
    made = kernel()
    before = namespace.leave_mounts()
    with namespace.enter_mount_namespace(before):
        namespace.unmount("/a")
    assert [call[0] for call in made.calls] == ["unshare", "setns", "umount2", "setns"]
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(before)
    kernel(errno.EPERM)
    with pytest.raises(PermissionError):
        namespace.leave_mounts()
    another = os.open("/", os.O_RDONLY)
    with pytest.raises(PermissionError), namespace.enter_mount_namespace(another):
        pass


def test_a_folder_has_files_in_memory(kernel, tmp_path):
    made = kernel()
    assert namespace.make_memory_folder(str(tmp_path), "new") == f"{tmp_path}/new"
    assert made.calls[0][1:4] == (b"tmpfs", os.fsencode(f"{tmp_path}/new"), b"tmpfs")


def test_maps_are_written_to_the_files_of_this_process(monkeypatch, tmp_path):
    opened = []
    true = os.open

    def record(path, _):
        opened.append(path)
        return true(tmp_path / "map", os.O_WRONLY | os.O_CREAT)

    monkeypatch.setattr(os, "open", record)
    namespace._write_own("uid_map", "0 1 1")
    assert opened == ["/proc/self/uid_map"]
    assert (tmp_path / "map").read_text() == "0 1 1"


@pytest.mark.parametrize("has_network", [True, False])
def test_what_leaves_the_node_has_a_name_and_memory_of_its_own(kernel, monkeypatch, has_network):
    names: list[str] = []
    asked: list[int] = []
    monkeypatch.setattr("socket.sethostname", names.append)
    monkeypatch.setattr("fcntl.ioctl", lambda _, number, __: asked.append(number))
    calls = kernel().calls
    namespace.leave_node(has_network=has_network)
    flags = namespace.CLONE_NEWUTS | (0 if has_network else namespace.CLONE_NEWNET)
    assert calls[0] == ("unshare", flags)
    assert calls[1][:4] == ("mount", b"shm", b"/dev/shm", b"tmpfs")
    assert [len(name) for name in names] == [12]
    assert asked == ([] if has_network else [namespace.SET_FLAGS])
