"""What earlier builds noted of layers, and when it counts."""

from dataclasses import replace

import pytest

from imagematrix.audit.images.cache import Cache
from imagematrix.audit.images.layer import Layer
from imagematrix.build.executor import build_cache
from imagematrix.build.executor.build_cache import BuildCache
from imagematrix.build.executor.image_rewriter import RewrittenLayer
from imagematrix.build.plan.protocols import BuildRequest, BuildSources
from imagematrix.images.oci.compression import Compression

INPUT = "1" * 12


def digest(digit):
    return f"sha256:{digit * 64}"


LAYERS = tuple(
    RewrittenLayer(exported=digest(one), digest=digest(two), size=9, diff_id=digest(three))
    for one, two, three in ("abc", "def")
)


class Stored:
    """A store whose images have the uncompressed layers in `images`, and that has base images or not."""

    def __init__(self):
        self.bases = True
        self.images = {f"t:v1-a-{INPUT}": {layer.diff_id for layer in LAYERS}}

    def list_layers(self, reference):
        return frozenset(self.images.get(reference, ()))

    def has_base(self, source, layers, together):
        return self.bases and (source, len(layers), together) == ("docker-image://base@x", 2, ["t:v1"])


@pytest.fixture
def cache(tmp_path):
    """A cache with audits of all LAYERS."""
    cache = Cache(tmp_path / "cache")
    for layer in LAYERS:
        cache.put(Layer(digest=layer.digest, entries={}, removed=frozenset(), emptied=frozenset()))
    return cache


@pytest.fixture
def store():
    return Stored()


@pytest.fixture
def builds(cache, store):
    return BuildCache(cache, store)


@pytest.fixture
def order(tmp_path):
    sources = BuildSources(context=tmp_path, platform="linux/amd64")
    return BuildRequest(reference=f"t:v1-a-{INPUT}", dockerfile="", sources=sources)


def test_layers_of_a_cell_are_those_of_its_last_build(builds, order):
    assert builds.find_cell_layers(order) == ()
    builds.note_cell(order, LAYERS)
    assert set(builds.find_cell_layers(replace(order, reference=f"t:v2-a-{INPUT}"))) == {*LAYERS}
    assert set(builds.find_cell_layers(replace(order, reference=f"t:v2-b-{INPUT}"))) == {*LAYERS}, (
        "any cell's"
    )
    builds.note_cell(replace(order, reference=f"t:v2-b-{INPUT}"), ())
    assert set(builds.find_cell_layers(order)) == {*LAYERS}, "its own, after that of another cell"


def test_other_images_and_other_ways_to_write_layers_have_none(builds, order, monkeypatch):
    builds.note_cell(order, LAYERS)
    others = [
        replace(order, reference=f"u:v1-a-{INPUT}"),
        replace(order, sources=replace(order.sources, platform="linux/arm64")),
        replace(order, compression=Compression(type="zstd", level=4)),
        replace(order, compression=Compression(type="gzip", level=3)),
    ]
    for other in others:
        assert builds.find_cell_layers(other) == ()
    monkeypatch.setattr(build_cache, "get_library", lambda _: "libzstd 9")
    assert builds.find_cell_layers(order) == ()


def test_layers_that_the_store_lacks_do_not_count(builds, order, store):
    builds.note_cell(order, LAYERS)
    store.images[order.reference] = {LAYERS[1].diff_id}
    assert builds.find_cell_layers(order) == (LAYERS[1],)
    store.images.clear()
    assert builds.find_cell_layers(order) == ()


def test_layers_without_an_audit_do_not_count(builds, order):
    """Somebody would need their bytes."""
    builds.note_cell(order, (replace(LAYERS[0], digest=digest("9")), LAYERS[1]))
    assert builds.find_cell_layers(order) == (LAYERS[1],)


def test_note_that_is_no_digest_is_ignored(builds, order):
    """It would become the name of a file."""
    builds.note_cell(order, (replace(LAYERS[0], exported="sha256:../../../etc/passwd"),))
    assert builds.find_cell_layers(order) == ()


def test_base_is_known_while_all_its_layers_are_audited_and_stored(store, builds):
    names = [layer.digest for layer in LAYERS]
    use = "docker-image://base@x", ["t:v1"]
    builds.note_base("base", names)
    assert builds.find_base_layers("base", *use) == (*names,)
    store.bases = False
    assert builds.find_base_layers("base", *use) == ()
    store.bases = True
    builds.note_base("base", [names[0], digest("9")])
    assert builds.find_base_layers("base", *use) == builds.find_base_layers("another", *use) == ()
