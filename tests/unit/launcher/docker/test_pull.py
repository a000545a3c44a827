"""Bringing the image of a Selection into the engine, with an engine that only records its calls."""

from types import SimpleNamespace
from urllib.parse import unquote

import pytest
from double import Double, response

from imagematrix.common.record import replace
from imagematrix.errors import EngineError, SignatureError, UnknownImageError, UsageError
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.images.catalog.warm_image import WarmImage, WarmMatch
from imagematrix.launcher.docker.options import parse_run_args
from imagematrix.launcher.docker.plan import plan_launch
from imagematrix.launcher.docker.pull import pull, pull_unless_present
from imagematrix.launcher.docker.warm_start import (
    count_container_cpus,
    fetch_start_image,
    use_variant,
)
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


@pytest.mark.parametrize("start", [pull, launch])
def test_an_image_with_its_digest_only_in_its_name_is_pulled_by_it(selection, start):
    """A signature is of the digest; what the registry has under the tag may be anything."""
    engine = Engine(registry=[NAME, IMAGE])
    with pytest.raises(UnknownImageError, match=f"cannot pull {IMAGE}@{DIGEST}"):
        start(selection(f"{NAME}@{DIGEST}", None), client=engine)
    assert engine.done == [("pull", f"{IMAGE}@{DIGEST}")]


def test_an_image_without_a_tag_in_its_catalog_gets_none():
    engine = Engine(registry=[f"{IMAGE}@{DIGEST}"])
    pull_unless_present(f"{IMAGE}@{DIGEST}", None, None, client=engine)
    assert engine.done == [("pull", f"{IMAGE}@{DIGEST}")]


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


WARM, BASE = f"sha256:{'4' * 64}", f"sha256:{'1' * 64}"


@pytest.fixture
def warm_selection(selection):
    """A selection whose variant has a warm image that fits."""
    cold = selection()
    warm = WarmImage(base=BASE, reference=f"{IMAGE}:v1-warm-1-2", digest=WARM, match=WarmMatch())
    catalog = replace(cold.decision.catalog, warm=(warm,))
    chosen = explain(cold.host, catalog)
    assert chosen.warm == warm
    return chosen


def test_the_warm_image_is_pulled_in_place_of_the_variant(warm_selection):
    engine = Engine(registry=[f"{IMAGE}@{WARM}", f"{IMAGE}@{DIGEST}"])
    assert pull(warm_selection, client=engine) == f"{IMAGE}:v1-warm-1-2@{WARM}"
    assert engine.done == [("pull", f"{IMAGE}@{WARM}"), ("tag", f"{IMAGE}:v1-warm-1-2")]


def test_the_variant_is_pulled_if_the_warm_image_cannot_be(warm_selection):
    engine = Engine(registry=[f"{IMAGE}@{DIGEST}"])
    assert pull(warm_selection, client=engine) == f"{NAME}@{DIGEST}"
    assert engine.done == [("pull", f"{IMAGE}@{WARM}"), ("pull", f"{IMAGE}@{DIGEST}"), ("tag", NAME)]
    with pytest.raises(UnknownImageError):
        pull(warm_selection, client=Engine())


def test_the_site_keeps_to_the_variant(warm_selection, monkeypatch, tmp_path):
    (tmp_path / "site.toml").write_text("warm = false")
    monkeypatch.setenv("IMAGEMATRIX_SITE", str(tmp_path / "site.toml"))
    engine = Engine(registry=[f"{IMAGE}@{WARM}", f"{IMAGE}@{DIGEST}"])
    assert pull(warm_selection, client=engine) == f"{NAME}@{DIGEST}"


def test_a_launch_names_the_warm_image_and_is_labelled_with_the_variant(warm_selection):
    planned = plan_launch(warm_selection, digests=frozenset())
    assert (planned.reference, planned.digest) == (f"{IMAGE}:v1-warm-1-2@{WARM}", WARM)
    assert planned.labels["io.imagematrix.selected"] == NAME
    kept, cold = use_variant(warm_selection, planned, "why")
    assert kept.warm is None
    assert cold == plan_launch(kept, digests=frozenset())
    assert use_variant(kept, cold, "again") == (kept, cold)


def test_without_its_policy_s_signature_the_variant_is_started_with_a_warning(warm_selection, monkeypatch):
    def refuse(warm, policy, *, version):
        assert (warm.digest, policy, version) == (WARM, "policy.json", "v1")
        raise SignatureError("it has no signature")

    monkeypatch.setattr("imagematrix.launcher.docker.warm_start.require_signed_warm_image", refuse)
    told: list[object] = []
    kept, answer = fetch_start_image(
        warm_selection, lambda chosen: chosen.warm, "policy.json", lambda *words: told.append(words)
    )
    assert (kept.warm, answer) == (None, None)
    text = f"{NAME} is started, not its warm image {IMAGE}:v1-warm-1-2: it has no signature"
    assert told == [(text, None)]
    assert kept.to_json()["warm"] is None


def test_cpus_of_a_container_are_those_that_its_options_and_its_daemon_leave_it(warm_selection):
    (warm,) = warm_selection.decision.catalog.warm
    images = tuple(replace(warm, match=WarmMatch.from_facts({"cpus": count})) for count in (4, 7))
    selection = explain(warm_selection.host, replace(warm_selection.decision.catalog, warm=images))

    def matched(line, info):
        counted = count_container_cpus(selection, parse_run_args([*line, "t"]), lambda: info)
        return counted.warm and dict(counted.warm.match.facts)["cpus"]

    assert matched([], {"NCPU": 4}) == 4
    assert matched([], {"NCPU": 5}) is None
    for option in ("--cpus=2", "--cpuset-cpus=0", "--cpu-quota=1000", "--cpu-period=9"):
        assert matched([option], {"NCPU": 4}) is None
    saved = selection.with_usable_cpus(7)
    assert count_container_cpus(saved, parse_run_args(["--host", "h", "t"]), dict).warm is images[1]
    assert count_container_cpus(warm_selection, parse_run_args(["t"]), pytest.fail) is warm_selection
