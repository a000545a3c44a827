"""`imagematrix doctor` on this machine, with simulated hosts."""

import errno
import json
import os
import sys
import tomllib

import pytest

from imagematrix.errors import EngineError
from imagematrix.hardware.host import probe
from imagematrix.hardware.host.host import Host
from imagematrix.launcher.docker import devices
from imagematrix.launcher.docker.devices import DeviceProblem
from imagematrix.launcher.doctor import node_facts as module
from imagematrix.launcher.doctor.daemonless import DaemonlessFacts
from imagematrix.launcher.doctor.node_facts import gather_facts
from imagematrix.launcher.doctor.pulls import TRANSFER, UNPACKS, ContainerdFacts, DockerFacts, PullFacts
from imagematrix.launcher.gpu_claims import pods
from imagematrix.launcher.gpu_claims.locks import Locks


@pytest.fixture(autouse=True)
def _locks(monkeypatch, tmp_path):
    monkeypatch.setenv("IMAGEMATRIX_LOCKS", str(tmp_path / "locks"))


@pytest.fixture
def docker(monkeypatch, tmp_path):
    """A docker command on PATH."""
    (tmp_path / "docker").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def on_node(monkeypatch, cli, profiles):
    """Run the doctor on this machine, simulated as one of the profiles."""

    def run(name, *words):
        node = Host.load(profiles[name])
        monkeypatch.setattr(probe, "assemble_host", lambda *_, **__: node)
        return cli("doctor", *words)

    return run


@pytest.mark.usefixtures("docker", "engine")
def test_cpu_only_machine_is_healthy(cli, profiles, conforms):
    result = cli("doctor", "--host", profiles["laptop"], "--json")
    assert (result.code, result.err) == (0, "")
    document = conforms(json.loads(result.out))
    assert document["launches"] is True
    table = cli("doctor", "--host", profiles["laptop"])
    assert table.out.startswith("ok       module          no NVIDIA GPU")


@pytest.mark.usefixtures("docker", "engine")
def test_missing_device_nodes_exit_with_5(on_node, conforms):
    result = on_node("rome-a100", "--json")
    assert result.code == 5
    document = conforms(json.loads(result.out))
    assert not document["launches"]
    (one,) = [one for one in document["findings"] if one["saw"].startswith("/dev/nvidiactl: ")]
    assert one["severity"] == "error"
    table = on_node("rome-a100")
    assert (
        "-> load the driver and create the node: `modprobe nvidia`, `nvidia-modprobe -c 255`\n" in table.out
    )


@pytest.mark.usefixtures("docker", "engine")
def test_missing_nodes_of_mig_devices_are_reported(on_node):
    result = on_node("mig")
    assert result.code == 5
    assert "/dev/nvidia-caps/nvidia-cap21: not found" in result.out


@pytest.mark.usefixtures("docker", "engine")
def test_unknown_nodes_of_mig_devices_are_reported(cli, profiles, tmp_path):
    node = json.loads(profiles["mig"].read_text())
    node["gpus"][0]["mig"][0]["capabilities"] = None
    (tmp_path / "node.json").write_text(json.dumps(node))
    result = cli("doctor", "--host", tmp_path / "node.json")
    assert result.code == 5
    assert "did not find /proc/driver/nvidia/capabilities/gpu0/mig/gi2\n" in result.out
    assert "-> probe the node again with driver loaded and MIG enabled" in result.out


@pytest.mark.parametrize(("else_", "code", "severity"), [(None, 8, "error  "), ("crun", 0, "warning")])
def test_missing_engine_exits_with_8_if_nothing_else_starts_containers(
    on_node, monkeypatch, else_, code, severity
):
    found = DaemonlessFacts(runtime=else_, store="/store")
    monkeypatch.setattr("imagematrix.launcher.doctor.daemonless.gather_daemonless_facts", lambda: found)
    result = on_node("laptop")
    assert result.code == code
    said = f"{severity}  engine          cannot reach the Docker engine at unix:///nowhere/docker.sock\n"
    assert said in result.out
    assert ("or launch with --engine oci, which needs no daemon" in result.out) is bool(else_)


@pytest.mark.usefixtures("docker")
def test_image_is_checked_against_the_node(cli, profiles, engine, shipped_catalog):
    engine.add_catalog(shipped_catalog)
    result = cli("doctor", "--host", profiles["laptop"], "training:v1")
    assert result.code == 0
    assert "ok       image           training:v1-cpu-broadwell-0123456789ab fits this node\n" in result.out
    assert " caches " not in result.out
    described = json.dumps({"Config": {"Env": ["NUMBA_CACHE_DIR=/var/cache/warm/numba"]}}).encode()
    engine.responses["GET", "training:v1-cpu-broadwell-0123456789ab/json"] = 200, described
    result = cli("doctor", "--host", profiles["laptop"], "training:v1")
    assert "ok       caches          in /var/cache/warm: numba\n" in result.out
    result = cli("doctor", "--host", profiles["laptop"], "training:v9")
    assert result.code == 4
    assert "error    image           the engine has no variant of training:v9" in result.out
    assert "doctor" in cli("doctor", "--help").out
    result = cli("doctor", "--host", profiles["grace-hopper"], "training:v1")
    assert result.code == 3
    assert "error    image           none of the" in result.out


