"""The server of the resolver: a registry's API, read-only (OCI distribution specification)."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import BasicAuth, web

from imagematrix.common.image_reference import DIGEST, Reference, is_repository, is_tag
from imagematrix.errors import EngineError, ImagematrixError, UnknownImageError, UsageError
from imagematrix.images.engine import releases
from imagematrix.images.oci.compression import has_zstd
from imagematrix.images.trust.files import list_policy_files
from imagematrix.images.trust.policy import load_policies
from imagematrix.integrations.http_service.connections import Limits, reserve_memory
from imagematrix.integrations.http_service.garbage import exempt_from_collection
from imagematrix.integrations.http_service.health import Health
from imagematrix.integrations.http_service.http_server import Address, serve_http
from imagematrix.integrations.http_service.metrics import make_metrics_handler
from imagematrix.integrations.http_service.workers import SMALL, Workers
from imagematrix.integrations.resolver.audit_log import ResolverLog
from imagematrix.integrations.resolver.byte_cache import ENTRY, ByteCache
from imagematrix.integrations.resolver.choice import explain_tag, resolve_tag
from imagematrix.integrations.resolver.node import HostSources
from imagematrix.integrations.resolver.state import StateFolder
from imagematrix.integrations.resolver.tag import CLASS_NAME
from imagematrix.integrations.resolver.tag_cache import TagCache
from imagematrix.integrations.resolver.upstream import LAYOUT, PIECE, open_upstream
from imagematrix.selection.selection import NothingFits

Result = TypeVar("Result")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from imagematrix.hardware.host.host import Host
    from imagematrix.images.catalog.catalog import Catalog
    from imagematrix.images.oci.manifest import Manifest
    from imagematrix.images.trust.policy import SignaturePolicy
    from imagematrix.integrations.resolver.choice import ResolvedTag
    from imagematrix.integrations.resolver.node import HostSource
    from imagematrix.integrations.resolver.upstream import Upstream

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

API = {"Docker-Distribution-Api-Version": "registry/2.0"}
PATH = re.compile(r"/v2/(?P<repository>.+)/(?P<kind>manifests|blobs|tags)/(?P<name>[^/]+)")
# The specification's error codes, by HTTP status.
CODES = {
    400: "UNSUPPORTED",
    401: "UNAUTHORIZED",
    403: "DENIED",
    404: "NAME_UNKNOWN",
    405: "UNSUPPORTED",
    429: "TOOMANYREQUESTS",
    502: "UNAVAILABLE",  # of Docker's registry: the specification has no code for it
}
DENIED, MISSING, UNAVAILABLE = 403, 404, 502
DOCKER = re.compile(r"docker/([0-9.]+)", re.ASCII)  # the beginning of its User-Agent
DECIDING = 4  # threads
WATCH_S = 10.0  # between checks whether the node has changed
CHOICES = 1_000 * ENTRY  # bytes of choices to keep
LARGE = SMALL + 1  # the size of an explanation, which waits until all choices are made
LIMITS = Limits(body=1 << 16)  # of requests that are refused for their method
GRACE_S = 10.0  # for pulls in progress, after a signal


class Resolver:
    """Answers requests for images of `upstream` with the variants that fit this node, one of `nodes`.

    containerd's requests name a registry, which has to be the one that this resolver `mirrors`. With a
    `token`, clients have to log in with it as their password. `policies` say which images have to be signed.
    `state` saves the last answers of the upstream for the next start. Variants are chosen in
    processes of its own, which `end` ends.
    """

    def __init__(
        self,
        *,
        upstream: Upstream,
        nodes: HostSources,
        log: ResolverLog,
        mirrors: str | None = None,
        token: str | None = None,
        policies: Sequence[SignaturePolicy] = (),
        state: StateFolder | None = None,
    ) -> None:
        self._upstream = upstream
        # Local work has its own threads, because asyncio's may all wait for an upstream that hangs.
        self._local = ThreadPoolExecutor(DECIDING)
        self._versions = TagCache(upstream, log, self._local, policies, state)
        self._nodes = nodes
        self._log = log
        self._choices: ByteCache[tuple[str, str], tuple[Catalog, HostSources, ResolvedTag]] = ByteCache(
            CHOICES, lambda _: 0
        )
        self._workers = Workers(resolve_tag.__module__)
        self._mirrors = mirrors
        self._token = token

    def make_application(self) -> web.Application:
        """Return the application."""
        application = web.Application(middlewares=[self._guard_request])
        application.router.add_get("/metrics", make_metrics_handler(self._log.registry))
        application.router.add_get("/explain/{name:.+}", self._explain)
        application.router.add_get("/{path:v2/?}", self._show_version)
        application.router.add_get("/v2/{path:.+}", self._serve)
        return application

    async def end(self) -> None:
        """End the processes."""
        await self._workers.end()

    @web.middleware
    async def _guard_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token, and convert errors to answers that engines show."""
        try:
            if self._token and not self._has_token(request):
                response: web.StreamResponse = _make_error(
                    401, "log in with the token as password, as any user"
                )
                response.headers["WWW-Authenticate"] = 'Basic realm="imagematrix"'
            else:
                response = await handler(request)
        except (ConnectionError, asyncio.CancelledError) as error:
            # The client has gone, or the answer has begun and can only be truncated.
            self._log.log_abort(request.path, str(error) or "the client has disconnected")
            raise
        except web.HTTPException as error:
            response = _make_error(error.status, error.text or error.reason)
        except UnknownImageError as error:
            response = _make_error(MISSING, _format_sentence(error))
        except EngineError as error:  # before its base class: `untag` removes a name that is refused with 403
            self._log.log_refusal(request.path, error)
            response = _make_error(UNAVAILABLE, _format_sentence(error))
        except ImagematrixError as error:
            self._log.log_refusal(request.path, error)
            response = _make_error(DENIED, _format_sentence(error))
        self._log.count_answer(request.method, response.status)
        return response

    def _has_token(self, request: web.Request) -> bool:
        try:
            login = BasicAuth.decode(request.headers.get("Authorization", ""), encoding="utf-8")
        except ValueError:
            return False
        return hmac.compare_digest(login.password.encode(), str(self._token).encode())

    async def _show_version(self, _: web.Request) -> web.Response:
        return web.json_response({}, headers=API)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for a manifest, a blob, or the list of tags."""
        match = PATH.fullmatch(request.path)
        if match is None:
            raise web.HTTPNotFound(text="not found: this registry has manifests, blobs and tags")
        repository, kind, name = match["repository"], match["kind"], match["name"]

        # All of the name has to be valid: what the upstream would take for a tag or a digest in it is not
        # what the policies are asked about.
        if not is_repository(repository):
            raise web.HTTPBadRequest(text=f"invalid repository: {repository[:80]!r}")
        namespace = request.query.get("ns")  # containerd sends the registry that it wants
        if namespace and self._mirrors and namespace != self._mirrors:
            raise web.HTTPForbidden(text=f"this resolver serves {self._mirrors}, not {namespace[:80]!r}")

        if kind == "tags":
            if name != "list":
                raise web.HTTPNotFound
            tags = await self._versions.list_tags(repository)
            return web.json_response({"name": repository, "tags": tags}, headers=API)
        if kind == "blobs":
            if not DIGEST.fullmatch(name):
                raise web.HTTPBadRequest(text=f"invalid digest: {name[:80]!r}")
            return await self._upstream.serve_blob(request, repository, name)
        if not (DIGEST.fullmatch(name) or is_tag(name)):
            raise web.HTTPBadRequest(text=f"invalid tag: {name[:80]!r}")
        manifest = await self._find_manifest(repository, name)
        if not _is_accepted(request, manifest.media_type):
            raise web.HTTPNotFound(
                text=f"{repository}:{name} is {manifest.media_type}, which the client does not accept"
            )
        _require_unpackable(request, manifest)
        headers = {**API, "Content-Type": manifest.media_type, "Docker-Content-Digest": manifest.digest}
        return _make_response(manifest.raw, headers)

    async def _find_manifest(self, repository: str, name: str) -> Manifest:
        """Return the manifest that answers a tag or a digest."""
        if DIGEST.fullmatch(name):
            manifest = await self._versions.find_manifest(repository, name)
            if manifest is None:
                raise UnknownImageError(f"{repository}@{name} not found")
            return manifest
        version = await self._versions.find(repository, name)
        if version.catalog is None:
            return version.manifest
        resolved = await self._resolve_tag(version.catalog, name)
        self._log.log_choice(f"{repository}:{resolved.tag}", resolved, [key.name for key in version.keys])
        manifest = await self._find_warm_manifest(repository, resolved)
        manifest = manifest or await self._versions.find_manifest(repository, resolved.digest)
        if manifest is None:
            raise EngineError(f"the index of {repository}:{name} lists {resolved.digest}, which is missing")
        return manifest

    async def _find_warm_manifest(self, repository: str, resolved: ResolvedTag) -> Manifest | None:
        """Return the manifest of a variant's warm image; None if it has none, or that cannot be had."""
        if resolved.warm is None:
            return None
        reference = resolved.warm.reference
        try:
            manifest = await self._versions.find_manifest(repository, resolved.warm.digest)
        except ImagematrixError as error:
            self._log.log_lost_warm_image(reference, str(error))
            return None
        if manifest is None:
            self._log.log_lost_warm_image(reference, "the upstream does not have it")
        return manifest

    async def _run_locally(self, work: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._local, work, *arguments)

    async def _resolve_tag(self, catalog: Catalog, tag: str) -> ResolvedTag:
        """Return the variant for a tag, chosen again only if the catalog or a node has changed."""
        nodes = await self._run_locally(self._nodes.read_all)
        key = catalog.image, tag
        earlier = self._choices.get(key)
        if earlier and earlier[0] is catalog and earlier[1] == nodes:
            return earlier[2]
        resolved = await self._workers.call(resolve_tag, nodes, tag, cached=catalog)
        self._choices.put(key, (catalog, nodes, resolved))
        return resolved

    async def check_answer(self) -> None:
        """Make an answer of this process's own: choose the variant of the tag that was requested last.

        Before the first request, the node is read and a process called, which every choice needs. Raises
        EngineError if there is no answer; that no variant fits is one.
        """
        latest = self._versions.get_latest()
        if latest and latest[1].catalog:
            nodes = await self._run_locally(self._nodes.read_all)
            with contextlib.suppress(NothingFits, UsageError):
                await self._workers.call(resolve_tag, nodes, latest[0][1], cached=latest[1].catalog)
        else:
            await self._run_locally(self._nodes.get_host, None)
            await self._workers.call(len, cached=())

    async def _explain(self, request: web.Request) -> web.Response:
        """Answer with the Selection document of IMAGE:TAG."""
        reference = Reference.parse(f"localhost/{request.match_info['name']}")
        version = await self._versions.find(reference.repository, reference.tag)
        if version.catalog is None:
            raise UnknownImageError(f"{reference.repository}:{reference.tag} has no variants")
        nodes = await self._run_locally(self._nodes.read_all)
        document = await self._workers.call(
            explain_tag, nodes, reference.tag, cached=version.catalog, size=LARGE
        )
        return _make_response(document.encode(), {"Content-Type": "application/json; charset=utf-8"})


