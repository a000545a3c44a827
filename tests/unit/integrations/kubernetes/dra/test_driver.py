"""The driver with a simulated kubelet and a simulated API server: real gRPC over sockets, real HTTP."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from typing import Any

import grpc
import pytest
from aiohttp import web
from api_server import serving
from claiming import NODE, Claims
from coroutines import until

from imagematrix.common.record import replace
from imagematrix.errors import EngineError, ProbeError, UsageError
from imagematrix.integrations.kubernetes.client import api
from imagematrix.integrations.kubernetes.client.api import ApiServer
from imagematrix.integrations.kubernetes.dra import cdi, slice_publisher
from imagematrix.integrations.kubernetes.dra.ledger import ClaimLedger
from imagematrix.integrations.kubernetes.dra.resource_claims import ClaimError
from imagematrix.integrations.kubernetes.dra.server import DraDriver, DriverSettings
from imagematrix.integrations.kubernetes.dra.slices import DRIVER, SLICES
from imagematrix.integrations.kubernetes.nodes.node_monitor import MonitorTimes
from imagematrix.integrations.kubernetes.nodes.node_view import NodeView, open_node_view
from imagematrix.integrations.kubernetes.plugin.offer import (
    GPU,
    AllocationError,
    allocate_devices,
    find_users,
    make_offer,
)
from imagematrix.launcher.docker.devices import DevicesError, find_absent_nodes
from imagematrix.launcher.gpu_claims.survey import survey_node_leases
from imagematrix.launcher.gpu_claims.usage import Consumer
from imagematrix.launcher.kubelet.grpc_server import make_handler, start_server
from imagematrix.launcher.kubelet.messages import PODS, load_message
from imagematrix.launcher.kubelet.sockets import find_answering_socket

TIMES = MonitorTimes(probe=0.02, usage=0.02, stop=1)
PROCESS = Consumer(kind="process", name="python3", pid=7, user="ann")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(api, "PAUSE_S", 0.02)
    monkeypatch.setattr(slice_publisher, "PAUSE_S", 0.02)


class FakeCluster:
    """An API server with one node, its slices and claims; a test makes it fail, or changes its slices."""

    def __init__(self):
        self.uid = "node-uid"
        self.slices = {}
        self.claims = {}
        self.version = 0
        self.status = 200
        self.refused: dict[str, int] = {}  # the status by method
        self.calls = []
        self.drop: tuple[str, ...] = ()  # attributes that it does not know
        self.watches: list[asyncio.Queue[Any]] = []
        self.history: list[tuple[int, Any]] = []  # versions and events

    def application(self):
        application = web.Application(middlewares=[self.check])
        application.router.add_get(SLICES, self.list)
        application.router.add_post(SLICES, self.create)
        application.router.add_put(SLICES + "/{name}", self.update)
        application.router.add_delete(SLICES + "/{name}", self.remove)
        application.router.add_get(f"/api/v1/nodes/{NODE}", self.node)
        application.router.add_get(
            "/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}", self.claim
        )
        return application

    @web.middleware
    async def check(self, request, handler):
        self.calls.append((request.method, request.path))
        status = self.refused.get(request.method, self.status)
        if status != 200:
            return web.json_response({"message": "no"}, status=status)
        return await handler(request)

    async def node(self, _request):
        return web.json_response({"kind": "Node", "metadata": {"name": NODE, "uid": self.uid}})

    async def claim(self, request):
        found = self.claims.get((request.match_info["namespace"], request.match_info["name"]))
        return web.json_response(found or {"kind": "Status"}, status=200 if found else 404)

    async def list(self, request):
        assert request.query["fieldSelector"] == f"spec.driver={DRIVER},spec.nodeName={NODE}"
        if "watch" in request.query:
            response = web.StreamResponse()
            await response.prepare(request)
            events: asyncio.Queue[Any] = asyncio.Queue()
            for version, event in self.history:
                if version > int(request.query["resourceVersion"]):
                    events.put_nowait(event)
            self.watches.append(events)
            while (event := await events.get()) is not None:
                await response.write(json.dumps(event).encode() + b"\n")
            return response
        items = [{key: one[key] for key in ("metadata", "spec")} for one in self.slices.values()]
        metadata = {"resourceVersion": str(self.version)}
        return web.json_response({"kind": "ResourceSliceList", "metadata": metadata, "items": items})

    def _store(self, kind, one):
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        for device in one["spec"]["devices"]:
            for name in self.drop:
                device["attributes"].pop(name, None)
        self.slices[one["metadata"]["name"]] = one
        self.tell(kind, one)
        return web.json_response(one, status=201 if kind == "ADDED" else 200)

    def tell(self, kind, one):
        event = {"type": kind, "object": json.loads(json.dumps(one))}
        self.history.append((self.version, event))
        for watch in self.watches:
            watch.put_nowait(event)

    async def create(self, request):
        one = await request.json()
        if one["metadata"]["name"] in self.slices:
            return web.json_response({"reason": "AlreadyExists"}, status=409)
        return self._store("ADDED", one)

    async def update(self, request):
        one = await request.json()
        if (
            one["metadata"]["resourceVersion"]
            != self.slices[request.match_info["name"]]["metadata"]["resourceVersion"]
        ):
            return web.json_response({"reason": "Conflict"}, status=409)
        return self._store("MODIFIED", one)

    async def remove(self, request):
        if request.match_info["name"] not in self.slices:
            return web.json_response({}, status=404)
        self.forget(request.match_info["name"])
        return web.json_response({"kind": "Status"})

    def forget(self, name):
        self.version += 1
        gone = self.slices.pop(name)
        gone["metadata"]["resourceVersion"] = str(self.version)
        self.tell("DELETED", gone)

    def allocate(self, number, *devices, **more):
        self.claims["default", f"claim-{number}"] = Claims.document(number, *devices, **more)

    @property
    def published(self):
        """The names of all published devices."""
        return {device["name"] for one in self.slices.values() for device in one["spec"]["devices"]}


class Node:
    """A node whose hardware and users a test changes, its kubelet, and the lines that the driver writes."""

    def __init__(self, host, token, root, cdi_root):
        self.host, self.token, self.root, self.cdi_root = host, token, root, cdi_root
        self.cluster = FakeCluster()
        self.error = None
        self.unknown = None  # the error if the usage outside of pods cannot be read
        self.used, self.plugins = {}, {}
        self.missing = ()  # device nodes
        self.notes = []
        self.names = [gpu.uuid.lower() for gpu in host.gpus]

    def probe(self):
        if self.error:
            raise self.error
        return self.host

    def usage(self, gpus):
        assert isinstance(gpus, tuple)
        if self.unknown:
            raise self.unknown
        return self.used

    def require(self, paths):
        problems = find_absent_nodes(path for path in paths if path in self.missing)
        if problems:
            raise DevicesError(problems)

    def lose(self, index):
        gpus = tuple(replace(gpu, state="lost") if gpu.index == index else gpu for gpu in self.host.gpus)
        self.host = replace(self.host, gpus=gpus)

    @contextlib.asynccontextmanager
    async def driver(self):
        """Run the driver with an API server for its cluster."""
        ended = asyncio.Event()
        async with serving(self.cluster.application()) as server:
            settings = DriverSettings(
                node=NODE,
                api=ApiServer(url=str(server.make_url("/")), token=self.token),
                view=NodeView(
                    probe=self.probe,
                    survey_usage=self.usage,
                    survey_plugin_usage=lambda _: self.plugins,
                    require_nodes=self.require,
                ),
                kubelet=self.root,
                cdi_root=self.cdi_root,
                times=TIMES,
            )
            running = asyncio.create_task(DraDriver(settings, self.notes.append).run(ended))
            registration = self.root / "plugins_registry" / f"{DRIVER}-reg.sock"
            try:
                await until(lambda: registration.exists() or running.done())
                yield running
                ended.set()
                await asyncio.wait_for(running, 10)
                assert not registration.exists()
                assert [*(self.root / "plugins" / DRIVER).iterdir()] == []
            finally:
                for watch in self.cluster.watches:
                    watch.put_nowait(None)

    async def call(self, path, method, request, answer, **fields):
        async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
            ask = channel.unary_unary(
                method,
                request_serializer=lambda one: one.SerializeToString(),
                response_deserializer=load_message(answer).FromString,
            )
            return await ask(load_message(request)(**fields), timeout=10)

    async def register(self):
        """Do what kubelet does with a socket in its folder; return what it learns."""
        (path,) = (self.root / "plugins_registry").iterdir()
        info = await self.call(path, "/pluginregistration.Registration/GetInfo", "Empty", "PluginInfo")
        status = {"plugin_registered": True}
        method = "/pluginregistration.Registration/NotifyRegistrationStatus"
        await self.call(path, method, "RegistrationStatus", "Empty", **status)
        return info

    async def prepare(self, *references):
        return await self._claims("NodePrepareResources", references)

    async def unprepare(self, *references):
        return await self._claims("NodeUnprepareResources", references)

    async def _claims(self, method, references):
        """Return the answer for each claim, by UID."""
        info = await self.register()
        claims = [
            load_message("Claim")(namespace=one.namespace, name=one.name, uid=one.uid) for one in references
        ]
        answer = await self.call(
            info.endpoint,
            f"/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/{method}",
            f"{method}Request",
            f"{method}Response",
            claims=claims,
        )
        return {one.key: one.value for one in answer.claims}

    @property
    def specs(self):
        """The GPUs' device nodes in each spec, by the UID of the claim."""
        return {
            uid: [path for path in cdi.list_device_nodes(cdi.read_spec(file)) if path[-1].isdigit()]
            for uid, file in cdi.list_prepared_claims(self.cdi_root)
        }


