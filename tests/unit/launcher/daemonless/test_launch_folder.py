"""The folder of a launch: new, locked, and removed when the launch has ended or was killed."""

import os
import stat
from pathlib import Path

import pytest

from imagematrix.errors import EngineError
from imagematrix.launcher.daemonless import launch_folder as module
from imagematrix.launcher.daemonless.launch_folder import find_containers_folder, make_launch_folder


@pytest.fixture(autouse=True)
def containers(monkeypatch, tmp_path):
    """The folder of launches, in a folder of the test."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "imagematrix" / "containers"


def test_containers_are_mounted_in_a_folder_of_the_user(containers):
    assert find_containers_folder() == str(containers)
    assert stat.S_IMODE(containers.stat().st_mode) == 0o700
    assert find_containers_folder() == str(containers)


def test_a_name_that_is_taken_is_left_alone(containers, tmp_path):
    containers.parent.mkdir(mode=0o700)
    containers.symlink_to(tmp_path)
    assert find_containers_folder() == f"{containers}.1"
    containers.unlink()
    (containers.parent / "containers.1").rmdir()
    containers.parent.rmdir()
    containers.parent.write_text("")
    assert find_containers_folder() == f"{tmp_path}/imagematrix.1/containers"
    assert containers.parent.is_file()


@pytest.mark.parametrize("value", [None, "", "relative", "/nowhere/at/all", "another user's"])
def test_without_a_folder_of_the_session_it_is_in_tmp(monkeypatch, value):
    if value == "another user's":  # of the user before, after `su`
        true = os.stat
        other = os.stat_result((0o40700, 0, 0, 2, os.geteuid() + 1, 0, 0, 0, 0, 0))
        monkeypatch.setattr(os, "stat", lambda path, **how: other if path == "/run/7" else true(path, **how))
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/7")
        monkeypatch.setattr(os, "access", lambda *_: True)
    elif value is None:
        monkeypatch.delenv("XDG_RUNTIME_DIR")
    else:
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    asked = []
    monkeypatch.setattr(
        module, "make_user_folder", lambda parent, name: asked.append((parent, name)) or "/own"
    )
    assert find_containers_folder() == "/own"
    assert asked == [("/tmp", f"imagematrix-{os.geteuid()}"), ("/own", "containers")]


def test_no_place_for_a_folder_is_an_error(monkeypatch, tmp_path):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module, "make_user_folder", refuse)
    with pytest.raises(EngineError, match=f"{tmp_path}: Permission denied") as caught:
        find_containers_folder()
    assert "XDG_RUNTIME_DIR" in caught.value.remedy


def test_a_folder_lasts_as_long_as_its_launch(containers):
    with make_launch_folder() as name:
        path = Path(name)
        assert path.parent == containers
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "files").mkdir()
        (path / "environment").write_text("A=b")
        (path / "link").symlink_to("/proc")
        with make_launch_folder() as another:
            assert {name, another} == {str(one) for one in containers.iterdir()}
        assert (path / "environment").exists()
    assert not list(containers.iterdir())


def test_a_folder_of_a_launch_that_was_killed_is_removed(containers):
    find_containers_folder()
    for name in ("launch-killed/files", "other", ".launch-new"):
        (containers / name).mkdir(parents=True)
    (containers / "launch-killed/environment").touch()
    (containers / "launch-file").touch()
    (containers / "launch-link").symlink_to("other")
    with make_launch_folder() as path:
        found = {one.name for one in containers.iterdir()}
    assert found == {Path(path).name, "other", ".launch-new", "launch-file", "launch-link"}


def test_a_folder_with_more_than_a_launch_makes_is_left(containers):
    with make_launch_folder() as path:
        Path(path, "files/more").mkdir(parents=True)
    assert [str(one) for one in containers.iterdir()] == [path]


def test_a_full_disk_is_an_error(monkeypatch):
    parent = find_containers_folder()

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(EngineError, match=f"{parent}: No space left"), make_launch_folder():
        pass
