"""The plugin with a simulated kubelet: real gRPC over sockets."""

import asyncio
import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from coroutines import until

from imagematrix.common.record import replace
from imagematrix.errors import EngineError, ProbeError, UsageError
from imagematrix.integrations.kubernetes.nodes.node_view import NodeView
from imagematrix.integrations.kubernetes.plugin.offer import GPU, make_offer
from imagematrix.integrations.kubernetes.plugin.server import Plugin, PluginSettings, PluginTimes
from imagematrix.launcher.gpu_claims.gpu_claim import lock_gpus
from imagematrix.launcher.gpu_claims.locks import Locks, release_locks
from imagematrix.launcher.gpu_claims.pods import VRAM
from imagematrix.launcher.gpu_claims.survey import survey_node_leases
from imagematrix.launcher.gpu_claims.usage import Consumer
from imagematrix.launcher.kubelet.grpc_server import start_server
from imagematrix.launcher.kubelet.messages import load_message

H200 = "imagematrix.io/gpu-h200"
TIMES = PluginTimes(watch=0.02, pods=0.02, usage=0.02, probe=0.02, answer=2, settle=1.0)


class Kubelet:
    """A simulated kubelet: it accepts registrations, connects back, and lists the devices of its pods."""

    def __init__(self, folder, *, refuse=()):
        self.folder = folder / "device-plugins"
        self.folder.mkdir(exist_ok=True)
        self.pods = folder / "root" / "pod-resources" / "kubelet.sock"
        self.pods.parent.mkdir(parents=True, exist_ok=True)
        self.registered = {}
        self.used = {}  # device ids by resource
        self.refuse = refuse
        self._servers = []

    async def __aenter__(self):
        for leftover in self.folder.iterdir():
            leftover.unlink()
        await self._serve(self.folder / "kubelet.sock", "v1beta1.Registration", Register=self._register)
        self.pods.unlink(missing_ok=True)
        await self._serve(self.pods, "v1.PodResourcesLister", List=self._list)
        return self

    async def __aexit__(self, *_):
        for server in self._servers:
            await server.stop(None)

    async def _serve(self, path, service, **methods):
        server = grpc.aio.server()
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                method,
                request_deserializer=load_message(
                    "RegisterRequest" if name == "Register" else "Empty"
                ).FromString,
                response_serializer=lambda answer: answer.SerializeToString(),
            )
            for name, method in methods.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        self._servers.append(server)

    async def _register(self, request, context):
        if request.resource_name in self.refuse:
            await context.abort(grpc.StatusCode.UNKNOWN, "unsupported version")
        assert request.version == "v1beta1"
        options = await self._call(request.endpoint, "GetDevicePluginOptions", "Empty", "DevicePluginOptions")
        self.registered[request.resource_name] = SimpleNamespace(
            endpoint=request.endpoint, packs=options.get_preferred_allocation_available
        )
        return load_message("Empty")()

    async def _list(self, _request, _context):
        devices = [
            load_message("ContainerDevices")(resource_name=resource, device_ids=ids)
            for resource, ids in self.used.items()
        ]
        container = load_message("ContainerResources")(name="main", devices=devices)
        pod = load_message("PodResources")(name="pod", namespace="default", containers=[container])
        return load_message("ListPodResourcesResponse")(pod_resources=[pod])

    async def _call(self, endpoint, method, request, answer, **fields):
        async with grpc.aio.insecure_channel(f"unix:{self.folder / endpoint}") as channel:
            call = channel.unary_unary(
                f"/v1beta1.DevicePlugin/{method}",
                request_serializer=lambda one: one.SerializeToString(),
                response_deserializer=load_message(answer).FromString,
            )
            return await call(load_message(request)(**fields), timeout=5)

    async def has(self, *resources):
        await until(lambda: self.registered.keys() >= set(resources))

    @contextlib.asynccontextmanager
    async def watching(self, resource):
        """Return the lists of healthy devices that the plugin sends, as an iterator."""
        async with grpc.aio.insecure_channel(
            f"unix:{self.folder / self.registered[resource].endpoint}"
        ) as channel:
            stream = channel.unary_stream(
                "/v1beta1.DevicePlugin/ListAndWatch",
                request_serializer=lambda one: one.SerializeToString(),
                response_deserializer=load_message("ListAndWatchResponse").FromString,
            )(load_message("Empty")(), timeout=20)
            answers = aiter(stream)

            async def healthy():
                """Return the next list, or None if the plugin has ended the stream."""
                answer: Any = await anext(answers, None)
                return answer and {device.ID for device in answer.devices if device.health == "Healthy"}

            yield healthy

    async def list_healthy(self, resource):
        async with self.watching(resource) as healthy:
            return await healthy()

    async def allocate(self, resource, *ids):
        answer = await self._call(
            self.registered[resource].endpoint,
            "Allocate",
            "AllocateRequest",
            "AllocateResponse",
            container_requests=[load_message("ContainerAllocateRequest")(devices_ids=ids)],
        )
        (container,) = answer.container_responses
        return container

    async def preferred(self, resource, available, count):
        request = load_message("ContainerPreferredAllocationRequest")(
            available_deviceIDs=available, allocation_size=count
        )
        answer = await self._call(
            self.registered[resource].endpoint,
            "GetPreferredAllocation",
            "PreferredAllocationRequest",
            "PreferredAllocationResponse",
            container_requests=[request],
        )
        return list(answer.container_responses[0].deviceIDs)


