"""Removing names from an engine that the resolver would now answer with another image.

An engine does not pull a name again that it already has. After a driver update, the name of a version would
still refer to the variant for the old driver.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

from imagematrix.common.image_reference import DIGEST, is_tag
from imagematrix.common.programs import read_output
from imagematrix.errors import EngineError, UsageError
from imagematrix.images.engine import images, transport
from imagematrix.images.oci.manifest import MANIFESTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIMEOUT_S = 60
OK, UNAUTHORIZED, DENIED = 200, 401, 403


def untag(
    names: DockerNames | ContainerdNames,
    address: str,
    on_failure: Callable[[str], None],
    *,
    token: str | None = None,
) -> list[str]:
    """Remove the names that the resolver at `address` now answers with another image, or refuses.

    Containers keep running. `on_failure` is called with a message for each name that could not be removed.
    `token` is the resolver's password. Returns the removed names, sorted. Raises EngineError if the engine or
    the resolver cannot be reached, UsageError if the token is wrong.
    """
    removed = []
    for name, digests in sorted(names.list_names()):
        if not _is_outdated(name.removeprefix(names.prefix), digests, address, token):
            continue
        try:
            names.remove(name)
        except EngineError as error:
            on_failure(f"{name} was not removed: {error}")
        else:
            removed.append(name)
    return removed


def _is_outdated(name: str, digests: frozenset[str], address: str, token: str | None) -> bool:
    """Whether the resolver refuses a name, or answers it with another digest; other errors say nothing."""
    import requests

    repository, _, tag = name.rpartition(":")
    if not is_tag(tag):
        raise UsageError(f"the engine has an image with an invalid name: {name!r}")
    url = f"http://{address}/v2/{repository}/manifests/{tag}"
    try:
        with requests.Session() as session:
            session.trust_env = False  # the resolver is on this machine: no proxy, and no login from ~/.netrc
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
        digest = answer.headers.get("Docker-Content-Digest")
        return bool(digest) and digest not in digests
    return answer.status_code == DENIED


class DockerNames:
    """The names that begin with the resolver's address, in the engine that docker's clients use."""

    def __init__(self, address: str) -> None:
        self.prefix = f"{address}/"
        self._client = transport.open_client()

    def list_names(self) -> Iterator[tuple[str, frozenset[str]]]:
        """Yield each name and the digests of its image."""
        with transport.convert_errors():
            docker_py = transport.DockerPy(self._client)
            for image in self._client.api.images():
                for name in image.get("RepoTags") or ():
                    if name.startswith(self.prefix):
                        yield name, images.get_digests(name, docker_py)

    def remove(self, name: str) -> None:
        """Remove only the name, by force: otherwise Docker refuses if a container uses it."""
        with transport.convert_errors():
            self._client.api.remove_image(name, force=True, noprune=True)


@dataclass(frozen=True, slots=True)
class ContainerdNames:
    """The names in a `namespace` of containerd from a `registry` that the resolver mirrors.

    It uses containerd's client ctr, which finds containerd by CONTAINERD_ADDRESS.
    """

    registry: str
    namespace: str

    @property
    def prefix(self) -> str:
        """The common beginning of the names."""
        return f"{self.registry}/"

    def list_names(self) -> Iterator[tuple[str, frozenset[str]]]:
        """Yield each name with a tag, and the digests of its image."""
        for line in self._run_ctr("list").splitlines():
            name, *rest = line.split()
            digests = frozenset(word for word in rest if DIGEST.fullmatch(word))
            if name.startswith(self.prefix) and digests and "@" not in name:
                yield name, digests

    def remove(self, name: str) -> None:
        """Remove a name."""
        self._run_ctr("remove", name)

    def _run_ctr(self, *words: str) -> str:
        command = ["ctr", "--namespace", self.namespace, "images", *words]
        try:
            process = read_output(command, TIMEOUT_S)
        except FileNotFoundError:
            raise EngineError("ctr not found", remedy="install containerd's client") from None
        except subprocess.TimeoutExpired:
            raise EngineError(f"containerd did not answer in {TIMEOUT_S} s") from None
        if process.returncode:
            raise EngineError(
                process.stderr.strip() or "ctr failed", remedy="check that containerd is running"
            )
        return process.stdout