@pytest.fixture
def node(hosts, tmp_path, kubelet_root, cdi_root):
    (tmp_path / "token").write_text("secret")
    return Node(hosts["genoa-h200"], tmp_path / "token", kubelet_root, cdi_root)


async def test_kubelet_learns_of_the_driver_and_prepares_a_claim(node):
    node.cluster.allocate(1, node.names[3])
    async with node.driver():
        info = await node.register()
        answers = await node.prepare(Claims.reference(1))
        specs = node.specs
    assert [info.type, info.name, [*info.supported_versions]] == ["DRAPlugin", DRIVER, ["v1.DRAPlugin"]]
    assert info.endpoint == f"{node.root}/plugins/{DRIVER}/dra.sock"
    uid = Claims.uid(1)
    (device,) = answers[uid].devices
    assert [device.pool_name, device.device_name] == [NODE, node.names[3]]
    assert [[*device.request_names], [*device.cdi_device_ids]] == [["gpu"], [f"imagematrix.io/claim={uid}"]]
    assert answers[uid].error == ""
    assert specs == {uid: ["/dev/nvidia3"]}
    assert node.specs == specs  # the driver has ended, and the pod goes on
    assert f"claim default/claim-1: prepared {node.names[3]}" in node.notes
    assert "registered" in node.notes


