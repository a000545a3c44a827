"""The installed runtime, called as by the engine: it is runc, except for containers that may be tasks."""

import json
import subprocess
import sys

import pytest

from imagematrix.common import programs, zipapp_writer
from imagematrix.errors import ProbeError
from imagematrix.integrations.swarm.program import ROOTS, get_installed_locks, make_program
from imagematrix.integrations.swarm.runtime import RuntimeSettings
from imagematrix.launcher.gpu_claims.locks import SHARED

SPEC = {"linux": {}, "process": {"env": ["DOCKER_RESOURCE_NVIDIA-GPU=GPU-a"]}}
CREATE = ("--log", "log.json", "create", "--bundle", "bundle", "c1")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A PATH with a runc that prints its arguments."""
    runc = tmp_path_factory.mktemp("bin") / "runc"
    runc.write_text('#!/bin/sh\necho "runc $*"\nexit 7\n')
    runc.chmod(0o755)
    return f"{runc.parent}:/usr/bin:/bin"


@pytest.fixture(scope="module")
def built(path, host, tmp_path_factory):
    """The program for a node with a GPU that this machine lacks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "_get_path", lambda: path)
        return make_program(
            RuntimeSettings(
                data_root=".",
                address="unix:///nowhere.sock",
                host=host(24564),
                locks=str(tmp_path_factory.mktemp("node") / "locks"),
            )
        )


@pytest.fixture
def installed(built, tmp_path, monkeypatch):
    """The program in a folder with a bundle; the folder is also the engine's data root."""
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
def test_calls_without_a_task_go_to_runc(installed, words):
    assert run(installed, *words) == (7, f"runc {' '.join(words)}\n", "")


def test_a_container_without_the_variable_starts_no_python(installed, tmp_path):
    (tmp_path / "bundle/config.json").write_text('{"process": {"env": ["NVIDIA-GPU=GPU-a"]}}')
    text = installed.read_bytes().replace(b"python=", b"python=/nowhere #", 1)
    installed.write_bytes(text)
    assert run(installed, *CREATE)[1] == f"runc {' '.join(CREATE)}\n"


@pytest.mark.parametrize("words", [CREATE, ("-log=log.json", "create", "-b", "bundle", "c1")])
def test_a_container_outside_swarm_stays_as_it_is(installed, record, tmp_path, words):
    record("DOCKER_RESOURCE_NVIDIA-GPU=GPU-a", managed=False)
    assert run(installed, *words) == (7, f"runc {' '.join(words)}\n", "")
    assert json.loads((tmp_path / "bundle/config.json").read_text()) == SPEC


def test_errors_are_in_the_log(installed, record, tmp_path):
    record("DOCKER_RESOURCE_NVIDIA-GPU=GPU-a")
    code, out, err = run(installed, *CREATE)
    assert (code, out) == (1, "")
    assert "cannot reach the Docker engine at unix:///nowhere.sock" in err
    assert json.loads((tmp_path / "log.json").read_text())["msg"] == err.rstrip()


@pytest.mark.parametrize("flag", ["--bundle=bundle", "-bundle=bundle"])
def test_a_missing_python(installed, tmp_path, flag):
    start = installed.read_bytes().index(b"python=")
    text = installed.read_bytes()
    end = text.index(b"\n", start)
    installed.write_bytes(text[:start] + b"python=/nowhere/python3" + text[end:])
    code, _, err = run(installed, "--log=log.json", "create", flag, "c1")
    assert code == 1
    assert (
        err
        == "imagematrix: /nowhere/python3 not found; write this file anew: imagematrix swarm node-config\n"
    )
    assert json.loads((tmp_path / "log.json").read_text()) == {"level": "error", "msg": err.rstrip()}


def imported(installed, start, modules):
    """Return the origins of modules in an interpreter that has only the standard library."""
    shown = f"for name in {modules!r}: print(sys.modules[name].__spec__)"
    code = f"{start}\nimport sys, {', '.join(modules)}\n{shown}"
    words = [sys.executable, "-I", "-S", "-c", code, installed, "/bin/true"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_archive_contains_all_imported_modules(installed):
    start = zipapp_writer.make_start_code(ROOTS[0]).removesuffix("main()\n")
    runtime, claim, nvml = imported(
        installed,
        start,
        ["imagematrix.integrations.swarm.runtime", "imagematrix.launcher.gpu_claims.gpu_claim", "pynvml"],
    )
    assert "CompiledModules object" in runtime
    assert "CompiledModules object" in claim
    assert f"origin='{installed}/pynvml.py'" in nvml


def test_another_python_reads_the_sources(installed):
    start = zipapp_writer.make_start_code(ROOTS[0]).removesuffix("main()\n")
    start = start.replace("sys.implementation.cache_tag", "'cpython-399'")
    (runtime,) = imported(installed, start, ["imagematrix.integrations.swarm.runtime"])
    assert f"origin='{installed}/imagematrix/integrations/swarm/runtime.py'" in runtime


def test_the_driver_is_queried_by_modules_of_the_archive(installed):
    start = f"import sys; sys.path.append({str(installed)!r})"
    (query,) = imported(installed, start, ["imagematrix.hardware.host.nvml_query"])
    assert f"origin='{installed}/imagematrix/hardware/host/nvml_query.py'" in query


def test_the_same_node_has_the_same_program(host, path, monkeypatch):
    monkeypatch.setenv("PATH", path)
    settings = RuntimeSettings(data_root="/a", address="unix:///b", host=host(1), locks="/l")
    assert make_program(settings) == make_program(settings)


def test_a_node_without_runc(host, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProbeError, match=r"^runc not found on PATH"):
        make_program(RuntimeSettings(data_root="/a", address="unix:///b", host=host(1), locks="/l"))


def test_the_lock_folder_of_the_installed_runtime(host, tmp_path):
    path = tmp_path / "runtime"
    settings = RuntimeSettings(data_root="/a", address="unix:///b", host=host(1), locks="/srv/locks")
    path.write_bytes(make_program(settings))
    assert (
        get_installed_locks({"Runtimes": {"imagematrix": {"path": str(path)}, "runc": {"path": "runc"}}})
        == "/srv/locks"
    )
    assert RuntimeSettings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({}, None),
        ({"Runtimes": None}, None),
        ({"Runtimes": {"runc": {"path": "runc"}}}, None),
        ({"Runtimes": {"imagematrix": None}}, None),
        ({"Runtimes": {"imagematrix": {}}}, SHARED),
        ({"Runtimes": {"imagematrix": {"path": "/dev/null"}}}, SHARED),
        ({"Runtimes": {"imagematrix": {"path": "/nowhere"}}}, SHARED),
    ],
)
def test_a_node_without_the_runtime_or_with_an_unreadable_one(info, expected):
    assert get_installed_locks(info) == expected
