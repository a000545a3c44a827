"""The engine as a store, over its API."""

import io
import json
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from imagematrix.build.plan.protocols import BuildRequest, BuildSources, BuiltImage, StoredImageInfo
from imagematrix.build.stores.engine import EngineStore
from imagematrix.build.stores.names import NEW, REPOSITORY
from imagematrix.common.temp_folder import make_owned_folder
from imagematrix.errors import EngineError, TagMovedError, UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.oci.layout import LayoutImage
from imagematrix.images.oci.manifest import DOCKER_LIST, IMAGE, INDEX, compute_digest
from imagematrix.images.oci.parts import SizedLayer

DIGEST, OTHER = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"
CONTAINERD = [["driver-type", "io.containerd.snapshotter.v1"]]
OWN = {labels.CELL: "a", labels.INPUT: DIGEST, labels.INPUTS: '{"dockerfile": "x"}', labels.IMAGE: "t"}
OWN |= {labels.VERSION: "v1"}
TAG = labels.make_tag("v1", "a", DIGEST)
LOADED = (200, b'{"stream": "Loaded"}')
REFUSED = (500, b'{"message": "something about the daemon"}')


def tell(engine, method, path, document, status=200):
    engine.responses[method, path] = status, json.dumps(document).encode()


@pytest.fixture
def docker(engine):
    tell(engine, "GET", "/info", {"ServerVersion": "28.5.2", "DriverStatus": CONTAINERD})
    with EngineStore() as store:
        store.require()  # the connection is opened by the first request
        yield store


@pytest.fixture
def built(engine, tmp_path, layout):
    """An order for t:v1-a, and its image in a layout; the engine loads it."""
    engine.responses["POST", "/images/load"] = LOADED
    sources = BuildSources(context=tmp_path, platform="linux/amd64")
    made = BuiltImage(digest=layout(tmp_path, b"lower", b"upper"), layout=tmp_path)
    return BuildRequest(reference=f"t:{TAG}", dockerfile="", sources=sources, labels=OWN), made


def test_version_and_manifest_support_are_read(engine, docker):
    assert docker.version == "26.1.5"
    assert docker.has_manifests
    docker.require()
    tell(engine, "GET", "/info", {"ServerVersion": "26.1.5", "DriverStatus": None})
    assert not EngineStore().has_manifests
    tell(engine, "GET", "/version", {"Version": "5.8.6", "Components": [{"Name": "Podman Engine"}]})
    assert EngineStore().version is None


@pytest.mark.parametrize("response", [None, REFUSED])
def test_engine_lost_at_the_first_request_is_an_engine_error(engine, response):
    engine.responses["GET", "/info"] = response
    with pytest.raises(EngineError):
        _ = EngineStore().has_manifests


TRIGGER = "COPY --from=tool:1 /x /"
BRINGS = "the base image .*base:1 brings tool:1 into every build, by ONBUILD COPY --from=tool:1 /x /"


def test_base_in_the_engine_that_brings_inputs_from_elsewhere_is_refused(engine, docker):
    """They would be in the image, but neither in its identity nor in the lock."""
    tell(engine, "GET", "/images/base:1/json", {"Id": OTHER, "Config": {"OnBuild": ["RUN make", TRIGGER]}})
    tell(engine, "GET", "/distribution/base:1/json", {"message": "denied"}, 403)
    for read in (docker.resolve, docker.resolve_newest, lambda name: docker.pin_by_digest(name, OTHER)):
        with pytest.raises(UsageError, match=BRINGS):
            read("base:1")
    tell(engine, "GET", "/images/base:1/json", {"Id": OTHER, "Config": {"OnBuild": ["RUN make"]}})
    assert docker.resolve("base:1") == docker.resolve_newest("base:1") == OTHER


