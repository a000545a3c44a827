"""URLs of registries and of what their answers name, parsed once.

Every request is sent to the text of such a value, which all parsers read alike, so the host that was compared
is the host to which the client connects.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from urllib.parse import urljoin

from requests.utils import requote_uri

from imagematrix.common.host_port import parse_host_port
from imagematrix.errors import EngineError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Self

VISIBLE = re.compile(r"[!-\[\]-~]*")  # of ASCII, without the backslash, which some parsers take for a slash
URL = re.compile(r"(https?)://([^/?#]*)([^#]*)(?:#.*)?", re.IGNORECASE)
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
PORTS = {"http": 80, "https": 443}
REMEDY = "check the name of the registry, and the proxies and redirects that are configured in front of it"
LONGEST = 200  # characters of an invalid address in a message


@dataclass(frozen=True, slots=True)
class Url:
    """An http or https URL without user, password and fragment.

    `host` is as `parse_host_port` returns it, `target` the path and the query, as they are sent.
    """

    scheme: str
    host: str
    port: int
    target: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the URL that is written as `text`; raise ValueError if it is invalid."""
        matched = URL.fullmatch(_require_visible(text))
        if matched is None:
            raise ValueError(f"not an address of the web: {text[:LONGEST]!r}")
        scheme, target = matched[1].lower(), matched[3]
        host, port = parse_host_port(matched[2])
        if port == 0:  # some clients connect to the default port instead
            raise ValueError("nothing listens on port 0")
        # As requests would quote it. It is not normalized further, because it may be signed.
        target = requote_uri(target if target.startswith("/") else f"/{target}")
        return cls(scheme, host, port or PORTS[scheme], target)

    @property
    def authority(self) -> str:
        """HOST, or HOST:PORT if the port is not the scheme's own."""
        return self.host if self.port == PORTS[self.scheme] else f"{self.host}:{self.port}"

    @property
    def origin(self) -> tuple[str, str, int]:
        """Scheme, host and port (RFC 6454)."""
        return self.scheme, self.host, self.port

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"

    def join(self, reference: str) -> Url:
        """Return the URL that an answer of this one names, absolutely or relatively.

        Raises EngineError if it is invalid.
        """
        try:
            text = _require_visible(reference)
            if text.startswith("//"):
                text = f"{self.scheme}:{text}"
            elif not SCHEME.match(text):  # `urljoin` would take http:path and http:///path for paths
                text = urljoin(str(self), text)
            return Url.parse(text)
        except ValueError as error:
            message = f"{self.authority} returned an invalid address: {reference[:LONGEST]!r}"
            raise EngineError(message, remedy=REMEDY) from error

    def follow(self, reference: str) -> Url:
        """Return the URL at which a request to this one goes on; see `join`.

        Raises EngineError, too, if that would leave TLS.
        """
        url = self.join(reference)
        if self.scheme == "https" and url.scheme != "https":
            raise EngineError(f"{self.authority} sends requests on to {url}, without TLS", remedy=REMEDY)
        return url

    def with_query(self, query: str) -> Url:
        """Return this URL with further parameters, which are encoded already."""
        return replace(self, target=f"{self.target}{'&' if '?' in self.target else '?'}{query}")


def _require_visible(text: str) -> str:
    """Return a text without blanks, control characters, backslashes and other scripts; else ValueError."""
    if not VISIBLE.fullmatch(text):
        raise ValueError(f"an address has other characters: {text[:LONGEST]!r}")
    return text
