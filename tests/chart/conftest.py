"""Helm, as `make test-chart` builds it, and the chart."""

import subprocess
from pathlib import Path

import pytest
from charting import CHART

ROOT = Path(__file__).parents[2]
RELEASES = ("helm3", "helm4")


@pytest.fixture(scope="session", params=RELEASES)
def helm(request, tmp_path_factory):
    """Return a function that runs a release of Helm, without a cluster."""
    program = ROOT / ".cache/modules" / request.param / "helm"
    home = tmp_path_factory.mktemp(request.param)
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin", "KUBECONFIG": "/nowhere"}

    def run(*words, check=True):
        command = [program, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0 or not check, done.stderr
        return done

    assert f"v{request.param[-1]}." in run("version").stdout
    return run


@pytest.fixture(scope="session")
def chart():
    """Return the folder of the chart."""
    return CHART
