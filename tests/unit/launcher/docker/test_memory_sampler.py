"""The peak GPU memory of a container, from NVML's readings of processes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from imagematrix.launcher.docker import memory_sampler
from imagematrix.launcher.docker.memory_sampler import MemorySampler, format_summary

OURS, OTHERS = "a" * 64, "b" * 64


@pytest.fixture
def looks(monkeypatch):
    """Returns the peaks of samples; processes 1 and 2 are in the measured container, 3 is in another."""
    monkeypatch.setattr(
        memory_sampler, "find_container_ids", {1: {OURS}, 2: {OURS}, 3: {OTHERS}, 4: set()}.__getitem__
    )

    def look(*lines):
        result = MemorySampler(lambda: OURS)
        for line in lines:
            result._record_sample(line if isinstance(line, bytes) else json.dumps(line).encode(), OURS)
        return result.peaks

    return look


@pytest.mark.parametrize(
    ("lines", "peaks"),
    [
        ([[[0, [[1, 100], [2, 50]]]], [[0, [[1, 120]]]]], {0: 150}),
        ([[[0, [[1, 1]]], [3, [[2, 7]]]], [[0, [[1, 5]]], [3, [[2, 2]]]]], {0: 5, 3: 7}),
        ([[[0, [[3, 100], [4, 100], [1, 10]]]]], {0: 10}),
        ([[[0, [[1, None]]]], [[0, []]], b"[[0, [[1, 1", b""], {}),
    ],
    ids=["simultaneous memory", "each GPU", "other containers do not count", "missing readings"],
)
def test_the_peak_of_memory(looks, lines, peaks):
    assert looks(*lines) == peaks


def test_the_summary_suggests_a_share(make):
    gpus = (make.gpu(0), make.gpu(1))
    assert format_summary({3: 100, 4: 250, 9: 900}, gpus) == (
        "peak GPU memory, sampled every 0.2 s: 100 MiB on GPU 0 (NVIDIA A100), "
        "250 MiB on GPU 1 (NVIDIA A100); "
        "pass --vram 250Mi or more"
    )
    assert (
        format_summary({}, gpus)
        == "peak GPU memory unknown: NVML did not report the processes of the container"
    )


def test_it_samples_until_stopped(configure_nvml, monkeypatch):
    configure_nvml(gpus="minor=3,procs=open")
    monkeypatch.setattr(memory_sampler, "find_container_ids", lambda _: {OURS})
    samples = []
    looking = MemorySampler(lambda: samples.append(1) or OURS)
    looking.start()
    deadline = time.monotonic() + 120
    while len(samples) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    pid = looking._sampler.pid
    assert Path(f"/proc/{pid}").exists()
    looking.stop()
    assert looking._sampler.wait(20) == -9
    assert len(samples) >= 2
    MemorySampler(lambda: None).stop()  # it never started


def test_without_a_sampler_there_is_no_peak(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    looking = MemorySampler(lambda: OURS)
    looking.start()
    looking.stop()
    assert looking.peaks == {}
