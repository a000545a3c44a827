"""Reviews: over HTTP, and as a function."""

import base64
import json
import re
from contextlib import asynccontextmanager
from dataclasses import replace
from io import BytesIO

import pytest
from admission_cases import CLASSES, DECIDED, NAME, OTHER, POLICY, REFUSED, A, B, asking, images, pod, review
from aiohttp import ClientSession
from scheduling import ApiServer, patched

from imagematrix.errors import EngineError
from imagematrix.integrations.http_service.http_server import Address, serve_http
from imagematrix.integrations.http_service.workers import Workers
from imagematrix.integrations.kubernetes.admission.admission import AdmissionPolicy, admit
from imagematrix.integrations.kubernetes.admission.policy import make_policy_objects
from imagematrix.integrations.kubernetes.nodes.labels import CLASS
from imagematrix.integrations.kubernetes.webhook.review import PATH, answer_review
from imagematrix.integrations.kubernetes.webhook.server import LIMITS, Server
from imagematrix.integrations.kubernetes.webhook.state import ClusterState, PolicyOptions
from imagematrix.integrations.kubernetes.workloads.affinity import get_required_terms

SECOND = AdmissionPolicy(name="reg/s:v1", classes=POLICY.classes)


def raw(*arguments, **options):
    return json.dumps(review(*arguments, **options)).encode()


def patch_of(response):
    return json.loads(base64.b64decode(response["patch"])) if "patch" in response else []


class Here(Workers):
    """Workers that do their work at once, in this process."""

    async def call(self, function, *arguments, cached, **_):
        return function(*arguments, cached)


@asynccontextmanager
async def serving(server):
    """Yield a client of a webhook."""
    local = Address("127.0.0.1", 0)
    async with serve_http(server.make_application(), local, limits=LIMITS) as bound:  # noqa: SIM117 - with its address
        async with ClientSession(f"http://{bound}") as client:
            yield client


@asynccontextmanager
async def serving_reviews(telemetry, policies=(POLICY,)):
    """Yield a client of a webhook that has policies."""
    current = ClusterState([], PolicyOptions(), telemetry)
    current.policies = policies
    async with serving(Server(current, telemetry, Here())) as client:
        yield client


# The pods of the tests of `admit` and of its CEL.
PODS = [*(pod(NAME, OTHER, **spec) for spec, _ in DECIDED), *(refused for refused, _ in REFUSED)]


async def test_the_webhook_answers_as_the_function_decides(telemetry):
    count = len(PODS)
    async with serving_reviews(telemetry) as client:
        for given_pod in PODS:
            expected = admit(given_pod, POLICY)
            answered = await client.post(PATH, json=review(given_pod))
            assert answered.status == 200
            document = await answered.json()
            response = document["response"]
            assert (document["apiVersion"], document["kind"]) == (
                "admission.k8s.io/v1",
                "AdmissionReview",
            )
            assert response["uid"] == "1-2-3"
            assert response["allowed"] is not expected.refused
            assert patch_of(response) == list(expected.patch)
            assert ("patchType" in response) == bool(expected.patch)
            if expected.refused:
                status = {"code": 403, "reason": "Forbidden", "message": expected.reason}
                assert response["status"] == status
        metrics = await (await client.get("/metrics")).text()
    refused = float(re.search(r'reviews_total\{outcome="refused"\} (\S+)', metrics)[1])
    patched_pods = float(re.search(r'reviews_total\{outcome="patched"\} (\S+)', metrics)[1])
    assert refused + patched_pods == count
    assert f"imagematrix_webhook_review_seconds_count {float(count)}" in metrics
    assert len(telemetry.lines) == refused
    assert telemetry.lines[0].startswith(f"pod 'default/p' refused: {NAME}: ")


def test_an_ephemeral_container_by_its_subresource():
    before = pod(OTHER, nodeName="n4")
    given_pod = pod(OTHER, nodeName="n4", ephemeralContainers=[{"name": "debug", "image": NAME}])
    answered = answer_review(raw(given_pod, "UPDATE", "ephemeralcontainers", oldObject=before), [POLICY])
    assert patch_of(answered.document["response"]) == [
        {"op": "replace", "path": "/spec/ephemeralContainers/0/image", "value": B}
    ]


