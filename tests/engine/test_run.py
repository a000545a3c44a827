"""`imagematrix run`: exactly the right device nodes, no mounts, no privileges; else like `docker run`."""

import contextlib
import json
import os
import shlex
import signal
import socket
import socketserver
import subprocess
import threading
from pathlib import Path

import docker
import pytest
from mps import daemon

import imagematrix as im

ROOT = Path(__file__).parents[2]
L40S = ROOT / "tests/hosts/icelake-l40s.json"
CONTROL = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")


@pytest.fixture(scope="module")
def images(engine):
    """The image of an L40S node, and one that this machine can run."""
    only = "cuda=12.4,compute=8.9,driver=550.163.01,march=icelake-server"
    engine.build_shipped(only, "cuda=none,march=x86-64-v2")


@pytest.fixture
def host():
    """An L40S host with four GPUs, whose minors are not their indices."""
    return json.loads(L40S.read_text())


def minors(host, *indices):
    return [f"/dev/nvidia{host['gpus'][index]['minor']}" for index in indices]


def run(engine, *words, **options):
    return engine.imagematrix("run", *words, **options)


@pytest.mark.usefixtures("images", "nodes")
def test_exactly_the_nodes_of_the_chosen_gpus_are_passed(engine, host):
    done = run(
        engine, "--host", L40S, "--gpus", "0,2", "--rm", "training:v1", "sh", "-c", "ls -d /dev/nvidia*"
    )
    assert done.returncode == 0, done.stderr
    expected = {*minors(host, 0, 2), *(path for path in CONTROL if path in host["devices"])}
    assert set(done.stdout.split()) == expected


@pytest.mark.usefixtures("images", "nodes")
def test_nothing_is_mounted_and_nothing_is_privileged(engine, host):
    started = run(
        engine, "--host", L40S, "--gpus", "device=1", "-d", "--name", "seen", "training:v1", "sleep", "300"
    )
    assert started.returncode == 0, started.stderr
    try:
        seen = engine.inspect("seen")
    finally:
        engine.docker("rm", "-f", "seen")
    config = seen["HostConfig"]
    devices = {device["PathOnHost"] for device in config["Devices"]}
    assert devices == {*minors(host, 1), *(path for path in CONTROL if path in host["devices"])}
    assert {device["PathInContainer"] for device in config["Devices"]} == devices
    assert seen["Mounts"] == []
    assert not config["Binds"]
    assert config["Privileged"] is False
    assert not config["CapAdd"]
    assert not config["DeviceRequests"]