async def test_devices_are_published_as_they_change(node):
    async with node.driver():
        await until(lambda: node.cluster.published == {*node.names})
        (made,) = node.cluster.slices.values()
        (owner,) = made["metadata"]["ownerReferences"]
        node.lose(2)
        await until(lambda: node.cluster.published == {*node.names} - {node.names[2]})
        node.used = {"nvidia0": (PROCESS,)}
        await until(lambda: node.cluster.published == {*node.names[1:]} - {node.names[2]})
        node.used = {}
        await until(lambda: len(node.cluster.published) == 7)
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Node", NODE, "node-uid")
    assert f"{node.names[0]} is in use by {PROCESS}" in node.notes
    assert f"{node.names[0]} is no longer in use outside of pods" in node.notes
    assert len(node.cluster.published) == 7  # kubelet removes the slices of a driver that does not come back


async def test_gpus_that_a_device_plugin_has_given_out_are_not_published(node):
    node.plugins = {"nvidia0": (Consumer(kind="container", name="default/pod (main)"),)}
    async with node.driver():
        await until(lambda: node.cluster.published == {*node.names[1:]})
        node.plugins = {}
        await until(lambda: node.cluster.published == {*node.names})


async def test_slices_that_others_change_or_remove_are_made_again(node):
    async with node.driver():
        await until(lambda: node.cluster.published)
        (name,) = node.cluster.slices
        node.cluster.forget(name)  # as kubelet does when it starts
        await until(lambda: node.cluster.published)
        changed = json.loads(json.dumps(node.cluster.slices[name]))
        changed["spec"]["devices"] = []
        changed["metadata"]["name"] = "stale"
        node.cluster._store("ADDED", changed)
        await until(lambda: [*node.cluster.slices] == [name])
        changed["metadata"]["name"] = name
        node.cluster._store("MODIFIED", changed)
        await until(lambda: len(node.cluster.published) == 8)


