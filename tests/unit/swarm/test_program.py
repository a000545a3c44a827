"""The installed runtime, as the engine calls it: runc for all but a container that may be a task."""

import json
import subprocess
import sys
import zipfile

import pytest

from imagematrix.errors import ProbeError
from imagematrix.swarm.program import program
from imagematrix.swarm.runtime import Settings

SPEC = {"linux": {}, "process": {"env": ["DOCKER_RESOURCE_NVIDIA-GPU=GPU-a"]}}
CREATE = ("--log", "log.json", "create", "--bundle", "bundle", "c1")


@pytest.fixture(scope="module")
def built(tmp_path_factory, host):
    """The program for a node with a GPU that is no device here; its runc says how it was called."""
    runc = tmp_path_factory.mktemp("bin") / "runc"
    runc.write_text('#!/bin/sh\necho "runc $*"\nexit 7\n')
    runc.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{runc.parent}:/usr/bin:/bin")
        return program(Settings(data_root=".", address="unix:///nowhere.sock", host=host(24564)))


@pytest.fixture
def installed(built, tmp_path, monkeypatch):
    """The program in a folder with a bundle, which is the engine's data root too."""
    monkeypatch.setenv("IMAGEMATRIX_LOCKS", str(tmp_path / "locks"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/config.json").write_text(json.dumps(SPEC))
    path = tmp_path / "imagematrix-runtime"
    path.write_bytes(built)
    path.chmod(0o755)
    return path


def run(path, *words):
    done = subprocess.run([path, *words], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--version",),
        ("--root", "/a b", "state", "c1"),
        ("kill", "--all", "c1", "9"),
        ("create", "--bundle", "nowhere", "c1"),
        ("delete", "--force", "create"),
    ],
)
def test_it_is_runc(installed, words):
    assert run(installed, *words) == (7, f"runc {' '.join(words)}\n", "")


def test_a_container_without_the_variable_starts_no_python(installed, tmp_path):
    (tmp_path / "bundle/config.json").write_text('{"process": {"env": ["NVIDIA-GPU=GPU-a"]}}')
    text = installed.read_bytes().replace(b"python=", b"python=/nowhere #", 1)
    installed.write_bytes(text)
    assert run(installed, *CREATE)[1] == f"runc {' '.join(CREATE)}\n"


@pytest.mark.parametrize("words", [CREATE, ("-log=log.json", "create", "-b", "bundle", "c1")])
def test_a_strangers_container_stays_as_it_is(installed, record, tmp_path, words):
    record("DOCKER_RESOURCE_NVIDIA-GPU=GPU-a", managed=False)
    assert run(installed, *words) == (7, f"runc {' '.join(words)}\n", "")
    assert json.loads((tmp_path / "bundle/config.json").read_text()) == SPEC


def test_what_goes_wrong_is_in_the_log(installed, record, tmp_path):
    record("DOCKER_RESOURCE_NVIDIA-GPU=GPU-a")
    code, out, err = run(installed, *CREATE)
    assert (code, out) == (1, "")
    assert "cannot reach the Docker engine at unix:///nowhere.sock" in err
    assert json.loads((tmp_path / "log.json").read_text())["msg"] == err.rstrip()


@pytest.mark.parametrize("flag", ["--bundle=bundle", "-bundle=bundle"])
def test_a_python_that_is_gone(installed, tmp_path, flag):
    start = installed.read_bytes().index(b"python=")
    text = installed.read_bytes()
    end = text.index(b"\n", start)
    installed.write_bytes(text[:start] + b"python=/nowhere/python3" + text[end:])
    code, _, err = run(installed, "--log=log.json", "create", flag, "c1")
    assert code == 1
    assert err == "imagematrix: /nowhere/python3 not found, run imagematrix swarm node-config again\n"
    assert json.loads((tmp_path / "log.json").read_text()) == {"level": "error", "msg": err.rstrip()}


def test_the_archive_has_all_that_it_imports(installed):
    """In an interpreter without any other package, and with neither bytecode nor sources missing."""
    imports = "import imagematrix.swarm.runtime as r, imagematrix.node.nvml_query, pynvml; print(r.__file__)"
    words = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        f"import sys; sys.path.insert(0, {str(installed)!r}); {imports}",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == f"{installed}/imagematrix/swarm/runtime.pyc\n"
    with zipfile.ZipFile(installed) as archive:
        names = set(archive.namelist()) - {"settings.json"}
    sources = {name for name in names if name.endswith(".py")}
    assert names == sources | {f"{name}c" for name in sources}


def test_another_python_reads_the_sources(installed):
    text = installed.read_bytes()
    with zipfile.ZipFile(installed) as archive:
        magic = archive.read("imagematrix/__init__.pyc")[:4]
    installed.write_bytes(text.replace(magic, b"\0\0\r\n"))
    imports = "import imagematrix.errors as e; print(e.__file__)"
    words = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        f"import sys; sys.path.insert(0, {str(installed)!r}); {imports}",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == f"{installed}/imagematrix/errors.py\n"


def test_the_same_node_has_the_same_program(host):
    settings = Settings(data_root="/a", address="unix:///b", host=host(1))
    assert program(settings) == program(settings)


def test_a_node_without_runc(host, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProbeError, match=r"^runc not found on PATH"):
        program(Settings(data_root="/a", address="unix:///b", host=host(1)))
