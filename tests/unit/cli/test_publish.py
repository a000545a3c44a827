"""publish, lock, plan --push and build --push from the outside; where select and run look for an image."""

import contextlib
import io
import json

import pytest
from distribution import digest

from imagematrix.builder import buildx
from imagematrix.builder.compiler import Compilers
from imagematrix.catalog import labels
from imagematrix.cli.choosing import catalog_of
from imagematrix.errors import EngineError, UnknownImageError
from imagematrix.planning.backend import Made, Present
from imagematrix.stores import engine as local
from imagematrix.stores.publish import publish

CPU = ("--only", "cuda=none")
EMPTY = bytes(10240)  # a layer without files


class Backend:
    """An engine and a builder in one, as the FakeBackend of the builds' tests, that makes real layouts."""

    reproducible = has_manifests = local = True

    def __init__(self, make):
        self.make_layout = make
        self.images = {}
        self.known = {}
        self.newer = {}
        self.pushed = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def resolve(self, reference):
        return self.known.get(reference, digest(reference.encode()))

    def newest(self, reference):
        return self.newer.get(reference) or self.resolve(reference)

    def present(self, image, version):
        return [one for one in self.images.values() if one.reference.startswith(f"{image}:{version}-")]

    def held(self, reference, digest):  # noqa: ARG002
        return None

    def image(self, reference):
        return digest(reference.encode())

    def save(self, image):
        return io.BytesIO(image.encode())

    def push(self, reference):
        self.pushed.append(reference)


@pytest.fixture
def backend(make_image, monkeypatch):
    found = Backend(make_image)
    monkeypatch.setattr(buildx, "Buildx", lambda *_, **__: found)
    monkeypatch.setattr("imagematrix.stores.registry.examine", lambda *_: None)
    monkeypatch.setattr(local, "Engine", lambda: found)
    return found


@pytest.fixture
def no_engine(monkeypatch):
    def gone():
        raise EngineError("cannot reach the Docker engine")

    monkeypatch.setattr(local, "Engine", gone)


@pytest.fixture
def matrix(project, image):
    path = project(("  training:\n", f"  {image}:\n"))
    (path.parent / ".dockerignore").write_text("*\n")
    return path


def push_all(server_repository, document, told):
    """Let the registry have the image of each cell that a plan has to build."""
    for cell in document["cells"]:
        if cell["status"] == "build":
            own = told(cell["cell"]) | {labels.INPUT: cell["input"]}
            server_repository.image(cell["reference"].rpartition(":")[2], own)


def test_plan_with_push_compares_with_the_registry(cli, backend, matrix, repository, told, conforms):  # noqa: ARG001
    said = cli("plan", "-f", matrix, "--push", "--json", *CPU)
    document = json.loads(said.out)
    conforms(document)
    assert [cell["status"] for cell in document["cells"]] == ["build", "build"]
    push_all(repository, document, told)
    said = cli("plan", "-f", matrix, "--push", "--json", *CPU)
    assert [cell["status"] for cell in json.loads(said.out)["cells"]] == ["up-to-date"] * 2
    said = cli("build", "-f", matrix, "--push", *CPU)
    assert said == (0, "", "nothing to build: 2 images up to date\n")


def test_image_lost_by_the_registry_is_rebuilt(cli, backend, matrix, image, repository, registry, told):
    document = json.loads(cli("plan", "-f", matrix, "--push", "--json", *CPU).out)
    push_all(repository, document, told)
    publish(registry, "v1")
    assert cli("plan", "-f", matrix, "--push", *CPU).err == "2 up-to-date\n"
    tag = document["cells"][0]["reference"].rpartition(":")[2]
    raw = repository.manifests.pop(repository.tags[tag])
    for where in ("the tag, too", "its manifest"):
        said = cli("plan", "-f", matrix, "--push", "--json", *CPU)
        cells = json.loads(said.out)["cells"]
        assert [cell["status"] for cell in cells] == ["build", "up-to-date"], where
        assert cells[0]["why"] == "the registry lost it"
        repository.tags.pop(tag, None)
    other = ("--only", "march=znver4")
    for command in ("plan", "build"):
        said = cli(command, "-f", matrix, "--push", *CPU, *other)
        assert f"the registry lost {image}:{tag}, which is not in this plan" in said.err, command
    said = cli("publish", f"{image}:v1")
    assert said.code == 4
    assert "the registry lost images" in said.err
    said = cli("publish", f"{image}:v1", "--repair", "--json")
    assert said.code == 0
    assert "it is removed" in said.err
    assert len(json.loads(said.out)["dropped"]) == 1
    # What the engine has goes back to where it was.
    reference = f"{image}:{tag}"
    own = told("cpu-x86-64-v3") | {labels.INPUT: document["cells"][0]["input"]}
    backend.push = lambda _: repository.put(tag, raw[1], raw[0])
    backend.digest = lambda _: repository.tags[tag]
    backend.images[reference] = Present(
        reference=reference, cell="cpu-x86-64-v3", input_digest=own[labels.INPUT]
    )
    assert json.loads(cli("publish", f"{image}:v1", "--json").out)["variants"] == 2


