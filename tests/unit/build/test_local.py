"""The engine as a store, over its API: what it refuses, and what it is when it goes away."""

import io
import json
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from imagematrix.build.backend import Made, Order, Sources
from imagematrix.build.layout import Image
from imagematrix.build.local import Engine
from imagematrix.catalog import labels
from imagematrix.errors import EngineError, UsageError

DIGEST, OTHER = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"
CONTAINERD = [["driver-type", "io.containerd.snapshotter.v1"]]
OWN = {labels.CELL: "a", labels.INPUT: DIGEST, labels.INPUTS: '{"dockerfile": "x"}', labels.IMAGE: "t"}
REFUSED = (500, b'{"message": "something about the daemon"}')


def tell(engine, method, path, document, status=200):
    engine.told[method, path] = status, json.dumps(document).encode()


@pytest.fixture
def docker(engine):
    tell(engine, "GET", "/info", {"ServerVersion": "28.5.2", "DriverStatus": CONTAINERD})
    with Engine() as found:
        found.require()  # it is reached when it is first asked
        yield found


@pytest.fixture
def order(tmp_path, layout):
    """An order for t:v1-a, and its image in a layout."""
    sources = Sources(context=tmp_path, platform="linux/amd64")
    made = Made(digest=layout(tmp_path, b"lower", b"upper"), layout=tmp_path)
    return Order(reference="t:v1-a", dockerfile="", sources=sources, labels=OWN), made


def test_it_says_what_it_is(engine, docker):
    assert docker.version == "28.5.2"
    assert docker.has_manifests
    docker.require()
    tell(engine, "GET", "/info", {"ServerVersion": "26.1.5", "DriverStatus": None})
    assert not Engine().has_manifests


@pytest.mark.parametrize("told", [None, REFUSED])
def test_an_engine_that_goes_away_at_the_first_question(engine, told):
    engine.told["GET", "/info"] = told
    with pytest.raises(EngineError):
        _ = Engine().version


def test_the_digest_of_a_name(engine, docker):
    names = [f"other@{OTHER}", f"reg:5000/t@{DIGEST}"]
    tell(engine, "GET", "/images/reg:5000/t:v1/json", {"Id": OTHER, "RepoDigests": names})
    assert docker.digest("reg:5000/t:v1") == DIGEST
    assert docker.resolve("reg:5000/t:v1") == DIGEST
    tell(engine, "GET", "/images/t:v1/json", {"Id": OTHER})
    assert docker.digest("t:v1") == docker.adopt("t:v1") == OTHER
    tell(engine, "GET", "/images/t:v2/json", {"message": "no such image"}, 404)
    assert docker.digest("t:v2") is None


def test_a_base_that_is_not_here_is_asked_for_in_its_registry(engine, docker):
    tell(engine, "GET", "/images/base:1/json", {"message": "no such image"}, 404)
    tell(engine, "GET", "/distribution/base:1/json", {"Descriptor": {"digest": DIGEST}})
    assert docker.resolve("base:1") == docker.newest("base:1") == DIGEST
    tell(engine, "GET", "/distribution/base:1/json", {"message": "denied"}, 403)
    with pytest.raises(UsageError, match=r"base:1 is not in the engine.*denied") as caught:
        docker.resolve("base:1")
    assert caught.value.remedy.startswith("`docker pull base:1`")
    tell(engine, "GET", "/distribution/base:1/json", {"message": "timeout"}, 500)
    with pytest.raises(EngineError, match="timeout"):
        docker.newest("base:1")
    tell(engine, "GET", "/images/base:1/json", {"Id": OTHER})
    assert docker.newest("base:1") == OTHER, "better than none"


def test_what_it_has_of_a_version(engine, docker):
    engine.image({**OWN, labels.VERSION: "v1"}, RepoTags=["t:v1-a", "copy:1"])
    engine.image({**OWN, labels.INPUTS: "{", labels.CELL: "b"}, RepoTags=["t:v1-b"])
    engine.image(OWN | {labels.DEVELOPMENT: "true"}, RepoTags=["t:v1-c"])
    engine.image({labels.IMAGE: "t", labels.INPUTS: "{}"}, RepoTags=["t:v1-d"])
    engine.image(OWN, RepoTags=None)
    # The filter is the engine's own business; this one gives all it has.
    engine.answer = lambda _: engine.images
    found = docker.present("t", "v1")
    assert [(one.reference, one.cell, one.development) for one in found] == [
        ("t:v1-a", "a", False),
        ("t:v1-c", "a", True),
    ]
    assert docker.components("t:v1-a") == {"dockerfile": "x"}
    assert docker.components("t:v1-b") == {}
    assert docker.source("t:v1-a") is None


def test_it_is_given_only_the_layers_it_lacks(engine, docker, order):
    asked, made = order
    engine.told["POST", "/images/load"] = 200, b'{"stream": "Loaded"}'
    tell(engine, "GET", "/images/t:v1-a/json", {"Id": made.digest})
    assert docker.store(asked, made) == made.digest
    assert docker.store(asked, made) == made.digest
    first, second = (names(archive) for archive in engine.received if archive)
    lower, upper = (f"blobs/sha256/{one[7:]}" for one in Image(made.layout, made.digest).layers)
    assert {lower, upper} <= first
    assert second == first - {lower, upper}


def test_layers_that_it_has_lost_are_given_again(engine, docker, order):
    asked, made = order
    engine.told["POST", "/images/load"] = 200, b'{"stream": "Loaded"}'
    tell(engine, "GET", "/images/t:v1-a/json", {"Id": made.digest})
    docker.store(asked, made)
    engine.received.clear()
    answers = iter([(200, b'{"error": "content digest not found"}'), (200, b'{"stream": "Loaded"}')])
    engine.then["POST", "/images/load"] = lambda: engine.told.update(
        {("POST", "/images/load"): next(answers)}
    )
    assert docker.store(asked, made) == made.digest
    first, second = (names(archive) for archive in engine.received if archive)
    assert len(second - first) == 2


