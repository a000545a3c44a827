"""Events about pending pods: one for each cause, written by one of several webhooks, whatever fails."""

import asyncio
import contextlib
import itertools
import json
import re
from types import SimpleNamespace

import kubernetes_validate
import pytest
from admission_cases import asking, pod, term
from api_server import FakeApiServer, serving
from coroutines import running, until
from prometheus_client import generate_latest

from imagematrix.common.record import replace
from imagematrix.integrations.kubernetes.client import api
from imagematrix.integrations.kubernetes.client.api import ApiServer
from imagematrix.integrations.kubernetes.install import certificates
from imagematrix.integrations.kubernetes.nodes.labels import CLASS
from imagematrix.integrations.kubernetes.nodes.nodes import parse_nodes
from imagematrix.integrations.kubernetes.webhook import events, lease
from imagematrix.integrations.kubernetes.webhook.events import Events
from imagematrix.integrations.kubernetes.webhook.lease import Leadership
from imagematrix.integrations.kubernetes.webhook.state import ClusterState, PolicyOptions

NAME = "reg/t:v1"


@pytest.fixture(autouse=True)
def quick_events(monkeypatch):
    """Shorten all intervals; a lease expires after 3 seconds."""
    monkeypatch.setattr(events, "PATIENCE_S", 0.1)
    monkeypatch.setattr(events, "LOOK_S", 0.02)
    monkeypatch.setattr(events, "AGE_S", 0.1)
    monkeypatch.setattr(lease, "RETRY_S", 0.1)
    monkeypatch.setattr(lease, "PAUSE_S", 0.1)
    monkeypatch.setattr(lease, "DURATION_S", 3)
    monkeypatch.setattr(lease, "RENEWED_S", 2.0)


@pytest.fixture
def fake():
    return FakeApiServer()


@pytest.fixture
def account(tmp_path):
    """Return the path of a token, with an authority beside it: to load all of the machine's takes long."""
    (tmp_path / "token").write_text("secret")
    (tmp_path / "ca.crt").write_bytes(certificates.make_certificate(["x"]).authorities)
    return tmp_path / "token"


def api_server(url, account):
    return ApiServer(url=str(url), token=account, authorities=account.with_name("ca.crt"))


def pending(name, *images, space="ml", **spec):
    made = pod(*images, **spec)
    made["metadata"] |= {"name": name, "namespace": space, "uid": f"uid-of-{name}"}
    return made | {"status": {"phase": "Pending"}}


class Webhooks:
    """Webhooks that share a cluster and an API server, each with its own state."""

    def __init__(self, url, account, telemetry, catalog, listed):
        self._api = api_server(url, account)
        self._telemetry = telemetry
        self._catalog = catalog
        self._listed = listed
        self.tasks = {}

    async def start(self, identity):
        """Start a webhook; return its state."""
        state = ClusterState(["x"], PolicyOptions(), self._telemetry)
        state.put_catalog("x", self._catalog)
        state.put_nodes(parse_nodes(self._listed, "nodes"))
        leadership = Leadership(api=self._api, namespace="space", name="l", identity=identity)
        writer = Events(leadership, ["left-out"])

        async def work():
            async with running(state.follow(), writer.follow(state, self._telemetry)):
                await asyncio.Event().wait()

        self.tasks[identity] = asyncio.create_task(work())
        await until(lambda: state.policies)
        return state

    async def kill(self, identity):
        """End a webhook without a last word."""
        task = self.tasks.pop(identity)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
def webhooks(fake, account, telemetry, catalog, nodes):
    """Return an asynchronous context in which webhooks of these identities have started."""

    @contextlib.asynccontextmanager
    async def make(*identities):
        async with serving(fake.application()) as server:
            named = replace(catalog, image="reg/t")
            made = Webhooks(
                str(server.make_url("/")), account, telemetry, named, nodes(n1=None, n2="580.65.06")
            )
            try:
                for identity in identities:
                    await made.start(identity)
                yield made
                assert not any(task.done() for task in made.tasks.values())
            finally:
                for identity in list(made.tasks):
                    await made.kill(identity)

    return make


def follow(fake, *pods):
    """Give the API server these pods."""
    fake.pods.items = {one["metadata"]["name"]: one for one in pods}