@pytest.mark.parametrize("indexed", [False, True])
def test_base_in_a_registry_that_brings_inputs_from_elsewhere_is_refused(engine, docker, server, indexed):
    name = f"{server.address}/base:1"
    repository = server.repository("base")
    tell(engine, "GET", f"/images/{name}/json", {"message": "no such image"}, 404)

    def put(triggers):
        config = json.dumps({"config": {"OnBuild": triggers}}).encode()
        digest = repository.image(None, None, config=config)
        if indexed:
            other = repository.image(None, None, config=b'{"config": null}')
            entries = [
                {"digest": one, "size": 1, "platform": {"os": "linux", "architecture": architecture}}
                for one, architecture in (
                    (other, "amd64"),
                    (digest, "arm64"),
                    (DIGEST, "s390x"),
                    (DIGEST, "amd64"),
                )
            ]
            digest = repository.put(None, json.dumps({"manifests": entries}).encode(), INDEX)
        tell(engine, "GET", f"/distribution/{name}/json", {"Descriptor": {"digest": digest}})
        return digest

    put(["RUN make", TRIGGER])
    for read in (docker.resolve, docker.resolve_newest):
        with pytest.raises(UsageError, match=BRINGS):
            read(name)
    digest = put(None)
    assert docker.resolve(name) == docker.resolve_newest(name) == digest
    server.close()
    assert docker.resolve(name) == digest, "only the engine can read this registry"


def test_platform_is_that_of_the_engine_s_machine(engine):
    for machine, platform in (("x86_64", "linux/amd64"), ("aarch64", "linux/arm64"), ("s390x", None)):
        tell(engine, "GET", "/info", {"Architecture": machine})
        assert EngineStore().platform == platform
    tell(engine, "GET", "/info", {})
    assert EngineStore().platform is None


SINGLE = json.dumps({"mediaType": IMAGE, "config": {"digest": DIGEST, "size": 1}, "layers": []}).encode()
SEVERAL = json.dumps({"mediaType": INDEX, "manifests": [{"digest": DIGEST, "size": 1}]}).encode()


@pytest.mark.parametrize(("document", "expected"), [(SINGLE, False), (SEVERAL, True)])
def test_engine_tells_whether_a_base_is_an_index(engine, docker, document, expected):
    digest = compute_digest(document)
    exported = io.BytesIO()
    with tarfile.open(fileobj=exported, mode="w") as archive:
        member = tarfile.TarInfo(f"blobs/sha256/{digest[7:]}")
        member.size = len(document)
        archive.addfile(member, io.BytesIO(document))
    tell(engine, "GET", "/images/base:1/json", {"Id": digest})
    engine.responses["GET", f"/images/{digest}/get"] = 200, exported.getvalue()
    assert docker.is_index("base:1", digest) is expected


@pytest.mark.parametrize(("kind", "expected"), [(IMAGE, False), (INDEX, True), (DOCKER_LIST, True)])
@pytest.mark.parametrize("present", [None, OTHER])
def test_registry_tells_it_of_a_base_that_the_engine_lacks(engine, docker, kind, expected, present):
    answer = {"Id": present} if present else {"message": "no such image"}
    tell(engine, "GET", "/images/base:1/json", answer, 200 if present else 404)
    descriptor = {"digest": DIGEST, "mediaType": kind}
    tell(engine, "GET", f"/distribution/base:1@{DIGEST}/json", {"Descriptor": descriptor})
    assert docker.is_index("base:1", DIGEST) is expected
    tell(engine, "GET", f"/distribution/base:1@{DIGEST}/json", {"message": "timeout"}, 500)
    with pytest.raises(EngineError, match="cannot be reached"):
        docker.is_index("base:1", DIGEST)