async def test_slices_belong_to_the_node_that_was_registered_again(node):
    """`kubectl delete node` removes the slices of the first one, and kubelet registers another."""
    async with node.driver():
        await until(lambda: node.cluster.published)
        (name,) = node.cluster.slices
        node.cluster.uid = "another-uid"
        node.cluster.forget(name)
        await until(lambda: node.cluster.published)
        (made,) = node.cluster.slices.values()
    assert [owner["uid"] for owner in made["metadata"]["ownerReferences"]] == ["another-uid"]


async def test_what_the_api_server_leaves_out_is_not_sent_forever(node):
    node.cluster.drop = ("class",)
    for times in (1, 2):
        async with node.driver():
            await until(lambda times=times: len([n for n in node.notes if "published" in n]) == times)
            await asyncio.sleep(0.3)
    assert [method for method, path in node.cluster.calls if path.startswith(SLICES) and method != "GET"] == [
        "POST",
        "PUT",
    ]


async def test_an_api_server_that_fails_is_tried_again(node):
    node.cluster.status = 403
    async with node.driver():
        await until(lambda: any("slices cannot be read" in note for note in node.notes))
        refused = await node.prepare(Claims.reference(1))
        await asyncio.sleep(0.2)
        node.cluster.status = 200
        await until(lambda: node.cluster.published)
    assert "the API server answered 403" in refused[Claims.uid(1)].error
    assert len([note for note in node.notes if "slices cannot be read" in note]) == 1


@pytest.mark.parametrize("status", [403, 409])
async def test_devices_that_cannot_be_published_are_published_later(node, status):
    node.cluster.refused = {"POST": status}
    failure = "devices cannot be published: the API server answered"
    async with node.driver():
        await until(lambda: any(failure in note for note in node.notes))
        await asyncio.sleep(0.2)
        node.cluster.refused = {}
        await until(lambda: len(node.cluster.published) == 8)
    assert len([note for note in node.notes if failure in note]) == 1


async def test_a_claim_that_cannot_be_unprepared_stays(node, monkeypatch):
    node.cluster.allocate(1, node.names[0])
    async with node.driver():
        await node.prepare(Claims.reference(1))
        with monkeypatch.context() as patch:
            patch.setattr(ClaimLedger, "unprepare", raising(ClaimError("it cannot be removed")))
            failed = await node.unprepare(Claims.reference(1))
        left = node.specs
        done = await node.unprepare(Claims.reference(1))
    assert failed[Claims.uid(1)].error == "it cannot be removed"
    assert left == {Claims.uid(1): ["/dev/nvidia0"]}
    assert done[Claims.uid(1)].error == ""
    assert "claim default/claim-1: not unprepared: it cannot be removed" in node.notes


def raising(error):
    """Return a function that raises an error."""

    def fail(*_):
        raise error

    return fail


async def test_pods_that_name_one_claim_share_its_gpu_and_other_claims_do_not_get_it(node):
    for number in (1, 2):
        node.cluster.allocate(number, node.names[0])
    async with node.driver():
        one, again = [await node.prepare(Claims.reference(1)) for _ in range(2)]
        other = await node.prepare(Claims.reference(2))
        await node.unprepare(Claims.reference(1))
        then = await node.prepare(Claims.reference(2))
    assert one == again
    assert "in use by container default/claim-1 (claim)" in other[Claims.uid(2)].error
    assert not other[Claims.uid(2)].devices
    assert then[Claims.uid(2)].error == ""
    assert node.specs == {Claims.uid(2): ["/dev/nvidia0"]}


async def test_two_claims_of_one_call_do_not_get_one_gpu(node):
    for number in (1, 2):
        node.cluster.allocate(number, node.names[0])
    async with node.driver():
        answers = await node.prepare(Claims.reference(1), Claims.reference(2))
    assert sorted(bool(answer.error) for answer in answers.values()) == [False, True]
    assert len(node.specs) == 1