async def test_each_cause_has_one_event_and_pods_of_others_have_none(fake, webhooks, telemetry):
    follow(
        fake,
        pending("undecided", NAME, NAME),
        pending("cpu", NAME, nodeSelector={"imagematrix.io/gpu.count": "0"}, space="other"),
        pending("nowhere", NAME, nodeSelector={CLASS: "x"}),
        pending("theirs", "debian:trixie"),
        pending("fine", NAME.replace("v1", "v2")),
    )
    async with webhooks("w1"):
        await until(lambda: len(fake.events) == 3)
        await asyncio.sleep(0.3)
    by_pod = {one["involvedObject"]["name"]: one for one in fake.events.values()}
    assert len(fake.posted) == len(by_pod) == 3
    assert {name: one["reason"] for name, one in by_pod.items()} == {
        "undecided": "ImageUndecided",
        "cpu": "NoImageFits",
        "nowhere": "NoClassMatches",
    }
    assert by_pod["undecided"]["message"].endswith(f"select one by {CLASS}")
    assert "the image needs a GPU, and none is passed (run it on a node with" in by_pod["cpu"]["message"]
    assert by_pod["cpu"]["metadata"]["namespace"] == "other"
    for one in fake.events.values():
        for release in ("1.34", "1.37"):
            kubernetes_validate.validate(one, release, strict=True)
        assert one["involvedObject"]["uid"] == f"uid-of-{one['involvedObject']['name']}"
    assert fake.pods.asked[0][0]["fieldSelector"] == "status.phase=Pending"
    assert (
        'imagematrix_webhook_events_total{reason="NoImageFits"} 1.0'
        in generate_latest(telemetry.registry).decode()
    )


async def test_pods_about_which_the_webhook_is_not_asked_have_no_event(fake, webhooks):
    spaces = ("kube-system", "space", "left-out", "ml")
    follow(fake, *(pending(f"p-{space}", NAME, space=space) for space in spaces))
    async with webhooks("w1"):
        await until(lambda: fake.events)
        await asyncio.sleep(0.3)
    assert [one["metadata"]["namespace"] for one in fake.events.values()] == ["ml"]


async def test_a_pod_that_starts_in_time_has_no_event_and_a_later_pod_has_one(fake, webhooks, monkeypatch):
    monkeypatch.setattr(events, "PATIENCE_S", 0.5)
    quick, late = pending("quick", NAME), pending("late", NAME)
    follow(fake, quick)
    async with webhooks("w1"):
        await until(lambda: fake.pods.watches)
        fake.pods.send("DELETED", quick)
        fake.pods.send("ADDED", late)
        fake.pods.send("ADDED", {"metadata": {"name": "bad"}, "spec": []})
        await until(lambda: fake.events)
        await asyncio.sleep(0.2)
    assert [one["involvedObject"]["name"] for one in fake.events.values()] == ["late"]


async def test_large_pods_take_little_memory(fake, webhooks, telemetry):
    """Users make them as large as they like, and one answer of the API server has many."""
    long = asking(term("pool", "In", *("x" * 60 for _ in range(900))), term("pool", "In", *["y" * 60] * 900))
    follow(fake, *(pending(f"p{number:02}", NAME, affinity=long) for number in range(30)), pending("x", NAME))
    async with webhooks("w1"):
        await until(lambda: fake.events)
    assert [query.get("limit") for query, _ in fake.pods.asked][:2] == ["20", "20"]
    assert [one["involvedObject"]["name"] for one in fake.events.values()] == ["x"]
    failure = "pods: ml/p00 gets no Event: it is longer than 65,536 characters"
    assert any(failure in line for line in telemetry.lines)


async def test_a_page_that_is_too_large_is_refused(fake, webhooks, telemetry, monkeypatch):
    follow(fake, pending("x", NAME))
    async with webhooks("w1"):
        await until(lambda: fake.events)
        monkeypatch.setattr(api, "PAGE_BYTES", 1 << 20)
        follow(fake, pending("x", NAME) | {"more": "x" * (2 << 20)})
        fake.pods.send("ERROR", code=410)
        message = "pods: the API server sent more than 1 MiB of pods at once"
        await until(lambda: any(message in line for line in telemetry.lines))