def test_files_of_an_image_are_not_examined_without_an_engine_or_for_a_saved_host(
    cli, on_node, profiles, engine, shipped_catalog, monkeypatch
):
    engine.add_catalog(shipped_catalog)

    def run_no_docker(*_):
        raise EngineError("cannot start docker")

    monkeypatch.setattr("imagematrix.launcher.doctor.image._run_docker", run_no_docker)
    said = "fits this node; its files were not examined\n"
    assert said in on_node("icelake-l40s", "training:v1").out
    monkeypatch.setattr("imagematrix.launcher.doctor.image._run_docker", None)
    assert said in cli("doctor", "--host", profiles["icelake-l40s"], "training:v1").out


def test_saved_host_is_not_compared_with_this_machine(cli, profiles, conforms, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "99")
    for name in ("driver-mismatch", "rome-a100", "mig"):
        result = cli("doctor", "--host", profiles[name], "--json")
        document = conforms(json.loads(result.out))
        assert result.code == 0
        assert {one["check"] for one in document["findings"]} <= {"module", "device-nodes", "probe"}
    table = cli("doctor", "--host", profiles["driver-mismatch"]).out
    assert "ok       device-nodes    device nodes exist\n" in table
    mismatch = "driver mismatch: the host's user-mode driver is 550.144.03, the kernel module is 550.163.01"
    assert f"warning  probe           NVML {mismatch};" in table


def test_missing_nodes_of_a_saved_host_are_reported(cli, profiles, tmp_path):
    node = json.loads(profiles["rome-a100"].read_text())
    node["devices"].remove("/dev/nvidia-uvm")
    (tmp_path / "node.json").write_text(json.dumps(node))
    result = cli("doctor", "--host", tmp_path / "node.json")
    assert result.code == 5
    assert "error    device-nodes    /dev/nvidia-uvm: not found\n" in result.out


@pytest.mark.usefixtures("engine")
def test_the_environment_does_not_apply_to_a_saved_host(cli, profiles, engine, shipped_catalog, monkeypatch):
    engine.add_catalog(shipped_catalog)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "99")
    result = cli("doctor", "--host", profiles["laptop"], "training:v1")
    assert result.code == 0


@pytest.mark.usefixtures("docker", "engine")
def test_variables_that_stop_a_launch_are_reported(on_node, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "99")
    result = on_node("laptop")
    assert result.code == 0
    assert "warning  accelerators    accelerator that images do not support: CUDA_VISIBLE" in result.out
    assert "CPU-only images" not in result.out
    result = on_node("rome-a100")
    assert result.code == 5
    assert "error    gpus            CUDA_VISIBLE_DEVICES=99: '99' not found on this host\n" in result.out
    assert "-> unset CUDA_VISIBLE_DEVICES, or correct it\n" in result.out


def test_unusable_lock_folder_is_reported(profiles, engine, monkeypatch, tmp_path):
    assert engine.containers == []
    (tmp_path / "file").touch()
    monkeypatch.setenv("IMAGEMATRIX_LOCKS", str(tmp_path / "file"))
    result = gather_facts(Host.load(profiles["rome-a100"]), None)
    assert "cannot use the GPU locks" in str(result.locks_error)
    assert "mkdir" in result.locks_error.remedy
    assert gather_facts(Host.load(profiles["laptop"]), None).locks_error is None


def test_a_lock_folder_that_cannot_be_written_is_reported(profiles, engine, monkeypatch):
    assert engine.containers == []

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Locks, "_create_file", full)
    result = gather_facts(Host.load(profiles["rome-a100"]), None)
    assert str(result.locks_error).endswith("No space left on device")
    assert result.locks_error.remedy.startswith("free space there")


def test_only_launches_by_docker_need_a_lock_folder_of_its_group(profiles, engine, monkeypatch, tmp_path):
    assert engine.containers == []
    monkeypatch.setattr("imagematrix.images.engine.endpoint.get_socket_group", lambda: 0)
    monkeypatch.setattr(os, "fchown", outside)
    monkeypatch.setenv("IMAGEMATRIX_LOCKS", str(tmp_path / "locks"))
    host = Host.load(profiles["rome-a100"])
    assert "this user is not in it" in str(gather_facts(host, None).locks_error)
    monkeypatch.setenv("IMAGEMATRIX_ENGINE", "oci")
    assert gather_facts(host, None).locks_error is None


