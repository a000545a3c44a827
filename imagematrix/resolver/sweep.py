"""Removing names from an engine that the resolver would now answer with another image.

An engine does not pull a name again that it already has. After a driver update, the name of a version would
still refer to the variant for the old driver.
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
    """Remove the names that the resolver at `address` now answers with another image, or refuses.

    Containers keep running. `note` is called with a message for each name that could not be removed. `token`
    is the resolver's password. Returns the removed names, sorted. Raises EngineError if the engine or the
    resolver cannot be reached, UsageError if the token is wrong.
    """
    removed = []
    for name, digests in sorted(names.held()):
        answered = _answered(address, name.removeprefix(names.prefix), token)
        if answered is None or answered in digests:
            continue
        try:
            names.remove(name)
        except EngineError as error:
            note(f"{name} was not removed: {error}")
        else:
            removed.append(name)
    return removed


def _answered(address: str, name: str, token: str | None) -> str | None:
    """Return the digest that the resolver answers for a name, "" if it refuses, None if it has no answer."""
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
        raise EngineError(
            message, remedy="start it and run the command again; no further names were removed"
        ) from error
    if answer.status_code == UNAUTHORIZED:
        raise UsageError(f"the resolver at {address} needs a token", remedy="pass it with --token-file")
    if answer.status_code == OK:
        return answer.headers.get("Docker-Content-Digest") or None
    return "" if answer.status_code == DENIED else None