def test_cell_pushed_twice_is_a_conflict(cli, backend, matrix, image, repository, have, told):  # noqa: ARG001
    document = json.loads(cli("plan", "-f", matrix, "--push", "--json", *CPU).out)
    push_all(repository, document, told)
    own = document["cells"][0]["reference"].rpartition(":")[2]
    have("cpu-x86-64-v3", "another input")
    other = labels.tag("v1", "cpu-x86-64-v3", digest(b"another input"))
    said = cli("plan", "-f", matrix, "--push", "--json", *CPU)
    assert said.code == 7
    cells = json.loads(said.out)["cells"]
    assert [cell["status"] for cell in cells] == ["refused", "up-to-date"]
    assert f"there are both {image}:{own} and {image}:{other}" in cells[0]["why"]
    said = cli("build", "-f", matrix, "--push", *CPU)
    assert said.code == 7
    assert f"there are both {image}:{own} and {image}:{other}" in said.err
    assert cli("publish", f"{image}:v1").code == 7
    said = cli("publish", f"{image}:v1", "--choose", f"{image}:{own}")
    assert said.code == 0, said.err
    assert f"{other} is left out: its cell is published, built from other inputs" in said.err
    said = cli("build", "-f", matrix, "--push", *CPU)
    assert said == (0, "", "nothing to build: 2 images up to date\n")


def test_pushed_image_with_other_inputs_exits_with_7(cli, backend, matrix, have, told):  # noqa: ARG001
    have("cpu-znver4", "another input")
    said = cli("plan", "-f", matrix, "--push", "--json", *CPU)
    assert said.code == 7
    assert [cell["status"] for cell in json.loads(said.out)["cells"]] == ["build", "refused"]
    assert cli("build", "-f", matrix, "--push", *CPU).code == 7


def test_unreachable_registry_exits_with_8(cli, backend, matrix, server):  # noqa: ARG001
    server.fails("GET", "manifests", times=99, status=503)
    said = cli("build", "-f", matrix, "--push", *CPU)
    assert (said.code, said.out) == (8, "")
    assert "answered 503" in said.err
    assert "same command continues" in said.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("version: v1", "version: v1\n    development: true"),
            "is a development version, which is never pushed",
        ),
        (("matrix/v1", "matrix/v1"), "has no registry in its name"),
    ],
)
def test_unpushable_image_is_rejected_before_the_build(cli, backend, project, server, change, message):  # noqa: ARG001
    said = cli("build", "-f", project(change), "--push")
    assert said.code == 2
    assert message in said.err
    assert "matrix.yaml" in said.err
    assert not server.asked


def test_publish_prints_the_index_with_its_digest(cli, no_engine, image, repository, have, conforms):  # noqa: ARG001
    there = have("a")
    said = cli("publish", f"{image}:v1", "--alias", "latest")
    assert said.code == 0
    assert said.out == f"{image}:v1@{repository.tags['v1']}\n"
    assert "publishing only what is in the registry" in said.err
    assert f"{image}:v1: 1 variant, 1 new" in said.err
    document = json.loads(cli("publish", f"{image}:v1", "--json").out)
    conforms(document)
    assert document == {
        "schema": "imagematrix.published/v1",
        "image": image,
        "version": "v1",
        "digest": repository.tags["latest"],
        "variants": 1,
        "new": 0,
        "aliases": [],
        "plain_pull": [
            {
                "platform": "linux/amd64",
                "reference": f"{image}:v1-a-{digest(b'1')[7:19]}",
                "digest": there,
                "cuda": None,
                "needs": ["avx2"],
                "why": "the CPU-only variant that needs least",
            }
        ],
        "dropped": [],
        "stuck": [],
        "others": [],
    }


