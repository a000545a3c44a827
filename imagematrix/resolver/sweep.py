"""The names that an engine keeps of what the resolver answered before.

An engine looks at a name only: what it has is not pulled again. After a new driver, a version would go on
meaning the variant for the old one.
"""

from __future__ import annotations

from imagematrix.errors import EngineError, UsageError
from imagematrix.oci.registry import MANIFESTS
from imagematrix.reference import TAG

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from imagematrix.resolver.held import Names

__all__ = ["sweep"]

TIMEOUT_S = 60
OK, UNAUTHORIZED, DENIED = 200, 401, 403


def sweep(names: Names, address: str, note: Callable[[str], None], *, token: str | None = None) -> list[str]:
    """Remove the names for which the resolver at `address` now answers another image, or none.

    Containers keep running. `note` is told what could not be removed. `token` is the password that the
    resolver asks for. Returns the removed names, sorted. Raises EngineError if the engine or the resolver
    cannot be reached, UsageError if the token is wrong.
    """
    removed = []
    for name, digests in sorted(names.held()):
        meant = _meant(address, name.removeprefix(names.prefix), token)
        if meant is None or meant in digests:
            continue
        try:
            names.remove(name)
        except EngineError as error:
            note(f"{name} stays: {error}")
        else:
            removed.append(name)
    return removed


def _meant(address: str, name: str, token: str | None) -> str | None:
    """Return the digest that the resolver answers for a name, "" for a refusal; None if it has no answer."""
    import requests

    repository, _, tag = name.rpartition(":")
    if not TAG.fullmatch(tag):
        raise UsageError(f"the engine has an image with an invalid name: {name!r}")
    url = f"http://{address}/v2/{repository}/manifests/{tag}"
    try:
        with requests.Session() as session:
            session.trust_env = False
            session.auth = ("imagematrix", token) if token else None
            answer = session.head(url, headers={"Accept": ", ".join(MANIFESTS)}, timeout=TIMEOUT_S)
    except requests.RequestException as error:
        message = f"the resolver at {address} cannot be reached"
        raise EngineError(message, remedy="start it; nothing more was removed") from error
    if answer.status_code == UNAUTHORIZED:
        raise UsageError(f"the resolver at {address} needs a token", remedy="give its --token-file")
    if answer.status_code == OK:
        return answer.headers.get("Docker-Content-Digest") or None
    return "" if answer.status_code == DENIED else None
