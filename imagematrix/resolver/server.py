"""The registry's API, read-only (OCI distribution specification)."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aiohttp import BasicAuth, web

from imagematrix.errors import EngineError, ImagematrixError, UnknownImageError
from imagematrix.reference import DIGEST, TAG, Reference
from imagematrix.resolver.answer import explained, resolve
from imagematrix.resolver.versions import Versions

Result = TypeVar("Result")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from imagematrix.catalog.catalog import Catalog
    from imagematrix.oci.registry import Manifest
    from imagematrix.resolver.answer import Nodes, Resolved
    from imagematrix.resolver.journal import Journal
    from imagematrix.resolver.policy import Policy
    from imagematrix.resolver.signature import Key
    from imagematrix.resolver.state import State
    from imagematrix.resolver.upstream import Upstream
    from imagematrix.resolver.version import Version

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

__all__ = ["Resolver"]

API = {"Docker-Distribution-Api-Version": "registry/2.0"}
PATH = re.compile(r"/v2/(?P<repository>[^?]+)/(?P<kind>manifests|blobs|tags)/(?P<name>[^/]+)", re.ASCII)
# The specification's error codes, by HTTP status.
CODES = {
    400: "UNSUPPORTED",
    401: "UNAUTHORIZED",
    403: "DENIED",
    404: "NAME_UNKNOWN",
    405: "UNSUPPORTED",
    502: "UNAVAILABLE",
}
DENIED, MISSING, UNAVAILABLE = 403, 404, 502
OPEN = ("/healthz",)  # paths that need no token
DECIDING = 4  # threads


class Resolver:
    """Answers requests for images of `upstream` with the variants that fit this node, one of `nodes`.

    containerd's requests name a registry, which has to be the one that this resolver `mirrors`. With a
    `token`, clients have to log in with it as their password. `policy` says which images have to be signed.
    `state` saves the last answers of the upstream for the next start.
    """

    def __init__(
        self,
        *,
        upstream: Upstream,
        nodes: Nodes,
        journal: Journal,
        mirrors: str | None = None,
        token: str | None = None,
        policy: Policy | None = None,
        state: State | None = None,
    ) -> None:
        self._upstream = upstream
        # Local work has its own threads, because asyncio's may all wait for an upstream that hangs.
        self._local = ThreadPoolExecutor(DECIDING)
        self._versions = Versions(upstream, journal, self._local, policy, state)
        self._nodes = nodes
        self._journal = journal
        self._mirrors = mirrors
        self._token = token

    def application(self) -> web.Application:
        """Return the application."""
        application = web.Application(middlewares=[self._guarded])
        application.router.add_get("/healthz", self._health)
        application.router.add_get("/metrics", self._show_metrics)
        application.router.add_get("/explain/{name:.+}", self._explain)
        application.router.add_get("/{path:v2/?}", self._base)
        application.router.add_get("/v2/{path:.+}", self._serve)
        return application

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token, and convert errors to answers that engines show."""
        try:
            if self._token and request.path not in OPEN and not self._admitted(request):
                response: web.StreamResponse = _error(401, "log in with the token as password, as any user")
                response.headers["WWW-Authenticate"] = 'Basic realm="imagematrix"'
            else:
                response = await handler(request)
        except ConnectionError as error:
            # The answer has begun, so it can only be truncated.
            self._journal.aborted(request.path, error)
            raise
        except web.HTTPException as error:
            response = _error(error.status, error.text or error.reason)
        except UnknownImageError as error:
            response = _error(MISSING, _sentence(error))
        except EngineError as error:
            self._journal.refused(request.path, error)
            response = _error(UNAVAILABLE, _sentence(error))
        except ImagematrixError as error:
            self._journal.refused(request.path, error)
            response = _error(DENIED, _sentence(error))
        self._journal.answered(request.method, response.status)
        return response

    def _admitted(self, request: web.Request) -> bool:
        try:
            given = BasicAuth.decode(request.headers.get("Authorization", ""), encoding="utf-8")
        except ValueError:
            return False
        return hmac.compare_digest(given.password.encode(), str(self._token).encode())

    async def _health(self, _: web.Request) -> web.Response:
        """Answer whether the node can be probed; the upstream may be unavailable."""
        try:
            await self._locally(self._nodes.here.host)
        except ImagematrixError as error:
            return web.Response(status=503, text=f"{error}\n")
        return web.Response(text="ok\n")

    async def _show_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._journal.text(), headers={"Content-Type": self._journal.TYPE})

    async def _base(self, _: web.Request) -> web.Response:
        return web.json_response({}, headers=API)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        matched = PATH.fullmatch(request.path)
        if matched is None:
            raise web.HTTPNotFound(text="not found: this registry has manifests, blobs and tags")
        repository, kind, name = matched["repository"], matched["kind"], matched["name"]
        self._check(request, repository)
        if kind == "tags":
            if name != "list":
                raise web.HTTPNotFound
            tags = await asyncio.to_thread(self._upstream.tags, repository)
            return web.json_response({"name": repository, "tags": tags}, headers=API)
        if kind == "blobs":
            if not DIGEST.fullmatch(name):
                raise web.HTTPBadRequest(text=f"invalid digest: {name[:80]!r}")
            return await self._upstream.blob(request, repository, name)
        if not (DIGEST.fullmatch(name) or TAG.fullmatch(name)):
            raise web.HTTPBadRequest(text=f"invalid tag: {name[:80]!r}")
        manifest = await self._found(repository, name)
        if not _accepted(request, manifest.media_type):
            raise web.HTTPNotFound(
                text=f"{repository}:{name} is {manifest.media_type}, which the client does not accept"
            )
        return _manifest(manifest)

    def _check(self, request: web.Request, repository: str) -> None:
        """Raise UsageError for an invalid repository, HTTPForbidden if a request names another registry."""
        Reference.parse(f"localhost/{repository}")
        namespace = request.query.get("ns")  # containerd sends the registry that it wants
        if namespace and self._mirrors and namespace != self._mirrors:
            raise web.HTTPForbidden(text=f"this resolver serves {self._mirrors}, not {namespace[:80]!r}")

    async def _found(self, repository: str, name: str) -> Manifest:
        """Return the manifest that answers a tag or a digest."""
        if DIGEST.fullmatch(name):
            manifest = await self._versions.manifest(repository, name)
            if manifest is None:
                raise UnknownImageError(f"{repository}@{name} not found")
            return manifest
        version = await self._version(repository, name)
        if version.catalog is None:
            return version.manifest
        chosen = await self._locally(self._chosen, version.catalog, version.key, repository, name)
        manifest = await self._versions.manifest(repository, chosen.digest)
        if manifest is None:
            raise EngineError(f"the index of {repository}:{name} lists {chosen.digest}, which is missing")
        return manifest

    async def _version(self, repository: str, tag: str) -> Version:
        """Return the upstream's manifest for a tag, or else for the version that the tag begins with."""
        version = await self._versions.find(repository, tag)
        if version is None:
            raise UnknownImageError(f"{repository}:{tag} not found")
        return version

    async def _locally(self, work: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._local, work, *arguments)

    def _chosen(self, catalog: Catalog, key: Key | None, repository: str, tag: str) -> Resolved:
        chosen = resolve(self._nodes, catalog, tag)
        self._journal.chose(f"{repository}:{tag}", chosen, key.name if key else None)
        return chosen

    async def _explain(self, request: web.Request) -> web.Response:
        """Answer with the Selection document of IMAGE:TAG."""
        reference = Reference.parse(f"localhost/{request.match_info['name']}")
        version = await self._version(reference.repository, reference.tag)
        if version.catalog is None:
            raise UnknownImageError(f"{reference.repository}:{reference.tag} has no variants")
        document = await self._locally(explained, self._nodes, version.catalog, reference.tag)
        return web.json_response(document)


def _accepted(request: web.Request, media_type: str) -> bool:
    """Whether a client accepts a media type; without an Accept header, it accepts any."""
    accepted = ",".join(request.headers.getall("Accept", ["*/*"])).split(",")
    return any(one.partition(";")[0].strip() in (media_type, "application/*", "*/*") for one in accepted)


def _manifest(manifest: Manifest) -> web.Response:
    headers = {**API, "Content-Type": manifest.media_type, "Docker-Content-Digest": manifest.digest}
    return web.Response(body=manifest.raw, headers=headers)


def _error(status: int, message: str) -> web.Response:
    """Return an error in the specification's format; engines print the message."""
    errors = {"errors": [{"code": CODES.get(status, "UNKNOWN"), "message": message}]}
    body = json.dumps(errors).encode()
    return web.Response(status=status, body=body, headers={**API, "Content-Type": "application/json"})


def _sentence(error: ImagematrixError) -> str:
    return f"{error}; {error.remedy}" if error.remedy else str(error)