class Node:
    """A node whose hardware a test changes, and the lines that the plugin writes on it."""

    def __init__(self, host):
        self.host = host
        self.options = {}
        self.error = None
        self.hangs = None  # the event that ends a probe
        self.unknown = None  # the error if the usage outside of pods cannot be read
        self.used = {}  # it, by key
        self.notes = []
        self.uuids = [gpu.uuid for gpu in host.gpus]

    def probe(self):
        if self.hangs:
            self.hangs.wait(60)
        if self.error:
            raise self.error
        return self.host

    def usage(self, gpus):
        assert isinstance(gpus, tuple)
        if self.unknown:
            raise self.unknown
        return self.used

    def lose(self, *indices):
        gpus = tuple(replace(gpu, state="lost") if gpu.index in indices else gpu for gpu in self.host.gpus)
        self.host = replace(self.host, gpus=gpus)

    @contextlib.asynccontextmanager
    async def plugin(self, folder, times=TIMES):
        ended = asyncio.Event()
        settings = PluginSettings(
            view=NodeView(probe=self.probe, survey_usage=self.usage, lock_gpus=lock_gpus),
            offer=functools.partial(make_offer, **self.options),
            folder=folder / "device-plugins",
            kubelet=folder / "root",
            times=times,
        )
        running = asyncio.create_task(Plugin(settings, self.notes.append).run(ended))
        yield running
        ended.set()
        await asyncio.wait_for(running, 10)


@pytest.fixture
def folder():
    """A folder with a short path: a socket's path has at most 107 bytes, and pytest's folders are long."""
    with tempfile.TemporaryDirectory(prefix="kubelet-") as path:
        yield Path(path)


@pytest.fixture(autouse=True)
def locks(monkeypatch, tmp_path):
    monkeypatch.setenv("IMAGEMATRIX_LOCKS", str(tmp_path / "locks"))
    with Locks(str(tmp_path / "locks")) as locks:
        yield locks


@pytest.fixture
def node(host):
    return Node(host)


async def test_a_container_gets_device_nodes_and_no_mounts(folder, node):
    async with Kubelet(folder) as kubelet, node.plugin(folder):
        await kubelet.has(GPU)
        assert await kubelet.list_healthy(GPU) == set(node.uuids)
        registered = kubelet.registered[GPU]
        container = await kubelet.allocate(GPU, node.uuids[3])
    assert registered == SimpleNamespace(endpoint="imagematrix.io-gpu.sock", packs=False)
    paths = [device.host_path for device in container.devices]
    assert paths[:3] == ["/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm"]
    assert {(device.container_path, device.permissions) for device in container.devices} == {
        (path, "rw") for path in paths
    }
    assert [(one.key, one.value) for one in container.envs] == [("IMAGEMATRIX_GPUS", node.uuids[3])]
    assert {field.name for field in container.DESCRIPTOR.fields} == {"envs", "devices"}
    assert node.notes == ["offering 8 imagematrix.io/gpu"]
    assert [path.name for path in (folder / "device-plugins").glob("imagematrix*")] == []