async def test_claims_that_are_prepared_at_once_do_not_get_one_gpu(node):
    for number in range(6):
        node.cluster.allocate(number, node.names[number % 2])
    async with node.driver():
        all_answers = await asyncio.gather(*(node.prepare(Claims.reference(number)) for number in range(6)))
    answers = [answer for some in all_answers for answer in some.values()]
    assert sorted(bool(answer.error) for answer in answers) == [False] * 2 + [True] * 4
    assert sorted(node.specs.values()) == [["/dev/nvidia0"], ["/dev/nvidia1"]]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda node: node.cluster.claims.clear(), "answered 404"),
        (lambda node: node.cluster.allocate(1, "gpu-of-yesterday"), "device 'gpu-of-yesterday' not found"),
        (lambda node: node.cluster.allocate(1, "../../etc"), "device '../../etc' not found"),
        (lambda node: node.cluster.allocate(1, node.names[0], driver="gpu.nvidia.com"), "no device of"),
        (lambda node: node.cluster.allocate(1, node.names[0], pool="n2"), "another node"),
        (lambda node: node.lose(0), "cannot be used: lost"),
        (lambda node: setattr(node, "error", ProbeError("no /proc")), "no /proc"),
        (lambda node: setattr(node, "host", replace(node.host, gpus=())), "not found on this node"),
        (lambda node: setattr(node, "used", {"nvidia0": (PROCESS,)}), "in use by process python3"),
        (lambda node: setattr(node, "plugins", {"nvidia0": (PROCESS,)}), "in use by process python3"),
        (lambda node: setattr(node, "unknown", EngineError("no answer")), "no answer"),
        (lambda node: setattr(node, "missing", ("/dev/nvidia-uvm",)), "/dev/nvidia-uvm: not found"),
    ],
)
async def test_a_claim_that_cannot_be_prepared_is_refused_with_the_reason(node, change, why):
    node.cluster.allocate(1, node.names[0])
    async with node.driver():
        await until(lambda: node.cluster.published)
        change(node)
        answer = (await node.prepare(Claims.reference(1)))[Claims.uid(1)]
    assert why in answer.error
    assert not answer.devices
    assert node.specs == {}
    assert any(note.startswith("claim default/claim-1: refused: ") for note in node.notes)


async def test_a_claim_of_the_same_name_made_anew_is_another_one(node):
    node.cluster.allocate(1, node.names[0])
    anew = Claims.reference(1, uid=Claims.uid(9))
    async with node.driver():
        await node.prepare(Claims.reference(1))
        refused = await node.prepare(anew)
        node.cluster.claims["default", "claim-1"]["metadata"]["uid"] = Claims.uid(9)
        waiting = await node.prepare(anew)
        await node.unprepare(Claims.reference(1))
        done = await node.prepare(anew)
        refused, waiting, done = [one[Claims.uid(9)].error for one in (refused, waiting, done)]
    assert refused == "the claim was replaced by another of its name"
    assert "in use by container default/claim-1 (claim)" in waiting
    assert done == ""
    assert node.specs == {Claims.uid(9): ["/dev/nvidia0"]}


@pytest.mark.parametrize("uid", ["../../../tmp/x", "", "x" * 10_000, "\x00"])
async def test_a_uid_that_is_none_never_becomes_a_path(node, uid):
    reference = Claims.reference(1, uid=uid)
    async with node.driver():
        prepared = await node.prepare(reference)
        unprepared = await node.unprepare(reference)
    assert "invalid claim" in prepared[uid].error
    assert unprepared[uid].error == ""
    assert not node.cdi_root.exists()


async def test_kubelet_may_unprepare_twice_and_what_was_never_prepared(node):
    node.cluster.allocate(1, node.names[0])
    async with node.driver():
        await node.prepare(Claims.reference(1))
        node.cluster.claims.clear()
        for _ in range(2):
            answers = await node.unprepare(Claims.reference(1), Claims.reference(2))
            assert [answers[Claims.uid(number)].error for number in (1, 2)] == ["", ""]
    assert node.specs == {}
    assert node.notes.count("claim default/claim-1: unprepared") == 1


