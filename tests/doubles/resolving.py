"""A registry in memory with a version of several variants, and a resolver in front of it."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests
from distribution import LAYER, MANIFEST, digest

from imagematrix.hardware.host.host import Host
from imagematrix.images.catalog import image_index, labels
from imagematrix.images.oci.manifest import INDEX
from imagematrix.integrations.http_service.http_server import Address, serve_http
from imagematrix.integrations.resolver.audit_log import ResolverLog
from imagematrix.integrations.resolver.node import HostSources
from imagematrix.integrations.resolver.server import LIMITS, Resolver
from imagematrix.integrations.resolver.state import StateFolder
from imagematrix.integrations.resolver.upstream import open_upstream

HOSTS = Path(__file__).parents[1] / "hosts"
INPUT = digest(b"input")
UNKNOWN = {"os": "unknown", "architecture": "unknown"}
HOPPER = {"cuda": "12.4", "cubins": ["90"], "driver": {"mode": "exact", "version": "550.163.01"}}


def variant(march="x86-64-v2", flags=("sse4_2",), **more):
    return {"platform": "linux/amd64", "march": march, "cpu_flags": list(flags), **more}


class SimulatedNode:
    """A node with the facts of a saved host; a test may change the name to that of another host."""

    def __init__(self, name):
        self.name = name

    def read_host(self):
        return Host.load(HOSTS / f"{self.name}.json")


class Front:
    """A resolver that runs in a thread of its own; `state` is the folder of its state.

    At most `threads` wait for the upstream at a time, if that is given. `limits` are those of its clients.
    """

    def __init__(self, upstream, node, *, classes=None, state=None, threads=None, limits=None, **options):
        self._limits = limits or LIMITS
        self.notes: list[str] = []
        self.log = ResolverLog(self.notes.append)
        self._upstream = open_upstream(upstream)
        self._resolver = Resolver(
            upstream=self._upstream,
            nodes=HostSources(this_node=node, classes=classes or {}),
            log=self.log,
            state=StateFolder(state, upstream, self.notes.append) if state else None,
            **options,
        )
        self._loop = asyncio.new_event_loop()
        if threads:
            self._loop.set_default_executor(ThreadPoolExecutor(threads))
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.address = self._run(self._start())
        self.session = requests.Session()
        self.session.trust_env = False

    async def _start(self):
        application = self._resolver.make_application()
        self._serving = serve_http(application, Address("127.0.0.1", 0), limits=self._limits)
        return str(await self._serving.__aenter__())

    async def _stop(self):
        await self._serving.__aexit__(None, None, None)
        await self._resolver.end()
        await self._upstream.close()

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self):
        """End it, as a test may do before its fixture does."""
        if self._loop.is_closed():
            return
        self.session.close()
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def answer_own(self):
        """Let it make an answer of its own, as for its health."""
        self._run(self._resolver.check_answer())

    def kept(self):
        """Return the manifests that it keeps, of tags and of digests."""
        kept = self._resolver._versions
        return [one.manifest for _, (_, one) in kept._versions] + [one for _, one in kept._large]

    def get(self, path, method="GET", **options):
        return self.session.request(method, f"http://{self.address}{path}", timeout=30, **options)

    def pull(self, tag, repository="ml/training"):
        """Return the digest that a tag is answered with, or the message of the refusal with its status."""
        answer = self.get(f"/v2/{repository}/manifests/{tag}")
        if answer.status_code == requests.codes.ok:
            assert digest(answer.content) == answer.headers["Docker-Content-Digest"]
            return answer.headers["Docker-Content-Digest"]
        (error,) = answer.json()["errors"]
        return answer.status_code, error["message"]


class Published:
    """Versions in the repository ml/training of a registry; `digests` are the variants' by cell."""

    def __init__(self, server):
        self.repository = server.repository("ml/training")
        self.digests = {}

    def publish(self, variants, version="v1", packed=LAYER, **terms):
        listed = []
        for cell, entry in variants.items():
            own = {
                labels.VERSION: version,
                labels.CELL: cell,
                labels.INPUT: INPUT,
                labels.VARIANT: json.dumps(entry),
                **terms,
            }
            name = labels.make_tag(version, cell, INPUT)
            result = self.repository.image(
                name, own, layer=cell.encode() * 1000, annotations=own, packed=packed
            )
            self.digests[cell] = result
            size = len(self.repository.manifests[result][1])
            described = {"mediaType": MANIFEST, "digest": result, "size": size}
            listed.append({**described, "annotations": own, "platform": UNKNOWN})
        entries = image_index.parse_index(json.dumps({"manifests": listed}).encode(), version)
        return self.repository.put(version, image_index.write_index(entries, "ml/training", version), INDEX)