async def test_a_gpu_that_fails_becomes_unhealthy_and_healthy_again(folder, node):
    well = node.host
    async with Kubelet(folder) as kubelet, node.plugin(folder):
        await kubelet.has(GPU)
        async with kubelet.watching(GPU) as healthy:
            lists = [await healthy()]
            node.lose(5)
            lists.append(await healthy())
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await kubelet.allocate(GPU, node.uuids[5])
            node.host = well
            lists.append(await healthy())
    everything = set(node.uuids)
    assert lists == [everything, everything - {node.uuids[5]}, everything]
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert refused.value.details() == f"{node.uuids[5]} cannot be used: lost"
    assert f"imagematrix.io/gpu: {refused.value.details()}" in node.notes


# As in operation, but the node is not probed again before the test has ended.
SELDOM = dataclasses.replace(TIMES, probe=60.0, usage=60.0)


async def test_a_gpu_that_has_failed_since_the_last_probe_is_not_given_out(folder, node):
    everything = set(node.uuids)
    async with Kubelet(folder) as kubelet, node.plugin(folder, SELDOM):
        await kubelet.has(GPU)
        async with kubelet.watching(GPU) as healthy:
            assert await healthy() == everything
            node.lose(5)
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await kubelet.allocate(GPU, node.uuids[5])
            assert await healthy() == everything - {node.uuids[5]}
        node.host = replace(node.host, gpus=node.host.gpus[:5])  # fallen off the bus
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await kubelet.allocate(GPU, node.uuids[6])
        node.error = ProbeError("no /proc")
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await kubelet.allocate(GPU, node.uuids[0])
        node.error = None
        container = await kubelet.allocate(GPU, node.uuids[0])
    for refused, why in (
        (lost, f"{node.uuids[5]} cannot be used: lost"),
        (gone, f"{GPU}: device '{node.uuids[6]}' not found"),
        (unknown, "no /proc"),
    ):
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert refused.value.details() == why
    assert container.devices[0].host_path == "/dev/nvidia0"


async def test_minors_that_have_changed_since_the_last_probe_are_those_given_out(folder, node):
    one, two = node.host.gpus[:2]
    async with Kubelet(folder) as kubelet, node.plugin(folder, SELDOM):
        await kubelet.has(GPU)
        swapped = (replace(one, minor=two.minor), replace(two, minor=one.minor))
        node.host = replace(node.host, gpus=(*swapped, *node.host.gpus[2:]))
        container = await kubelet.allocate(GPU, one.uuid)
    assert container.devices[0].host_path == f"/dev/nvidia{two.minor}"


async def test_a_node_that_cannot_be_read_in_time_gives_out_nothing(folder, node):
    """A driver can hang on a lost GPU, and kubelet, which sets no limit, would start no pod at all."""
    goes_on = threading.Event()
    async with Kubelet(folder) as kubelet, node.plugin(folder, dataclasses.replace(SELDOM, read=0.2)):
        await kubelet.has(GPU)
        node.hangs = goes_on
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await kubelet.allocate(GPU, node.uuids[0])
        goes_on.set()
    assert late.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert late.value.details() == "the node could not be read within 0.2 s"


async def test_the_plugin_registers_again_when_kubelet_restarts(folder, node):
    node.options = {"vram": True}
    async with node.plugin(folder):
        async with Kubelet(folder) as first:
            await first.has(GPU, VRAM)
        async with Kubelet(folder) as second:
            await second.has(GPU, VRAM)
            assert await second.list_healthy(GPU) == set(node.uuids)
            container = await second.allocate(GPU, node.uuids[0])
    assert container.devices[0].host_path == "/dev/nvidia0"
    assert node.notes.count("offering 8 imagematrix.io/gpu") == 2


