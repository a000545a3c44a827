"""Sampling the GPU memory of processes."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pytest

from imagematrix.hardware.host import nvml_memory

GPUS = "minor=3,procs=17:-1:-1/18:-1:-1;minor=4,procs=-1;minor=5,handle=15;minor=6,query=3;minor=7"


class Reader(io.StringIO):
    """Reads a number of lines and closes."""

    def __init__(self, lines):
        super().__init__()
        self._left = lines

    def flush(self):
        self._left -= 1
        if self._left < 0:
            raise BrokenPipeError


@pytest.fixture(autouse=True)
def _gpus(configure_nvml):
    configure_nvml(gpus=GPUS)


def test_gpus_with_errors_are_left_out(pynvml):
    pynvml.nvmlInit()
    assert nvml_memory.read_sample(pynvml) == [[3, [[17, 0], [18, 0]]], [7, []]]


def test_it_samples_until_the_reader_closes(pynvml, monkeypatch):
    monkeypatch.setattr(nvml_memory, "EVERY_S", 0.001)
    monkeypatch.setattr(sys, "stdout", reader := Reader(3))
    nvml_memory.main()
    assert [json.loads(line) for line in reader.getvalue().splitlines()] == [
        nvml_memory.read_sample(pynvml)
    ] * 4


def test_unreported_memory():
    class Process:
        pid, usedGpuMemory = 5, None  # noqa: N815 - NVML's name

    nvml = SimpleNamespace(
        NVMLError=OSError,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeRunningProcesses=lambda _: [Process],
        nvmlDeviceGetMinorNumber=lambda _: 3,
    )
    assert nvml_memory.read_sample(nvml) == [[3, [[5, None]]]]
