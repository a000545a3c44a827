"""Addresses in answers of registries: relative URLs, redirects, and which addresses get credentials."""

from __future__ import annotations

from urllib.parse import urljoin, urlsplit

from imagematrix.errors import EngineError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Redirects", "address", "same_origin"]

REDIRECTS = 5
MOVED = frozenset({301, 302, 307, 308})  # the request is repeated with the same method and content
SEE_OTHER = 303  # the request is repeated with GET, so only GET and HEAD follow it
READING = ("GET", "HEAD")
PORTS = {"http": 80, "https": 443}


class Redirects:
    """The addresses of a request that may be redirected; `url` is the current one."""

    def __init__(self, method: str, url: str) -> None:
        self.url = url
        self._first = url
        self._statuses = MOVED | ({SEE_OTHER} if method in READING else set())
        self._left = REDIRECTS

    @property
    def trusted(self) -> bool:
        """Whether credentials for the first address may be sent to the current one."""
        return same_origin(self._first, self.url)

    def follow(self, status: int, headers: Mapping[str, str]) -> bool:
        """Whether an answer redirects the request; if so, `url` becomes the next address.

        Raises EngineError if the next address is invalid, or after too many redirects.
        """
        where = headers.get("Location")
        if status not in self._statuses or where is None:
            return False
        if not self._left:
            raise EngineError(f"{urlsplit(self._first).netloc} redirects more than {REDIRECTS} times")
        self._left -= 1
        self.url = address(self.url, where)
        return True


def address(base: str, url: str) -> str:
    """Return `url` resolved relative to `base`; raise EngineError if it is invalid."""
    try:
        parts = urlsplit(urljoin(base, url))
        parts.port  # noqa: B018 - raises ValueError
        return parts.geturl()
    except ValueError as error:
        host = urlsplit(base).netloc
        raise EngineError(f"{host} returned an invalid address: {url[:200]!r}") from error


def same_origin(first: str, second: str) -> bool:
    """Whether two addresses have the same scheme, host and port (RFC 6454)."""
    return _origin(first) == _origin(second)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or PORTS.get(parts.scheme)