def _is_accepted(request: web.Request, media_type: str) -> bool:
    """Whether a client accepts a media type; without an Accept header, it accepts any."""
    accepted = ",".join(request.headers.getall("Accept", ["*/*"])).split(",")
    return any(kind.partition(";")[0].strip() in (media_type, "application/*", "*/*") for kind in accepted)


def _require_unpackable(request: web.Request, manifest: Manifest) -> None:
    """Raise UsageError if the client is a Docker that cannot unpack the layers of an image."""
    client = DOCKER.match(request.headers.get("User-Agent", ""))
    if client and not releases.ZSTD_LAYERS.is_in(client[1]) and has_zstd(manifest.raw):
        raise UsageError(
            f"the image has layers compressed with zstd, which Docker {client[1]} cannot unpack",
            remedy=releases.ZSTD_REMEDY,
        )


def _make_response(body: bytes, headers: dict[str, str]) -> web.Response:
    """Return a response whose body is sent in pieces, as the client reads, and copied for no client."""
    reserve_memory(len(body))

    async def pieces() -> AsyncIterator[memoryview]:
        for begin in range(0, len(body), PIECE):
            yield memoryview(body)[begin : begin + PIECE]

    return web.Response(body=pieces(), headers={**headers, "Content-Length": f"{len(body)}"})