def test_a_changed_image_by_the_node_of_the_pod():
    placed = review(pod(NAME, nodeName="n4"), "UPDATE", oldObject=pod(A, nodeName="n4"))
    answered = answer_review(json.dumps(placed).encode(), [POLICY])
    assert patch_of(answered.document["response"]) == [
        {"op": "replace", "path": "/spec/containers/0/image", "value": B}
    ]
    pending = review(pod(NAME, nodeSelector={"pool": "big"}), "UPDATE", oldObject=pod(A))
    answered = answer_review(json.dumps(pending).encode(), [POLICY])
    assert (answered.outcome, answered.document["response"]["allowed"]) == ("refused", False)
    assert answered.reason.endswith("create it again")


@pytest.mark.parametrize(
    "request_of",
    [
        review(pod(NAME, labels={"a": "b"}), "UPDATE", oldObject=pod(NAME)),
        review(pod(NAME), "UPDATE", "status", oldObject=pod(OTHER)),
        review(pod(NAME), "UPDATE", "resize", oldObject=pod(OTHER)),
        review(pod(NAME), "CREATE", "ephemeralcontainers"),
        review(None, "DELETE"),
        review(pod(NAME), subresource="binding"),
        review(pod(NAME), resource={"resource": "jobs"}),
        review(pod(NAME), resource=None),
        review(pod(OTHER)),
    ],
)
def test_a_review_that_sets_no_image_is_allowed_unchanged(request_of):
    answered = answer_review(json.dumps(request_of).encode(), [POLICY])
    assert answered.outcome == "unchanged"
    assert answered.document["response"] == {"uid": "1-2-3", "allowed": True}


def test_a_pod_with_the_images_of_two_policies():
    given_pod = pod(NAME, "reg/s:v1", nodeSelector={"pool": "big"})
    answered = answer_review(raw(given_pod), [POLICY, SECOND])
    after = patched(given_pod, patch_of(answered.document["response"]))
    assert images(after) == [A, A]
    (term,) = get_required_terms(after["spec"])
    assert [one["key"] for one in term["matchExpressions"]] == [CLASS, CLASS]
    assert answer_review(raw(after), [POLICY, SECOND]).outcome == "unchanged"


@pytest.mark.parametrize("order", [1, -1])
def test_the_affinity_of_one_image_decides_another(order):
    """In whichever order the policies are."""
    lone = AdmissionPolicy(
        name="reg/s:v1", classes=tuple(replace(each, image=B if each.image == B else "") for each in CLASSES)
    )
    policies = [POLICY, lone][::order]
    given_pod = pod(NAME, "reg/s:v1")
    answered = answer_review(raw(given_pod), policies)
    assert answered.outcome == "patched"
    after = patched(given_pod, patch_of(answered.document["response"]))
    assert images(after) == [B, B]
    servers = [ApiServer(list(make_policy_objects(policy, "x"))) for policy in policies]
    for server in [*servers, *servers]:  # the API server asks again after a change
        given_pod = patched(given_pod, server.mutate(given_pod))
    assert images(given_pod) == [B, B]
    assert not any(server.refuse(given_pod) for server in servers)


def test_a_pod_of_a_controller_is_known_by_the_start_of_its_name():
    given_pod = pod(NAME)
    given_pod["metadata"] = {"generateName": "train-7f9c-"}
    assert answer_review(raw(given_pod, name=None), [POLICY]).pod == "default/train-7f9c-"


def test_an_image_without_a_policy_is_refused_alone():
    broken = AdmissionPolicy(name="reg/s:v1", classes=(), deny=True, problem="no image can be chosen: why")
    chosen = {"nodeSelector": {"pool": "big"}}
    assert answer_review(raw(pod(NAME, **chosen)), [POLICY, broken]).outcome == "patched"
    refused = answer_review(raw(pod(NAME, "reg/s:v1", **chosen)), [POLICY, broken])
    assert (refused.outcome, refused.reason) == ("refused", "reg/s:v1: no image can be chosen: why")


