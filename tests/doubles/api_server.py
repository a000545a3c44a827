"""An API server of Kubernetes over HTTP: nodes and pods whose watches a test feeds, a Lease, and Events."""

import asyncio
import contextlib
import json
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

LEASE = "/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{name}"
CONFLICT = {"code": 409}
TURNS = 20  # of the event loop, in which an accepted connection gets its transport, and more


@contextlib.asynccontextmanager
async def serving(application):
    """Serve an application on loopback; its clients have ended before the context does."""
    async with TestServer(application) as server:
        try:
            yield server
        finally:
            # Python 3.11 leaves a connection open that has no transport yet when the server is closed.
            for _ in range(TURNS):
                await asyncio.sleep(0)


class Collection:
    """The objects of one kind, and the watches of them."""

    def __init__(self):
        self.items = {}
        self.version = 100
        self.asked = []
        self.gone = False
        self.status = 200
        self.watches = []

    async def answer(self, request):
        self.asked.append((dict(request.query), request.headers["Authorization"]))
        if self.status != 200:
            return web.Response(status=self.status, text="no")
        if "watch" in request.query:
            return await self._watch(request)
        names = sorted(self.items)
        start = int(request.query.get("continue", 0))
        page = int(request.query["limit"])
        following = str(start + page) if start + page < len(names) else ""
        page_items = [self.items[name] for name in names[start : start + page]]
        metadata = {"resourceVersion": str(self.version), "continue": following}
        return web.json_response({"kind": "SomeList", "metadata": metadata, "items": page_items})

    async def _watch(self, request):
        if self.gone:
            self.gone = False
            return web.json_response({"code": 410}, status=410)
        response = web.StreamResponse()
        await response.prepare(request)
        events: asyncio.Queue[Any] = asyncio.Queue()
        self.watches.append(events)
        while (event := await events.get()) is not None:
            await response.write(event if isinstance(event, bytes) else json.dumps(event).encode() + b"\n")
        return response

    def send(self, kind, item=None, **more):
        """Send an event to the last watch; its object gets the next version."""
        self.version += 1
        sent = {"metadata": {}} if item is None else json.loads(json.dumps(item))
        sent.pop("kind", None)
        sent["metadata"]["resourceVersion"] = str(self.version)
        self.watches[-1].put_nowait({"type": kind, "object": sent | more})


class FakeApiServer:
    """An API server with nodes, pods, one Lease and Events; each has a `status` to fail with."""

    def __init__(self):
        self.nodes = Collection()
        self.pods = Collection()
        self.lease: dict[str, Any] | None = {"metadata": {"name": "l", "resourceVersion": "1"}, "spec": {}}
        self.lease_status = 200
        self.events: dict[str, Any] = {}
        self.posted: list[str] = []
        self.event_status = 201

    @property
    def holder(self):
        """Who holds the Lease."""
        return self.lease["spec"].get("holderIdentity")

    def application(self):
        application = web.Application()
        application.router.add_get("/api/v1/nodes", self.nodes.answer)
        application.router.add_get("/api/v1/pods", self.pods.answer)
        application.router.add_get(LEASE, self._lease)
        application.router.add_put(LEASE, self._put_lease)
        application.router.add_post("/api/v1/namespaces/{namespace}/events", self._event)
        return application

    async def _lease(self, _):
        if self.lease_status != 200:
            return web.Response(status=self.lease_status, text="no lease")
        if self.lease is None:
            return web.json_response({"code": 404}, status=404)
        return web.json_response(self.lease)

    async def _put_lease(self, request):
        put = await request.json()
        if put["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            return web.json_response(CONFLICT, status=409)
        put["metadata"]["resourceVersion"] = str(int(put["metadata"]["resourceVersion"]) + 1)
        self.lease = put
        return web.json_response(put)

    async def _event(self, request):
        event = await request.json()
        name = event["metadata"]["name"]
        self.posted.append(name)
        if self.event_status != 201:
            return web.Response(status=self.event_status, text="no events")
        assert request.match_info["namespace"] == event["involvedObject"]["namespace"]
        if name in self.events:
            return web.json_response(CONFLICT, status=409)
        self.events[name] = event
        return web.json_response(event, status=201)