def _make_error(status: int, message: str) -> web.Response:
    """Return an error in the specification's format; engines print the message."""
    errors = {"errors": [{"code": CODES.get(status, "UNKNOWN"), "message": message}]}
    body = json.dumps(errors).encode()
    return web.Response(status=status, body=body, headers={**API, "Content-Type": "application/json"})


def _format_sentence(error: ImagematrixError) -> str:
    return f"{error}; {error.shown}" if error.shown else str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolverSettings:
    """The options of `imagematrix resolver`.

    `listen` and `health` are ADDRESS:PORT. The file `changed` is touched at the start, and after each change
    of the node. `policy` is a file, `state` a folder.
    """

    upstream: str
    listen: str
    node: HostSource
    classes: Mapping[str, HostSource]
    token: str | None
    health: str | None = None
    changed: Path | None = None
    policy: Path | None = None
    state: Path | None = None

    def get_address(self) -> Address:
        """Return the address to listen on; raise UsageError if it is invalid, or needs a token."""
        address = Address.parse(self.listen)
        if not ipaddress.ip_address(address.host).is_loopback and not self.token:
            raise UsageError(
                f"other machines can reach {self.listen}, and would read images with this node's login",
                remedy="require a password with --token-file, or listen on 127.0.0.1",
            )
        return address


