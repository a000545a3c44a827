"""Launches in a mount namespace or a container of their own use the machine's locks, or are refused."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from imagematrix.errors import EngineError, ProbeError
from imagematrix.images.engine import endpoint, system
from imagematrix.launcher.gpu_claims import lock_folder as module
from imagematrix.launcher.gpu_claims.lock_folder import require_shared
from imagematrix.launcher.gpu_claims.locks import SHARED

CHECK = """
import sys
from imagematrix.launcher.gpu_claims.lock_folder import require_shared
from imagematrix.errors import ProbeError
try:
    require_shared(sys.argv[1])
except ProbeError as error:
    print(error)
"""


@pytest.fixture(autouse=True)
def _address(monkeypatch, tmp_path_factory):
    """An engine's socket, on which the process of the tests listens."""
    path = tmp_path_factory.mktemp("engine") / "sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    monkeypatch.delenv("IMAGEMATRIX_LOCKS", raising=False)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield


def test_the_machine_s_folder_is_accepted(tmp_path):
    require_shared(str(tmp_path))
    require_shared(f"{tmp_path}/later")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("mount", ["", "mount -t tmpfs none $0"])
def test_a_folder_of_a_mount_namespace_is_refused(tmp_path, mount):
    script = f'{mount or ":"} && exec "$@"'
    words = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        script,
        str(tmp_path),
        sys.executable,
        "-c",
        CHECK,
        str(tmp_path),
    ]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if "not permitted" in done.stderr:
        pytest.skip("this machine permits no mounts")
    assert done.stderr == ""
    assert ("the machine has another folder there" in done.stdout) == bool(mount)


@pytest.fixture
def proc(tmp_path):
    """A /proc whose processes hide their files; call it with the mounts that each process has."""

    def write(**tables):
        for pid, lines in tables.items():
            folder = tmp_path / "proc" / pid.strip("_")
            folder.mkdir(parents=True)
            (folder / "root").symlink_to("root")  # a loop: nothing can be looked up in it
            (folder / "mountinfo").write_text("".join(f"{line} - tmpfs none rw\n" for line in lines))
        return str(tmp_path / "proc")

    return write


@pytest.mark.parametrize(
    ("own", "others", "accepted"),
    [
        (["1 0 8:1 / /"], ["1 0 8:1 / /"], True),
        (["1 0 8:1 / /", "2 1 0:25 / /run"], ["1 0 8:1 / /", "2 1 0:25 / /run"], True),
        # A container with `-v /run/lock:/run/lock`.
        (["9 0 0:77 / /", "8 9 0:25 /lock /run/lock"], ["1 0 8:1 / /", "2 1 0:25 / /run"], True),
        (["9 0 0:77 / /"], ["1 0 8:1 / /", "2 1 0:25 / /run"], False),
        (["1 0 8:1 / /", "2 1 0:99 / /run"], ["1 0 8:1 / /", "2 1 0:25 / /run"], False),
        ([], ["1 0 8:1 / /"], True),  # unknown
        (["broken"], ["1 0 8:1 / /"], True),
    ],
)
def test_mounts_are_compared_where_files_of_others_are_hidden(proc, monkeypatch, own, others, accepted):
    monkeypatch.setattr(endpoint, "get_listener_pid", lambda _: 1)
    folder = proc(self=[f"{line} rw" for line in own], _1=[f"{line} rw" for line in others])
    with contextlib.nullcontext() if accepted else pytest.raises(ProbeError, match="another folder"):
        require_shared("/run/lock/imagematrix", folder)


def test_without_an_engine_the_first_process_has_to_see_the_folder(proc, monkeypatch):
    """There may be launches without a daemon, and an engine that this user may not ask."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    same = ["1 0 8:1 / / rw"]
    folder = proc(self=same, _1=same)
    require_shared("/run/lock/imagematrix", folder)
    Path(folder, "self", "mountinfo").write_text("9 0 0:77 / / rw\n")
    with pytest.raises(ProbeError, match="the machine has another folder there"):
        require_shared("/run/lock/imagematrix", folder)
    require_shared("/run/lock/imagematrix", folder, by_scheduler=True)


def test_it_is_enough_that_the_engine_sees_the_folder(proc, monkeypatch):
    """As on a machine that is a mount namespace itself, with an engine of its own."""
    inner = ["1 0 8:2 / / rw"]
    monkeypatch.setattr(endpoint, "get_listener_pid", lambda _: 40)
    require_shared("/run/lock/imagematrix", proc(self=inner, _1=["1 0 8:1 / / rw"], _40=inner))


@pytest.mark.parametrize(
    ("mounts", "named", "why"),
    [
        ([("bind", "/run/lock", "/run/lock")], False, None),
        ([("bind", SHARED, SHARED)], False, None),
        ([("bind", "/", "/"), ("tmpfs", "", "/run")], False, "this container has one of its own"),
        ([], False, "this container has one of its own"),
        ([("volume", "/var/lib/docker/volumes/x", "/run/lock")], True, "this container has one of its own"),
        ([("bind", "/srv/lock", "/run/lock")], False, "it is /srv/lock/imagematrix of the machine"),
        ([("bind", "/srv/lock", "/run/lock")], True, None),
        (None, False, "it is unknown which folder of the machine it is"),
        (None, True, None),
    ],
)
def test_a_container_has_to_mount_the_machine_s_folder(monkeypatch, mounts, named, why):
    monkeypatch.setattr(endpoint, "get_listener_pid", lambda _: 0)
    listed = mounts and [
        {"Type": kind, "Source": source, "Destination": target} for kind, source, target in mounts
    ]
    monkeypatch.setattr(system, "get_own_mounts", lambda: [] if mounts == [] else listed)
    if named:
        monkeypatch.setenv("IMAGEMATRIX_LOCKS", SHARED)
    if why is None:
        require_shared(SHARED)
        return
    with pytest.raises(ProbeError, match=f"launches: {why}$") as caught:
        require_shared(SHARED)
    assert "-v /run/lock:/run/lock" in caught.value.remedy


def test_an_engine_that_does_not_answer_is_reported_by_the_launch(monkeypatch):
    def fail():
        raise EngineError("no")

    monkeypatch.setattr(endpoint, "get_listener_pid", lambda _: 0)
    monkeypatch.setattr(system, "get_own_mounts", fail)
    require_shared(SHARED)
    assert module.INIT == 1