async def test_a_claim_with_several_requests(node):
    node.cluster.allocate(1, ("a", node.names[0]), ("b/large", node.names[1]), ("b/large", node.names[2]))
    uid = Claims.uid(1)
    async with node.driver():
        answers = await node.prepare(Claims.reference(1))
    devices = answers[uid].devices
    assert [([*one.request_names], one.device_name, [*one.cdi_device_ids]) for one in devices] == [
        (["a"], node.names[0], [f"imagematrix.io/claim={uid}_a"]),
        (["b"], node.names[1], [f"imagematrix.io/claim={uid}_b"]),
        (["b"], node.names[2], []),
    ]


async def test_a_driver_that_starts_again_neither_loses_nor_doubles_a_claim(node):
    for number in (1, 2):
        node.cluster.allocate(number, node.names[0])
    async with node.driver():
        before = await node.prepare(Claims.reference(1))
    node.used = survey_node_leases()  # as any survey of the node shows it
    async with node.driver():
        await until(lambda: len(node.cluster.published) == 8)
        after = await node.prepare(Claims.reference(1))
        other = await node.prepare(Claims.reference(2))
        await node.unprepare(Claims.reference(1))
    assert before == after
    assert "claim-1" in other[Claims.uid(2)].error
    assert node.specs == {}


async def test_nothing_is_published_while_the_usage_is_unknown(node):
    node.unknown = EngineError("no answer")
    async with node.driver():
        await asyncio.sleep(0.2)
        nothing = [*node.cluster.slices]
        node.unknown = None
        await until(lambda: len(node.cluster.published) == 8)
        node.unknown = EngineError("no answer")
        await until(lambda: any("the last known counts" in note for note in node.notes))
        assert nothing == []
    expected = "usage of GPUs outside of pods unknown, no device is published: no answer"
    assert node.notes.count(expected) == 1
    assert len(node.cluster.published) == 8


async def test_a_refused_registration_is_reported(node):
    async with node.driver():
        (path,) = (node.root / "plugins_registry").iterdir()
        method = "/pluginregistration.Registration/NotifyRegistrationStatus"
        await node.call(path, method, "RegistrationStatus", "Empty", error="no such version")
    assert "kubelet refused: no such version" in node.notes


async def test_a_folder_that_cannot_be_made_ends_the_driver(node):
    (node.root / "plugins").write_text("a file")
    with pytest.raises(UsageError, match="plugins"):
        async with node.driver() as running:
            await running


async def test_the_command_serves_until_a_signal(node, tmp_path, profiles):
    config = tmp_path / "kubeconfig"
    (tmp_path / "token").write_text("secret")
    node.cluster.allocate(1, node.names[0])
    words = ["kubernetes", "dra-driver", "--node-name", NODE, "--host", profiles["genoa-h200"]]
    words += ["--kubelet", node.root, "--cdi-root", node.cdi_root, "--kubeconfig", config]
    words += ["--device-plugins", tmp_path]
    async with serving(node.cluster.application()) as server:
        config.write_text(
            json.dumps(
                {
                    "current-context": "c",
                    "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                    "clusters": [{"name": "k", "cluster": {"server": str(server.make_url("/"))}}],
                    "users": [{"name": "u", "user": {"tokenFile": "token"}}],
                }
            )
        )
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "imagematrix", *map(str, words), stderr=subprocess.PIPE
        )
        await until(lambda: node.cluster.published)
        answers = await node.prepare(Claims.reference(1))
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 10)
        for watch in node.cluster.watches:
            watch.put_nowait(None)
    assert (process.returncode, answers[Claims.uid(1)].error) == (0, ""), errors
    assert b"published 8 devices, generation 1\n" in errors
    assert b"Traceback" not in errors
    assert [*(node.root / "plugins_registry").iterdir()] == []
    assert node.specs == {Claims.uid(1): ["/dev/nvidia0"]}
    assert [str(one) for one in survey_node_leases()["nvidia0"]] == ["container default/claim-1 (claim)"]


