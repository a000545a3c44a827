"""Names of images in an engine: given by one client at a time, after it has looked again what is there."""

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as replaced
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from imagematrix.build.plan.protocols import BuildRequest, BuildSources
from imagematrix.build.stores import names
from imagematrix.build.stores.names import Tagger, hold_mutex
from imagematrix.errors import EngineError, TagMovedError
from imagematrix.images.catalog import labels
from imagematrix.images.engine import transport

ONE, TWO, BUILT = (f"sha256:{digit * 64}" for digit in "123")


def own(cell, inputs, **more):
    return {
        labels.IMAGE: "t",
        labels.VERSION: "v1",
        labels.CELL: cell,
        labels.INPUT: inputs,
        labels.INPUTS: "{}",
    } | {getattr(labels, name): value for name, value in more.items()}


def name(cell, inputs):
    return f"t:{labels.make_tag('v1', cell, inputs)}"


@pytest.fixture
def order(tmp_path):
    """Call it to get the order for cell a, in a build of the cells a and b from the inputs ONE."""

    def make(**more):
        return BuildRequest(
            reference=name("a", ONE),
            dockerfile="",
            sources=BuildSources(context=tmp_path, platform="linux/amd64"),
            labels=own("a", ONE, **more),
            sibling_references=frozenset({name("a", ONE), name("b", ONE)}),
        )

    return make


@pytest.fixture
def namer(engine):  # noqa: ARG001 - for its effect
    with contextlib.closing(transport.open_client()) as client:
        yield Tagger(client)


@pytest.fixture
def done(engine):
    """Call it to get what was done to images: tags that were set, and removed names."""

    def read():
        words = []
        for resource in engine.requests:
            parts = urlsplit(unquote(resource))
            query = {key: value[0] for key, value in parse_qs(parts.query).items()}
            what = parts.path.partition("/images/")[2]
            if what.endswith("/tag"):
                words.append(f"{what} {query['repo']}:{query['tag']}")
            elif "noprune" in query:
                assert query["noprune"] == "True"
                assert query["force"] == "False"
                words.append(f"remove {what}")
        return words

    return read


def test_new_cell_gets_its_name(engine, namer, order, done):
    assert namer.tag_image(order(), BUILT) is None
    assert done() == [f"{BUILT}/tag {name('a', ONE)}"]
    assert engine.volumes == {}


def test_image_of_the_same_inputs_is_kept(engine, namer, order, done):
    """Another build was faster; in the classic store its image has another ID."""
    engine.add_image(own("a", ONE), RepoTags=[name("a", ONE)], Id=TWO)
    assert namer.tag_image(order(), BUILT) == TWO
    assert namer.tag_image(order(DEVELOPMENT="true"), BUILT) == TWO
    assert done() == []


def test_same_image_may_be_named_again(engine, namer, order):
    engine.add_image(own("a", ONE), RepoTags=[name("a", ONE)], Id=BUILT)
    assert namer.tag_image(order(), BUILT) is None


@pytest.mark.parametrize("cell", ["a", "b"])
def test_build_is_refused_a_cell_if_another_build_made_one_of_its_cells(engine, namer, order, done, cell):
    """One of two builds gets all cells; otherwise both could end with some."""
    engine.add_image(own(cell, TWO), RepoTags=[name(cell, TWO)])
    with pytest.raises(
        TagMovedError, match=f"{name('a', ONE)}: .* made {name(cell, TWO)} from other"
    ) as caught:
        namer.tag_image(order(), BUILT)
    assert "raise the version" in caught.value.remedy
    assert done() == []
    assert engine.volumes == {}


def test_cells_outside_the_build_are_free(engine, namer, order):
    engine.add_image(own("c", TWO), RepoTags=[name("c", TWO)])
    engine.add_image(own("a", TWO, VERSION="v2"), RepoTags=[f"t:{labels.make_tag('v2', 'a', TWO)}"])
    engine.add_image(own("a", TWO), RepoTags=["t:v1-mine"])  # built on a variant by a user
    assert namer.tag_image(order(), BUILT) is None


def test_only_the_first_image_of_a_version_looks_at_all_cells(engine, namer, order):
    """Listing all images of a version takes the engine long."""

    def patterns():
        filters = (parse_qs(urlsplit(one).query).get("filters") for one in engine.requests)
        return [json.loads(one[0])["reference"] for one in filters if one]

    namer.tag_image(order(), BUILT)
    engine.add_image(own("b", TWO), RepoTags=[name("b", TWO)])
    namer.tag_image(order(), BUILT)
    assert patterns() == [["t:v1-*"], ["t:v1-a-????????????"]]
    engine.add_image(own("a", TWO), RepoTags=[name("a", TWO)])
    with pytest.raises(TagMovedError):
        namer.tag_image(order(), BUILT)


def test_name_of_a_registry_with_brackets_is_no_pattern(engine, namer, order):
    reference = f"[::1]:5000/{name('a', ONE)}"
    namer.tag_image(replaced(order(), reference=reference), BUILT)
    (query,) = (parse_qs(urlsplit(one).query) for one in engine.requests if "filters" in one)
    assert json.loads(query["filters"][0])["reference"] == ["\\[::1\\]:5000/t:v1-*"]