def test_a_layer_is_sent_once_and_images_are_unpacked_side_by_side(engine, docker, order, tmp_path, layout):
    asked, made = order
    other = replace(made, digest=layout(tmp_path, b"lower", b"another"))
    engine.told["POST", "/images/load"] = 200, b'{"stream": "Loaded"}'
    tell(engine, "GET", "/images/t:v1-a/json", {"Id": made.digest})
    tell(engine, "GET", "/images/t:v1-b/json", {"Id": other.digest})
    together = threading.Barrier(2)
    engine.then["POST", "/images/load"] = lambda: together.wait(10)  # it has read the archive by then
    with ThreadPoolExecutor() as threads:
        first = threads.submit(docker.store, asked, made)
        second = threads.submit(docker.store, replace(asked, reference="t:v1-b"), other)
        assert (first.result(), second.result()) == (made.digest, other.digest)
    loaded = [names(archive) for archive in engine.received if archive]
    lower = f"blobs/sha256/{Image(tmp_path, made.digest).layers[0][7:]}"
    assert sorted(lower in found for found in loaded) == [False, True]


def test_one_archive_is_sent_at_a_time(engine, docker, order, monkeypatch):
    asked, made = order
    engine.told["POST", "/images/load"] = 200, b'{"stream": "Loaded"}'
    tell(engine, "GET", "/images/t:v1-a/json", {"Id": made.digest})
    notes = []

    def archive(self, reference, layers, real=Image.archive):
        notes.append("begin")
        yield from real(self, reference, layers)
        time.sleep(0.05)  # in which another would begin if it did not wait
        notes.append("end")

    monkeypatch.setattr(Image, "archive", archive)
    with ThreadPoolExecutor() as threads:
        stored = [threads.submit(docker.store, asked, made) for _ in range(3)]
        assert {one.result() for one in stored} == {made.digest}
    assert notes == ["begin", "end"] * 3


@pytest.mark.parametrize("said", [None, b'{"error": "no space left"}'])
def test_a_layer_that_was_not_loaded_after_all_is_loaded_by_the_next(engine, docker, order, said):
    asked, made = order
    tell(engine, "GET", "/images/t:v1-a/json", {"Id": made.digest})
    engine.told["POST", "/images/load"] = (200, said) if said else None
    with pytest.raises(EngineError):
        docker.store(asked, made)
    layers = {f"blobs/sha256/{one[7:]}" for one in Image(made.layout, made.digest).layers}

    def load():
        *_, last = filter(None, engine.received)
        answer = b'{"stream": "Loaded"}' if layers <= names(last) else b'{"error": "digest not found"}'
        engine.told["POST", "/images/load"] = 200, answer

    engine.then["POST", "/images/load"] = load
    for _ in range(2):  # the second time somebody has taken them out of the engine
        assert docker.store(asked, made) == made.digest
        *_, last = filter(None, engine.received)
        assert layers <= names(last)


def names(archive):
    with tarfile.open(fileobj=io.BytesIO(archive)) as found:
        return set(found.getnames())


def test_what_it_stores_must_be_what_was_built(engine, docker, order):
    asked, made = order
    engine.told["POST", "/images/load"] = 200, b'{"stream": "Loaded"}'
    tell(engine, "GET", "/images/t:v1-a/json", {"Id": OTHER})
    with pytest.raises(EngineError, match=f"was stored as {OTHER}, but {made.digest} was built"):
        docker.store(asked, made)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ((200, b'{"error": "no space left on device"}'), "does not take t:v1-a: no space left on device"),
        (REFUSED, "does not take t:v1-a: something about the daemon"),
        (None, "no Docker engine answers"),
    ],
)
def test_an_image_that_it_does_not_take(engine, docker, order, told, message):
    engine.told["POST", "/images/load"] = told
    with pytest.raises(EngineError, match=message):
        docker.store(*order)


def test_without_a_layout_it_names_what_it_has(engine, docker, order):
    asked, _ = order
    engine.told["POST", "/tag"] = 201, b""
    assert docker.store(asked, Made(digest=DIGEST)) == DIGEST
    engine.told["POST", "/tag"] = REFUSED
    with pytest.raises(EngineError, match="refused: something about the daemon"):
        docker.store(asked, Made(digest=DIGEST))


def test_what_it_replaces_may_be_gone(engine, docker, order):
    asked, _ = order
    engine.told["POST", "/tag"] = 201, b""
    tell(engine, "DELETE", "/images/t:v1-old", {"message": "no such image"}, 404)
    assert docker.store(replace(asked, replaces="t:v1-old"), Made(digest=DIGEST)) == DIGEST
    assert engine.asked[-1].partition("?")[0].endswith("/images/t:v1-old")


def test_a_push_that_the_registry_refuses(engine, docker):
    engine.told["POST", "/push"] = 200, b'{"status": "Preparing"}\r\n'
    docker.push("reg:5000/t:v1-a")
    engine.told["POST", "/push"] = 200, b'{"error": "denied: not yours"}'
    with pytest.raises(EngineError, match="reg:5000/t:v1-a was not pushed: denied: not yours"):
        docker.push("reg:5000/t:v1-a")
    engine.told["POST", "/push"] = None
    with pytest.raises(EngineError, match="no Docker engine answers"):
        docker.push("reg:5000/t:v1-a")
