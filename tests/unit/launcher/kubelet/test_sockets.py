"""The root directory of a node's kubelet, from the kernel's table of sockets."""

import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from imagematrix.launcher.kubelet import sockets

LINE = "0000000000000000: 00000002 00000000 00010000 0001 01 31337 {}\n"


@pytest.fixture
def table(tmp_path):
    """Return a function that writes a table with these paths, and returns its path."""

    def write(*paths):
        text = "Num       RefCount Protocol Flags    Type St Inode Path\n"
        (tmp_path / "unix").write_text(text + "".join(LINE.format(path) for path in paths))
        return str(tmp_path / "unix")

    return write


@pytest.fixture
def root(tmp_path):
    """A kubelet's root directory."""
    for name in ("pods", "pod-resources"):
        (tmp_path / "data/kubelet" / name).mkdir(parents=True)
    for folder in (tmp_path / "data").glob("**/"):
        folder.chmod(0o755)  # whatever the umask
    return tmp_path / "data/kubelet"


def test_the_kernel_shows_the_folder_in_which_a_kubelet_listens():
    with tempfile.TemporaryDirectory(prefix="imx") as folder, socket.socket(socket.AF_UNIX) as listener:
        resources = Path(folder, "pod-resources")
        resources.mkdir()
        listener.bind(str(resources / "123"))
        listener.listen()
        (resources / "123").rename(resources / "kubelet.sock")  # as kubelet does
        assert folder in sockets._list_listening_roots(sockets.TABLE)
        assert sockets.find_root_dir() != folder  # it has no pods


def test_the_root_directory_is_where_a_kubelet_listens(table, root):
    others = ("", "@/dbus", "relative", "/run/docker.sock", f"{root}/plugins/kubelet.sock", "/x\0y")
    assert sockets.find_root_dir(table(*others, f"{root}/pod-resources/123")) == str(root)
    assert sockets.locate_pods_socket(str(root)) == f"{root}/pod-resources/kubelet.sock"


def test_without_a_kubelet_it_is_the_default(table, tmp_path):
    assert sockets.find_root_dir(table("/run/docker.sock")) == "/var/lib/kubelet"
    assert sockets.find_root_dir(str(tmp_path / "none")) == "/var/lib/kubelet"


def test_folders_that_are_not_a_kubelet_s_do_not_count(table, root):
    listed = table(f"{root}/pod-resources/123")
    (root / "pods").rmdir()
    assert sockets.find_root_dir(listed) == sockets.ROOT_DIR
    (root / "pod-resources").rmdir()
    assert sockets.find_root_dir(listed) == sockets.ROOT_DIR


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make another user's folder")
@pytest.mark.parametrize("name", ["..", ".", "pods", "pod-resources"])
def test_what_another_user_can_change_does_not_count(table, root, name):
    listed = table(f"{root}/pod-resources/123")
    os.chown(root / name, 12345, 12345)
    assert sockets.find_root_dir(listed) == sockets.ROOT_DIR


@pytest.mark.parametrize("name", ["..", "pods", "pod-resources"])
def test_what_all_users_can_change_does_not_count_without_the_sticky_bit(table, root, name):
    listed = table(f"{root}/pod-resources/123")
    (root / name).chmod(0o777)
    assert sockets.find_root_dir(listed) == sockets.ROOT_DIR
    (root / name).chmod(0o1777)
    assert sockets.find_root_dir(listed) == str(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder to a group")
def test_folders_of_a_group_count_if_it_is_root_s(table, root):
    listed = table(f"{root}/pod-resources/123")
    root.parent.chmod(0o775)
    for group, found in ((0, str(root)), (12345, sockets.ROOT_DIR)):
        os.chown(root.parent, 0, group)
        assert sockets.find_root_dir(listed) == found


def test_a_link_counts_if_what_it_leads_to_does(table, root, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(root.parent)
    listed = table(f"{link}/kubelet/pod-resources/123")
    assert sockets.find_root_dir(listed) == f"{link}/kubelet"
    root.parent.chmod(0o777)
    assert sockets.find_root_dir(listed) == sockets.ROOT_DIR
    link.unlink()
    link.symlink_to(link)
    assert sockets.find_root_dir(listed) == sockets.ROOT_DIR


def test_the_usual_folder_comes_first(table, root, monkeypatch):
    monkeypatch.setattr(sockets, "ROOT_DIR", str(root))
    other = root.parent / "another"
    root.rename(other)
    listed = table(f"{other}/pod-resources/1", f"{root}/pod-resources/2")
    assert sockets.find_root_dir(listed) == str(other)
    shutil.copytree(other, root)
    assert sockets.find_root_dir(listed) == str(root)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_folder_counts_if_this_user_may_not_enter_it_but_not_a_mount_that_refuses_root(
    table, root, monkeypatch, is_closed
):
    listed = table(f"{root}/pod-resources/123")
    look = os.lstat

    def refuse(path):
        if path.startswith(f"{root}/"):
            raise PermissionError
        return look(path)

    monkeypatch.setattr(os, "lstat", refuse)
    monkeypatch.setattr(os, "access", lambda *_: not is_closed)
    assert sockets.find_root_dir(listed) == (str(root) if is_closed else sockets.ROOT_DIR)