async def test_a_gpu_held_under_one_name_is_unhealthy_under_another_until_its_pod_ends(folder, node):
    node.options = {"by": ["product"]}
    first, second, *_ = node.uuids
    everything = set(node.uuids)
    async with Kubelet(folder) as kubelet, node.plugin(folder):
        await kubelet.has(GPU, H200)
        async with kubelet.watching(GPU) as generic, kubelet.watching(H200) as product:
            lists = [await generic(), await product()]
            await kubelet.allocate(H200, first)
            lists.append(await generic())
            with pytest.raises(grpc.aio.AioRpcError, match="is in use as"):
                await kubelet.allocate(GPU, first)
            kubelet.used = {H200: [first], GPU: [second]}
            lists.append(await product())
            await asyncio.sleep(TIMES.settle + 0.2)
            kubelet.used = {GPU: [second]}
            lists.append(await generic())
            kubelet.used = {}
            lists.append(await product())
        assert lists == [
            everything,
            everything,
            everything - {first},
            everything - {second},
            everything,
            everything,
        ]


async def test_an_allocation_whose_pod_never_started_is_forgotten(folder, node):
    node.options = {"by": ["product"]}
    first = node.uuids[0]
    async with Kubelet(folder) as kubelet, node.plugin(folder):
        await kubelet.has(GPU, H200)
        async with kubelet.watching(GPU) as generic:
            assert await generic() == set(node.uuids)
            allocated = time.monotonic()
            await kubelet.allocate(H200, first)
            assert await generic() == set(node.uuids) - {first}
            assert await generic() == set(node.uuids)
            assert time.monotonic() - allocated >= TIMES.settle


PROCESS = Consumer(kind="process", name="python3", pid=7, user="ann")
CONTAINER = Consumer(kind="container", name="train (training:v1)")


@pytest.mark.parametrize("user", [PROCESS, CONTAINER])
async def test_a_gpu_in_use_outside_of_pods_is_not_given_out(folder, node, user):
    node.options = {"by": ["product"]}
    first, second, *_ = node.uuids
    async with Kubelet(folder) as kubelet, node.plugin(folder):
        await kubelet.has(GPU, H200)
        async with kubelet.watching(GPU) as generic, kubelet.watching(H200) as product:
            assert await generic() == await product() == set(node.uuids)
            node.used = {"nvidia0": (user,)}
            assert await generic() == await product() == set(node.uuids) - {first}
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await kubelet.allocate(GPU, first)
            await kubelet.allocate(GPU, second)
            node.used = {}
            while first not in await generic():
                pass
            assert refused.value.details() == f"{first} is in use by {user}"
    assert f"{first} is in use by {user}" in node.notes
    assert f"{first} is no longer in use outside of pods" in node.notes


async def test_a_gpu_that_was_taken_a_moment_ago_is_refused(folder, node):
    first = node.uuids[0]
    slow = dataclasses.replace(TIMES, usage=60)
    async with Kubelet(folder) as kubelet, node.plugin(folder, slow):
        await kubelet.has(GPU)
        node.used = {"nvidia0": (CONTAINER,)}
        with pytest.raises(grpc.aio.AioRpcError, match="is in use by container train"):
            await kubelet.allocate(GPU, first)


async def test_no_launch_gets_a_gpu_before_kubelet_lists_it(folder, node, locks):
    """Neither list has it meanwhile: the container does not exist yet."""
    node.options = {"vram": True}
    first = node.uuids[0]
    async with Kubelet(folder) as kubelet, node.plugin(folder):
        await kubelet.has(GPU, VRAM)
        await kubelet.allocate(VRAM, f"{first}::0")
        assert locks.take("nvidia0") is None
        assert (await asyncio.to_thread(survey_node_leases))["nvidia0"][0].pid == os.getpid()
        await kubelet.allocate(VRAM, f"{first}::1")
        kubelet.used = {VRAM: [f"{first}::0", f"{first}::1"]}
        await until(lambda: _is_free(locks, "nvidia0"))