@pytest.mark.parametrize("words", [("dra-driver", "--node-name", NODE), ("device-plugin",)])
def test_a_node_has_a_driver_or_a_plugin_but_not_both(cli, kubelet_root, profiles, words):
    """Each would offer the scheduler the same GPUs."""
    paths = {
        "dra-driver": kubelet_root / "imagematrix.io-gpu.sock",
        "device-plugin": kubelet_root / "plugins" / DRIVER / "dra.sock",
    }
    path = paths[words[0]]
    path.parent.mkdir(parents=True, exist_ok=True)
    options = ("--host", profiles["genoa-h200"], "--kubelet", kubelet_root, "--device-plugins", kubelet_root)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        done = cli("kubernetes", *words, *options)
    assert (done.code, done.out) == (2, "")
    assert f"offers this node's GPUs, at {path}" in done.err


def test_what_a_container_sees_of_the_node(tmp_path, host, claims, cdi_root):
    (tmp_path / "proc").mkdir()
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    view = open_node_view(None, tmp_path)
    view.require_nodes(("/dev/nvidia0",))
    with pytest.raises(DevicesError, match="/dev/nvidia1: not found"):
        view.require_nodes(("/dev/nvidia0", "/dev/nvidia1"))
    assert view.survey_usage(host.gpus) == view.survey_plugin_usage(host.gpus) == {}
    ClaimLedger(cdi_root).prepare(claims.reference(1), host, {"gpu": host.gpus[:1]}, dict)
    usage = view.survey_usage(host.gpus)
    assert [str(one) for one in usage["nvidia0"]] == ["container default/claim-1 (claim)"]
    offer = make_offer(host)
    uuid = str(host.gpus[0].uuid)
    with pytest.raises(AllocationError, match="in use by container default/claim-1"):
        allocate_devices(offer, GPU, [uuid], {}, find_users(offer, usage, {}))


async def test_a_container_sees_what_device_plugins_have_given_out(tmp_path, kubelet_root, host):
    """Also ours, which ran on the node before: the pods that it gave GPUs keep them."""
    second = host.gpus[1]

    async def answer(_request, _context):
        devices = load_message("ContainerDevices")(resource_name=GPU, device_ids=[second.uuid])
        container = load_message("ContainerResources")(name="main", devices=[devices])
        pod = load_message("PodResources")(name="pod", namespace="default", containers=[container])
        return load_message("ListPodResourcesResponse")(pod_resources=[pod])

    path = kubelet_root / "pod-resources" / "kubelet.sock"
    path.parent.mkdir()
    method = make_handler(grpc.unary_unary_rpc_method_handler, answer, "Empty")
    server = await start_server(path, grpc.method_handlers_generic_handler(PODS, {"List": method}))
    for root in (tmp_path, None):
        view = open_node_view(None, root, kubelet_root)
        usage = await asyncio.to_thread(view.survey_plugin_usage, host.gpus)
        assert {key: [str(one) for one in users] for key, users in usage.items()} == {
            f"nvidia{second.minor}": ["container default/pod (main)"]
        }
    await server.stop(None)


def test_the_socket_of_a_killed_plugin_does_not_count(kubelet_root):
    path = kubelet_root / "x.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    assert find_answering_socket([str(path), f"{path}.none"]) is None


def test_messages_are_encoded_as_kubelet_reads_them():
    device = load_message("PreparedDevice")(
        request_names=["r"], pool_name="p", device_name="d", cdi_device_ids=["c"], share_id="s"
    )
    answer = load_message("NodePrepareResourcesResponse")(
        claims=[
            load_message("PreparedClaim")(
                key="u", value=load_message("NodePrepareResourceResponse")(devices=[device], error="e")
            )
        ]
    )
    # In protobuf's encoding, a field with a length starts with its number times 8 plus 2, and the length.
    # A map is a list of messages with the fields 1 and 2.
    inner = b"\x0a\x01r\x12\x01p\x1a\x01d\x22\x01c\x2a\x01s"
    value = b"\x0a" + bytes([len(inner)]) + inner + b"\x12\x01e"
    entry = b"\x0a\x01u\x12" + bytes([len(value)]) + value
    assert answer.SerializeToString() == b"\x0a" + bytes([len(entry)]) + entry
    claim = load_message("Claim").FromString(b"\x0a\x02ns\x12\x03uid\x1a\x04name")
    assert (claim.namespace, claim.uid, claim.name) == ("ns", "uid", "name")