async def test_a_change_of_the_cluster_changes_the_cause(fake, webhooks, nodes, catalog):
    """A pod whose nodes are tainted, then gone, has an Event for each; equal pods are explained together."""
    async with webhooks() as started:
        state = await started.start("w1")
        listed = nodes(n1=None, n2="580.65.06")
        name = listed["items"][1]["metadata"]["labels"][CLASS]
        image = f"reg/t:v1-a@{catalog.variants[0].digest}"
        placed = {"affinity": asking(term(CLASS, "In", name))}
        await until(lambda: fake.pods.watches)
        for number in range(20):
            fake.pods.send("ADDED", pending(f"p{number}", image, **placed))
        await asyncio.sleep(0.3)
        assert not fake.events, "a node can take them"
        listed["items"][1]["spec"] = {"taints": [{"key": "k", "effect": "NoSchedule"}]}
        policies = state.policies
        state.put_nodes(parse_nodes(listed, "nodes"))
        await until(lambda: len(fake.events) == 20)
        assert state.policies is policies
        del listed["items"][1]
        state.put_nodes(parse_nodes(listed, "nodes"))
        await until(lambda: len(fake.events) == 40)
    reasons = [one["reason"] for one in fake.events.values()]
    assert (reasons.count("NoNodeFits"), reasons.count("ImageOutdated")) == (20, 20)


async def test_pods_that_take_long_do_not_stop_others_for_ever(fake, webhooks, monkeypatch):
    """A look explains one shape here, and explanations hold for no longer than until the next look."""
    monkeypatch.setattr(events, "BUSY_S", 0.15)
    clock = itertools.count()
    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: next(clock) / 10))
    monkeypatch.setattr(events, "AGE_S", 0.0)
    follow(fake, *(pending(f"p{number}", NAME, nodeSelector={"k": str(number)}) for number in range(3)))
    async with webhooks() as started:
        state = await started.start("w1")

        def has_all_events():
            state.put_nodes([*state.nodes])
            return len(fake.events) == 3

        await until(has_all_events)


async def test_one_webhook_writes_and_another_takes_over_when_it_dies(fake, webhooks, telemetry):
    follow(fake, pending("first", NAME))
    async with webhooks("w1") as started:
        await until(lambda: len(fake.events) == 1)
        await started.start("w2")
        await asyncio.sleep(3.5)
        assert fake.holder == "w1"
        assert fake.lease["spec"]["leaseTransitions"] == 1
        assert "w2 leads" not in telemetry.lines
        await started.kill("w1")
        fake.pods.items["second"] = pending("second", NAME)
        await until(lambda: len(fake.events) == 2)
        assert fake.holder == "w2"
        assert fake.lease["spec"]["leaseTransitions"] == 2
        await asyncio.sleep(0.3)
    names = [fake.events[name]["involvedObject"]["name"] for name in fake.posted]
    assert names == ["first", "first", "second"], "the second leader tries once, and the server refuses it"
    assert [line for line in telemetry.lines if "leads" in line] == ["w1 leads", "w2 leads"]
    times = fake.lease["spec"]
    for key in ("acquireTime", "renewTime"):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", times[key])


async def test_a_lease_of_another_is_left_until_it_expires(fake, webhooks):
    """Only whether it changes counts, because clocks differ."""
    fake.lease["spec"] = {
        "holderIdentity": "other",
        "leaseDurationSeconds": 2,
        "renewTime": "1999-01-01T00:00:00.000000Z",
        "leaseTransitions": 6,
    }
    async with webhooks("w1"):
        for second in range(12):
            await asyncio.sleep(0.2)
            assert fake.holder == "other"
            fake.lease["spec"]["renewTime"] = f"1999-01-01T00:00:{second:02}.000000Z"
        await until(lambda: fake.holder == "w1")
        assert fake.lease["spec"]["leaseTransitions"] == 7
        assert not fake.posted


async def test_a_holder_that_cannot_renew_stops_before_another_can_start(fake, webhooks, telemetry):
    async with webhooks("w1"):
        await until(lambda: "w1 leads" in telemetry.lines)
        fake.lease_status = 500
        await until(lambda: "w1 leads no longer" in telemetry.lines)
        fake.pods.items["p"] = pending("p", NAME)
        await asyncio.sleep(0.3)
        assert not fake.posted
        fake.lease_status = 200
        await until(lambda: len(fake.events) == 1)
    assert any("lease: the API server answered 500: no lease" in line for line in telemetry.lines)


async def test_a_holder_stops_in_time_if_the_api_server_does_not_answer(account, telemetry, monkeypatch):
    """Another process may take over after DURATION_S."""
    asked = []

    async def answer(*_):
        asked.append(asyncio.get_running_loop().time())
        if len(asked) > 1:
            await asyncio.Event().wait()
        return True

    monkeypatch.setattr(lease, "RENEWED_S", 1.0)
    monkeypatch.setattr(lease, "RETRY_S", 0.6)
    monkeypatch.setattr(Leadership, "_renew", answer)
    leadership = Leadership(api=api_server("http://x", account), namespace="n", name="l", identity="w1")
    holding = lease._Holding()
    assert await leadership._try_renewal(holding, telemetry)
    monkeypatch.setattr(lease, "RETRY_S", -9.0)
    assert not await leadership._try_renewal(holding, telemetry)
    assert asyncio.get_running_loop().time() - asked[0] < 5
    assert not holding.is_held


