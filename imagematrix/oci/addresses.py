"""Addresses that registries name: relative ones, redirections, and which of them get credentials."""

from __future__ import annotations

from urllib.parse import urljoin, urlsplit

from imagematrix.errors import EngineError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Way", "address", "same_origin"]

REDIRECTS = 5
MOVED = frozenset({301, 302, 307, 308})  # with the same method and content
SEE_OTHER = 303  # with GET: for a request without content it is the same
READING = ("GET", "HEAD")
PORTS = {"http": 80, "https": 443}


class Way:
    """The addresses of a request that is redirected; `url` is the current one."""

    def __init__(self, method: str, url: str) -> None:
        self.url = url
        self._first = url
        self._statuses = MOVED | ({SEE_OTHER} if method in READING else set())
        self._left = REDIRECTS

    @property
    def trusted(self) -> bool:
        """Whether credentials for the first address may be sent to the current one."""
        return same_origin(self._first, self.url)

    def goes_on(self, status: int, headers: Mapping[str, str]) -> bool:
        """Whether an answer redirects the request; `url` is the next address then.

        Raises EngineError if that is invalid, or if there were too many.
        """
        where = headers.get("Location")
        if status not in self._statuses or where is None:
            return False
        if not self._left:
            raise EngineError(f"{urlsplit(self._first).netloc} leads to more than {REDIRECTS} redirections")
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
        place = urlsplit(base).netloc
        raise EngineError(f"{place} names an invalid address: {url[:200]!r}") from error


def same_origin(one: str, other: str) -> bool:
    """Whether two addresses have the same scheme, host and port (RFC 6454)."""
    return _origin(one) == _origin(other)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or PORTS.get(parts.scheme)
