"""What commands and claims say if an extra is not installed."""

import os
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from daemonless_starts import HOST

import imagematrix as im
from imagematrix.cli.shared import run_docker
from imagematrix.common.child_modules import make_child_command
from imagematrix.hardware.host import device
from imagematrix.launcher.gpu_claims import survey
from imagematrix.launcher.kubelet import sockets

USER = 54321
SURVEY = survey.survey_without_daemon  # which the fixture `started` replaces
NEEDED = "asking kubelet needs the extra [kubernetes]"
REMEDY = "install it: "


@pytest.fixture
def kubelet(monkeypatch):
    """A socket that only root may open, and that has never an answer."""
    with tempfile.TemporaryDirectory(prefix="imx") as folder, socket.socket(socket.AF_UNIX) as listening:
        path = Path(folder) / "pod-resources" / "kubelet.sock"
        path.parent.mkdir()
        listening.bind(str(path))
        path.chmod(0o600)
        monkeypatch.setattr(sockets, "find_root_dir", lambda: folder)
        yield


@pytest.fixture(params=[True, False], ids=["root", "ordinary"])
def may_ask(request, kubelet, bare_install):  # noqa: ARG001 - for their effects
    """Whether this process may open the kubelet's socket: access(2) goes by its real user."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    os.setresuid(0 if request.param else USER, 0, 0)
    yield request.param
    os.setresuid(0, 0, 0)


@pytest.mark.usefixtures("bare_install")
@pytest.mark.parametrize(
    ("line", "extra"),
    [
        ("resolver --upstream registry.example.com", "resolver"),
        ("kubernetes webhook --catalog c --nodes n --tls-cert c --tls-key k", "kubernetes"),
        ("kubernetes device-plugin", "kubernetes"),
        ("kubernetes dra-driver --node-name n1", "kubernetes"),
    ],
)
def test_a_command_names_its_extra_and_how_to_install_it(line, extra):
    words = [*make_child_command("imagematrix.cli"), *line.split()]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    name = line.partition(" --")[0]
    what = f"imagematrix: imagematrix {name} needs the extra [{extra}]: "
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(what)
    assert done.stderr.count("\n") == 1
    command = [sys.executable, "-m", "pip", "install", f"imagematrix[{extra}]"]
    assert shlex.split(done.stderr.removeprefix(what)) == command


@pytest.fixture
def _node(monkeypatch, engine, shipped_catalog):
    """A node whose engine has the shipped images."""
    engine.add_catalog(shipped_catalog)
    monkeypatch.setattr("imagematrix.launcher.docker.request.require_device_nodes", lambda _: None)


@pytest.mark.usefixtures("_node")
def test_run_claims_no_gpu(cli, profiles, monkeypatch, may_ask):
    started = []
    monkeypatch.setattr(run_docker.DockerCommand, "_run_command", lambda *words: started.append(words) or 0)
    result = cli("run", "--host", profiles["genoa-h200"], "--gpus", "1", "training:v1")
    assert (result.code, len(started)) == ((8, 0) if may_ask else (0, 1))
    assert (NEEDED in result.err, REMEDY in result.err) == (may_ask, may_ask)
    assert ("permission denied: GPU usage by pods unknown" in result.err) != may_ask


@pytest.mark.usefixtures("_node")
def test_the_library_claims_no_gpu(engine, profiles, shipped_catalog, may_ask):
    engine.responses["POST", "/containers/create"] = (500, b'{"message": "created"}')
    selection = im.select(im.Host.load(profiles["genoa-h200"]), shipped_catalog)
    with pytest.raises(im.EngineError) as caught:
        im.launch(selection, gpus=1)
    assert ("created" in str(caught.value)) != may_ask
    assert (NEEDED in str(caught.value), REMEDY in str(caught.value.remedy)) == (may_ask, may_ask)


def test_without_a_daemon_no_gpu_is_claimed(started, monkeypatch, capfd, may_ask):
    monkeypatch.setattr(survey, "survey_without_daemon", SURVEY)
    code, calls = started("run", "--engine", "oci", "--gpus", "1", "reg:5000/training:v1")
    assert (code, len(calls)) == ((8, 0) if may_ask else (7, 1))
    said = capfd.readouterr().err
    assert (NEEDED in said, REMEDY in said) == (may_ask, may_ask)


def test_a_task_of_slurm_claims_no_gpu(started, monkeypatch, tmp_path, capfd, may_ask):
    monkeypatch.setattr("imagematrix.hardware.host.probe.probe_hardware", lambda: HOST)
    monkeypatch.setattr(device, "list_permitted_minors", lambda _: (1,))
    names = ("IMAGEMATRIX_STORE", "IMAGEMATRIX_LOCKS", "HOME")
    variables = {name: os.environ[name] for name in names} | {"SLURM_JOB_ID": "7", "SLURM_STEP_GPUS": "0"}
    environment = tmp_path / "environment"
    environment.write_text("".join(f"{name}={value}\0" for name, value in variables.items()))
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the task's take the place of these
    code, calls = started("oci-task", "reg:5000/training:v1", str(environment), str(tmp_path), "--", "train")
    assert (code, len(calls)) == ((8, 0) if may_ask else (7, 1))
    said = capfd.readouterr().err
    assert (NEEDED in said, REMEDY in said) == (may_ask, may_ask)


def test_usage_by_pods_is_unknown(show_gpus, profiles, may_ask):
    result = show_gpus(profiles["genoa-h200"])
    assert result.code == 0
    assert ("permission denied: GPU usage by pods unknown" in result.err) != may_ask
    assert (f"{NEEDED}: GPU usage by pods unknown" in result.err) == may_ask
    assert " free " not in result.out
