"""The GPU usage of pods, for `gpus` and launches, from a simulated kubelet: real gRPC over a socket."""

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from imagematrix.errors import EngineError, GpusBusyError
from imagematrix.integrations.kubernetes.plugin.offer import GPU
from imagematrix.launcher.gpu_claims import pods, survey
from imagematrix.launcher.gpu_claims.gpu_claim import adopt_scheduler_gpus
from imagematrix.launcher.gpu_claims.locks import release_locks
from imagematrix.launcher.gpu_claims.pods import VRAM
from imagematrix.launcher.kubelet import sockets
from imagematrix.launcher.kubelet.messages import PODS, load_message


@pytest.fixture
def socket(monkeypatch):
    """The socket of a kubelet, in a folder with a short name; nothing listens on it yet."""
    with tempfile.TemporaryDirectory(prefix="imx") as folder:
        path = Path(folder) / "pod-resources" / "kubelet.sock"
        path.parent.mkdir()
        monkeypatch.setattr(sockets, "find_root_dir", lambda: folder)
        yield path


@pytest.fixture
def listing(socket):
    """Return a function that makes kubelet list a pod's container with these resources and device ids."""
    server = grpc.server(ThreadPoolExecutor(1))
    devices: list[tuple[str, list[str]]] = []

    def answer(_request, _context):
        container = load_message("ContainerResources")(
            name="main",
            devices=[
                load_message("ContainerDevices")(resource_name=name, device_ids=ids) for name, ids in devices
            ],
        )
        pod = load_message("PodResources")(name="web-1", namespace="team", containers=[container])
        return load_message("ListPodResourcesResponse")(pod_resources=[pod])

    handler = grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=load_message("Empty").FromString,
        response_serializer=lambda answer: answer.SerializeToString(),
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PODS, {"List": handler}),))
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    yield lambda *listed: devices.extend(listed)
    server.stop(None).wait()


def test_pods_use_the_gpus_that_they_were_given(show_gpus, profiles, listing, conforms):
    first, second, *others = json.loads(profiles["genoa-h200"].read_text())["gpus"]
    listing(
        (GPU, [first["uuid"]]),
        (VRAM, [f"{second['uuid']}::{number}" for number in range(8)]),
        ("nvidia.com/gpu", [others[0]["uuid"]]),
        ("example.com/fpga", ["0"]),
    )
    result = show_gpus(profiles["genoa-h200"], "--json")
    assert (result.code, result.err) == (0, "")
    document = conforms(json.loads(result.out))
    assert [gpu["free"] for gpu in document["gpus"]] == [False] * 3 + [True] * 5
    users = [[(use["name"], use["vram_mib"]) for use in gpu["used_by"]] for gpu in document["gpus"]]
    assert users[:4] == [
        [("team/web-1 (main)", None)],
        [("team/web-1 (main)", 8192)],
        [("team/web-1 (main)", None)],
        [],
    ]


def test_a_mig_device_is_held_alone(show_gpus, profiles, listing):
    device, *_ = json.loads(profiles["mig"].read_text())["gpus"][0]["mig"]
    listing((f"imagematrix.io/mig-{device['profile']}", [device["uuid"]]))
    (gpu, whole) = json.loads(show_gpus(profiles["mig"], "--json").out)["gpus"]
    assert [bool(part["used_by"]) for part in gpu["mig"]] == [True, False, False]
    assert whole["free"]


def test_usage_is_unknown_while_kubelet_does_not_answer(show_gpus, profiles, socket):
    socket.touch()
    result = show_gpus(profiles["genoa-h200"], "--json")
    assert result.code == 0
    assert "kubelet does not answer" in result.err
    assert "GPU usage by pods unknown" in result.err
    assert {gpu["free"] for gpu in json.loads(result.out)["gpus"]} == {None}


def test_usage_is_unknown_without_grpc(show_gpus, profiles, socket, monkeypatch, tmp_path, gpu):
    socket.touch()
    (tmp_path / "grpc.py").write_text("raise ModuleNotFoundError(name='grpc')")
    monkeypatch.syspath_prepend(tmp_path)
    result = show_gpus(profiles["genoa-h200"])
    assert "grpc is not installed: GPU usage by pods unknown" in result.err
    with pytest.raises(EngineError, match="cannot ask kubelet") as caught:
        pods.compute_pod_usage((gpu(),))
    assert "`pip install '.[all]'` in a checkout" in caught.value.remedy


