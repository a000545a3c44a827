"""Bringing the image of a Selection into the engine, with an engine that only records its calls."""

from types import SimpleNamespace
from urllib.parse import unquote

import pytest
from double import Double, response

from imagematrix.common.record import replace
from imagematrix.errors import EngineError, SignatureError, UnknownImageError, UsageError
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.launcher.docker.pull import pull
from imagematrix.launcher.launch import launch
from imagematrix.selection.selector import explain

IMAGE = "registry:5000/ml/t"
NAME = f"{IMAGE}:v1-x"
DIGEST, OTHER = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"


class Engine(Double):
    """An engine's client with `images` by name; it pulls what `registry` has, and records what it does."""

    base_url, timeout, info = "http+docker://localhost", 60, dict

    def __init__(self, images=None, registry=()):
        self.api = SimpleNamespace(
            base_url=self.base_url, timeout=self.timeout, get=self._get, pull=self._pull, tag=self._tag
        )
        self.known = dict(images or {})
        self.registry = registry
        self.done = []

    def _get(self, resource, **_):
        name = unquote(resource.removeprefix(f"{self.base_url}/images/").removesuffix("/json"))
        return response(self.known.get(name))

    def _pull(self, repository, digest=None, **_):
        name = f"{repository}@{digest}" if digest else repository
        self.done.append(("pull", name))
        if name in self.registry:
            self.known[name] = image(name)
            yield {"status": "Pull complete", "id": "a"}
        else:
            yield {"error": "manifest unknown"}

    def _tag(self, name, repository, tag):
        self.done.append(("tag", f"{repository}:{tag}"))
        self.known[f"{repository}:{tag}"] = self.known[name]


def image(*digests, number=OTHER):
    return {"Id": number, "RepoDigests": list(digests), "Config": {}}


@pytest.fixture
def selection(make):
    """Call it with the name and the digest of the only variant."""

    def call(reference=NAME, digest=DIGEST):
        whole = make.selection(mode=None, reference=reference)
        variant = replace(whole.variant, digest=digest)
        return explain(whole.host, Catalog(image="t", version="v1", variants=(variant,)))

    return call


def test_an_image_is_pulled_by_its_digest_and_gets_its_name(selection):
    engine = Engine(registry=[f"{IMAGE}@{DIGEST}"])
    seen: list[object] = []
    assert pull(selection(), report=seen.append, client=engine) == f"{NAME}@{DIGEST}"
    assert engine.done == [("pull", f"{IMAGE}@{DIGEST}"), ("tag", NAME)]
    assert seen
    assert pull(selection(), client=engine) == f"{NAME}@{DIGEST}"
    assert len(engine.done) == 2, "it is there now"


def test_a_name_that_another_image_has_does_not_move(selection):
    engine = Engine({NAME: image(f"{IMAGE}@{OTHER}")}, [f"{IMAGE}@{DIGEST}"])
    for _ in range(2):
        assert pull(selection(), client=engine) == f"{NAME}@{DIGEST}"
        assert engine.done == [("pull", f"{IMAGE}@{DIGEST}")]


def test_an_image_that_is_there_without_its_name_only_gets_the_name(selection):
    engine = Engine({f"{IMAGE}@{DIGEST}": image(f"{IMAGE}@{DIGEST}")})
    assert pull(selection(), client=engine) == f"{NAME}@{DIGEST}"
    assert engine.done == [("tag", NAME)]


@pytest.mark.parametrize(
    ("digests", "answer"),
    [
        ([f"t@{DIGEST}"], f"t:v1-x@{DIGEST}"),
        ([f"other@{DIGEST}"], "t:v1-x"),
        ([], "t:v1-x"),
        (None, "t:v1-x"),
    ],
)
def test_an_image_that_only_the_engine_has_stays_as_it_is(selection, digests, answer):
    """Its ID is no digest: an engine that keeps no manifests would find no image by it."""
    engine = Engine({"t:v1-x": image() | {"RepoDigests": digests}})
    assert pull(selection("t:v1-x", OTHER), client=engine) == answer
    assert engine.done == []


def test_an_image_without_a_digest_in_its_catalog_is_pulled_by_its_name(selection):
    engine = Engine(registry=[NAME])
    assert pull(selection(digest=None), client=engine) == NAME
    assert engine.done == [("pull", NAME)]


def test_an_image_that_nobody_has_is_unknown(selection):
    for reference in (NAME, "t:v1-x"):
        with pytest.raises(UnknownImageError, match=f"cannot pull {reference[:-5]}@{DIGEST}"):
            pull(selection(reference), client=Engine())


def test_an_image_is_pulled_before_it_is_launched(selection):
    engine = Engine()
    with pytest.raises(UnknownImageError, match="manifest unknown"):
        launch(selection(), client=engine)
    assert engine.done == [("pull", f"{IMAGE}@{DIGEST}")]


@pytest.mark.parametrize("start", [pull, launch])
def test_signatures_are_checked_before_anything_is_pulled(selection, tmp_path, start):
    """Nothing says where the catalog of a selection comes from."""
    file = tmp_path / "policy.json"
    file.write_text('{"schema": "imagematrix.policy/v1", "otherwise": "deny"}')
    engine = Engine(registry=[f"{IMAGE}@{DIGEST}"])
    with pytest.raises(SignatureError, match="the policy allows no images of ml/t"):
        start(selection(), policy=file, client=engine)
    assert engine.done == []


def test_nothing_is_pulled_if_nothing_fits(make, no_engine, selection):  # noqa: ARG001 - for its effect
    nothing = replace(make.selection(mode=None).decision.catalog, variants=())
    with pytest.raises(UsageError, match="nothing was selected"):
        pull(explain(make.host(), nothing), client=Engine())
    with pytest.raises(EngineError, match="cannot reach the Docker engine"):
        pull(selection())
