"""A registry as the upstream of the resolver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import threading
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import aiohttp
from aiohttp import web
from requests.utils import get_environ_proxies, requote_uri, select_proxy
from yarl import URL

from imagematrix import documents
from imagematrix.errors import EngineError, UsageError
from imagematrix.oci.addresses import Redirects
from imagematrix.oci.registry import Registry
from imagematrix.reference import names_registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.oci.registry import Manifest

__all__ = ["Remote"]

REPOSITORIES = 256  # repositories whose logins are kept
PIECE = 1 << 18  # bytes to forward at once
CONNECT_S = 10
SILENCE_S = 60
UNAUTHORIZED = 401
REQUEST_HEADERS = ("Range", "If-Range")  # headers to forward in a request for a blob
ANSWER_HEADERS = ("Content-Length", "Content-Range", "Content-Type", "Accept-Ranges", "ETag")
AUTHORITIES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")  # as for manifests, which requests fetches


class Remote:
    """The registry `name`, or a path in one. It verifies the digests of manifests, but not of blobs."""

    def __init__(self, name: str) -> None:
        self._name = name.rstrip("/")
        if not names_registry(f"{self._name}/repository"):
            raise UsageError(f"invalid registry {name!r}: expected a name such as registry.example:5000")
        Registry(f"{self._name}/repository")  # raises an error for an invalid name
        self._repositories: OrderedDict[str, Registry] = OrderedDict()
        self._lock = threading.Lock()
        self._session: aiohttp.ClientSession | None = None

    def manifest(self, repository: str, reference: str) -> Manifest | None:
        """Return a manifest; see Upstream."""
        manifest = self._registry(repository).manifest(reference)
        if manifest is None:
            return None
        try:
            fields = documents.Fields(documents.parse(manifest.raw, reference), reference)
            # The digest covers the media type in the manifest, but not the one in the registry's header.
            media_type = fields.text_or_none("mediaType") or manifest.media_type
        except UsageError as error:
            raise EngineError(f"{self._name}/{repository} has a damaged manifest: {error}") from error
        return replace(manifest, media_type=media_type)

    def content(self, repository: str, digest: str) -> bytes:
        """Return a small blob; see Source."""
        return self._registry(repository).blob(digest)

    def tags(self, repository: str) -> list[str]:
        """Return the tags; see Upstream."""
        return self._registry(repository).tags()

    async def blob(self, request: web.Request, repository: str, digest: str) -> web.StreamResponse:
        """Forward a blob; see Upstream. The registry may redirect to another host."""
        registry = self._registry(repository)
        async with contextlib.AsyncExitStack() as stack:
            try:
                answer = await self._asked(stack, request, registry, digest)
                if answer.status == UNAUTHORIZED:
                    # Tokens expire; this request gets a new one.
                    await asyncio.to_thread(registry.has_blob, digest)
                    answer = await self._asked(stack, request, registry, digest)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:  # ValueError: an invalid address
                raise self._unreadable(error) from error
            headers = {name: answer.headers[name] for name in ANSWER_HEADERS if name in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=headers)
            await response.prepare(request)
            try:
                async for piece in answer.content.iter_chunked(PIECE):
                    await response.write(piece)
            except (aiohttp.ClientPayloadError, aiohttp.ServerTimeoutError) as error:
                # An answer that has begun can only be aborted: the engine notices that it is truncated.
                raise ConnectionResetError(str(error)) from error
            await response.write_eof()
            return response

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _asked(
        self, stack: contextlib.AsyncExitStack, request: web.Request, registry: Registry, digest: str
    ) -> aiohttp.ClientResponse:
        """Follow redirects and return the answer for a blob.

        Only the registry gets the Authorization. The proxies are the same as for manifests; aiohttp's own
        detection of proxies would also use logins from ~/.netrc.
        """
        wanted = {name: request.headers[name] for name in REQUEST_HEADERS if name in request.headers}
        redirects = Redirects(request.method, registry.blob_url(digest))
        while True:
            login = registry.authorization if redirects.trusted else None
            request_context = self._opened().request(
                request.method,
                URL(requote_uri(redirects.url), encoded=True),  # not normalized, because it may be signed
                headers=wanted | ({"Authorization": login} if login else {}),
                allow_redirects=False,
                proxy=_proxy(redirects.url),
            )
            answer = await stack.enter_async_context(request_context)
            if not redirects.follow(answer.status, answer.headers):
                return answer

    def _registry(self, repository: str) -> Registry:
        with self._lock:
            registry = self._repositories.pop(repository, None) or Registry(f"{self._name}/{repository}")
            self._repositories[repository] = registry
            if len(self._repositories) > REPOSITORIES:
                self._repositories.popitem(last=False)
            return registry

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=_context()),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S),
                headers={"Accept-Encoding": "identity"},
                auto_decompress=False,
            )
        return self._session

    def _unreadable(self, error: Exception) -> EngineError:
        return EngineError(f"the registry {self._name} cannot be read: {str(error) or type(error).__name__}")


def _proxy(url: str) -> str | None:
    """Return the proxy for a URL, as requests finds it; the variable may omit the scheme."""
    proxy = select_proxy(url, get_environ_proxies(url))
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


def _context() -> ssl.SSLContext:
    """Return the TLS context, with certificate authorities from a file or a folder, as in requests.

    Raises EngineError if they cannot be read.
    """
    path = next(filter(None, map(os.environ.get, AUTHORITIES)), None)
    folder = path if path and Path(path).is_dir() else None
    try:
        return ssl.create_default_context(cafile=None if folder else path, capath=folder)
    except OSError as error:
        message = f"the certificate authorities in {path} cannot be read: {error.strerror or error}"
        raise EngineError(message) from error