def test_an_undecided_image_gives_a_warning_and_the_other_is_replaced():
    mild = AdmissionPolicy(name=NAME, classes=POLICY.classes)
    answered = answer_review(raw(pod(NAME)), [mild])
    assert (answered.outcome, answered.document["response"]["allowed"]) == ("undecided", True)
    assert answered.document["response"]["warnings"] == [answered.reason]
    assert patch_of(answered.document["response"]) == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"a": 1' + b"1" * 10_000 + b"}",
        json.dumps({"apiVersion": "admission.k8s.io/v1beta1", "kind": "AdmissionReview"}).encode(),
        json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}).encode(),
        raw(pod(NAME), uid=7),
        raw(pod(NAME), operation=None),
        raw(pod(NAME), "UPDATE"),
        raw(pod(NAME), "UPDATE", oldObject=7),
        raw(pod(NAME), "UPDATE", oldObject={}),
        raw(pod(NAME), "UPDATE", oldObject={"spec": {"containers": [{"image": NAME, "name": []}]}}),
        raw([]),
        raw({}),
        raw({"spec": None}),
        raw({"spec": {"containers": 7}}),
        raw({"spec": {"containers": [7]}}),
        raw({"spec": {"containers": {"image": NAME}}}),
        raw(pod(NAME, nodeSelector=["x"])),
        raw(pod(NAME, affinity=asking(7))),
        raw(pod(NAME, affinity=asking({"matchExpressions": [{"key": "pool"}]}))),
        raw(pod(NAME, affinity=asking({"matchExpressions": [{"key": [], "operator": "In"}]}))),
        raw(pod(NAME, affinity={"nodeAffinity": [7]})),
    ],
)
async def test_a_hostile_body_is_answered_with_400(body, telemetry):
    async with serving_reviews(telemetry) as client:
        refused = await client.post(PATH, data=body)
        assert refused.status == 400, await refused.text()
        assert (await refused.text()).startswith("review")
        again = await client.post(PATH, json=review(pod(NAME, nodeSelector={"pool": "big"})))
        assert (await again.json())["response"]["allowed"]
        assert 'reviews_total{outcome="invalid"} 1.0' in await (await client.get("/metrics")).text()


async def test_a_body_is_bounded(telemetry):
    async with serving_reviews(telemetry) as client:
        assert (await client.post(PATH, data=BytesIO(b" " * (3 << 20) + b"{}"))).status == 413
        assert (await client.get(PATH)).status == 405
        large = BytesIO(raw(pod(OTHER, note="x" * (2 << 20))))
        assert (await client.post(PATH, data=large)).status == 200


async def test_without_policies_it_is_not_ready_and_answers_503(telemetry):
    current = ClusterState(["reg/t:v1"], PolicyOptions(), telemetry)
    server = Server(current, telemetry, Here())
    async with serving(server) as client:
        got = await client.post(PATH, data=raw(pod(NAME)))
        assert (got.status, await got.text()) == (503, "the nodes are not known yet\n")
        assert server.find_problem() == "the nodes are not known yet"
        with pytest.raises(EngineError, match="the nodes are not known yet"):
            await server.check_answer()
        current.put_nodes([])
        assert server.find_problem() == "the catalog of reg/t:v1 is not known yet"
        current.policies = (POLICY,)
        assert server.find_problem() is None
        await server.check_answer()
        server.is_ending = True
        assert server.find_problem() == "ending"
        answered = await client.post(PATH, data=raw(pod(NAME)))
        assert (answered.status, answered.headers["Connection"]) == (200, "close")


async def test_a_review_that_takes_too_long_is_answered_with_503(telemetry):
    class Stuck(Here):
        async def call(self, *_, **__):
            raise EngineError("the work took more than 2 s, or too much memory")

    current = ClusterState([], PolicyOptions(), telemetry)
    current.policies = (POLICY,)
    async with serving(Server(current, telemetry, Stuck())) as client:
        assert (await client.post(PATH, data=raw(pod(NAME)))).status == 503
        assert 'reviews_total{outcome="expensive"} 1.0' in await (await client.get("/metrics")).text()


async def test_reviews_are_decided_in_processes(telemetry):
    current = ClusterState([], PolicyOptions(), telemetry)
    current.policies = (POLICY,)
    workers = Workers(answer_review.__module__, count=1)
    server = Server(current, telemetry, workers)
    try:
        async with serving(server) as client:
            await server.check_answer()
            for body in (raw(pod(NAME, nodeSelector={"pool": "big"})), b"{"):
                answered = await client.post(PATH, data=body)
                assert answered.status == (400 if body == b"{" else 200), await answered.text()
    finally:
        await workers.end()