def test_base_of_another_tool_is_named_by_its_digest(engine, docker):
    tell(engine, "GET", f"/distribution/reg:5000/base:1@{DIGEST}/json", {"Descriptor": {"digest": DIGEST}})
    assert docker.pin_permanently("reg:5000/base:1", DIGEST) == f"docker-image://reg:5000/base:1@{DIGEST}"
    assert docker.pin_permanently(f"base@{DIGEST}", DIGEST) == f"docker-image://base@{DIGEST}"
    tell(engine, "GET", f"/distribution/base:1@{DIGEST}/json", {"message": "denied"}, 403)
    tell(engine, "GET", "/images/base:1/json", {"Id": DIGEST})
    engine.responses["POST", "/tag"] = 201, b""
    assert docker.pin_permanently("base:1", DIGEST) == f"docker-image://imagematrix-base:{DIGEST[7:]}"
    tagged = [one for one in engine.requests if "/tag?" in one]
    assert f"/images/{DIGEST}/tag" in unquote(tagged[0]), "by its id, which never moves"
    tell(engine, "GET", "/images/base:1/json", {"Id": OTHER})
    with pytest.raises(UsageError, match="base:1 is now another image"):
        docker.pin_permanently("base:1", DIGEST)
    assert len(tagged) == 1


def test_name_resolves_to_its_digest(engine, docker):
    names = [f"other@{OTHER}", f"reg:5000/t@{DIGEST}"]
    tell(engine, "GET", "/images/reg:5000/t:v1/json", {"Id": OTHER, "RepoDigests": names})
    assert docker.get_digest("reg:5000/t:v1") == DIGEST
    assert docker.resolve("reg:5000/t:v1") == DIGEST
    tell(engine, "GET", "/images/t:v1/json", {"Id": OTHER})
    assert docker.get_digest("t:v1") == docker.adopt("t:v1") == OTHER
    tell(engine, "GET", "/images/t:v2/json", {"message": "no such image"}, 404)
    assert docker.get_digest("t:v2") is None


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        ("reg:5000/t", "reg:5000/t"),
        ("docker.io/library/t:v1", "t"),
        ("docker.io/ml/t", "ml/t"),
        (f"t:v1@{OTHER}", "t"),
    ],
)
def test_digest_is_the_registry_s_for_any_form_of_the_name(engine, docker, name, listed):
    tell(engine, "GET", f"/images/{name}/json", {"Id": OTHER, "RepoDigests": [f"{listed}@{DIGEST}"]})
    assert docker.get_digest(name) == DIGEST


def test_layers_of_an_image_are_listed_with_sizes(engine, docker):
    image = {"Id": OTHER, "Size": 30, "RootFS": {"Layers": [DIGEST]}}
    tell(engine, "GET", f"/images/{OTHER}/json", image)
    tell(engine, "GET", f"/images/{OTHER}/history", [{"CreatedBy": "CMD a", "Size": 0}, {"Size": 10}])
    assert docker.list_parts(OTHER) == (SizedLayer(digest=DIGEST, size=10),)
    tell(engine, "GET", f"/images/{OTHER}/history", [{"Size": 10}, {"Size": 20}])
    assert docker.list_parts(OTHER) == (SizedLayer(digest=OTHER, size=30),)
    tell(engine, "GET", "/images/t:v2/json", {"message": "no such image"}, 404)
    assert docker.list_parts("t:v2") is None


def test_uncompressed_layers_are_listed(engine, docker):
    tell(engine, "GET", "/images/t:v1/json", {"Id": OTHER, "RootFS": {"Layers": [DIGEST]}})
    assert docker.list_layers("t:v1") == {DIGEST}
    tell(engine, "GET", "/images/t:v2/json", {"message": "no such image"}, 404)
    assert docker.list_layers("t:v2") == frozenset()


def test_base_is_there_if_it_is_held(engine, docker):
    tell(engine, "GET", "/images/base:1/json", {"Id": DIGEST, "RepoDigests": []})
    tell(engine, "GET", "/images/json", [])
    tell(engine, "POST", f"/images/{DIGEST}/tag", {}, 201)
    source = docker.pin_by_digest("base:1", DIGEST)
    assert docker.has_base(source, [OTHER], ["t:v1"])
    assert not docker.has_base(f"docker-image://base:1@{DIGEST}", [OTHER], ["t:v1"])


