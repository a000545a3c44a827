"""Redirects of requests to registries: which are followed, and whether credentials may go along."""

from __future__ import annotations

from imagematrix.errors import EngineError
from imagematrix.images.oci.url import REMEDY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from imagematrix.images.oci.url import Url

REDIRECTS = 5
MOVED = frozenset({301, 302, 307, 308})  # the request is repeated with the same method and content
SEE_OTHER = 303  # the request is repeated with GET, so only GET and HEAD follow it
READING = ("GET", "HEAD")


class Redirects:
    """The addresses of a request that may be redirected.

    `url` is the current one. It is `trusted` with credentials for the first one until the request leaves
    that origin; after that, another host decides where the request goes.
    """

    def __init__(self, method: str, url: Url) -> None:
        self.url = url
        self.trusted = True
        self._first = url
        self._statuses = MOVED | ({SEE_OTHER} if method in READING else set())
        self._left = REDIRECTS

    def follow(self, status: int, headers: Mapping[str, str]) -> bool:
        """Whether an answer redirects the request; if so, `url` becomes the next address.

        Raises EngineError if the next address is invalid or without TLS after one with it, or after too many
        redirects.
        """
        where = headers.get("Location")
        if status not in self._statuses or where is None:
            return False
        if not self._left:
            message = f"{self._first.authority} redirects more than {REDIRECTS} times"
            raise EngineError(message, remedy=REMEDY)
        self._left -= 1
        self.url = self.url.follow(where)
        self.trusted = self.trusted and self.url.origin == self._first.origin
        return True