async def test_a_gpu_that_no_pod_gets_in_the_end_is_free_again(folder, node, locks):
    async with Kubelet(folder) as kubelet, node.plugin(folder):
        await kubelet.has(GPU)
        await kubelet.allocate(GPU, node.uuids[0])
        assert not _is_free(locks, "nvidia0")
        await until(lambda: _is_free(locks, "nvidia0"))
        await kubelet.allocate(GPU, node.uuids[1])
    assert _is_free(locks, "nvidia1")


async def test_the_plugin_does_not_take_itself_for_a_user(folder, node):
    node.usage = lambda _: survey_node_leases()
    async with Kubelet(folder) as kubelet, node.plugin(folder, dataclasses.replace(TIMES, settle=60)):
        await kubelet.has(GPU)
        async with kubelet.watching(GPU) as healthy:
            await kubelet.allocate(GPU, node.uuids[0])
            await asyncio.sleep(5 * TIMES.usage)
            assert await healthy() == set(node.uuids)
    assert not any("in use" in note for note in node.notes)


async def test_a_gpu_that_a_launch_has_just_claimed_is_refused(folder, node, locks):
    """Its container does not run yet, and another PID namespace hides which process holds the lock."""
    async with Kubelet(folder) as kubelet, node.plugin(folder):
        await kubelet.has(GPU)
        claimed = locks.take("nvidia0")
        with pytest.raises(grpc.aio.AioRpcError, match="is in use by") as refused:
            await kubelet.allocate(GPU, node.uuids[1], node.uuids[0])
        assert _is_free(locks, "nvidia1")
        node.used = {"nvidia1": (CONTAINER,)}
        with pytest.raises(grpc.aio.AioRpcError, match="is in use by container train"):
            await kubelet.allocate(GPU, node.uuids[1])
        assert _is_free(locks, "nvidia1")
        release_locks(claimed)
        await kubelet.allocate(GPU, node.uuids[0])
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_launch_that_chooses_for_long_leaves_no_lock_of_a_pod_that_was_refused(folder, node, locks):
    async with Kubelet(folder) as kubelet, node.plugin(folder, dataclasses.replace(SELDOM, read=0.3)):
        await kubelet.has(GPU)
        with locks.hold_mutex(), pytest.raises(grpc.aio.AioRpcError):
            await kubelet.allocate(GPU, node.uuids[0])
        await asyncio.sleep(0.3)
        assert _is_free(locks, "nvidia0")
        await kubelet.allocate(GPU, node.uuids[0])


async def test_a_lock_folder_that_cannot_be_used_ends_the_plugin_at_its_start(folder, node, locks):
    file = Path(locks.path).with_name("file")
    file.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IMAGEMATRIX_LOCKS", str(file))
        with pytest.raises(ProbeError, match="cannot use the GPU locks"):
            async with Kubelet(folder), node.plugin(folder) as running:
                await asyncio.wait_for(running, 10)


def _is_free(locks, name):
    taken = locks.take(name)
    release_locks(taken or ())
    return taken is not None


async def test_a_gpu_whose_users_are_unknown_is_refused(folder, node):
    """The engine restarts, so the last known usage counts in lists, but not for giving a GPU out."""
    first = node.uuids[0]
    async with Kubelet(folder) as kubelet, node.plugin(folder):
        await kubelet.has(GPU)
        node.unknown = EngineError("the engine restarts")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await kubelet.allocate(GPU, first)
        assert await kubelet.list_healthy(GPU) == set(node.uuids)
        node.unknown = None
        await kubelet.allocate(GPU, first)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert refused.value.details() == "usage of GPUs outside of pods unknown: the engine restarts"


async def test_processes_of_a_pod_do_not_make_its_gpu_unhealthy(folder, node):
    node.options = {"vram": True}
    first = node.uuids[0]
    async with Kubelet(folder) as kubelet, node.plugin(folder):
        await kubelet.has(VRAM)
        kubelet.used = {VRAM: [f"{first}::0"]}
        async with kubelet.watching(VRAM) as shares, kubelet.watching(GPU) as whole:
            while first in await whole():
                pass
            node.used = {"nvidia0": (PROCESS,)}
            await kubelet.allocate(VRAM, f"{first}::1")
            node.used = {"nvidia0": (PROCESS, CONTAINER)}
            while f"{first}::1" in await shares():
                pass


