"""The upstream of the resolver, the source of its manifests and blobs: a registry or an OCI layout."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import aiohttp
from aiohttp import web
from requests.utils import get_environ_proxies, select_proxy
from yarl import URL

from imagematrix.common import json_documents
from imagematrix.common.image_reference import DIGEST, names_registry
from imagematrix.errors import EngineError, UnknownImageError, UsageError
from imagematrix.images.oci.layout import MARK, NAME, LayoutFolder
from imagematrix.images.oci.manifest import Descriptor, ImageIndex, Manifest, parse_manifest
from imagematrix.images.oci.redirects import Redirects
from imagematrix.images.oci.registry import Registry
from imagematrix.images.oci.retry import TRIES
from imagematrix.images.trust.signature import ManifestSource
from imagematrix.integrations.http_service.connections import reserve_memory
from imagematrix.integrations.resolver.timed_semaphore import TimedSemaphore

LAYOUT = "oci:"  # prefix of an upstream that is an OCI layout
REPOSITORIES = 256  # repositories whose logins are kept
PIECE = 1 << 16  # bytes to forward at once; a connection holds up to five such pieces
KEPT = 288 << 10  # bytes of a blob that are in memory while its client reads nothing
TURN = 32  # pieces to forward in a turn of the event loop, so that other clients get theirs
OPENING = 8  # blobs to open at once, as a registry reads ahead for each
OPENING_S = 0.25  # after which others are opened while one is not answered
OPENING_WAITING = 250  # requests that wait for that, so that there are always places for others
CONNECT_S = 10
SILENCE_S = 60
UNAUTHORIZED = 401
REQUEST_HEADERS = ("Range", "If-Range")  # headers to forward in a request for a blob
ANSWER_HEADERS = ("Content-Length", "Content-Range", "Content-Type", "Accept-Ranges", "ETag")
AUTHORITIES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")  # as for manifests, which requests fetches


class Upstream(ManifestSource, Protocol):
    """A source of images. Every method raises EngineError if the source cannot be read.

    Methods that are not coroutines block; they are thread-safe.
    """

    def get_digest(self, repository: str, tag: str) -> str | None:
        """Return the digest of a tag without its manifest, None if there is no such tag."""
        ...

    def list_tags(self, repository: str) -> list[str]:
        """Return the tags of a repository, none if there is no such repository."""
        ...

    async def serve_blob(self, request: web.Request, repository: str, digest: str, /) -> web.StreamResponse:
        """Answer a request for a blob, or for a range of it, without keeping the blob in memory."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


def make_crowd_error() -> EngineError:
    """Return the error for a request that is one too many."""
    return EngineError("too many requests wait for the upstream", remedy="try again later")


def open_upstream(name: str) -> Upstream:
    """Return the registry `name`, such as registry:5000 or registry:5000/mirror, or the layout "oci:FOLDER".

    Raises UsageError if it is neither.
    """
    if name.startswith(LAYOUT):
        return LayoutUpstream(Path(name.removeprefix(LAYOUT)))
    return RegistryUpstream(name)


