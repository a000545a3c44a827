"""Starts without a daemon, in a container that is watched: what ends it, and what is read of it then."""

import errno
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

from imagematrix.images.catalog.warm_up import WarmUp
from imagematrix.images.warm.tools import ROOT
from imagematrix.launcher.daemonless.image_root import UPPER
from imagematrix.launcher.warm_up import daemonless_warm_up
from imagematrix.launcher.warm_up.compilers import ImagePrograms
from imagematrix.launcher.warm_up.daemonless_warm_up import DaemonlessWarmUp
from imagematrix.launcher.warm_up.program_run import StartWay
from imagematrix.launcher.warm_up.warm_up_session import ProofImage

IMAGE = ProofImage(name="proof", programs=ImagePrograms(compilers=("/usr/bin/as",), packages={}), states={})


class Watched:
    """A container that began `seconds` ago, with its `files`; unless it `ends`, it has to be ended."""

    def __init__(self, files=None, seconds=0.0, *, ends=True):
        self.files = files
        self.started = time.monotonic() - seconds
        self.has_ended = ends
        self.looks = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read_output(self, _):
        self.looks += 1
        if self.looks > 1000:
            pytest.fail("nothing ends it")
        return b"" if self.has_ended else b"x"

    def end(self):
        self.has_ended = True

    def wait_for_end(self):
        assert self.has_ended
        return 0


@pytest.fixture
def start(monkeypatch):
    """Call it with the container that a warm-up starts, and its max_size, to get the warm-up."""

    def call(watched, max_size=100):
        monkeypatch.setattr(DaemonlessWarmUp, "_open_container", lambda *_: watched)
        unused: Any = None
        started: Any = SimpleNamespace(warm_up=WarmUp(command=("train",), max_size=max_size))
        return DaemonlessWarmUp(unused, unused, started)

    return call


def test_a_test_call_that_does_not_end_is_ended(start, monkeypatch):
    monkeypatch.setattr(daemonless_warm_up, "TEST_CALL_S", 0.0)
    watched = Watched(ends=False)
    assert not start(watched).can_see_compilers(IMAGE, StartWay(image="proof"))
    assert watched.has_ended


def test_of_a_program_that_wrote_too_much_the_seconds_are_told_and_nothing_is_read(start, tmp_path):
    folder = tmp_path / UPPER / ROOT.lstrip("/") / "numba"
    folder.mkdir(parents=True)
    (folder / "f").write_bytes(bytes(101))
    files = os.open(tmp_path, os.O_RDONLY)
    try:
        container: Any = SimpleNamespace(layer=None, environment={"A": "1"})
        warm_up = start(Watched(files, seconds=1000.0))
        run = warm_up._run_container(container, None, None, lambda _: None, tmp_path / "caches.tar")
    finally:
        os.close(files)
    assert run.why == "its caches have more than 100 bytes, its max_size"
    assert run.seconds >= 1000.0
    assert (run.has_states, run.states) == (False, {})
    assert not (tmp_path / "caches.tar").exists()


def test_a_program_that_takes_a_mode_away_while_it_is_looked_at_is_looked_at_again(
    start, tmp_path, monkeypatch
):
    (tmp_path / UPPER).mkdir()
    looks: list[int] = []

    def measure(upper):
        looks.append(upper)
        if len(looks) < 3:
            raise PermissionError(errno.EACCES, "Permission denied", ".")
        return 101

    monkeypatch.setattr(daemonless_warm_up, "measure_caches", measure)
    monkeypatch.setattr(daemonless_warm_up, "LOOK_S", 0.0)
    monkeypatch.setattr(daemonless_warm_up, "LOOKS", 0)
    files = os.open(tmp_path, os.O_RDONLY)
    try:
        container: Any = SimpleNamespace(layer=None, environment={})
        run = start(Watched(files, ends=False))._run_container(container, None, None, lambda _: None, None)
    finally:
        os.close(files)
    assert run.why == "its caches have more than 100 bytes, its max_size"
    assert len(looks) == 4, "the third look ends it, and the last one is after its end"
