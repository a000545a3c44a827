"""The interface of an upstream: the source of the resolver's manifests and blobs."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from imagematrix.resolver.layout import Layout
from imagematrix.resolver.remote import Remote
from imagematrix.resolver.signature import Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["LAYOUT", "Upstream", "open_upstream"]

LAYOUT = "oci:"  # prefix of an upstream that is an OCI layout


class Upstream(Source, Protocol):
    """A source of images. Every method raises EngineError if the source cannot be read.

    Methods that are not coroutines block; they are thread-safe.
    """

    def tags(self, repository: str) -> list[str]:
        """Return the tags of a repository, none if there is no such repository."""
        ...

    async def blob(self, request: web.Request, repository: str, digest: str, /) -> web.StreamResponse:
        """Answer a request for a blob, or for a range of it, without keeping the blob in memory."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


def open_upstream(name: str) -> Upstream:
    """Return the registry `name`, such as registry:5000 or registry:5000/mirror, or the layout "oci:FOLDER".

    Raises UsageError if it is neither.
    """
    if name.startswith(LAYOUT):
        return Layout(Path(name.removeprefix(LAYOUT)))
    return Remote(name)
