"""The last lines of a container, read while docker's command runs it: with --rm they are gone afterwards."""

from __future__ import annotations

import threading

from imagematrix import engine
from imagematrix.errors import EngineError

__all__ = ["Watch"]

KEPT = 64 * 1024  # bytes
PATIENCE_S = 2.0  # to read what a container said at its end


class Watch:
    """A thread that waits for the start of the container with `label` (NAME=VALUE) and reads what it says.

    `since` is the time, in seconds since 1970, before which nobody can have started it. `container` is its
    id, None until it is known.
    """

    def __init__(self, label: str, since: float) -> None:
        self._filters = {"type": "container", "event": "start", "label": label}
        self._since = int(since)
        self.container: str | None = None
        self._said = b""
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def last_lines(self) -> list[str]:
        """Return what the container that has ended said last, as far as an engine could tell."""
        self._thread.join(PATIENCE_S)
        return self._said.decode("utf-8", "replace").splitlines()

    def _follow(self) -> None:
        import docker
        import requests

        try:
            client = engine.client()
            started = next(client.events(since=self._since, filters=self._filters, decode=True))
            self.container = str(started["id"])
            for said in client.api.logs(self.container, stream=True, follow=True):
                self._said = (self._said + said)[-KEPT:]
        except (EngineError, docker.errors.DockerException, requests.RequestException, OSError):
            return  # it ended and is gone, or nobody may read its log
