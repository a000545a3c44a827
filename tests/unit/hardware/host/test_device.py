"""Access to a device, checked without opening it."""

import errno
import os
import stat

import pytest

from imagematrix.hardware.host import device
from imagematrix.hardware.host.tree import Tree

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
NOBODY = 65534
refusal = Tree("/").get_refusal


def test_an_accessible_device_is_not_opened(monkeypatch):
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("it was opened"))
    assert refusal("/dev/null") == 0


def test_a_mode_that_denies_access(tmp_path, monkeypatch):
    os.mknod(tmp_path / "node", stat.S_IFCHR | 0o640, os.makedev(1, 3))
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # the folders above are for their owner only
    os.seteuid(NOBODY)
    try:
        assert refusal("node") == errno.EACCES
    finally:
        os.seteuid(0)
    assert refusal("node") == 0


def test_a_major_number_without_a_driver(tmp_path, monkeypatch):
    os.mknod(tmp_path / "node", stat.S_IFCHR | 0o666, os.makedev(511, 0))
    assert refusal(str(tmp_path / "node")) == errno.ENXIO
    os.mknod(tmp_path / "block", stat.S_IFCHR | 0o666, os.makedev(259, 0))  # only block devices have it
    assert refusal(str(tmp_path / "block")) == errno.ENXIO
    monkeypatch.setattr(device, "DRIVERS", str(tmp_path / "none"))
    assert refusal(str(tmp_path / "node")) == 0


def test_a_missing_node(tmp_path):
    assert refusal(str(tmp_path / "node")) == errno.ENOENT


def test_access_granted_meanwhile(monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    assert refusal("/dev/null") == 0


def test_only_a_cgroup_withholds_gpus(tmp_path, monkeypatch):
    assert not device.is_withheld(str(tmp_path))  # there are none
    os.mknod(tmp_path / "nvidia0", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert not device.is_withheld(".")
    os.seteuid(NOBODY)
    try:
        assert not device.is_withheld(".")  # the engine may open what a mode denies
    finally:
        os.seteuid(0)
    errors = {"./nvidia0": errno.EPERM, "./nvidia1": errno.EACCES}
    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    monkeypatch.setattr(os, "open", lambda path, _: _refuse(errors[path]))
    assert device.is_withheld(".")
    os.mknod(tmp_path / "nvidia1", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    assert not device.is_withheld(".")


def _refuse(number):
    raise OSError(number, os.strerror(number))