def test_stored_image_is_described(engine, docker):
    image = {"Id": OTHER, "RootFS": {"Layers": [DIGEST]}, "Config": {"Labels": {labels.CONTENT: "x"}}}
    tell(engine, "GET", f"/images/{OTHER}/json", image)
    assert docker.inspect_image(OTHER) == StoredImageInfo(digest=OTHER, layers=(DIGEST,), configuration=image)
    assert docker.keeps_layers(BuiltImage(digest=OTHER))


def test_missing_base_is_resolved_in_its_registry(engine, docker):
    tell(engine, "GET", "/images/base:1/json", {"message": "no such image"}, 404)
    tell(engine, "GET", "/distribution/base:1/json", {"Descriptor": {"digest": DIGEST}})
    assert docker.resolve("base:1") == docker.resolve_newest("base:1") == DIGEST
    tell(engine, "GET", "/distribution/base:1/json", {"message": "denied"}, 403)
    with pytest.raises(UsageError, match=r"base:1 is neither in the engine.*denied") as caught:
        docker.resolve("base:1")
    assert caught.value.remedy.startswith(
        "run `docker pull base:1`, or bring it from a machine that has it: "
    )
    tell(engine, "GET", "/images/debian:trixie/json", {"message": "no such image"}, 404)
    tell(engine, "GET", "/distribution/debian:trixie/json", {"message": "denied"}, 403)
    with pytest.raises(UsageError) as caught:
        docker.resolve("debian:trixie")
    assert "`debootstrap --variant=minbase trixie tree && tar -C tree -c . | docker" in caught.value.remedy
    tell(engine, "GET", "/distribution/base:1/json", {"message": "timeout"}, 500)
    with pytest.raises(EngineError, match=r"registry of the image base:1 cannot be reached: timeout"):
        docker.resolve_newest("base:1")


def test_newest_base_is_the_engine_s_only_if_its_registry_has_none(engine, docker):
    tell(engine, "GET", "/images/base:1/json", {"Id": OTHER})
    tell(engine, "GET", "/distribution/base:1/json", {"message": "denied"}, 403)
    assert docker.resolve_newest("base:1") == OTHER
    tell(engine, "GET", "/distribution/base:1/json", {"message": "connection refused"}, 500)
    with pytest.raises(EngineError, match="connection refused") as caught:
        docker.resolve_newest("base:1")
    assert caught.value.remedy == "try again, or delete base:1 from the lock to use the engine's image"


def test_images_of_a_version_are_listed(engine, docker):
    own = OWN
    engine.add_image(own, RepoTags=[f"t:{TAG}", "copy:1"])
    engine.add_image({**own, labels.INPUTS: "{", labels.CELL: "b"}, RepoTags=[f"t:v1-b-{'1' * 12}"])
    engine.add_image(own | {labels.CELL: "c", labels.DEVELOPMENT: "true"}, RepoTags=[f"t:v1-c-{'1' * 12}"])
    engine.add_image({labels.IMAGE: "t", labels.INPUTS: "{}"}, RepoTags=["t:v1-d"])
    engine.add_image(own, RepoTags=None)
    engine.add_image(own, RepoTags=["t:mine", "t:v1-mine"])  # built on a variant by a user
    # The engine filters by labels; this one returns all images.
    engine.answer = lambda _: engine.images
    result = docker.list_variants("t", "v1")
    assert [(one.reference, one.cell, one.development) for one in result] == [
        (f"t:{TAG}", "a", False),
        (f"t:v1-c-{'1' * 12}", "c", True),
    ]
    assert docker.get_components(f"t:{TAG}") == {"dockerfile": "x"}
    assert docker.get_components(f"t:v1-b-{'1' * 12}") == {}
    assert docker.find_source(f"t:{TAG}", local=False) is None
    assert docker.find_source("t:another", local=True) is None