def test_publish_uses_plain_pull_of_the_matrix(cli, no_engine, matrix, image, have, variant, monkeypatch):  # noqa: ARG001
    have("cpu-x86-64-v3", VARIANT=variant("x86-64-v3"))
    have("cpu-znver4", VARIANT=variant("znver4"))
    stated = "context: .\n    plain_pull: {cuda: none, march: znver4}"
    matrix.write_text(matrix.read_text().replace("context: .", stated).replace("version: v1", "version: v2"))
    monkeypatch.chdir(matrix.parent)
    said = cli("publish", f"{image}:v1", "-f", matrix)
    assert said.code == 2
    assert f"has no {image}:v1" in said.err
    assert f"it has {image}:v2" in said.err
    matrix.write_text(matrix.read_text().replace("version: v2", "version: v1"))
    said = cli("publish", f"{image}:v1")
    assert said.code == 0, said.err
    assert "linux/amd64: `docker pull` gets v1-cpu-znver4-" in said.err
    assert "(plain_pull names it); it needs abm, adx" in said.err
    monkeypatch.chdir("/")
    assert "a version's default stays" in cli("publish", f"{image}:v1").err


@pytest.mark.usefixtures("no_engine")
def test_publish_warns_that_a_gpu_only_version_has_no_default(cli, image, have, variant, conforms):
    have("gpu", VARIANT=variant("x86-64-v3", cuda="12.4"))
    said = cli("publish", f"{image}:v1", "--json")
    assert "linux/amd64: `docker pull` gets nothing: there is no CPU-only variant" in said.err
    document = json.loads(said.out)
    conforms(document)
    assert document["plain_pull"][0]["reference"] is None
    assert document["plain_pull"][0]["needs"] == []


def test_publish_pushes_images_only_in_the_engine(cli, backend, image, repository, have, told):
    have("a")
    own = told("b")
    tag = labels.tag("v1", "b", own[labels.INPUT])
    for cell, made_of in (("a", told("a")[labels.INPUT]), ("b", own[labels.INPUT])):
        reference = f"{image}:{labels.tag('v1', cell, made_of)}"
        backend.images[reference] = Present(reference=reference, cell=cell, input_digest=made_of)
    there = {}
    backend.push = lambda reference: there.update({reference: repository.image(tag, own)})
    backend.digest = there.get
    said = cli("publish", f"{image}:v1", "--json")
    assert said.code == 0, said.err
    assert json.loads(said.out)["variants"] == 2
    assert list(there) == [f"{image}:{tag}"]


def test_publish_refuses_a_cell_pushed_with_other_inputs(cli, backend, image, have, server):
    have("a", "1")
    theirs, ours = (f"{image}:v1-a-{digest(made_of)[7:19]}" for made_of in (b"1", b"2"))
    backend.images[ours] = Present(reference=ours, cell="a", input_digest=digest(b"2"))
    said = cli("publish", f"{image}:v1")
    assert said.code == 7
    assert f"{ours} is in the engine, but the registry has {theirs}" in said.err
    assert not server.count("PUT")
    for _ in range(2):
        assert cli("publish", f"{image}:v1", "--choose", theirs).code == 0
    assert not backend.pushed


def test_publish_refuses_a_development_version(cli, backend, image, server):
    for cell, development in (("a", False), ("b", True)):
        reference = f"{image}:v1-{cell}-0123456789ab"
        backend.images[reference] = Present(
            reference=reference, cell=cell, input_digest=digest(b""), development=development
        )
    said = cli("publish", f"{image}:v1")
    assert said.code == 2
    assert "is a development version, which is never pushed" in said.err
    assert not backend.pushed
    assert not server.asked


@pytest.mark.parametrize("name", ["training:v1", "reg.example/ml/training"])
def test_publish_requires_a_registry_and_a_version(cli, name):
    said = cli("publish", name)
    assert said.code == 2
    assert "is not an image with a registry and a version" in said.err
    assert "such as registry.example.com" in said.err


def test_publish_of_an_empty_version_exits_with_4(cli, no_engine, image):  # noqa: ARG001
    said = cli("publish", f"{image}:v1")
    assert said.code == 4
    assert "imagematrix build --push" in said.err


def test_lock_keeps_digests_until_upgrade(cli, backend, matrix, conforms):
    said = cli("lock", "-f", matrix)
    assert (said.code, said.out) == (0, "")
    assert "debian:trixie: new -> sha256:" in said.err
    path = matrix.with_name("imagematrix.lock")
    before = json.loads(path.read_text())
    conforms(before)
    backend.known["debian:trixie"] = backend.newer["debian:bookworm"] = digest(b"newer")
    assert json.loads(cli("lock", "-f", matrix, "--json").out) == before
    said = cli("lock", "-f", matrix, "--upgrade")
    after = {one["name"]: one["digest"] for one in json.loads(path.read_text())["bases"]}
    assert set(after.values()) == {digest(b"newer")}
    assert said.err.count(" -> ") == 2
    matrix.write_text(matrix.read_text().replace("debian:bookworm", "debian:trixie"))
    said = cli("lock", "-f", matrix)
    assert f"debian:bookworm: {digest(b'newer')} -> removed" in said.err
    assert "1 base image" in said.err