class RegistryUpstream:
    """The registry `name`, or a path in one. It verifies the digests of manifests, but not of blobs."""

    def __init__(self, name: str) -> None:
        self._name = name.rstrip("/")
        if not names_registry(f"{self._name}/repository"):
            raise UsageError(f"invalid registry {name!r}: expected a name such as registry.example:5000")
        Registry(f"{self._name}/repository")  # raises an error for an invalid name
        self._repositories: OrderedDict[str, Registry] = OrderedDict()
        self._lock = threading.Lock()
        self._turns = asyncio.Semaphore(TURN)
        self._openings = TimedSemaphore(OPENING, OPENING_S, OPENING_WAITING)
        self._session: aiohttp.ClientSession | None = None

    def find_manifest(self, repository: str, reference: str) -> Manifest | None:
        """Return a manifest; see Upstream."""
        manifest = self._get_registry(repository).find_manifest(reference)
        if manifest is None:
            return None
        try:
            fields = json_documents.Fields(json_documents.parse_json(manifest.raw, reference), reference)
            # The digest covers the media type in the manifest, but not the one in the registry's header.
            media_type = fields.get_text_or_none("mediaType") or manifest.media_type
        except UsageError as error:
            raise EngineError(f"{self._name}/{repository} has a damaged manifest: {error}") from error
        return replace(manifest, media_type=media_type)

    def get_digest(self, repository: str, tag: str) -> str | None:
        """Return the digest of a tag; see Upstream."""
        return self._get_registry(repository).digest(tag)

    def read_content(self, repository: str, digest: str) -> bytes:
        """Return a small blob; see ManifestSource."""
        return self._get_registry(repository).fetch_small_blob(digest)

    def list_tags(self, repository: str) -> list[str]:
        """Return the tags; see Upstream."""
        return self._get_registry(repository).list_tags()

    async def serve_blob(self, request: web.Request, repository: str, digest: str) -> web.StreamResponse:
        """Forward a blob; see Upstream. The registry may redirect to another host."""
        registry = self._get_registry(repository)
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with self._openings.take_turn(digest):
                    answer = await self._request_blob(stack, request, registry, digest)
                if answer.status == UNAUTHORIZED:
                    # Tokens expire; this request gets a new one.
                    await asyncio.to_thread(registry.has_blob, digest)
                    answer = await self._request_blob(stack, request, registry, digest)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:  # ValueError: an invalid address
                reason = str(error) or type(error).__name__
                raise EngineError(f"the registry {self._name} cannot be read: {reason}") from error
            except asyncio.QueueFull:  # not 429, after which Docker does not try again
                raise make_crowd_error() from None
            size = answer.content_length
            reserve_memory(KEPT if size is None else min(size, KEPT))
            headers = {name: answer.headers[name] for name in ANSWER_HEADERS if name in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=headers)
            await response.prepare(request)
            try:
                has_begun = False
                async for piece in answer.content.iter_chunked(PIECE):
                    if has_begun:  # a small blob waits for none of the large ones
                        async with self._turns:
                            await asyncio.sleep(0)
                    await response.write(piece)
                    has_begun = True
            except (aiohttp.ClientPayloadError, aiohttp.ServerTimeoutError) as error:
                # An answer that has begun can only be aborted: the engine notices that it is truncated.
                raise ConnectionResetError(str(error)) from error
            await response.write_eof()
            return response

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _request_blob(
        self, stack: contextlib.AsyncExitStack, request: web.Request, registry: Registry, digest: str
    ) -> aiohttp.ClientResponse:
        """Follow redirects and return the answer for a blob.

        Only the registry gets the Authorization. The proxies are the same as for manifests; aiohttp's own
        detection of proxies would also use logins from ~/.netrc.
        """
        headers = {name: request.headers[name] for name in REQUEST_HEADERS if name in request.headers}
        redirects = Redirects(request.method, registry.make_blob_url(digest))
        while True:
            login = registry.authorization if redirects.trusted else None
            # As requests finds it; the variable may omit the scheme.
            proxy = select_proxy(str(redirects.url), get_environ_proxies(str(redirects.url)))
            if proxy and "://" not in proxy:
                proxy = f"http://{proxy}"
            request_context = self._open_session().request(
                request.method,
                URL(str(redirects.url), encoded=True),  # sent as it is
                headers=headers | ({"Authorization": login} if login else {}),
                allow_redirects=False,
                proxy=proxy,
            )
            answer = await stack.enter_async_context(request_context)
            if not redirects.follow(answer.status, answer.headers):
                return answer

    def _get_registry(self, repository: str) -> Registry:
        with self._lock:
            registry = self._repositories.pop(repository, None)
            if registry is None:  # a thread waits with each request, and a client of ours with it
                registry = Registry(f"{self._name}/{repository}", busy_tries=TRIES)
            self._repositories[repository] = registry
            if len(self._repositories) > REPOSITORIES:
                self._repositories.popitem(last=False)
            return registry

    def _open_session(self) -> aiohttp.ClientSession:
        """Return the session; raise EngineError if the certificate authorities cannot be read."""
        if self._session is None:
            # They are in a file or a folder, as for requests.
            path = next(filter(None, map(os.environ.get, AUTHORITIES)), None)
            folder = path if path and Path(path).is_dir() else None
            try:
                tls = ssl.create_default_context(cafile=None if folder else path, capath=folder)
            except OSError as error:
                message = f"the certificate authorities in {path} cannot be read: {error.strerror or error}"
                raise EngineError(message) from error
            self._session = aiohttp.ClientSession(
                # As many connections as there are clients.
                connector=aiohttp.TCPConnector(limit=0, ssl=tls),
                # A layer of gigabytes may take as long as it takes, if its bytes keep coming.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S),
                # A digest and a range are those of the bytes as stored.
                headers={"Accept-Encoding": "identity"},
                cookie_jar=aiohttp.DummyCookieJar(),  # as for manifests
                auto_decompress=False,
                read_bufsize=PIECE // 2,
            )
        return self._session


class LayoutUpstream:
    """The OCI layout in `folder`. Its images are named IMAGE:TAG in its index."""

    def __init__(self, folder: Path) -> None:
        self._layout = LayoutFolder(folder, EngineError)
        if not self._layout.is_marked:
            raise UsageError(f"{folder} is not an OCI layout: {MARK} not found")

    def find_manifest(self, repository: str, reference: str) -> Manifest | None:
        """Return a manifest; see Upstream."""
        digest = reference if DIGEST.fullmatch(reference) else self.get_digest(repository, reference)
        raw = self._layout.find_small_blob(digest) if digest else None
        if digest is None or raw is None:
            return None
        return Manifest(digest=digest, media_type=parse_manifest(raw, digest, Descriptor).media_type, raw=raw)

    def get_digest(self, repository: str, tag: str) -> str | None:
        """Return the digest of a tag; see Upstream."""
        return self._read_digests().get(f"{repository}:{tag}")

    def read_content(self, repository: str, digest: str) -> bytes:
        """Return a small blob; see ManifestSource."""
        raw = self._layout.find_small_blob(digest)
        if raw is None:
            raise UnknownImageError(f"{self._layout} has no {repository}@{digest}")
        return raw

    def list_tags(self, repository: str) -> list[str]:
        """Return the tags; see Upstream."""
        names = (name.rpartition(":") for name in self._read_digests())
        return sorted(tag for image, _, tag in names if image == repository)

    async def serve_blob(self, _request: web.Request, _repository: str, digest: str) -> web.StreamResponse:
        """Answer with a file; see Upstream."""
        path = self._layout.find_blob(digest)
        if path is None:
            raise web.HTTPNotFound
        reserve_memory(min(path.stat().st_size, KEPT))
        return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})

    async def close(self) -> None:
        """Do nothing: no connection is open."""

    def _read_digests(self) -> dict[str, str]:
        """Return the digests of the layout's images by their names."""
        index = parse_manifest(self._layout.read_index(), str(self._layout), Descriptor)
        entries = index.entries if isinstance(index, ImageIndex) else ()
        return {name: entry.digest for entry in entries if (name := entry.annotations.get(NAME))}