def test_usage_is_unknown_to_a_user_who_may_not_ask(show_gpus, profiles, socket, monkeypatch):
    socket.touch()
    monkeypatch.setattr(pods, "check_access", lambda *_: False)
    result = show_gpus(profiles["genoa-h200"])
    assert "permission denied: GPU usage by pods unknown" in result.err
    assert " free " not in result.out


def test_without_a_kubelet_there_is_nothing_to_ask(socket, gpu):
    assert pods.check_access() is None
    assert pods.compute_pod_usage((gpu(),)) == {}
    assert not socket.exists()


def test_a_kubelet_may_be_denied_to_this_user(socket, monkeypatch, gpu):
    socket.touch()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert pods.check_access() is False
    assert pods.compute_pod_usage((gpu(),)) == {}


def test_a_folder_that_is_not_readable_may_have_a_kubelet(monkeypatch, gpu):
    def denied(*_):
        raise PermissionError

    monkeypatch.setattr(os, "stat", denied)
    assert pods.check_access() is False
    assert pods.compute_pod_usage((gpu(),)) == {}


def test_a_gpu_in_mig_mode_may_be_held_whole(listing, gpu):
    listing(("nvidia.com/gpu", ["GPU-0", "GPU-1", "GPU-2"]))
    used = pods.compute_pod_usage((gpu(0, mig=[(1, 0), (2, 0)]), gpu(1, minor=None), gpu(3)))
    assert sorted(used) == ["nvidia10-gi1-ci0", "nvidia10-gi2-ci0"]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import time; time.sleep(9)", "does not answer within 0.2 seconds"),
        ("print('[')", "the query process failed: kubelet:"),
        ("print('{}')", None),
    ],
)
def test_a_query_that_fails_is_an_error(socket, monkeypatch, gpu, program, message):
    socket.touch()
    monkeypatch.setattr(pods, "TIMEOUT_S", 0.2 if message and "within" in message else 20)
    monkeypatch.setattr(
        "imagematrix.common.child_modules.make_child_command", lambda _: [sys.executable, "-c", program]
    )
    if message is None:
        assert pods.compute_pod_usage((gpu(),)) == {}
        return
    with pytest.raises(EngineError, match=message):
        pods.compute_pod_usage((gpu(),))


@pytest.mark.usefixtures("no_engine")
def test_without_a_daemon_the_kubelet_is_asked_too(listing, gpu):
    listing((GPU, ["GPU-0"]))
    usage = survey.survey_without_daemon((gpu(0), gpu(1)), lambda _: True)
    assert {key: [consumer.name for consumer in usage[key]] for key in usage} == {
        "nvidia10": ["team/web-1 (main)"]
    }


@pytest.mark.usefixtures("no_engine")
def test_without_a_daemon_nothing_starts_while_kubelet_does_not_answer(socket, gpu):
    socket.touch()
    with pytest.raises(EngineError, match="kubelet does not answer"):
        survey.survey_without_daemon((gpu(),), lambda _: True)


def test_a_batch_system_does_not_give_out_the_gpu_of_a_pod(listing, gpu, locks, monkeypatch):
    monkeypatch.setenv("IMAGEMATRIX_LOCKS", locks.path)
    listing((GPU, ["GPU-0"]))
    with adopt_scheduler_gpus([gpu(1)], by="Slurm") as claim:
        assert len(claim.descriptors) == 1
    with pytest.raises(GpusBusyError, match=r"Slurm gave .* is in use by container team/web-1 \(main\)"):
        adopt_scheduler_gpus([gpu(0), gpu(1)], by="Slurm")
    assert locks.take("nvidia10", "nvidia11")


def test_a_batch_system_does_not_give_out_a_gpu_of_which_a_launch_has_a_share(gpu, locks, monkeypatch):
    monkeypatch.setenv("IMAGEMATRIX_LOCKS", locks.path)
    held = locks.hold("share-a", "4000 nvidia10")
    with adopt_scheduler_gpus([gpu(1)], by="Slurm"):
        pass
    with pytest.raises(GpusBusyError, match=r"is in use by lease .* \(.*share of 4000 MiB\)"):
        adopt_scheduler_gpus([gpu(0), gpu(1)], by="Slurm")
    release_locks(held)
    with adopt_scheduler_gpus([gpu(0), gpu(1)], by="Slurm"):
        pass
