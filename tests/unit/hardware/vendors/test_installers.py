"""What installers of Python packages call a CUDA release."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from imagematrix.hardware.vendors.installers import TORCH_BACKENDS, get_torch_backend


@pytest.mark.parametrize(
    ("cuda", "backend"),
    [
        (None, "cpu"),
        ("11.8", "cu118"),
        ("12.6", "cu126"),
        ("12.7", "cu126"),  # uv has no index for it
        ("12.8", "cu128"),
        ("13.1", "cu130"),
        ("13.9", "cu132"),
        ("12.10", "cu129"),
        ("14.0", None),
        ("7.5", None),
    ],
)
def test_the_newest_index_that_is_not_newer(cuda, backend):
    assert get_torch_backend(cuda) == backend


def test_uv_has_an_index_for_each():
    uv = shutil.which("uv", path=Path(sys.executable).parent)
    refused = subprocess.run(
        [uv, "pip", "install", "--torch-backend", "none", "x"], check=False, capture_output=True, text=True
    )
    known = set(re.findall(r"\bcu\d+\b", refused.stderr))
    assert {*TORCH_BACKENDS.values()} <= known