async def test_nothing_is_offered_before_the_usage_outside_of_pods_is_known(folder, node):
    node.unknown = EngineError("the engine does not answer")
    async with Kubelet(folder) as kubelet, node.plugin(folder):
        await until(lambda: node.notes)
        assert kubelet.registered == {}
        node.unknown, node.used = None, {"nvidia0": (CONTAINER,)}
        await kubelet.has(GPU)
        node.unknown = EngineError("the engine restarts")
        await until(lambda: any("the last known counts" in note for note in node.notes))
        assert await kubelet.list_healthy(GPU) == set(node.uuids[1:])
    assert "no device is offered: the engine does not answer" in node.notes[0]


@pytest.mark.parametrize(
    ("resource", "device"),
    [(VRAM, "{}::0"), ("imagematrix.io/class-of-yesterday", "{}"), ("nvidia.com/gpu", "{}")],
)
async def test_devices_that_pods_had_before_are_not_allocated(folder, node, resource, device):
    """Also under other names: a node's class changes with its driver, and NVIDIA's plugin has its UUIDs."""
    node.options = {"vram": True}
    async with Kubelet(folder) as kubelet:
        kubelet.used = {resource: [device.format(node.uuids[0])]}
        async with node.plugin(folder):
            await kubelet.has(GPU)
            assert await kubelet.list_healthy(GPU) == set(node.uuids[1:])


async def test_while_kubelet_does_not_list_its_pods_nothing_is_released(folder, node):
    node.options = {"by": ["product"]}
    async with Kubelet(folder) as kubelet, node.plugin(folder):
        await kubelet.has(GPU, H200)
        kubelet.pods.unlink()
        await until(lambda: any("pods unknown" in note for note in node.notes))
        await kubelet.allocate(H200, node.uuids[0])
        await asyncio.sleep(TIMES.settle + 0.2)
        assert await kubelet.list_healthy(GPU) == set(node.uuids[1:])
    assert len([note for note in node.notes if "pods unknown" in note]) == 1


async def test_nothing_is_offered_before_kubelet_lists_its_pods(folder, node):
    """After a restart of the plugin, a GPU that a pod has under one name would look free under another."""
    node.options = {"by": ["product"]}
    first = node.uuids[0]
    async with Kubelet(folder) as kubelet:
        kubelet.used = {H200: [first]}
        hidden = kubelet.pods.rename(kubelet.pods.with_name("hidden"))
        async with node.plugin(folder):
            await until(lambda: any("pods unknown" in note for note in node.notes))
            await asyncio.sleep(5 * TIMES.watch)
            assert kubelet.registered == {}
            hidden.rename(kubelet.pods)
            await kubelet.has(GPU, H200)
            assert await kubelet.list_healthy(GPU) == set(node.uuids[1:])


@pytest.mark.parametrize("away_s", [0, TIMES.settle + 0.2])
async def test_a_kubelet_that_restarts_lists_no_pods_at_first(folder, node, away_s):
    """It does not know them from the API server yet, but their containers keep running."""
    node.options = {"by": ["product"]}
    first = node.uuids[0]
    async with node.plugin(folder):
        async with Kubelet(folder) as before:
            before.used = {H200: [first]}
            await before.has(GPU, H200)
            async with before.watching(GPU) as healthy:
                while first in await healthy():
                    pass
        await asyncio.sleep(away_s)
        async with Kubelet(folder) as after:
            await after.has(GPU, H200)
            await asyncio.sleep(5 * TIMES.pods)
            with pytest.raises(grpc.aio.AioRpcError, match="is in use as"):
                await after.allocate(GPU, first)
            after.used = {H200: [first]}
            await asyncio.sleep(TIMES.settle + 0.2)
            assert await after.list_healthy(GPU) == set(node.uuids[1:])


