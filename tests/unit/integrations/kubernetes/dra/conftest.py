"""A node whose claims and locks are in folders of their own, and sockets too."""

import tempfile
from pathlib import Path

import pytest
from claiming import Claims


@pytest.fixture(scope="session")
def claims():
    return Claims


@pytest.fixture(autouse=True)
def locks(tmp_path, monkeypatch):
    """The lock folder, instead of that of this machine."""
    folder = tmp_path / "locks"
    monkeypatch.setenv("IMAGEMATRIX_LOCKS", str(folder))
    return folder


@pytest.fixture
def cdi_root(tmp_path):
    return tmp_path / "run" / "cdi"


@pytest.fixture
def kubelet_root():
    """A folder with a short path: a socket's path has at most 107 bytes, and pytest's folders are long."""
    with tempfile.TemporaryDirectory(prefix="kubelet-") as path:
        yield Path(path)
