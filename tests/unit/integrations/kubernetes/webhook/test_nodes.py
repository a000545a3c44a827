"""The nodes and catalogs that the webhook follows, and the policies that it makes from them."""

import asyncio
import gc
import json
import socket
from contextlib import asynccontextmanager

import pytest
from admission_cases import A, B
from api_server import FakeApiServer, serving
from coroutines import running, until
from prometheus_client import generate_latest

from imagematrix.common import json_documents
from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.client import api
from imagematrix.integrations.kubernetes.client.api import ApiServer, find_cluster_api, read_namespace
from imagematrix.integrations.kubernetes.nodes.labels import CLASS
from imagematrix.integrations.kubernetes.nodes.nodes import parse_nodes
from imagematrix.integrations.kubernetes.webhook import state
from imagematrix.integrations.kubernetes.webhook.node_watch import WatchedNodes
from imagematrix.integrations.kubernetes.webhook.sources import NodesFile, follow_catalog
from imagematrix.integrations.kubernetes.webhook.state import ClusterState, PolicyOptions


def images_of(current):
    return [each.image for policy in current.policies for each in policy.classes]


def names_of(current):
    """Return the nodes with GPUs in the classes, as pods see them."""
    return {name for each in current.policies[0].classes for name in each.nodes} - {"n0"}


async def test_a_file_of_nodes_and_a_catalog_are_read_again(tmp_path, catalog, nodes, telemetry):
    path, saved = tmp_path / "nodes.json", tmp_path / "catalog.json"
    path.write_text(json.dumps(nodes(n1=None)))
    current = ClusterState([str(saved)], PolicyOptions(deny=True), telemetry)
    async with running(
        current.follow(),
        NodesFile(path).follow(current, telemetry),
        follow_catalog(str(saved), current, telemetry),
    ):
        await until(lambda: "catalog" in "".join(telemetry.lines))
        assert "policies made" not in "".join(telemetry.lines)
        saved.write_text(json_documents.dump_json(catalog.to_json()))
        await until(lambda: current.policies)
        assert [policy.deny for policy in current.policies or ()] == [True]
        assert names_of(current) == {"n1"}
        path.write_text(json.dumps(nodes(n1=None, n2="580.65.06")))
        await until(lambda: names_of(current) == {"n1", "n2"})
        assert set(images_of(current)) == {A, B, ""}
        path.write_text("{")
        await until(lambda: any("not JSON" in line for line in telemetry.lines))
        one = json_documents.dump_json(catalog.to_json()).replace("b" * 64, "c" * 64)
        saved.write_text(one)
        await until(lambda: any(image.endswith("c" * 64) for image in images_of(current)))
        assert names_of(current) == {"n1", "n2"}
        saved.write_text("[]")
        await until(lambda: any("expected an object" in line for line in telemetry.lines))
        assert current.policies
    metrics = generate_latest(telemetry.registry).decode()
    assert 'imagematrix_webhook_nodes{labelled="yes"} 3.0' in metrics
    assert 'imagematrix_webhook_failures_total{what="nodes"} 1.0' in metrics


async def test_a_node_without_a_matching_class_label_is_left_out(catalog, nodes, telemetry):
    listed = nodes(n1=None, n2="580.65.06", n3=None)
    del listed["items"][2]["metadata"]["labels"][CLASS]
    listed["items"][3]["metadata"]["labels"][CLASS] = "old"
    current = ClusterState(["x"], PolicyOptions(), telemetry)
    async with running(current.follow()):
        current.put_catalog("x", catalog)
        current.put_nodes(parse_nodes(listed, "x"))
        await until(lambda: current.policies)
        assert names_of(current) == {"n1"}
    assert telemetry.lines == ["policies made for 2 nodes; 2 without a matching class label, such as n2"]


async def test_the_collector_of_garbage_skips_the_policies(catalog, nodes, telemetry):
    current = ClusterState(["x"], PolicyOptions(), telemetry)
    async with running(current.follow()):
        current.put_catalog("x", catalog)
        current.put_nodes(parse_nodes(nodes(n1=None), "x"))
        await until(lambda: current.policies)
        [policy] = current.policies
        assert not any(each is policy for each in gc.get_objects())  # which has nothing that is skipped
    gc.unfreeze()
    assert any(each is policy for each in gc.get_objects())