async def test_a_gpu_that_a_probe_missed_is_still_held(folder, node):
    """Without NVML its UUID is unknown for a moment, while a pod keeps using it."""
    node.options = {"by": ["product"]}
    first = node.uuids[0]
    well = node.host
    nameless = replace(well, gpus=(replace(well.gpus[0], uuid=None), *well.gpus[1:]))
    async with Kubelet(folder) as kubelet, node.plugin(folder):
        await kubelet.has(GPU, H200)
        kubelet.used = {H200: [first]}
        async with kubelet.watching(H200) as product, kubelet.watching(GPU) as generic:
            while first in await generic():
                pass
            node.host = nameless
            while first in await product():
                pass
            await asyncio.sleep(TIMES.settle + 0.2)
            kubelet.pods.unlink()  # the plugin decides before it has read the list again
            await until(lambda: any("pods unknown" in note for note in node.notes))
            node.host = well
            while first not in await product():
                pass
            with pytest.raises(grpc.aio.AioRpcError, match="is in use as"):
                await kubelet.allocate(GPU, first)


async def test_shares_are_packed_and_refused_where_they_would_span_gpus(folder, node):
    node.options = {"vram": True}
    one, two, *_ = node.uuids
    async with Kubelet(folder) as kubelet, node.plugin(folder):
        await kubelet.has(VRAM)
        packed = await kubelet.preferred(VRAM, [f"{one}::0", f"{one}::1", f"{two}::0", f"{one}::2"], 2)
        container = await kubelet.allocate(VRAM, *packed)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await kubelet.allocate(VRAM, f"{one}::0", f"{two}::0")
        assert kubelet.registered[VRAM].packs
    assert packed == [f"{one}::0", f"{one}::1"]
    assert {one.key: one.value for one in container.envs}["IMAGEMATRIX_VRAM_MIB"] == "2048"
    assert "would span 2 GPUs" in refused.value.details()


async def test_what_a_node_offers_may_change(folder, node):
    empty = replace(node.host, gpus=())
    full, node.host = node.host, empty
    async with Kubelet(folder) as kubelet, node.plugin(folder):
        await until(lambda: node.notes)
        assert kubelet.registered == {}
        node.host = full
        await kubelet.has(GPU)
        async with kubelet.watching(GPU) as healthy:
            lists = [await healthy()]
            node.error = ProbeError("no /proc")
            await until(lambda: "the node cannot be probed: no /proc" in node.notes)
            node.error, node.host = None, empty
            assert [*lists, await healthy()] == [set(node.uuids), set()]
    assert node.notes[0] == "no GPU to offer on this node"


async def test_a_failure_is_reported_once_until_it_is_fixed(folder, node):
    failure = "the node cannot be probed: no /proc"
    async with Kubelet(folder) as kubelet, node.plugin(folder):
        await kubelet.has(GPU)
        for times in (1, 2):
            node.error = ProbeError("no /proc")
            await until(lambda times=times: node.notes.count(failure) == times)
            await asyncio.sleep(5 * TIMES.probe)
            node.error = None
            await asyncio.sleep(5 * TIMES.probe)
    assert node.notes.count(failure) == 2


async def test_a_refused_registration_is_tried_again(folder, node):
    async with Kubelet(folder, refuse=[GPU]) as kubelet, node.plugin(folder):
        await until(lambda: node.notes)
        kubelet.refuse = ()
        await until(lambda: node.notes[-1] == "offering 8 imagematrix.io/gpu")
    assert node.notes[0] == "kubelet did not register imagematrix.io/gpu: unsupported version"


async def test_a_refused_registration_does_not_stop_others(folder, node):
    node.options = {"by": ["product"], "vram": True}
    async with Kubelet(folder, refuse=[GPU]) as kubelet, node.plugin(folder):
        await kubelet.has(H200, VRAM)
        assert set(kubelet.registered) == {H200, VRAM}