def test_name_of_another_image_does_not_move(engine, namer, order, done):
    engine.add_image(None, RepoTags=[name("a", ONE)], Id=TWO)
    with pytest.raises(TagMovedError, match=f"is another image, {TWO}, not {BUILT}") as caught:
        namer.tag_image(order(), BUILT)
    assert f"docker image rm {name('a', ONE)}" in caught.value.remedy
    assert done() == []


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [({"DEVELOPMENT": "true"}, {}), ({}, {"DEVELOPMENT": "true"}), *[({"DEVELOPMENT": "true"},) * 2]],
)
def test_development_image_of_the_cell_loses_its_name(engine, namer, order, done, ours, theirs):
    """Only its own name: the engine removes the image if it has no other."""
    old = name("a", TWO)
    engine.add_image(own("a", TWO, **theirs), RepoTags=[old, "myapp:prod"])
    engine.add_image(own("b", TWO, **theirs), RepoTags=[name("b", TWO)])
    assert namer.tag_image(order(**ours), BUILT) is None
    assert done() == [f"{BUILT}/tag {name('a', ONE)}", f"remove {old}"]


def test_development_image_of_the_same_inputs_becomes_final(engine, namer, order, done):
    engine.add_image(own("a", ONE, DEVELOPMENT="true"), RepoTags=[name("a", ONE)], Id=TWO)
    assert namer.tag_image(order(), BUILT) is None
    assert done() == [f"{BUILT}/tag {name('a', ONE)}"]


def replace(engine, namer, order, *statuses):
    old = name("a", TWO)
    engine.add_image(own("a", TWO), RepoTags=[old])
    answers = iter(statuses)

    def answer():
        engine.responses["DELETE", f"/images/{old}"] = next(answers), b'{"message": "no"}'

    engine.responses["DELETE", f"/images/{old}"] = 200, b"[]"
    engine.before_response["DELETE", f"/images/{old}"] = answer
    with transport.convert_errors():
        namer.tag_image(order(DEVELOPMENT="true"), BUILT)


def test_replaced_image_may_be_gone(engine, namer, order, done):
    replace(engine, namer, order, 404)
    assert done()[1:] == [f"remove {name('a', TWO)}"]


def test_name_of_a_container_moves_before_it_is_removed(engine, namer, order, done):
    """The engine keeps a name that a container was started by; its image stays as long as the container."""
    old = name("a", TWO)
    replace(engine, namer, order, 409, 200)
    assert done()[1:] == [f"remove {old}", f"{name('a', ONE)}/tag {old}", f"remove {old}"]


def test_failed_removal_is_reported(engine, namer, order):
    with pytest.raises(EngineError, match="no"):
        replace(engine, namer, order, 500)


def test_suspended_build_that_lost_its_turn_withdraws_its_name(engine, namer, order, done):
    """While it was suspended before it set the name, another build took its turn."""

    def resumed():
        (volume,) = engine.volumes
        engine.volumes[volume] = {"Name": volume, "Labels": {}}
        if rival:
            engine.add_image(own("a", TWO), RepoTags=[name("a", TWO)])

    engine.responses["POST", "/tag"] = 201, b""
    engine.before_response["POST", "/tag"] = resumed
    rival = False
    assert namer.tag_image(order(), BUILT) is None
    rival = True
    engine.volumes.clear()
    with pytest.raises(TagMovedError, match="meanwhile another build"):
        namer.tag_image(order(), BUILT)
    assert done()[-1] == f"remove {name('a', ONE)}"


@pytest.fixture
def client(engine, monkeypatch):  # noqa: ARG001 - for its effect
    monkeypatch.setattr(names, "PAUSE", 0.001)
    with contextlib.closing(transport.open_client()) as made:
        yield made


def test_one_client_at_a_time_has_the_turn(engine, client):
    inside, most = [], []

    def work(_):
        with contextlib.closing(transport.open_client()) as own, hold_mutex(own, "t:v1") as still_mine:
            inside.append(1)
            most.append(len(inside))
            assert still_mine()
            inside.pop()

    with ThreadPoolExecutor(3) as threads:
        assert len(list(threads.map(work, range(12)))) == 12
    assert set(most) == {1}
    assert engine.volumes == {}
    with hold_mutex(client, "t:v1"), hold_mutex(client, "t:v2"):
        assert len(engine.volumes) == 2, "other versions do not wait"


def test_turn_of_a_killed_client_is_taken(engine, client, monkeypatch):
    """It has left its volume behind; of all who wait, one removes it."""
    with hold_mutex(client, "t:v1"):
        left = dict(engine.volumes)
    engine.volumes.update(left)
    monkeypatch.setattr(names, "PATIENCE", 0.05)
    held = threading.Lock()

    def work(_):
        with contextlib.closing(transport.open_client()) as own, hold_mutex(own, "t:v1"):
            assert held.acquire(blocking=False)
            held.release()

    with ThreadPoolExecutor(3) as threads:
        assert len(list(threads.map(work, range(6)))) == 6
    assert engine.volumes == {}


def test_suspended_client_notices_that_its_turn_was_taken(engine, client):
    with hold_mutex(client, "t:v1") as still_mine:
        (volume,) = engine.volumes
        assert still_mine()
        engine.volumes[volume] = {"Name": volume, "Labels": {names.OWNER_LABEL: "another"}}
        assert not still_mine()
    assert engine.volumes[volume]["Labels"] == {names.OWNER_LABEL: "another"}, "it is not removed"
    with hold_mutex(client, "t:v2") as still_mine:
        engine.volumes.clear()
        assert not still_mine()


def test_volume_of_a_user_is_no_turn_for_ever(engine, client, monkeypatch):
    with hold_mutex(client, "t:v1"):
        (volume,) = engine.volumes
    engine.volumes[volume] = {"Name": volume, "Labels": None}
    monkeypatch.setattr(names, "PATIENCE", 0)
    with hold_mutex(client, "t:v1") as still_mine:
        assert still_mine()


def test_engine_without_volumes_is_reported(engine, client):
    engine.responses["POST", "/volumes/create"] = 403, b'{"message": "denied by a plugin"}'
    with (
        pytest.raises(EngineError, match="denied by a plugin"),
        transport.convert_errors(),
        hold_mutex(client, "t:v1"),
    ):
        pass
