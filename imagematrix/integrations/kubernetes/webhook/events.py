"""Events about pending pods that use our images: one for each cause, written by one of several webhooks.

The name of an Event follows from the pod and the cause, so the API server refuses a second one, whoever
writes it. See https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/event-v1.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import json
import sys
import time
from dataclasses import dataclass, field

from imagematrix.common.groups import group_values
from imagematrix.errors import EngineError, UsageError
from imagematrix.integrations.kubernetes.client.api import (
    Collection,
    ConflictError,
    NotFoundError,
    send_request,
    watch_collection,
)
from imagematrix.integrations.kubernetes.client.objects import CONTROL_PLANE
from imagematrix.integrations.kubernetes.explain.explain_pod import explain_pod
from imagematrix.integrations.kubernetes.explain.obstacles import KnownNodes
from imagematrix.integrations.kubernetes.explain.pod import parse_pod, reduce_pod

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from imagematrix.common import json_documents
    from imagematrix.errors import ImagematrixError
    from imagematrix.integrations.kubernetes.admission.cluster_policy import ClusterPolicy
    from imagematrix.integrations.kubernetes.explain.explain_pod import Explanation
    from imagematrix.integrations.kubernetes.nodes.nodes import ClusterNode
    from imagematrix.integrations.kubernetes.webhook.lease import Leadership
    from imagematrix.integrations.kubernetes.webhook.state import ClusterState
    from imagematrix.integrations.kubernetes.webhook.telemetry import Telemetry

PODS = "/api/v1/pods"
PENDING = {"fieldSelector": "status.phase=Pending"}
PAGE = 20  # pods of one answer, each of at most 1.5 MiB
SHAPE = 64 << 10  # characters of what decides where a pod may run: all pending pods are kept
PATIENCE_S = 10.0  # for which a pod has to be pending: most get a node at once
LOOK_S = 5.0
AGE_S = 30.0  # of explanations; in a large cluster, some node always changes
KEPT_S = 600.0  # after which an Event is written again; an API server drops Events after an hour
BUSY_S = 5.0  # of a look, after which no further shape is explained
MOST = 500  # Events of one look; the others follow with the next
SOURCE = "imagematrix-webhook"
LONGEST = 1024  # characters of an Event's message
NAME = 200  # characters of a pod's name in the name of an Event, which has at most 253


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPod:
    """A pending pod; `shape` is what decides where it may run, as JSON: pods of one Job share it."""

    namespace: str
    name: str
    uid: str
    shape: str


@dataclass(slots=True)
class _EventMemory:
    """What this process knows of earlier looks.

    The pods; since when each is known to be pending, by UID; when each Event was written, by its name; the
    explanations of each shape, for the `cluster_policies` and `nodes` that they follow from, and when these
    were read; and when each shape was last explained, also for others.
    """

    pods: tuple[PendingPod, ...] = ()
    since: dict[str, float] = field(default_factory=dict)
    written: dict[str, float] = field(default_factory=dict)
    explanations: dict[str, tuple[Explanation, ...]] = field(default_factory=dict)
    cluster_policies: tuple[ClusterPolicy, ...] = ()
    nodes: tuple[ClusterNode, ...] = ()
    read_at: float = 0.0
    known_nodes: KnownNodes = field(default_factory=lambda: KnownNodes((), {}))
    explained_at: dict[str, float] = field(default_factory=dict)


class Events:
    """Writes an Event for each cause that keeps a pod that uses our images from running.

    Pods of the control plane, of the webhook's own namespace and of the `excluded` ones get none: the webhook
    is not asked about them.
    """

    def __init__(self, leadership: Leadership, excluded: Iterable[str] = ()) -> None:
        self._leadership = leadership
        self._excluded = frozenset([CONTROL_PLANE, leadership.namespace, *excluded])

    async def follow(self, state: ClusterState, telemetry: Telemetry) -> None:
        """Write Events while this process leads, until cancelled; failures are noted."""

        async def lead() -> None:
            memory = _EventMemory()
            pods = Collection(PODS, "pods", _parse_pending, query=PENDING, limit=PAGE)

            def keep_pods(pods: Mapping[str, PendingPod]) -> None:
                memory.pods = tuple(pod for pod in pods.values() if pod.namespace not in self._excluded)

            def record_failure(error: ImagematrixError) -> None:
                telemetry.record_failure("pods", error)

            async with asyncio.TaskGroup() as group:
                group.create_task(
                    watch_collection(self._leadership.api, pods, keep_pods, telemetry.log, record_failure)
                )
                while True:
                    await asyncio.sleep(LOOK_S)
                    await self._write_due_events(memory, state, telemetry)

        await self._leadership.follow(lead, telemetry)

    async def _write_due_events(
        self, memory: _EventMemory, state: ClusterState, telemetry: Telemetry
    ) -> None:
        now, pods = time.monotonic(), memory.pods
        memory.since = {pod.uid: memory.since.get(pod.uid, now) for pod in pods}
        waiting = [pod for pod in pods if now - memory.since[pod.uid] >= PATIENCE_S]
        memory.written = {name: at for name, at in memory.written.items() if now - at < KEPT_S}

        # Explanations hold for the policies and nodes that they were made for.
        stale = memory.nodes is not state.nodes and now - memory.read_at >= AGE_S
        if memory.cluster_policies is not state.cluster_policies or stale:
            memory.cluster_policies, memory.nodes = state.cluster_policies, state.nodes
            memory.known_nodes = await asyncio.to_thread(KnownNodes, memory.nodes, {})
            memory.read_at, memory.explanations = now, {}
        pods_by_shape = group_values((pod.shape, pod) for pod in waiting)
        memory.explanations = {
            shape: memory.explanations[shape] for shape in pods_by_shape if shape in memory.explanations
        }
        memory.explained_at = {shape: memory.explained_at.get(shape, 0.0) for shape in pods_by_shape}
        written = 0
        # Those that were explained longest ago come first: pods that take long do not stop others for ever.
        for shape in sorted(pods_by_shape, key=memory.explained_at.__getitem__):
            if shape not in memory.explanations:
                if time.monotonic() - now >= BUSY_S:
                    continue
                memory.explanations[shape] = await asyncio.to_thread(_explain_shape, shape, memory)
                memory.explained_at[shape] = time.monotonic()
            for event in self._make_due_events(pods_by_shape[shape], memory):
                if written == MOST or not await self._write_event(event, telemetry):
                    return
                memory.written[event["metadata"]["name"]] = now
                written += 1

    def _make_due_events(self, pods: Iterable[PendingPod], memory: _EventMemory) -> Iterator[dict[str, Any]]:
        for pod in pods:
            for explanation in memory.explanations[pod.shape]:
                event = make_event(pod, explanation, self._leadership.identity)
                if event["metadata"]["name"] not in memory.written:
                    yield event

    async def _write_event(self, event: dict[str, Any], telemetry: Telemetry) -> bool:
        """Write an Event; return whether the API server has answered."""
        path = f"/api/v1/namespaces/{event['metadata']['namespace']}/events"
        try:
            await send_request(self._leadership.api, "POST", path, event)
        except (ConflictError, NotFoundError):
            pass  # it exists, or its namespace has gone
        except (EngineError, UsageError) as error:
            telemetry.record_failure("events", error)
            return False
        else:
            telemetry.count_event(event["reason"])
        return True


def make_event(pod: PendingPod, explanation: Explanation, instance: str) -> dict[str, Any]:
    """Return the Event about a pod, whose name follows from the pod's uid, the image and the cause."""
    fix = f" ({explanation.fix})" if explanation.fix else ""
    key = "\n".join([pod.uid, explanation.image, str(explanation.cause)])
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{pod.name[:NAME].rstrip('-.')}.{digest}", "namespace": pod.namespace},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": pod.name,
            "namespace": pod.namespace,
            "uid": pod.uid,
        },
        "type": "Warning",
        "reason": explanation.cause,
        "message": f"{explanation.summary}{fix}"[:LONGEST],
        "source": {"component": SOURCE},
        "reportingComponent": SOURCE,
        "reportingInstance": instance,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def _explain_shape(shape: str, memory: _EventMemory) -> tuple[Explanation, ...]:
    """Return the explanations of a shape, without those that have no cause."""
    pod = parse_pod(json.loads(shape), "pod")
    explanations = explain_pod(pod, memory.cluster_policies, memory.known_nodes, in_detail=False)
    return tuple(explanation for explanation in explanations if explanation.cause)


def _parse_pending(fields: json_documents.Fields) -> PendingPod:
    metadata = fields.get_object_or_empty("metadata")
    namespace, name = metadata.get_text("namespace"), metadata.get_text("name")
    shape = json.dumps(reduce_pod(fields), sort_keys=True, separators=(",", ":"))
    if len(shape) > SHAPE:
        raise UsageError(f"{namespace}/{name} gets no Event: it is longer than {SHAPE:,} characters")
    return PendingPod(
        namespace=namespace,
        name=name,
        uid=metadata.get_text("uid"),
        shape=sys.intern(shape),
    )