def serve(settings: ResolverSettings, on_message: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `on_message` is called with the address, the choices and the refusals.

    Raises UsageError for invalid settings, ImagematrixError if the node cannot be probed.
    """
    for name in settings.classes:
        if not CLASS_NAME.fullmatch(f"class.{name}"):
            raise UsageError(
                f"invalid class name: {name!r}; expected letters, digits, '.' and '_', as in a tag"
            )
    address = settings.get_address()
    health = Address.parse(settings.health) if settings.health else None
    policies = load_policies(list_policy_files(settings.policy))
    for node in (settings.node, *settings.classes.values()):
        node.read_host()
    asyncio.run(_run_resolver(settings, policies, address, health, on_message))


async def _run_resolver(
    settings: ResolverSettings,
    policies: Sequence[SignaturePolicy],
    address: Address,
    health_address: Address | None,
    on_message: Callable[[str], None],
) -> None:
    upstream = open_upstream(settings.upstream)
    registry = "" if settings.upstream.startswith(LAYOUT) else settings.upstream.rstrip("/")
    resolver = Resolver(
        upstream=upstream,
        nodes=HostSources(this_node=settings.node, classes=settings.classes),
        log=ResolverLog(on_message),
        mirrors=registry.partition("/")[0] or None,
        token=settings.token,
        policies=[policy.with_registry(registry) for policy in policies],
        state=StateFolder(settings.state, settings.upstream.rstrip("/"), on_message)
        if settings.state
        else None,
    )
    health = Health(lambda: None, resolver.check_answer)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(upstream.close)
        stack.push_async_callback(resolver.end)
        serving = serve_http(resolver.make_application(), address, grace_s=GRACE_S, limits=LIMITS)
        where = f"serving {settings.upstream} on {await stack.enter_async_context(serving)}"
        if health_address:
            where += f", health on {await stack.enter_async_context(health.serve(health_address))}"
        ended = asyncio.Event()
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signal_number, ended.set)
        on_message(where)
        exempt_from_collection()  # the modules stay
        tasks = [asyncio.create_task(_watch_node(settings, on_message)), asyncio.create_task(health.follow())]
        await ended.wait()
        for task in tasks:
            task.cancel()


async def _watch_node(settings: ResolverSettings, on_message: Callable[[str], None]) -> None:
    """Report changes of the node, and touch the file `changed`.

    The file is touched at the start, too, because the node may have changed before.
    """
    last: Host | None = None
    loop = asyncio.get_running_loop()
    executor = ThreadPoolExecutor(1)  # asyncio's threads may all wait for an upstream that hangs
    while True:
        try:
            host = await loop.run_in_executor(executor, settings.node.read_host)
        except ImagematrixError as error:
            on_message(str(error))
        else:
            if last is not None and host != last:
                on_message("the node has changed: new answers may differ from the images in the engine")
            if settings.changed and host != last:
                try:
                    await loop.run_in_executor(executor, settings.changed.touch)
                except OSError as error:
                    on_message(f"{settings.changed} cannot be touched: {error.strerror}")
            last = host
        await asyncio.sleep(WATCH_S)
