"""Pulls: what the engine reports of them, and what its errors become."""

from types import SimpleNamespace

import pytest
from docker.errors import APIError
from double import Double, response

from imagematrix.errors import EngineError, UnknownImageError
from imagematrix.images.engine.pull import PullProgress, pull_image

NAME = f"registry:5000/ml/t@sha256:{'1' * 64}"


class Engine(Double):
    """An engine's client; `events` are its answer to a pull, or an error."""

    def __init__(self, *events):
        self.api = SimpleNamespace(pull=self._pull)
        self.events = events
        self.requests = []

    def _pull(self, *name, **options):
        self.requests.append((name, options))
        for event in self.events:
            if isinstance(event, Exception):
                raise event
            yield event


def reported(*events):
    """Return the progress after the last of these events."""
    seen: list[PullProgress] = []
    pull_image(NAME, on_progress=seen.append, client=Engine(*events))
    return seen[-1]


def event(status, layer, current=None):
    detail = {} if current is None else {"current": current, "total": 100}
    return {"status": status, "id": layer, "progressDetail": detail}


def test_a_digest_is_pulled_without_a_tag_and_a_tag_without_a_digest():
    engine = Engine()
    pull_image(NAME, platform="linux/arm64", client=engine)
    pull_image("training:v1-x", client=engine)
    (first, options), (second, _) = engine.requests
    assert first == ("registry:5000/ml/t", f"sha256:{'1' * 64}")
    assert options == {"stream": True, "decode": True, "platform": "linux/arm64"}
    assert second == ("training:v1-x",)


def test_layers_are_counted_from_what_the_engine_reports():
    events = [
        {"status": "Pulling from ml/t", "id": "v1"},
        event("Already exists", "a"),
        event("Pulling fs layer", "b"),
        event("Waiting", "c"),
        event("Downloading", "b", 10),
        event("Downloading", "b", 60),
    ]
    assert reported(*events) == PullProgress(layers=3, downloaded=1, received=60)
    events += [event("Download complete", "b"), event("Extracting", "b", 99), event("Pull complete", "c")]
    assert reported(*events) == PullProgress(layers=3, downloaded=3, received=60)
    events += [event("Retrying in 5 seconds", "c"), event("Downloading", "c"), {"status": "Digest: x"}]
    assert reported(*events) == PullProgress(layers=3, downloaded=2, received=60)
    assert reported({}) == PullProgress(layers=0, downloaded=0, received=0)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(
    ("message", "error", "remedy"),
    [
        ("manifest for x not found: manifest unknown", UnknownImageError, "still in its registry"),
        ("pull access denied for t, repository does not exist", UnknownImageError, "`docker login`"),
        ("unauthorized: authentication required", EngineError, "`docker login registry:5000`"),
        ("no basic auth credentials", EngineError, "`docker login registry:5000`"),
        ("dial tcp: connect: connection refused", EngineError, "try again"),
        ("unexpected EOF", EngineError, "try again"),
    ],
)
def test_errors_of_a_pull_have_a_remedy(message, error, remedy, at_once):
    told = APIError("500", response({}), message) if at_once else {"error": message}
    with pytest.raises(error) as caught:
        pull_image(NAME, client=Engine(event("Pulling fs layer", "a"), told))
    assert str(caught.value) == f"cannot pull {NAME}: {message}"
    assert remedy in caught.value.remedy


def test_a_full_disk_is_named_without_the_engine_s_paths():
    with pytest.raises(EngineError) as caught:
        pull_image(NAME, client=Engine({"error": "write /data/x: no space left on device: unknown"}))
    assert str(caught.value) == f"cannot pull {NAME}: no space left on device"
    assert "docker system df" in caught.value.remedy


def test_an_error_is_one_line_without_control_characters():
    with pytest.raises(EngineError) as caught:
        pull_image(NAME, client=Engine({"error": "first\nlast \x1b[31mred\x07"}))
    assert str(caught.value).endswith(": last red\N{REPLACEMENT CHARACTER}")


def test_an_engine_that_ends_meanwhile_is_an_engine_error(no_engine):  # noqa: ARG001 - for its effect
    with pytest.raises(EngineError, match="cannot reach the Docker engine"):
        pull_image(NAME, client=Engine(event("Pulling fs layer", "a"), ConnectionError("reset")))
    with pytest.raises(EngineError, match="cannot reach the Docker engine"):
        pull_image(NAME)