async def test_a_failure_keeps_the_last_policies(catalog, nodes, telemetry, monkeypatch):
    current = ClusterState(["x"], PolicyOptions(), telemetry)
    async with running(current.follow()):
        current.put_catalog("x", catalog)
        current.put_nodes([])
        await until(lambda: current.policies)

        def fail(*_, **__):
            raise UsageError("an open axis")

        monkeypatch.setattr(state, "make_cluster_policy", fail)
        current.put_nodes(parse_nodes(nodes(n1=None), "x"))
        await until(lambda: "policies: an open axis" in telemetry.lines)
        assert current.policies


async def test_a_catalog_without_a_policy_leaves_the_others_alone(catalog, nodes, telemetry, make):
    open_axis = [
        make.variant(f"reg/u:v1-{python}", digest=f"sha256:{digit * 64}", axes=(("python", python),))
        for python, digit in (("3.12", "c"), ("3.13", "d"))
    ]
    current = ClusterState(["u", "x"], PolicyOptions(deny=True), telemetry)
    async with running(current.follow()):
        current.put_catalog("u", replace(make.catalog(*open_axis), image="reg/u"))
        current.put_catalog("x", catalog)
        current.put_nodes(parse_nodes(nodes(n1=None), "x"))
        await until(lambda: current.policies)
        broken, policy = current.policies
        assert (broken.name, broken.deny, policy.problem) == ("reg/u:v1", True, None)
        assert "differ in python" in broken.problem
        assert [each.policy for each in current.cluster_policies] == [policy]
        assert any("policies: " in line and "differ in python" in line for line in telemetry.lines)
        current.put_catalog("u", replace(make.catalog(open_axis[0]), image="reg/u"))
        await until(lambda: not current.policies[0].problem)
        current.put_catalog("u", replace(make.catalog(*open_axis), image="reg/u"))
        current.put_nodes(parse_nodes(nodes(n1=None, n2="580.65.06"), "x"))
        await until(lambda: len(current.policies[1].classes) > len(policy.classes))
        assert (current.policies[0].problem, len(current.policies[0].classes)) == (None, len(policy.classes))


@pytest.fixture
def fake(nodes, monkeypatch):
    """An API server with the nodes n0 to n3, two on a page."""
    monkeypatch.setattr(api, "PAGE", 2)
    made = FakeApiServer()
    for one in nodes(n1=None, n2=None, n3="580.65.06")["items"]:
        # The items of a list have no kind.
        made.nodes.items[one["metadata"]["name"]] = {key: one[key] for key in one if key != "kind"}
    return made


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "token"
    path.write_text("first\n")
    return path


@asynccontextmanager
async def watching(fake, catalog, telemetry, token):
    """Yield the nodes and policies from an API server, once it is watched."""
    async with serving(fake.application()) as server:
        current = ClusterState(["x"], PolicyOptions(), telemetry)
        current.put_catalog("x", catalog)
        source = WatchedNodes(ApiServer(url=str(server.make_url("/")), token=token, authorities=None))
        async with running(current.follow(), source.follow(current, telemetry)):
            await until(lambda: fake.nodes.watches and current.policies)
            yield current


async def test_nodes_are_listed_and_watched(fake, catalog, nodes, telemetry, token):
    _, n4 = nodes(n4=None)["items"]
    async with watching(fake, catalog, telemetry, token) as current:
        assert names_of(current) == {"n1", "n2", "n3"}
        assert [query.get("continue") for query, _ in fake.nodes.asked] == [None, "2", None]
        assert fake.nodes.asked[-1][0]["resourceVersion"] == "100"
        fake.nodes.send("ADDED", n4)
        await until(lambda: names_of(current) == {"n1", "n2", "n3", "n4"})
        count = len(telemetry.lines)
        fake.nodes.send("MODIFIED", {**n4, "status": {"images": ["a heartbeat"] * 100_000}})
        fake.nodes.send("BOOKMARK")
        fake.nodes.send("DELETED", fake.nodes.items["n1"])
        await until(lambda: names_of(current) == {"n2", "n3", "n4"})
        assert len(telemetry.lines) == count + 1