@pytest.mark.usefixtures("images", "nodes")
def test_dry_run_prints_the_command_that_would_run(engine):
    words = (
        "--host",
        L40S,
        "--gpus",
        "2",
        "--rm",
        "-e",
        "A=b c",
        "training:v1",
        "sh",
        "-c",
        "echo $A; ls -d /dev/nvidia*",
    )
    printed = run(engine, "--dry-run", *words)
    assert printed.returncode == 0, printed.stderr
    ran = run(engine, *words)
    by_hand = subprocess.run(
        shlex.split(printed.stdout), env=engine.environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout == by_hand.stdout
    assert ran.stdout.startswith("b c\n")


@pytest.mark.usefixtures("images")
def test_the_error_for_a_missing_device_node_has_a_remedy(engine):
    done = run(engine, "--host", L40S, "--rm", "training:v1", "true")
    assert done.returncode == 5
    assert "/dev/nvidia-uvm" in done.stderr
    assert "nvidia-modprobe" in done.stderr
    assert engine.has_no_containers()


@pytest.mark.usefixtures("images")
def test_exit_code_stdin_and_environment_are_passed(engine):
    assert run(engine, "--rm", "training:v1", "sh", "-c", "exit 42").returncode == 42
    assert run(engine, "--rm", "-i", "training:v1", "cat", input="through\n").stdout == "through\n"
    assert (
        run(engine, "--rm", "-eX=1", "--hostname=h", "training:v1", "sh", "-c", "echo $X $(hostname)").stdout
        == "1 h\n"
    )


@pytest.mark.usefixtures("images")
def test_signals_reach_the_container(engine):
    script = "trap 'echo got it; exit 7' TERM; echo ready; while :; do sleep 0.1; done"
    process = subprocess.Popen(
        [ROOT / ".venv/bin/imagematrix", "run", "--rm", "training:v1", "sh", "-c", script],
        env=engine.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "got it\n"
    assert process.returncode == 7


@pytest.mark.usefixtures("images")
def test_a_wrong_driver_is_refused_with_both_versions(engine, tmp_path, host):
    host["driver"]["version"] = "550.54.14"
    (tmp_path / "host.json").write_text(json.dumps(host))
    done = run(engine, "--host", tmp_path / "host.json", "--rm", "training:v1")
    assert done.returncode == 3
    assert "550.54.14" in done.stderr
    explained = engine.imagematrix("explain", "training:v1", "--host", tmp_path / "host.json")
    text = " ".join(explained.stdout.split())
    assert "the image carries driver 550.163.01" in text
    assert "the host has 550.54.14" in text


@pytest.mark.usefixtures("images")
def test_a_gpu_without_device_code_is_refused_with_its_capability(engine, tmp_path, host):
    for gpu in host["gpus"]:
        gpu["compute"] = "12.0"
    (tmp_path / "host.json").write_text(json.dumps(host))
    done = engine.imagematrix("explain", "training:v1", "--host", tmp_path / "host.json")
    assert done.returncode == 3
    assert "device-code" in done.stdout
    assert "compute capability 12.0" in " ".join(done.stdout.split())


@pytest.mark.long
def test_a_refused_image_dies_of_sigill(engine, project):
    """FMA4 and XOP exist only in four old generations of AMD CPUs."""
    folder = project({"cuda": ["none"], "march": ["x86-64-v2", "bdver1"]}, image="forced")
    done = engine.imagematrix("build", "-f", folder / "matrix.yaml")
    assert done.returncode == 0, done.stderr
    (bulldozer,) = [name for name in done.stdout.split() if "bdver1" in name]
    explained = engine.imagematrix("explain", "forced:v1", "--json")
    (candidate,) = [
        item for item in json.loads(explained.stdout)["candidates"] if item["reference"] == bulldozer
    ]
    assert [rule["rule"] for rule in candidate["rules"] if not rule["ok"]] == ["cpu"]
    assert engine.docker("run", "--rm", bulldozer, check=False).returncode == 132
    assert run(engine, "--rm", "forced:v1", "train", "--steps", "50").returncode == 0


@pytest.mark.usefixtures("images")
def test_the_library_starts_the_same_container(engine, nodes, host, monkeypatch):  # noqa: ARG001 - creates device nodes
    import docker

    import imagematrix as im

    selection = im.select(im.Host.load(L40S), im.open_catalog(_saved(engine)), gpus="device=3")
    client = docker.DockerClient(base_url=engine.host)
    monkeypatch.setenv("IMAGEMATRIX_LOCKS", engine.environment["IMAGEMATRIX_LOCKS"])
    container = im.launch(selection, command=["sleep", "300"], client=client)
    try:
        devices = {device["PathOnHost"] for device in engine.inspect(container.id)["HostConfig"]["Devices"]}
    finally:
        container.remove(force=True)
        client.close()
    assert minors(host, 3)[0] in devices
    assert len(devices & {f"/dev/nvidia{minor}" for minor in range(4)}) == 1


def _saved(engine):
    path = engine.folder / "catalog.json"
    path.write_text(engine.imagematrix("ls", "training:v1", "--json").stdout)
    return path


@pytest.mark.usefixtures("images")
@pytest.mark.parametrize("options", [(), ("--rm",), ("-t",)])
def test_the_cause_of_a_containers_death_is_reported_with_the_rule(engine, options):
    done = run(engine, *options, "training:v1", "sh", "-c", "sh -c 'kill -ILL $$'; exit $?")
    assert done.returncode == 132
    assert "the container failed: SIGILL" in done.stderr
    assert "rule cpu expected it to run: the CPUs have every flag that the code needs" in done.stderr
    fine = run(engine, *options, "training:v1", "sh", "-c", "echo CUDA error 803; exit 0")
    assert (fine.returncode, fine.stderr) == (0, "")


@pytest.mark.long
@pytest.mark.usefixtures("images", "nodes")
@pytest.mark.parametrize("options", [(), ("--rm",), ("-t",), ("--rm", "--log-driver", "none")])
def test_cuda_errors_are_read_from_the_last_lines_of_the_log(engine, options):
    script = (
        "sleep 2; echo 'RuntimeError: CUDA error: no kernel image is available for execution on the device'"
    )
    words = ("--gpus", "1", *options, "training:v1", "sh", "-c", f"{script} >&2; exit 1")
    done = run(engine, "--host", L40S, *words)
    assert done.returncode == 1
    message = "the container failed: CUDA error 209: no kernel image is available for execution on the device"
    if "none" in options:  # no log is kept
        assert "the container failed" not in done.stderr
    else:
        assert f"{message}; rule device-code expected it to run" in done.stderr


@pytest.mark.usefixtures("images", "nodes")
def test_the_printed_launch_is_what_is_started(engine, host):
    words = ("--host", L40S, "--gpus", "0,2", "--name", "seen")
    done = run(engine, *words, "--print", "json", "training:v1", "sleep", "300")
    document = json.loads(done.stdout)
    assert document["devices"][:2] == minors(host, 0, 2)
    assert document["options"] == ["--name", "seen"]
    assert run(engine, *words, "-d", "training:v1", "sleep", "300").returncode == 0
    try:
        seen = engine.inspect("seen")
    finally:
        engine.docker("rm", "-f", "seen")
    assert [device["PathOnHost"] for device in seen["HostConfig"]["Devices"]] == document["devices"]
    assert seen["Config"]["Labels"].items() >= document["labels"].items()
    assert seen["Config"]["Image"] == document["reference"]
    assert seen["Config"]["Cmd"] == document["command"]


@pytest.mark.usefixtures("images", "nodes")
def test_mps_is_used_through_its_pipes_and_the_host_ipc(engine, tmp_path):
    pipes = tmp_path / "mps"
    pipes.mkdir()
    environment = {**engine.environment, "CUDA_MPS_PIPE_DIRECTORY": str(pipes)}
    words = ("--host", L40S, "--vram", "4Gi", "--mps-threads", "25", "--rm", "training:v1")
    script = "test -S $CUDA_MPS_PIPE_DIRECTORY/control && env | grep -E 'CUDA_MPS|IMAGEMATRIX' | sort"
    nobody = run(engine, *words, "true", env=environment)
    assert nobody.returncode == 5
    assert "nvidia-cuda-mps-control -d" in nobody.stderr
    with daemon(pipes):
        done = run(engine, *words, "sh", "-c", script, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=4096M",
        f"CUDA_MPS_PIPE_DIRECTORY={pipes}",
        "IMAGEMATRIX_VRAM_FRACTION=0.0715",
        "IMAGEMATRIX_VRAM_MIB=4096",
    ]


@pytest.fixture
def without_a_driver(engine, tmp_path):
    """The catalog of an image in mode `host`."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "bare.j2").write_text(
        "FROM debian:trixie\nLABEL com.nvidia.cuda.version={{ cuda }}\n"
    )
    (tmp_path / "matrix.yaml").write_text(
        "schema: imagematrix.matrix/v1\nimages:\n  bare:\n    version: v1\n    template: bare.j2\n"
        "    device_code: claim\n"
        'axes:\n  cuda: ["12.4"]\n  compute: ["8.9"]\n  driver: [host]\n'
    )
    done = engine.imagematrix("build", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return engine.imagematrix("select", "bare:v1", "--host", L40S).stdout.strip()


@pytest.mark.usefixtures("nodes")
def test_an_image_without_a_driver_gets_cdi_devices(engine, without_a_driver, host, tmp_path, monkeypatch):
    assert without_a_driver.startswith("bare:v1-")
    monkeypatch.setenv("IMAGEMATRIX_LOCKS", engine.environment["IMAGEMATRIX_LOCKS"])
    # Probed as a tree, so that it counts as this machine: CDI devices of other machines are unknown.
    words = ("--gpus", "device=1", "--dry-run", "bare:v1")
    elsewhere = run(engine, "--host", L40S, *words)
    assert f"--gpus device={host['gpus'][1]['uuid']}" in elsewhere.stdout
    spec = {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [
            {
                "name": gpu["uuid"],
                "containerEdits": {
                    "deviceNodes": [{"path": f"/dev/nvidia{gpu['minor']}"}],
                    "env": ["CDI=yes"],
                },
            }
            for gpu in host["gpus"]
        ],
    }
    (engine.folder / "cdi").mkdir(exist_ok=True)
    (engine.folder / "cdi" / "nvidia.json").write_text(json.dumps(spec))
    saved = tmp_path / "bare.json"
    saved.write_text(engine.imagematrix("ls", "bare:v1", "--json").stdout)
    selection = im.select(im.Host.load(L40S), im.open_catalog(saved), gpus="device=1")
    client = docker.DockerClient(base_url=engine.host)
    try:
        container = im.launch(selection, ["sh", "-c", "echo $CDI; ls -d /dev/nvidia[0-9]"], client=client)
        container.wait()
        assert container.logs().decode().split() == ["yes", *minors(host, 1)]
        container.remove()
    finally:
        client.close()


@pytest.fixture
def relayed(engine):
    """The engine's address on a port of loopback."""

    class Relay(socketserver.BaseRequestHandler):
        def handle(self):
            with socket.socket(socket.AF_UNIX) as upstream:
                upstream.connect(engine.host.removeprefix("unix://"))
                back = threading.Thread(target=self.copy, args=(upstream, self.request), daemon=True)
                back.start()
                self.copy(self.request, upstream)
                back.join()  # one direction may end before the other

        @staticmethod
        def copy(one, other):
            with contextlib.suppress(OSError):
                while data := one.recv(65536):
                    other.sendall(data)
                other.shutdown(socket.SHUT_WR)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Relay) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"tcp://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.usefixtures("images", "nodes")
def test_an_engine_on_another_machine_needs_a_saved_host(engine, relayed):
    def on_another_machine(*words):
        command = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh"]
        command += [str(ROOT / ".venv/bin/imagematrix"), "run", *words]
        environment = {**engine.environment, "DOCKER_HOST": relayed}
        return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)

    refused = on_another_machine("--rm", "training:v1", "true")
    assert refused.returncode == 2
    assert (
        f"the engine runs on {os.uname().nodename}, but a probe would describe this machine" in refused.stderr
    )
    assert "imagematrix probe --json" in refused.stderr
    words = (
        "--host",
        L40S,
        "--gpus",
        "device=1",
        "--rm",
        "training:v1",
        "sh",
        "-c",
        "ls /dev | grep -c nvidia[0-9]",
    )
    given = on_another_machine(*words)
    assert (given.returncode, given.stdout) == (0, "1\n"), given.stderr
    local = run(engine, "--rm", "training:v1", "true", env={**engine.environment, "DOCKER_HOST": relayed})
    assert local.returncode != 2  # the engine is on this machine despite its address