def test_frozen_lock_without_a_base_exits_with_2(cli, backend, matrix):  # noqa: ARG001
    said = cli("build", "-f", matrix, "--frozen")
    assert said.code == 2
    assert "debian:trixie not found in the lock" in said.err
    assert "run `imagematrix lock`, and commit the file" in said.err
    assert not matrix.with_name("imagematrix.lock").exists()


def test_damaged_lock_exits_with_2_and_a_remedy(cli, backend, matrix):  # noqa: ARG001
    matrix.with_name("imagematrix.lock").write_text("{")
    for command in ("plan", "build", "lock"):
        said = cli(command, "-f", matrix)
        assert said.code == 2
        assert "imagematrix.lock:1:2: not JSON" in said.err
        assert "from version control" in said.err


def test_image_name_decides_between_engine_and_registry(engine, image, have, registry, capsys, told):
    own = told("a", IMAGE=image)
    reference = f"{image}:{labels.tag('v1', 'a', own[labels.INPUT])}"
    engine.image(own, RepoTags=[reference])
    (local_one,) = catalog_of(f"{image}:v1", None).variants
    assert local_one.reference == reference
    said = capsys.readouterr().err
    assert "has no" in said
    assert "using the engine's images" in said
    have("a")
    there = publish(registry, "v1")
    (variant,) = catalog_of(f"{image}:v1", None).variants
    assert variant.reference == reference
    assert variant.digest != local_one.digest
    assert capsys.readouterr().err == ""
    assert catalog_of(f"{image}@{there.digest}", None).variants == (variant,)
    with pytest.raises(UnknownImageError, match="the engine has no variant of training"):
        catalog_of("training:v1", None)


def test_engine_does_not_replace_an_unreachable_registry(engine, server, image):
    server.fails("GET", "manifests", times=99, status=500)
    with pytest.raises(EngineError, match="answered 500"):
        catalog_of(f"{image}:v1", None)
    assert not engine.asked


def test_run_uses_the_digest_unless_the_engine_has_the_image(cli, engine, image, have, registry, profiles):
    there = have("a", VARIANT=json.dumps({"platform": "linux/amd64", "cpu_flags": []}))
    publish(registry, "v1")
    words = ("run", "--dry-run", "--host", profiles["laptop"], f"{image}:v1")
    tag = labels.tag("v1", "a", digest(b"1"))
    engine.told["GET", f"{tag}/json"] = 404, b"{}"
    assert cli(*words).out.endswith(f" {image}:{tag}@{there}\n")
    engine.told["GET", f"{tag}/json"] = 200, json.dumps({"RepoDigests": [f"{image}@{there}"]}).encode()
    assert cli(*words).out.endswith(f" {image}:{tag}\n")
    engine.told["GET", f"{tag}/json"] = 200, json.dumps({"RepoDigests": [f"{image}@{digest(b'')}"]}).encode()
    assert cli(*words).out.endswith(f" {image}:{tag}@{there}\n")
    engine.told["GET", f"{tag}/json"] = 500, b'{"message": "no"}'
    assert cli(*words).out.endswith(f" {image}:{tag}@{there}\n")
    refused = cli(*(word for word in words if word != "--dry-run"))
    assert refused.code == 8


def test_build_reports_a_tag_moved_during_the_push(
    cli, backend, matrix, make_image, repository, image, monkeypatch
):
    monkeypatch.setattr(Compilers, "flags", lambda *_: frozenset())
    backend.held = lambda *_: None
    backend.stop = lambda: None

    @contextlib.contextmanager
    def build(order, log, step):  # noqa: ARG001
        own = order.labels
        one = make_image(own[labels.CELL], layers=[EMPTY], IMAGE=image, INPUT=own[labels.INPUT])
        yield Made(digest=one.made.digest, layout=one.made.layout)

    backend.make = build
    said = cli("build", "-f", matrix, "--push", "--only", "cuda=none,march=znver4")
    assert said.code == 0, said.err
    assert list(repository.tags) == [said.out.strip().rpartition(":")[2]]

    real = build

    @contextlib.contextmanager
    def slow(order, log, step):
        with real(order, log, step) as made:
            repository.image(order.reference.rpartition(":")[2], {"by": "somebody"})
            yield made

    backend.make = slow
    said = cli("build", "-f", matrix, "--push", *CPU)
    assert said.code == 7
    assert "from other inputs" in said.err