async def test_a_node_whose_capacity_contradicts_its_labels_is_left_out(fake, catalog, telemetry, token):
    """A device plugin has started on n0, whose labels say that it has no GPUs."""
    async with watching(fake, catalog, telemetry, token):
        plain = fake.nodes.items["n0"]
        status = plain["status"]
        fake.nodes.send("MODIFIED", {**plain, "status": {**status, "capacity": {"nvidia.com/gpu": "8"}}})
        await until(lambda: len(telemetry.lines) == 2)
        fake.nodes.send("MODIFIED", plain)
        await until(lambda: len(telemetry.lines) == 3)
    assert [line.partition("; ")[2] for line in telemetry.lines] == [
        "",
        "1 without a matching class label, such as n0",
        "",
    ]


async def test_a_watch_that_ends_continues_from_its_version(fake, catalog, telemetry, token):
    async with watching(fake, catalog, telemetry, token):
        fake.nodes.send("BOOKMARK")
        token.write_text("second")
        fake.nodes.watches[-1].put_nowait(None)
        await until(lambda: len(fake.nodes.watches) == 2)
        assert fake.nodes.asked[-1][0]["resourceVersion"] == str(fake.nodes.version) == "101"
        assert [login for _, login in fake.nodes.asked][-2:] == ["Bearer first", "Bearer second"]


async def test_nodes_are_listed_again_if_a_version_is_gone(fake, catalog, nodes, telemetry, token):
    _, n4 = nodes(n4=None)["items"]
    async with watching(fake, catalog, telemetry, token) as current:
        del fake.nodes.items["n1"], fake.nodes.items["n3"]
        fake.nodes.send("ERROR", code=410)
        await until(lambda: names_of(current) == {"n2"})
        await until(lambda: len(fake.nodes.watches) == 2)
        fake.nodes.items["n4"] = n4
        fake.nodes.gone = True
        fake.nodes.watches[-1].put_nowait(None)
        await until(lambda: names_of(current) == {"n2", "n4"})


async def test_a_failing_api_server_is_tried_again_and_the_nodes_stay(fake, catalog, telemetry, token):
    async with watching(fake, catalog, telemetry, token) as current:
        fake.nodes.send("ERROR", code=500, message="etcd")
        await until(lambda: any("the watch has ended: etcd" in line for line in telemetry.lines))
        await until(lambda: len(fake.nodes.watches) == 2)
        fake.nodes.watches[-1].put_nowait(b"{\n")
        await until(lambda: any("not JSON" in line for line in telemetry.lines))
        await until(lambda: len(fake.nodes.watches) == 3)
        fake.nodes.watches[-1].put_nowait(b"[" + b"x" * (10 << 20) + b"\n")
        await until(lambda: len(fake.nodes.watches) == 4)
        assert names_of(current) == {"n1", "n2", "n3"}
        fake.nodes.send("MODIFIED", {"metadata": {"name": "n3", "labels": 7}})
        await until(lambda: names_of(current) == {"n1", "n2"})
        fake.nodes.status = 403
        fake.nodes.watches[-1].put_nowait(None)
        await until(lambda: any("answered 403: no" in line for line in telemetry.lines))
        token.unlink()
        await until(lambda: any("token cannot be read" in line for line in telemetry.lines))
        assert names_of(current) == {"n1", "n2"}


def test_an_unreachable_api_server_is_tried_again(tmp_path, telemetry):
    (tmp_path / "token").write_text("x")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"

        async def run():
            current = ClusterState([], PolicyOptions(), telemetry)
            source = WatchedNodes(ApiServer(url=url, token=tmp_path / "token", authorities=None))
            missing = WatchedNodes(
                ApiServer(url=url, token=tmp_path / "token", authorities=tmp_path / "none")
            )
            async with running(source.follow(current, telemetry), missing.follow(current, telemetry)):
                await until(
                    lambda: sum("the API server cannot be read" in one for one in telemetry.lines) > 1
                )
                await until(lambda: any("none cannot be read" in one for one in telemetry.lines))

        asyncio.run(run())


def test_the_api_server_of_a_pod(tmp_path):
    found = find_cluster_api(
        "do", {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}, tmp_path
    )
    expected = ApiServer(
        url="https://[fd00::1]:443", token=tmp_path / "token", authorities=tmp_path / "ca.crt"
    )
    assert found == expected
    with pytest.raises(UsageError, match="not running in a pod"):
        find_cluster_api("do", {})
    with pytest.raises(UsageError, match="namespace cannot be read"):
        read_namespace(tmp_path)
    (tmp_path / "namespace").write_text("space\n")
    assert read_namespace(tmp_path) == "space"