def test_base_is_held_under_its_own_name_during_builds(engine, docker):
    """Moving the base's tag during the build has no effect."""
    tell(engine, "GET", "/images/base:1/json", {"Id": OTHER, "RepoDigests": [f"base@{DIGEST}"]})
    engine.responses["POST", "/tag"] = 201, b""
    held = docker.pin_by_digest("base:1", DIGEST)
    assert held.startswith(f"docker-image://{REPOSITORY}:{DIGEST[7:]}-")
    (tag,) = {parse_qs(urlsplit(one).query)["tag"][0] for one in engine.requests if "/tag?" in one}
    assert held == f"docker-image://{REPOSITORY}:{tag}"
    assert any(f"/images/{OTHER}/tag" in unquote(one) for one in engine.requests), (
        "by its id, which never moves"
    )
    assert docker.pin_by_digest("base:1", DIGEST) == held
    assert docker.find_pinned_digest(held) == DIGEST
    assert docker.find_pinned_digest("docker-image://base:1") is None
    assert docker.pin_by_digest("base:1", f"sha256:{'3' * 64}") is None
    tell(engine, "GET", "/images/base:2/json", {"message": "no such image"}, 404)
    assert docker.pin_by_digest("base:2", DIGEST) is None


@pytest.mark.parametrize(("names", "goes"), [(["base:1"], True), ([], False)])
def test_held_names_are_removed_at_exit(engine, names, goes):
    tell(engine, "GET", "/images/base:1/json", {"Id": OTHER})
    engine.responses["POST", "/tag"] = 201, b""
    with EngineStore() as docker:
        held = docker.pin_by_digest("base:1", OTHER).removeprefix("docker-image://")
        tell(engine, "GET", f"/images/{held}/json", {"Id": OTHER, "RepoTags": [*names, held]})
        tell(engine, "DELETE", f"/images/{held}", [])
    assert any(f"/images/{held}?" in unquote(one) for one in engine.requests) == goes, (
        "an image keeps its last name"
    )


def test_reading_images_at_a_socket_needs_no_docker_py(engine, monkeypatch):
    monkeypatch.setattr("imagematrix.images.engine.transport.open_client", None)
    engine.add_image(OWN, RepoTags=[f"t:{TAG}"])
    with EngineStore() as docker:
        assert [one.reference for one in docker.list_variants("t", "v1")] == [f"t:{TAG}"]
        assert docker.version == "26.1.5"
        assert docker.get_digest(engine.images[0]["Id"]) == docker.resolve(engine.images[0]["Id"])


def test_held_names_of_killed_builds_are_removed(engine, monkeypatch, tmp_path):
    """Names of running builds, other machines and other engines stay, as does the last name of an image."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    engine.responses["POST", "/tag"] = 201, b""
    tell(engine, "GET", "/images/base:1/json", {"Id": OTHER})
    left: list[Any] = []
    for info in ({"ID": "other"}, {"ID": "this"}):
        tell(engine, "GET", "/info", info)
        with EngineStore() as docker:
            docker.pin_by_digest("base:1", OTHER)
            (folder,) = set(tmp_path.iterdir()) - set(left)
        left.append(folder)
        folder.mkdir()  # as kill -9 leaves it
    prefix, _, word = left[-1].name.rpartition("-")
    with make_owned_folder(f"{prefix}-") as living:
        words = {"dead": word, "living": living.name.rpartition("-")[2], "remote": "abcdefgh"}
        names = {state: f"{REPOSITORY}:{OTHER[7:]}-{word}" for state, word in words.items()}
        names["last"] = f"{REPOSITORY}:{DIGEST[7:]}-{word}"
        listed = [{"RepoTags": [name]} for name in names.values()]
        tell(engine, "GET", "/images/json", [*listed, {"RepoTags": None}])
        for state, name in names.items():
            tell(engine, "GET", f"/images/{name}/json", {"RepoTags": [name, *["base:1"] * (state != "last")]})
            tell(engine, "DELETE", f"/images/{name}", [])
        with EngineStore() as docker:
            docker.pin_by_digest("base:1", OTHER)
            assert not left[-1].exists()
            assert living.exists()
    requests = [unquote(one) for one in engine.requests]
    assert {state for state, name in names.items() if any(f"/images/{name}?" in one for one in requests)} == {
        "dead"
    }
    assert len(list(tmp_path.iterdir())) == 2, "names of the running build and of the other engine"


def test_names_that_cannot_be_listed_are_left_to_the_next_build(engine, monkeypatch, tmp_path):
    """The engine may fail to list images while another process removes some."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    engine.responses["POST", "/tag"] = 201, b""
    tell(engine, "GET", "/info", {"ID": "this"})
    tell(engine, "GET", "/images/base:1/json", {"Id": OTHER})
    with EngineStore() as docker:
        docker.pin_by_digest("base:1", OTHER)
        (folder,) = tmp_path.iterdir()
    folder.mkdir()  # as kill -9 leaves it
    tell(engine, "GET", "/images/json", {"message": "content digest: not found"}, 404)
    with EngineStore() as docker:
        assert docker.pin_by_digest("base:1", OTHER)
    assert folder.exists()


