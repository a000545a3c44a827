"""What `gpus` shows of pods, by a kubelet's list: real gRPC over a socket."""

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from imagematrix.kubernetes.plugin import pods
from imagematrix.kubernetes.plugin.messages import PODS, message
from imagematrix.kubernetes.plugin.offer import GPU, VRAM


@pytest.fixture
def socket(monkeypatch):
    """The socket of a kubelet, in a folder with a short name; nothing listens on it yet."""
    with tempfile.TemporaryDirectory(prefix="imx") as folder:
        path = Path(folder) / "kubelet.sock"
        monkeypatch.setattr(pods, "SOCKET", path)
        monkeypatch.setattr(pods.usage, "__defaults__", (path,))
        yield path


@pytest.fixture
def listing(socket):
    """Call it with resources and device ids of a pod's container to have kubelet list them."""
    server = grpc.server(ThreadPoolExecutor(1))
    devices: list[tuple[str, list[str]]] = []

    def answer(_request, _context):
        container = message("ContainerResources")(
            name="main",
            devices=[
                message("ContainerDevices")(resource_name=name, device_ids=ids) for name, ids in devices
            ],
        )
        pod = message("PodResources")(name="web-1", namespace="team", containers=[container])
        return message("ListPodResourcesResponse")(pod_resources=[pod])

    handler = grpc.unary_unary_rpc_method_handler(
        answer,
        request_deserializer=message("Empty").FromString,
        response_serializer=lambda answer: answer.SerializeToString(),
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PODS, {"List": handler}),))
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    yield lambda *found: devices.extend(found)
    server.stop(None).wait()


@pytest.mark.usefixtures("no_engine")
def test_pods_use_the_gpus_that_they_were_given(cli, profiles, listing, conforms):
    first, second, *others = json.loads(profiles["genoa-h200"].read_text())["gpus"]
    listing(
        (GPU, [first["uuid"]]),
        (VRAM, [f"{second['uuid']}::{number}" for number in range(8)]),
        ("nvidia.com/gpu", [others[0]["uuid"]]),
        ("example.com/fpga", ["0"]),
    )
    said = cli("gpus", "--host", profiles["genoa-h200"], "--json")
    assert (said.code, said.err) == (0, "")
    document = json.loads(said.out)
    conforms(document)
    assert [gpu["free"] for gpu in document["gpus"]] == [False] * 3 + [True] * 5
    users = [[(use["name"], use["vram_mib"]) for use in gpu["used_by"]] for gpu in document["gpus"]]
    assert users[:4] == [
        [("team/web-1 (main)", None)],
        [("team/web-1 (main)", 8192)],
        [("team/web-1 (main)", None)],
        [],
    ]


@pytest.mark.usefixtures("no_engine")
def test_a_mig_device_is_held_alone(cli, profiles, listing):
    device, *_ = json.loads(profiles["mig"].read_text())["gpus"][0]["mig"]
    listing((f"imagematrix.io/mig-{device['profile']}", [device["uuid"]]))
    (gpu, whole) = json.loads(cli("gpus", "--host", profiles["mig"], "--json").out)["gpus"]
    assert [bool(part["used_by"]) for part in gpu["mig"]] == [True, False, False]
    assert whole["free"]


@pytest.mark.usefixtures("no_engine")
def test_usage_is_unknown_while_kubelet_does_not_answer(cli, profiles, socket):
    socket.touch()
    said = cli("gpus", "--host", profiles["genoa-h200"], "--json")
    assert said.code == 0
    assert "kubelet does not answer" in said.err
    assert "GPU usage by pods unknown" in said.err
    assert {gpu["free"] for gpu in json.loads(said.out)["gpus"]} == {None}


@pytest.mark.usefixtures("no_engine")
def test_usage_is_unknown_without_grpc(cli, profiles, socket, monkeypatch):
    socket.touch()
    monkeypatch.setitem(sys.modules, "grpc", None)
    said = cli("gpus", "--host", profiles["genoa-h200"])
    assert "grpc is not installed: GPU usage by pods unknown" in said.err