async def test_the_plugin_waits_for_a_kubelet_and_reports_that_once(folder, node):
    async with node.plugin(folder):
        await until(lambda: any("waiting for kubelet" in note for note in node.notes))
        await asyncio.sleep(5 * TIMES.watch)
        waits = [note for note in node.notes if "waiting for kubelet" in note]
        async with Kubelet(folder) as kubelet:
            await kubelet.has(GPU)
    assert waits == [f"{folder}/device-plugins/kubelet.sock not found: waiting for kubelet"]


async def test_a_socket_that_cannot_be_created_ends_the_plugin(folder, node):
    long = folder / ("x" * (72 - len(str(folder))))  # room for kubelet's own sockets alone
    long.mkdir()
    settings = PluginSettings(
        view=NodeView(probe=node.probe, survey_usage=node.usage),
        folder=long / "device-plugins",
        kubelet=long / "root",
        times=TIMES,
    )
    with pytest.raises(UsageError, match="cannot listen on") as raised:
        async with Kubelet(long):
            await Plugin(settings, node.notes.append).run(asyncio.Event())

    assert raised.value.remedy == "use a shorter path: the path of a socket has at most 107 bytes"


async def test_a_socket_that_cannot_be_replaced_is_an_error(folder):
    path = folder / "gpu.sock"
    path.mkdir()
    with pytest.raises(UsageError, match=f"cannot replace {path}: Is a directory") as raised:
        await start_server(path)
    assert raised.value.remedy == "remove it as root"


def test_a_resource_with_a_long_name_has_a_short_socket(node):
    node.options = {"by": ["product"]}
    long = "RTX PRO 6000 Blackwell Max-Q Workstation Edition"
    node.host = replace(node.host, gpus=tuple(replace(gpu, name=f"NVIDIA {long}") for gpu in node.host.gpus))

    async def scenario(folder):
        async with Kubelet(folder) as kubelet, node.plugin(folder):
            await kubelet.has(GPU, f"{GPU}-{long.lower().replace(' ', '-')}")

    with tempfile.TemporaryDirectory(prefix="kubelet-like-in-var-lib-") as path:
        asyncio.run(scenario(Path(path)))


async def test_the_command_ends_on_a_signal_and_removes_its_sockets(folder, profiles):
    words = ["kubernetes", "device-plugin", "--host", profiles["genoa-h200"], "--kubelet", folder / "root"]
    words += ["--device-plugins", folder / "device-plugins"]
    async with Kubelet(folder) as kubelet:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "imagematrix", *map(str, words), stderr=subprocess.PIPE
        )
        await kubelet.has(GPU)
        present = (kubelet.folder / kubelet.registered[GPU].endpoint).exists()
        async with kubelet.watching(GPU) as healthy:
            await healthy()
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(grpc.RpcError):  # the client may be sending when the process ends
                assert await healthy() is None
        _, errors = await asyncio.wait_for(process.communicate(), 10)
        left = [path.name for path in kubelet.folder.iterdir()]
    assert (present, process.returncode, left) == (True, 0, ["kubelet.sock"])
    assert errors in {b"offering 8 imagematrix.io/gpu\n", b""}  # the signal may come before it is printed


def test_messages_are_encoded_as_kubelet_reads_them():
    grant = load_message("ContainerAllocateResponse")(
        envs=[load_message("Variable")(key="A", value="b")],
        devices=[load_message("DeviceSpec")(container_path="/c", host_path="/h", permissions="rw")],
    )
    request = load_message("RegisterRequest")(
        version="v1beta1",
        endpoint="e",
        resource_name="r/g",
        options=load_message("DevicePluginOptions")(get_preferred_allocation_available=True),
    )

    # In protobuf's encoding, a field with a length starts with its number times 8 plus 2, and the length.
    assert grant.SerializeToString() == b"\x0a\x06\x0a\x01A\x12\x01b\x1a\x0c\x0a\x02/c\x12\x02/h\x1a\x02rw"
    assert request.SerializeToString() == b"\x0a\x07v1beta1\x12\x01e\x1a\x03r/g\x22\x02\x10\x01"
    topology = b"\x1a\x04\x0a\x02\x08\x01"  # a field of Device that is not described here
    assert load_message("Device").FromString(b"\x0a\x01G\x12\x07Healthy" + topology).health == "Healthy"