def test_base_built_by_the_matrix_is_held_too(engine, docker):
    engine.add_image(OWN, RepoTags=[f"t:{TAG}"], Id=OTHER)
    engine.answer = lambda _: engine.images
    docker.list_variants("t", "v1")
    engine.responses["POST", "/tag"] = 201, b""
    tell(engine, "GET", f"/images/t:{TAG}/json", {"Id": OTHER})
    assert docker.find_source(f"t:{TAG}", local=True) == docker.pin_by_digest(f"t:{TAG}", OTHER)
    tell(engine, "GET", f"/images/t:{TAG}/json", {"Id": DIGEST})
    with pytest.raises(TagMovedError, match="is now another image"):
        docker.find_source(f"t:{TAG}", local=True)
    engine.answer = lambda _: {}


def test_only_missing_layers_are_loaded(engine, docker, built):
    order, made = built
    assert docker.store(order, made) == made.digest
    assert docker.store(order, made) == made.digest
    first, second = (names(archive) for archive in engine.bodies if archive)
    lower, upper = (f"blobs/sha256/{one[7:]}" for one in LayoutImage(made.layout, made.digest).layers)
    assert {lower, upper} <= first
    assert second == first - {lower, upper}


def test_lost_layers_are_loaded_again(engine, docker, built):
    order, made = built
    docker.store(order, made)
    engine.bodies.clear()
    answers = iter([(200, b'{"error": "content digest not found"}'), LOADED])
    engine.before_response["POST", "/images/load"] = lambda: engine.responses.update(
        {("POST", "/images/load"): next(answers)}
    )
    assert docker.store(order, made) == made.digest
    first, second = (names(archive) for archive in engine.bodies if archive)
    assert len(second - first) == 2


def test_layers_of_a_present_base_are_not_loaded(engine, docker, built):
    order, made = built
    lower, upper = LayoutImage(made.layout, made.digest).layers
    docker.store(order, replace(made, stored_layers=frozenset({lower})))
    (loaded,) = (names(archive) for archive in engine.bodies if archive)
    assert {lower, upper} & {f"sha256:{name[13:]}" for name in loaded} == {upper}


@pytest.fixture
def store_both(engine, docker, built, tmp_path, layout):
    """Call it with the layers of another image, and what a load waits for, to store both at a time.

    It returns how many images the engine was loading, for each load.
    """

    def call(*layers, wait=lambda: time.sleep(0.1)):  # long enough for another load to start
        order, made = built
        other = replace(made, digest=layout(tmp_path, *layers))
        loading, most = [], []

        def load():  # called after the archive is read
            loading.append(1)
            most.append(len(loading))
            wait()
            loading.pop()

        engine.before_response["POST", "/images/load"] = load
        with ThreadPoolExecutor() as threads:
            first = threads.submit(docker.store, order, made)
            second = threads.submit(docker.store, replace(order, reference="t:v1-b"), other)
            assert (first.result(), second.result()) == (made.digest, other.digest)
        return most

    return call


