"""The most memory that a container had on its GPUs, from what NVML says of processes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from imagematrix.launcher import measure
from imagematrix.launcher.measure import Measure, told

OURS, OTHERS = "a" * 64, "b" * 64


@pytest.fixture
def looks(monkeypatch):
    """Returns the peaks after looks at GPUs; of the processes 1 and 2 are in our container, 3 in another."""
    monkeypatch.setattr(measure, "container_ids", {1: {OURS}, 2: {OURS}, 3: {OTHERS}, 4: set()}.__getitem__)

    def look(*lines):
        found = Measure(lambda: OURS)
        for line in lines:
            found._take(line if isinstance(line, bytes) else json.dumps(line).encode(), OURS)
        return found.peaks

    return look


def test_the_most_at_one_time_counts(looks):
    assert looks([[0, [[1, 100], [2, 50]]]], [[0, [[1, 120]]]]) == {0: 150}


def test_each_gpu_has_its_own_peak(looks):
    assert looks([[0, [[1, 1]]], [3, [[2, 7]]]], [[0, [[1, 5]]], [3, [[2, 2]]]]) == {0: 5, 3: 7}


def test_processes_of_others_do_not_count(looks):
    assert looks([[0, [[3, 100], [4, 100], [1, 10]]]]) == {0: 10}


def test_what_nvml_does_not_tell_is_no_peak(looks):
    assert looks([[0, [[1, None]]]], [[0, []]], b"[[0, [[1, 1", b"") == {}


def test_the_peaks_are_told_with_what_to_ask_for(make):
    gpus = (make.gpu(0), make.gpu(1))
    assert told({3: 100, 4: 250, 9: 900}, gpus) == (
        "peak GPU memory, seen every 0.2 s: 100 MiB on GPU 0 (NVIDIA A100), 250 MiB on GPU 1 (NVIDIA A100); "
        "ask for --vram 250Mi or more"
    )
    assert told({}, gpus) == "the GPU memory of the run is not known: NVML told nothing of its processes"


def test_it_looks_until_it_is_stopped(play, monkeypatch):
    play(gpus="minor=3,procs=open")
    monkeypatch.setattr(measure, "container_ids", lambda _: {OURS})
    asked = []
    looking = Measure(lambda: asked.append(1) or OURS)
    looking.start()
    deadline = time.monotonic() + 20
    while len(asked) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    pid = looking._looking.pid
    assert Path(f"/proc/{pid}").exists()
    looking.stop()
    assert looking._looking.wait(20) == -9
    assert len(asked) >= 2
    Measure(lambda: None).stop()  # which never began


def test_where_it_cannot_look_there_is_no_peak(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    looking = Measure(lambda: OURS)
    looking.start()
    looking.stop()
    assert looking.peaks == {}
