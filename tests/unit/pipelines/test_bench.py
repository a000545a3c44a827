"""The benchmark runs."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_benchmark_prints_rows():
    command = [sys.executable, str(ROOT / "ci/bench"), "--quick", "--rounds", "1", "--only", "start"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert "x pass" in done.stdout
    assert "FAILED" not in done.stdout, done.stdout
