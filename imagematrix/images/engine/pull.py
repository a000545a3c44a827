"""Pulling an image into the engine, with the progress that the engine reports."""

from __future__ import annotations

import contextlib

from imagematrix.common.record import Record
from imagematrix.common.text import make_headline, quote_word
from imagematrix.errors import EngineError, UnknownImageError
from imagematrix.images.engine import transport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    import docker

    from imagematrix.errors import ImagematrixError

# What the engine says of a layer: the states that follow its download, and those in which it is in the store.
DOWNLOADED = frozenset({"Verifying Checksum", "Download complete", "Extracting"})
STORED = frozenset({"Pull complete", "Already exists"})
STATES = DOWNLOADED | STORED | {"Pulling fs layer", "Waiting", "Downloading"}
# Parts of the engine's errors, in lower case: an image that no registry has, a login that one wants.
UNKNOWN = ("manifest unknown", "not found", "does not exist")
DENIED = ("unauthorized", "authentication required", "no basic auth credentials", "denied", "forbidden")
FULL = "no space left on device"


class PullProgress(Record):
    """How far a pull is: the layers of the image, those `downloaded`, and the bytes `received` so far.

    The engine mentions a layer when its turn comes, so the number of `layers` may grow.
    """

    layers: int
    downloaded: int
    received: int


class _LayerProgress:
    """What the engine has reported of the layers of a pull."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._received: dict[str, int] = {}

    def update(self, event: Mapping[str, Any]) -> PullProgress:
        """Return the progress after an event."""
        layer, state = str(event.get("id")), event.get("status")
        if state in STATES:
            self._states[layer] = state
        detail = event.get("progressDetail")
        if state == "Downloading" and isinstance(detail, dict) and isinstance(detail.get("current"), int):
            self._received[layer] = detail["current"]
        return PullProgress(
            layers=len(self._states),
            downloaded=sum(state in DOWNLOADED | STORED for state in self._states.values()),
            received=sum(self._received.values()),
        )


def ignore_progress(_: PullProgress) -> None:
    """Report nothing."""


def pull_image(
    name: str,
    *,
    platform: str | None = None,
    on_progress: Callable[[PullProgress], object] = ignore_progress,
    client: docker.DockerClient | None = None,
) -> None:
    """Pull the image with this name, which has a tag, or a digest without a tag.

    The first report comes before the engine asks the registry, and has no layers.
    Raises UnknownImageError if its registry does not have it, EngineError if the engine or the registry
    cannot be reached, or the pull fails.
    """
    with contextlib.ExitStack() as stack:
        engine = client or stack.enter_context(contextlib.closing(transport.open_client()))
        layers = _LayerProgress()
        on_progress(layers.update({}))
        from docker.errors import APIError

        api: Any = engine.api
        repository, at, digest = name.partition("@")
        words = (repository, digest) if at else (repository,)
        try:
            with transport.convert_errors(APIError):
                for event in api.pull(*words, stream=True, decode=True, platform=platform):
                    if "error" in event:
                        raise _make_failure(name, str(event["error"]))
                    on_progress(layers.update(event))
        except APIError as error:  # the engine refuses the pull at once
            raise _make_failure(name, error.explanation or str(error)) from error


def _make_failure(name: str, message: str) -> ImagematrixError:
    """Return the error for a pull that failed with the engine's `message`."""
    why, lower = make_headline(message), message.lower()
    if FULL in lower:
        remedy = "free disk space where the engine keeps its images (`docker system df`), and try again"
        return EngineError(f"cannot pull {name}: {FULL}", remedy=remedy)
    if any(part in lower for part in UNKNOWN):
        remedy = "check that it is still in its registry, and `docker login` if that demands one"
        return UnknownImageError(f"cannot pull {name}: {why}", remedy=remedy)
    if any(part in lower for part in DENIED):
        remedy = f"`docker login {quote_word(name.partition('/')[0])}` with an account that has access"
        return EngineError(f"cannot pull {name}: {why}", remedy=remedy)
    remedy = "check that the registry is running, and try again"
    return EngineError(f"cannot pull {name}: {why}", remedy=remedy)