def outside(*_):
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.usefixtures("docker", "engine")
def test_a_kubelet_that_does_not_answer_is_reported(on_node, monkeypatch):
    def silent(_):
        raise EngineError("it does not answer")

    monkeypatch.setattr(pods, "check_access", lambda: True)
    monkeypatch.setattr(pods, "compute_pod_usage", silent)
    assert "error    kubelet         it does not answer\n" in on_node("rome-a100").out


def test_nodes_that_only_this_user_may_not_open_are_doubts(profiles, engine, monkeypatch):
    assert engine.containers == []
    problems = (
        DeviceProblem(path="/dev/nvidia0", what="permission denied", remedy="grant", doubt=True),
        DeviceProblem(path="/dev/nvidia-uvm", what="not found", remedy="create"),
    )
    monkeypatch.setattr(devices, "check_device_nodes", lambda _: problems)
    facts = gather_facts(Host.load(profiles["rome-a100"]), None)
    assert facts.doubts == (("/dev/nvidia0: permission denied", "grant"),)
    assert facts.problems == (("/dev/nvidia-uvm: not found", "create"),)


def test_loaded_modules_are_read(profiles, engine, monkeypatch, tmp_path):
    assert engine.containers == []
    node = Host.load(profiles["laptop"])
    (tmp_path / "modules").write_text("nvidia_uvm 1 0 - Live 0x0\nnvidia 2 1 nvidia_uvm, Live 0x0\n")
    monkeypatch.setattr(module, "MODULES", str(tmp_path / "modules"))
    assert gather_facts(node, None).modules == {"nvidia", "nvidia_uvm"}
    monkeypatch.setattr(module, "MODULES", str(tmp_path / "none"))
    assert gather_facts(node, None).modules is None


def test_device_nodes_without_a_dev_char_link_are_found(tmp_path):
    (tmp_path / "dev/char").mkdir(parents=True)
    (tmp_path / "dev/nvidia0").symlink_to("/dev/null")
    paths = ["/dev/nvidia0", "/dev/nvidia1"]
    assert module._find_unlinked(paths, str(tmp_path)) == (("/dev/nvidia0", "/dev/char/1:3"),)
    (tmp_path / "dev/char/1:3").symlink_to("/dev/nvidia0")
    assert module._find_unlinked(paths, str(tmp_path)) == ()


SLOW = PullFacts(
    processors=4,
    containerds=(
        ContainerdFacts(version="2.4.2", file="/etc/k3s.toml", config={"plugins": {TRANSFER: {UNPACKS: 1}}}),
    ),
    docker=DockerFacts(version="29.7.0", containerd_store=True),
)


@pytest.fixture
def slow(monkeypatch):
    """Let this machine have engines that pull slowly."""
    monkeypatch.setattr("imagematrix.launcher.doctor.node_facts.gather_pull_facts", lambda _: SLOW)


@pytest.mark.usefixtures("docker", "engine", "slow")
def test_settings_of_pulls_are_told_with_the_command_that_changes_them(cli, conforms):
    result = cli("doctor")
    lines = [line.partition("pulls")[2].strip() for line in result.out.splitlines() if " pulls " in line]
    assert lines[:2] == [
        (
            "CRI (transfer service), containerd 2.4.2 (/etc/k3s.toml): max_concurrent_unpacks = 1, "
            "snapshotter = overlayfs"
        ),
        (
            "CRI (transfer service), containerd 2.4.2 (/etc/k3s.toml): max_concurrent_unpacks = 1: "
            "layers are unpacked one after the other"
        ),
    ]
    assert "-> imagematrix doctor --drop-in containerd; it sets max_concurrent_unpacks = 4" in result.out
    assert "-> imagematrix doctor --drop-in docker; it sets max-concurrent-downloads = 64" in result.out
    document = conforms(json.loads(cli("doctor", "--json").out))
    assert {one["engine"] for one in document["pulls"]} == {"containerd", "docker"}


@pytest.mark.usefixtures("docker", "engine", "slow")
def test_a_drop_in_is_the_file_and_nothing_else(cli):
    result = cli("doctor", "--drop-in", "containerd")
    assert (result.code, result.err) == (0, "")
    assert tomllib.loads(result.out) == {"version": 2, "plugins": {TRANSFER: {UNPACKS: 4}}}
    assert json.loads(cli("doctor", "--drop-in", "docker").out) == {"max-concurrent-downloads": 64}


@pytest.mark.usefixtures("docker", "engine")
def test_wrong_use_of_a_drop_in(cli, monkeypatch):
    monkeypatch.setattr("imagematrix.launcher.doctor.node_facts.gather_pull_facts", lambda _: PullFacts())
    cli("doctor", "--drop-in", "dockre").fails(2, "docker")
    cli("doctor", "--drop-in", "docker").fails(8, "no docker of this machine answers")
    for words in (("training:v1",), ("--json",), ("--host", "x")):
        cli("doctor", "--drop-in", "docker", *words).fails(2, "--drop-in stands alone")
    cli("doctor", "--where", "python=3.13").refuses(2, "--where decides among the variants of an image")
