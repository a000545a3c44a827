"""Our own code in one file: which modules it has, its bytes, and its start with compiled modules."""

import gc
import importlib
import io
import subprocess
import sys
import zipfile

import pytest

from imagematrix.common import zipapp_start, zipapp_writer

ROOT = "imagematrix.common.suggestions"


@pytest.fixture
def sources():
    return zipapp_writer.collect_sources([ROOT], ["imagematrix/hardware/vendors/cuda.json"])


@pytest.fixture(autouse=True)
def _unchanged(monkeypatch):
    """Undo what the start of a program changes in this process."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield
    gc.enable()


def test_it_has_what_the_roots_import_and_read(sources):
    assert sorted(sources) == [
        "imagematrix/__init__.py",
        "imagematrix/common/__init__.py",
        "imagematrix/common/interpreter.py",
        "imagematrix/common/suggestions.py",
        "imagematrix/errors.py",
        "imagematrix/hardware/vendors/cuda.json",
    ]
    assert "imagematrix/common/units.py" in zipapp_writer.collect_sources(
        ["imagematrix.integrations.swarm.resources"]
    )  # in a function
    # For type checkers only.
    assert "imagematrix/integrations/swarm/nodes.py" not in zipapp_writer.collect_sources(
        ["imagematrix.integrations.swarm.reservation"]
    )


def test_the_same_contents_give_the_same_bytes(sources):
    backwards = dict(reversed(sources.items()))
    assert zipapp_writer.write_archive(sources) == zipapp_writer.write_archive(backwards)


def test_the_archive_follows_its_head():
    raw = zipapp_writer.write_archive({"b": bytes(1000), "a": bytes(1000)}, b"#!/bin/sh\n", stored={"a"})
    assert raw.startswith(b"#!/bin/sh\n")
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        small, large = archive.getinfo("b"), archive.getinfo("a")
        assert (small.compress_size < 100, large.compress_size) == (True, 1000)
        assert archive.namelist() == ["a", "b"]


def test_python_runs_it(tmp_path):
    file = tmp_path / "program.pyz"
    contents = {
        "__main__.py": zipapp_writer.make_main("said"),
        "said.py": b"def main():\n    print('hello')\n",
    }
    file.write_bytes(zipapp_writer.write_archive(contents))
    done = subprocess.run([sys.executable, "-I", "-S", file], capture_output=True, text=True, check=True)
    assert done.stdout == "hello\n"


@pytest.mark.parametrize("compiled", [True, False])
def test_modules_are_imported_compiled_or_not(tmp_path, compiled):
    modules = {f"a{compiled}/__init__.py": b"", f"a{compiled}/b.py": b'"""Text."""\nWORD = 7\n'}
    contents = (
        {**modules, zipapp_writer.COMPILED: zipapp_writer.compile_modules(modules)} if compiled else modules
    )
    file = tmp_path / "program.pyz"
    file.write_bytes(zipapp_writer.write_archive(contents))
    zipapp_start.prepare(str(file))
    assert not gc.isenabled()
    imported = importlib.import_module(f"a{compiled}.b")
    assert imported.WORD == 7
    assert imported.__doc__ == (None if compiled else "Text.")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"a{compiled}.c")
