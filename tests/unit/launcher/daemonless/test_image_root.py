"""The root of a container, without the kernel's part: tests/engine has that."""

import errno
import os

import pytest

from imagematrix.errors import EngineError
from imagematrix.launcher.daemonless import image_root


def test_a_writable_image_has_its_changes_in_memory(kernel, stored, monkeypatch, tmp_path):
    made = kernel()
    (tmp_path / "files").mkdir()
    monkeypatch.setattr(image_root, "OWNER", os.geteuid())
    root = image_root.mount_image(stored(tmp_path / "files"), str(tmp_path), None, read_only=False)
    assert root == str(tmp_path / "root")
    kinds = [call[3] for call in made.calls]
    assert kinds == [b"tmpfs", b"overlay"]
    assert made.calls[-1][-1].endswith(b",userxattr")
    assert (tmp_path / "lower").readlink() == tmp_path / "files"


def test_a_read_only_image_is_used_as_it_is(kernel, stored, tmp_path):
    kernel()
    root = image_root.mount_image(stored(tmp_path), str(tmp_path), None, read_only=True)
    assert root == str(tmp_path)


@pytest.mark.parametrize("read_only", [True, False])
def test_a_layer_is_over_the_image(kernel, stored, monkeypatch, tmp_path, read_only):
    made = kernel()
    (tmp_path / "files").mkdir()
    monkeypatch.setattr(image_root, "OWNER", os.geteuid())
    image = stored(tmp_path / "files")
    root = image_root.mount_image(image, str(tmp_path), None, read_only=read_only, layer="/a,layer")
    assert root == str(tmp_path / "root")
    options = os.fsdecode(made.calls[-1][-1])
    assert options.startswith(f"lowerdir={tmp_path}/layer:{tmp_path}/lower,")
    assert ("upperdir" in options) is not read_only
    assert (tmp_path / "layer").readlink().name == "a,layer"


def test_a_folder_of_another_user_can_only_be_read(kernel, stored, monkeypatch, tmp_path):
    kernel()
    monkeypatch.setattr(image_root, "OWNER", 12345)
    with pytest.raises(EngineError, match="belongs to another user") as caught:
        image_root.mount_image(stored(tmp_path), str(tmp_path), None, read_only=False)
    assert "--read-only" in caught.value.remedy


def test_a_kernel_that_mounts_nothing_is_an_error(kernel, stored, tmp_path):
    kernel(errno.EINVAL)
    with pytest.raises(EngineError, match=r"cannot mount .*: Invalid argument"):
        image_root.mount_image(stored(tmp_path), str(tmp_path), None, read_only=False)
    with pytest.raises(EngineError, match="cannot mount an empty image"):
        image_root.mount_trial_root(str(tmp_path))


def test_a_squashfs_is_mounted_by_the_program(kernel, stored, programs, tmp_path, monkeypatch):
    calls = kernel().calls
    monkeypatch.setattr(image_root, "has_fuse", lambda: True)
    program = programs(squashfuse=f"echo $* > {tmp_path}/asked") / "squashfuse"
    root = image_root.mount_image(stored("/image", "squashfs"), str(tmp_path), str(program), read_only=True)
    assert root == str(tmp_path / "lower")
    assert (tmp_path / "asked").read_text() == f"/image {root}\n"
    # It serves the files as long as they are mounted elsewhere than where it runs.
    assert [call[0] for call in calls] == ["mount", "unshare", "setns", "umount2", "setns"]


@pytest.mark.parametrize(
    ("scripts", "works", "message"),
    [
        ({}, True, "squashfuse not found"),
        ({}, False, "/dev/fuse cannot be opened"),
        ({"squashfuse_ll": "exit 1"}, True, "squashfuse_ll cannot mount /image"),
    ],
)
def test_a_squashfs_that_cannot_be_mounted_is_an_error(
    kernel, stored, programs, tmp_path, monkeypatch, scripts, works, message
):
    kernel()
    monkeypatch.setattr(image_root, "has_fuse", lambda: works)
    folder = programs(**scripts)
    program = next((f"{folder}/{name}" for name in scripts), None)
    with pytest.raises(EngineError, match=message):
        image_root.mount_image(stored("/image", "squashfs"), str(tmp_path), program, read_only=True)


def test_whether_images_can_be_mounted_is_whether_the_device_can_be_opened(monkeypatch):
    for answer in (True, False):
        monkeypatch.setattr(os, "access", lambda *_, answer=answer: answer)
        assert image_root.has_fuse() is answer
