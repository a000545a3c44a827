import os
import socket

import pytest

from imagematrix.errors import ProbeError
from imagematrix.hardware.host.tree import Tree

ROOT = os.geteuid() == 0


def test_reads_below_the_root(captured):
    tree = Tree(str(captured({"proc/cpuinfo": "flags\n"})))
    assert tree.read_text("/proc/cpuinfo") == "flags\n"
    assert tree.list_names("/proc") == ["cpuinfo"]
    assert tree.has_folder("/proc")
    assert not tree.live
    assert tree.warnings == []


def test_missing_files_cause_no_warning(captured):
    tree = Tree(str(captured({"proc/cpuinfo": ""})))
    assert tree.read_text("/proc/driver/nvidia/version") is None
    assert tree.read_text("/proc/cpuinfo/below/a/file") is None
    assert tree.list_names("/dev") == []
    assert tree.read_link("/sys/driver") is None
    assert not tree.has_folder("/proc/cpuinfo")
    assert not tree.has_node("/dev/nvidia0")
    assert tree.warnings == []


def test_the_running_host():
    tree = Tree("//")
    assert tree.live
    assert tree.read_text("/proc/self/status").startswith("Name:")
    assert tree.has_node("/dev/null")
    assert not tree.has_node("/proc/self/status")  # a plain file is no device here


@pytest.mark.parametrize("root", ["/nowhere/at/all", "a\0b", "", "/proc/self/status"])
def test_no_such_root(root, tmp_path, monkeypatch):
    if not root:
        (tmp_path / "loop").symlink_to("loop")
        monkeypatch.chdir(tmp_path)
        root = "loop"
    with pytest.raises(ProbeError, match="not a folder") as caught:
        Tree(root)
    assert caught.value.remedy


def test_size_is_bounded(captured):
    tree = Tree(str(captured({"big": "x" * 200_000, "fits": "y" * 2048})))
    assert tree.read_text("/big", limit=100_000) == "x" * 100_000
    assert tree.read_text("/fits", limit=2048) == "y" * 2048
    assert tree.warnings == ["/big is larger than 97 KiB; the rest was ignored"]


def test_binary_junk_is_replaced(captured):
    tree = Tree(str(captured({"junk": b"\xff\xfeflags\x00: a\x80"})))
    assert tree.read_text("/junk") == "\ufffd\ufffdflags\0: a\ufffd"


def test_pipes_sockets_and_folders_are_not_opened(captured):
    root = captured({"folder/file": ""})
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        cwd = os.open(root, os.O_RDONLY)
        server.bind(f"/proc/self/fd/{cwd}/socket")
        os.close(cwd)
    tree = Tree(str(root))
    for name in ("pipe", "socket", "folder"):
        assert tree.read_text(f"/{name}") is None
        assert tree.warnings.pop() == f"could not read /{name}: not a regular file"


def test_loops_and_links_out_of_the_tree(captured, tmp_path):
    (tmp_path / "outside").write_text("another host's")
    root = captured({"proc/version": "x", "proc/inside": "y"})
    (root / "loop").symlink_to("loop")
    (root / "out").symlink_to(tmp_path / "outside")
    (root / "up").symlink_to("../outside")
    (root / "in").symlink_to("proc/inside")
    tree = Tree(str(root))
    assert tree.read_text("/in") == "y"
    assert tree.read_text("/loop") is None
    assert tree.read_text("/out") is None
    assert tree.read_text("/up") is None
    assert tree.list_names("/loop") == []
    assert not tree.has_node("/out")
    assert "symbolic links" in tree.warnings[0]
    captured({"outside": "the tree's own", str(tmp_path / "outside")[1:]: "the tree's own"})
    assert tree.read_text("/out") == tree.read_text("/up") == "the tree's own"


def test_link_names(captured):
    root = captured({"sys/bus/pci/drivers/nouveau/x": "", "sys/device/vendor": ""})
    (root / "sys/device/driver").symlink_to("../bus/pci/drivers/nouveau")
    tree = Tree(str(root))
    assert tree.read_link("/sys/device/driver") == "nouveau"
    assert tree.read_link("/sys/device/vendor") is None
    (root / "sys/device/odd").symlink_to("../\udcff")
    assert tree.read_link("/sys/device/odd") == "\ufffd"


@pytest.mark.skipif(ROOT, reason="root reads everything")
def test_unreadable_as_a_user(captured):
    root = captured({"secret": "x", "folder/x": ""})
    (root / "secret").chmod(0)
    (root / "folder").chmod(0)
    tree = Tree(str(root))
    assert tree.read_text("/secret") is None
    assert tree.list_names("/folder") == []
    (root / "folder").chmod(0o700)
    assert tree.warnings == [
        "could not read /secret: Permission denied",
        "could not read /folder: Permission denied",
    ]


def test_unreadable(captured, monkeypatch):
    root = captured({"secret": "x"})

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    tree = Tree(str(root))
    assert tree.read_text("/secret") is None
    assert tree.warnings == ["could not read /secret: Permission denied"]


def test_no_device_of_a_captured_tree_is_refused_nor_one_that_fails_otherwise(tmp_path, monkeypatch):
    assert Tree(str(tmp_path)).get_refusal("/none") == 0
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(OSError("of no number")))
    assert Tree("/").get_refusal("/dev/null") == 0