def test_images_that_share_a_new_layer_are_loaded_in_turn(engine, built, store_both):
    """Otherwise the engine would unpack the layer twice."""
    assert store_both(b"lower", b"another") == [1, 1]
    _, made = built
    loaded = [names(archive) for archive in engine.bodies if archive]
    lower = f"blobs/sha256/{LayoutImage(made.layout, made.digest).layers[0][7:]}"
    assert sorted(lower in layers for layers in loaded) == [False, True]


def test_small_images_are_loaded_in_turn(store_both):
    assert store_both(b"third", b"another") == [1, 1]


def test_large_images_without_shared_layers_are_loaded_in_parallel(store_both, monkeypatch):
    monkeypatch.setattr("imagematrix.build.stores.engine.SMALL", 0)
    together = threading.Barrier(2)
    assert store_both(b"third", b"another", wait=lambda: together.wait(10)) == [1, 2]


def test_one_archive_is_sent_at_a_time(docker, built, tmp_path, layout, monkeypatch):
    order, made = built
    images = {f"t:v1-{name}": layout(tmp_path, name.encode(), name.encode() * 2) for name in "abc"}
    notes = []

    def archive(self, reference, layers, real=LayoutImage.stream_archive):
        notes.append("begin")
        yield from real(self, reference, layers)
        time.sleep(0.05)  # long enough for another load to start, if it did not wait
        notes.append("end")

    monkeypatch.setattr(LayoutImage, "stream_archive", archive)
    with ThreadPoolExecutor() as threads:
        stored = [
            threads.submit(docker.store, replace(order, reference=reference), replace(made, digest=digest))
            for reference, digest in images.items()
        ]
        assert {one.result() for one in stored} == set(images.values())
    assert notes == ["begin", "end"] * 3


@pytest.mark.parametrize("response", [None, b'{"error": "no space left"}'])
def test_layer_of_a_failed_load_is_loaded_by_the_next(engine, docker, built, response):
    order, made = built
    engine.responses["POST", "/images/load"] = (200, response) if response else None
    with pytest.raises(EngineError):
        docker.store(order, made)
    layers = {f"blobs/sha256/{one[7:]}" for one in LayoutImage(made.layout, made.digest).layers}

    def load():
        *_, last = filter(None, engine.bodies)
        answer = b'{"stream": "Loaded"}' if layers <= names(last) else b'{"error": "digest not found"}'
        engine.responses["POST", "/images/load"] = 200, answer

    engine.before_response["POST", "/images/load"] = load
    for _ in range(2):  # the second time, the layers have been removed from the engine
        assert docker.store(order, made) == made.digest
        *_, last = filter(None, engine.bodies)
        assert layers <= names(last)


def names(archive):
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return set(tar.getnames())


def test_stored_image_must_have_the_built_digest(engine, docker, built, monkeypatch):
    order, made = built
    monkeypatch.setattr(engine, "answer", lambda _: {"Id": OTHER})
    with pytest.raises(EngineError, match=f"was stored as {OTHER}, but {made.digest} was built"):
        docker.store(order, made)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ((200, b'{"error": "no space left on device"}'), "rejected t:v1-a-1{12}: no space left on device"),
        (REFUSED, "rejected t:v1-a-1{12}: something about the daemon"),
        (None, "cannot reach the Docker engine"),
    ],
)
def test_rejected_load_is_an_engine_error(engine, docker, built, response, message):
    engine.responses["POST", "/images/load"] = response
    with pytest.raises(EngineError, match=message):
        docker.store(*built)


