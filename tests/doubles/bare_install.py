"""An installation without extras, on the path of this process and of those that it starts."""

import sys
import sysconfig
from importlib.metadata import distribution
from pathlib import Path

import pytest

from imagematrix.common.extras import list_extras


@pytest.fixture
def bare_install(monkeypatch, tmp_path):
    """Replace the folder of installed packages by one that lacks what extras bring."""
    installed = Path(sysconfig.get_path("purelib"))
    brought = {name for names in list_extras(distribution("imagematrix")).values() for name in names}
    lacking = {file.parts[0] for name in brought for file in distribution(name).files or ()}
    bare = tmp_path / "site-packages"
    bare.mkdir()
    for path in installed.iterdir():
        if path.name not in lacking:
            (bare / path.name).symlink_to(path)
    monkeypatch.setattr(sys, "path", [str(bare) if entry == str(installed) else entry for entry in sys.path])
    return bare
