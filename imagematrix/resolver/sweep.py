"""The names that an engine keeps of what the resolver answered before.

An engine looks at a name only: what it has is not pulled again. After a new driver, a version would go on
meaning the variant for the old one.
"""

from __future__ import annotations

from imagematrix import engine
from imagematrix.errors import EngineError, UsageError
from imagematrix.oci.registry import MANIFESTS
from imagematrix.reference import TAG

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import docker

__all__ = ["sweep"]

TIMEOUT_S = 60
OK, UNAUTHORIZED, DENIED = 200, 401, 403


def sweep(address: str, note: Callable[[str], None], *, token: str | None = None) -> list[str]:
    """Remove the names of images pulled from the resolver at `address` that now mean another image, or none.

    Containers keep running. `note` is told what could not be removed. `token` is the password that the
    resolver asks for. Returns the removed names, sorted. Raises EngineError if the engine or the resolver
    cannot be reached, UsageError if the token is wrong.
    """
    import docker

    client = engine.client()
    removed = []
    for name, digests in sorted(_pulled(client, address)):
        meant = _meant(address, name, token)
        if meant is None or meant in digests:
            continue
        try:
            # By force: a container that uses it would stop that, though only a name goes.
            client.api.remove_image(name, force=True, noprune=True)
        except docker.errors.APIError as error:
            note(f"{name} stays: {error.explanation or error}")
        else:
            removed.append(name)
    return removed


def _pulled(client: docker.DockerClient, address: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the names in the engine that begin with the resolver's address, with their images' digests."""
    for image in client.api.images():
        for name in image.get("RepoTags") or ():
            if name.startswith(f"{address}/"):
                yield name, engine.digests_of(client, name)


def _meant(address: str, name: str, token: str | None) -> str | None:
    """Return the digest that the resolver answers for a name, "" for a refusal; None if it has no answer."""
    import requests

    repository, _, tag = name.removeprefix(f"{address}/").rpartition(":")
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
