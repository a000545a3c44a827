"""Without an NVIDIA GPU these tests are skipped, and say so."""

from pathlib import Path

import pytest

WITHOUT = "this machine has no NVIDIA GPU: no /proc/driver/nvidia/version"


@pytest.fixture(autouse=True)
def _gpu():
    if not Path("/proc/driver/nvidia/version").exists():
        pytest.skip(WITHOUT)