async def test_a_holder_whose_lease_another_has_taken_stops(fake, webhooks, telemetry):
    async with webhooks("w1"):
        await until(lambda: "w1 leads" in telemetry.lines)
        version = str(int(fake.lease["metadata"]["resourceVersion"]) + 1)
        taken = {"holderIdentity": "w9", "leaseDurationSeconds": 3600}
        fake.lease = {"metadata": {"name": "l", "resourceVersion": version}, "spec": taken}
        await until(lambda: "w1 leads no longer" in telemetry.lines)
        assert fake.holder == "w9"


@pytest.mark.parametrize(
    ("lease_object", "message"),
    [
        (None, "there is no Lease l in space"),
        ({"metadata": {}, "spec": {"holderIdentity": 7}}, "holderIdentity: expected a string"),
        ({"metadata": {}, "spec": []}, "spec: expected an object"),
        ([], "expected an object"),
    ],
)
async def test_an_invalid_lease_is_noted(fake, webhooks, telemetry, lease_object, message):
    fake.lease = lease_object
    async with webhooks("w1"):
        await until(lambda: any(message in line for line in telemetry.lines))
    assert "w1 leads" not in telemetry.lines


async def test_failures_of_the_api_server_are_noted_and_tried_again(fake, webhooks, telemetry, account):
    follow(fake, pending("p", NAME))
    fake.pods.status = fake.event_status = 403
    async with webhooks("w1"):
        await until(lambda: "pods: the API server answered 403: no" in telemetry.lines)
        fake.pods.status = 200
        await until(lambda: "events: the API server answered 403: no events" in telemetry.lines)
        account.unlink()
        await until(lambda: any("events" in line and "token" in line for line in telemetry.lines))
        account.write_text("again")
        fake.event_status = 404
        posted = len(fake.posted)
        await until(lambda: len(fake.posted) > posted)
        await asyncio.sleep(0.1)
        count = len(fake.posted)
        await asyncio.sleep(0.2)
        assert len(fake.posted) == count, "the namespace has gone"


async def test_an_event_that_the_api_server_has_dropped_is_written_again(fake, webhooks, monkeypatch):
    monkeypatch.setattr(events, "KEPT_S", 0.3)
    follow(fake, pending("p", NAME))
    async with webhooks("w1"):
        await until(lambda: fake.events)
        fake.events.clear()
        await until(lambda: fake.events)
    assert len(set(fake.posted)) == 1


async def test_a_task_that_fails_is_started_again(fake, webhooks, telemetry, monkeypatch):
    follow(fake, pending("p", NAME))

    def fail(*_, **__):
        monkeypatch.undo()
        raise RuntimeError("unexpected")

    monkeypatch.setattr(events, "explain_pod", fail)
    monkeypatch.setattr(events, "LOOK_S", 0.02)
    async with webhooks("w1"):
        await until(lambda: any("started again after" in line for line in telemetry.lines))
        assert fake.holder == "w1"


async def test_a_long_message_and_name_are_shortened(fake, webhooks):
    long = pending("p" * 253, NAME, nodeSelector={CLASS: "x" * 5000})
    follow(fake, long)
    async with webhooks("w1"):
        await until(lambda: fake.events)
    (one,) = fake.events.values()
    assert len(one["message"]) == 1024
    assert len(one["metadata"]["name"]) <= 253
    assert one["involvedObject"]["name"] == "p" * 253
    assert json.dumps(one).isascii()


async def test_a_webhook_that_ends_while_it_stops_to_lead_ends(fake, account, telemetry):
    """The task that leads takes its time to end, and the webhook is cancelled meanwhile."""
    leading = asyncio.Event()

    async def lead():
        leading.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)

    async with serving(fake.application()) as server:
        api = api_server(server.make_url("/"), account)
        leadership = Leadership(api=api, namespace="space", name="l", identity="w1")
        task = asyncio.create_task(leadership.follow(lead, telemetry))
        await asyncio.wait_for(leading.wait(), 10)
        version = str(int(fake.lease["metadata"]["resourceVersion"]) + 1)
        fake.lease = {"metadata": {"resourceVersion": version}, "spec": {"holderIdentity": "w9"}}
        await until(lambda: "w1 leads no longer" in telemetry.lines)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=5)
        assert done
        assert task.cancelled()