def test_image_without_a_layout_is_only_tagged(engine, docker, built):
    order, _ = built
    engine.responses["POST", "/tag"] = 201, b""
    assert docker.store(order, BuiltImage(digest=DIGEST)) == DIGEST
    engine.responses["POST", "/tag"] = REFUSED
    for store in (docker.store, docker.tag_image):
        with pytest.raises(EngineError, match="refused: something about the daemon"):
            store(order, BuiltImage(digest=DIGEST))


def test_loaded_image_has_no_name_until_it_is_tagged(engine, docker, built):
    """Whatever ends the build in between leaves nothing that looks like a variant."""
    order, made = built
    docker.store(order, made)
    (archive,) = filter(None, engine.bodies)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        assert TAG not in str(tar.extractfile("index.json").read())
    done = [unquote(one.partition("/images/")[2]) for one in engine.requests]
    (at,) = (number for number, one in enumerate(done) if one.startswith(f"{made.digest}/tag"))
    assert f"tag={TAG}" in done[at]
    assert done[at + 1].startswith(f"{REPOSITORY}:{NEW}{made.digest[7:]}-")


@pytest.mark.parametrize(
    "error",
    [
        "unexpected status from HEAD request to http://reg:5000/v2/t/manifests/a: 500 Internal Server Error",
        "unexpected status from PUT request to http://reg:5000/v2/t/manifests/a: 400 Bad Request",
        "received unexpected HTTP status: 503 Service Unavailable",
        "errors:\ndigest invalid: invalid digest\nmanifest blob unknown: blob unknown to registry\n",
        "unknown: unknown error",
    ],
)
def test_transient_error_of_a_push_is_retried(engine, docker, monkeypatch, error):
    pauses = []
    failed = 200, json.dumps({"error": error}).encode()
    engine.responses["POST", "/push"] = failed

    def sleep(pause):
        pauses.append(pause)
        engine.responses["POST", "/push"] = 200, b'{"status": "Pushed"}'

    monkeypatch.setattr("imagematrix.build.stores.engine.time.sleep", sleep)
    docker.push("reg:5000/t:v1-a")
    assert pauses == [0.3]
    monkeypatch.setattr("imagematrix.build.stores.engine.time.sleep", pauses.append)
    engine.responses["POST", "/push"] = failed
    with pytest.raises(EngineError, match="reg:5000/t:v1-a was not pushed: "):
        docker.push("reg:5000/t:v1-a")
    assert pauses == [0.3, 0.3, 0.6]


@pytest.mark.parametrize(("compression", "named"), [("zstd -3", True), ("gzip -6", False)])
def test_refused_manifest_of_a_zstd_image_names_the_remedy(engine, docker, compression, named):
    own = OWN | {labels.INPUTS: json.dumps({"compression": compression})}
    entry = {"Id": OTHER, "Labels": own, "RepoTags": [f"t:{TAG}"]}
    tell(engine, "GET", "/images/json", [entry])
    docker.list_variants("t", "v1")
    engine.responses["POST", "/push"] = 200, b'{"error": "manifest invalid: unknown media type"}'
    with pytest.raises(EngineError, match="manifest invalid") as caught:
        docker.push(f"t:{TAG}")
    assert ("compression: gzip" in (caught.value.remedy or "")) is named


def test_refused_push_is_an_engine_error(engine, docker, monkeypatch):
    monkeypatch.setattr("imagematrix.build.stores.engine.PAUSE", 60)  # it is not repeated
    engine.responses["POST", "/push"] = 200, b'{"status": "Preparing"}\r\n'
    docker.push("reg:5000/t:v1-a")
    engine.responses["POST", "/push"] = 200, b'{"error": "denied: not yours"}'
    with pytest.raises(EngineError, match="reg:5000/t:v1-a was not pushed: denied: not yours"):
        docker.push("reg:5000/t:v1-a")
    engine.responses["POST", "/push"] = None
    with pytest.raises(EngineError, match="cannot reach the Docker engine"):
        docker.push("reg:5000/t:v1-a")
