"""publish, lock, plan --push and build --push, and where select and run look for an image."""

import contextlib
import io
import json

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from distribution import MANIFEST, digest

from imagematrix.build.executor.compiler import Compilers
from imagematrix.build.plan.protocols import StoredVariant
from imagematrix.build.publish.publish import publish
from imagematrix.build.stores import engine as local
from imagematrix.cli.shared.build_session import BuildSession
from imagematrix.cli.shared.inputs import find_catalog
from imagematrix.errors import EngineError, UnknownImageError
from imagematrix.images.catalog import labels
from imagematrix.images.oci.compression import DEFAULT

CPU = ("--only", "cuda=none")
EMPTY = bytes(10240)  # a layer without files


class Backend:
    """An engine and a builder in one that makes real layouts."""

    has_manifests = local = True
    platform = "linux/amd64"
    parallel_exports = 1

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

    def is_index(self, _reference, _digest):
        return True

    def resolve_newest(self, reference):
        return self.newer.get(reference) or self.resolve(reference)

    def list_variants(self, image, version):
        return [one for one in self.images.values() if one.reference.startswith(f"{image}:{version}-")]

    def add_early_labels(self, order, promise):  # noqa: ARG002
        return order

    def pin_by_immovable_name(self, reference, digest):  # noqa: ARG002
        return None

    def get_image_id(self, reference):
        return digest(reference.encode())

    def save(self, image):
        return io.BytesIO(image.encode())

    def push(self, reference):
        self.pushed.append(reference)


@pytest.fixture
def backend(make_image, monkeypatch):
    result = Backend(make_image)
    monkeypatch.setattr(BuildSession, "builder", result)
    monkeypatch.setattr("imagematrix.build.stores.registry._audit_archive", lambda *_: None)
    monkeypatch.setattr(local, "EngineStore", lambda: result)
    return result


@pytest.fixture
def no_engine(monkeypatch):
    def gone():
        raise EngineError("cannot reach the Docker engine")

    monkeypatch.setattr(local, "EngineStore", gone)


@pytest.fixture
def matrix(project, image):
    path = project(("  training:\n", f"  {image}:\n"))
    (path.parent / ".dockerignore").write_text("*\n")
    return path


def push_all(server_repository, document, labels_of):
    """Put an image into the registry for each cell that a plan would build."""
    for cell in document["cells"]:
        if cell["status"] == "build":
            own = labels_of(cell["cell"]) | {labels.INPUT: cell["input"]}
            server_repository.image(cell["reference"].rpartition(":")[2], own)


def test_plan_with_push_compares_with_the_registry(cli, backend, matrix, repository, labels_of, conforms):  # noqa: ARG001
    result = cli("plan", "-f", matrix, "--push", "--json", *CPU)
    document = conforms(json.loads(result.out))
    assert [cell["status"] for cell in document["cells"]] == ["build", "build"]
    push_all(repository, document, labels_of)
    result = cli("plan", "-f", matrix, "--push", "--json", *CPU)
    assert [cell["status"] for cell in json.loads(result.out)["cells"]] == ["up-to-date"] * 2
    result = cli("build", "-f", matrix, "--push", *CPU)
    assert result == (0, "", "nothing to build: 2 images up to date\n")


def test_image_lost_by_the_registry_is_rebuilt(cli, backend, matrix, image, repository, registry, labels_of):
    document = json.loads(cli("plan", "-f", matrix, "--push", "--json", *CPU).out)
    push_all(repository, document, labels_of)
    publish(registry, "v1")
    assert cli("plan", "-f", matrix, "--push", *CPU).err == "2 up-to-date\n"
    tag = document["cells"][0]["reference"].rpartition(":")[2]
    raw = repository.manifests.pop(repository.tags[tag])
    for where in ("the tag, too", "its manifest"):
        result = cli("plan", "-f", matrix, "--push", "--json", *CPU)
        cells = json.loads(result.out)["cells"]
        assert [cell["status"] for cell in cells] == ["build", "up-to-date"], where
        assert cells[0]["why"] == "the registry lost it"
        repository.tags.pop(tag, None)
    other = ("--only", "march=znver4")
    for command in ("plan", "build"):
        result = cli(command, "-f", matrix, "--push", *CPU, *other)
        assert f"the registry lost {image}:{tag}, which is not in this plan" in result.err, command
    cli("publish", f"{image}:v1").refuses(4, "the registry lost images")
    result = cli("publish", f"{image}:v1", "--repair", "--json")
    assert result.code == 0
    assert " removed: the registry lost it" in result.err
    assert len(json.loads(result.out)["dropped"]) == 1
    # The registry lost the image, but the engine still has it.
    reference = f"{image}:{tag}"
    own = labels_of("cpu-x86-64-v3") | {labels.INPUT: document["cells"][0]["input"]}
    backend.push = lambda _: repository.put(tag, raw[1], raw[0])
    backend.get_digest = lambda _: repository.tags[tag]
    backend.images[reference] = StoredVariant(
        reference=reference, cell="cpu-x86-64-v3", input_digest=own[labels.INPUT]
    )
    assert json.loads(cli("publish", f"{image}:v1", "--json").out)["variants"] == 2


def test_cell_pushed_twice_is_a_conflict(cli, backend, matrix, image, repository, add_variant, labels_of):  # noqa: ARG001
    document = json.loads(cli("plan", "-f", matrix, "--push", "--json", *CPU).out)
    push_all(repository, document, labels_of)
    own = document["cells"][0]["reference"].rpartition(":")[2]
    add_variant("cpu-x86-64-v3", "another input")
    other = labels.make_tag("v1", "cpu-x86-64-v3", digest(b"another input"))
    result = cli("plan", "-f", matrix, "--push", "--json", *CPU)
    assert result.code == 7
    cells = json.loads(result.out)["cells"]
    assert [cell["status"] for cell in cells] == ["refused", "up-to-date"]
    assert f"there are both {image}:{own} and {image}:{other}" in cells[0]["why"]
    cli("build", "-f", matrix, "--push", *CPU).refuses(7, f"there are both {image}:{own} and {image}:{other}")
    assert cli("publish", f"{image}:v1").code == 7
    result = cli("publish", f"{image}:v1", "--choose", f"{image}:{own}")
    assert result.code == 0, result.err
    assert f"{other} skipped: its cell is published with other inputs" in result.err
    result = cli("build", "-f", matrix, "--push", *CPU)
    assert result == (0, "", "nothing to build: 2 images up to date\n")


def test_pushed_image_with_other_inputs_exits_with_7(cli, backend, matrix, add_variant, labels_of):  # noqa: ARG001
    add_variant("cpu-znver4", "another input")
    result = cli("plan", "-f", matrix, "--push", "--json", *CPU)
    assert result.code == 7
    assert [cell["status"] for cell in json.loads(result.out)["cells"]] == ["build", "refused"]
    assert cli("build", "-f", matrix, "--push", *CPU).code == 7


def test_unreachable_registry_exits_with_8(cli, backend, matrix, server):  # noqa: ARG001
    server.fails("GET", "manifests", times=99, status=503)
    cli("build", "-f", matrix, "--push", *CPU).refuses(8, "answered 503", "same command continues")


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
    cli("build", "-f", project(change), "--push").refuses(2, message, "matrix.yaml")
    assert not server.requests


def test_publish_prints_the_index_with_its_digest(cli, no_engine, image, repository, add_variant, conforms):  # noqa: ARG001
    pushed = add_variant("a")
    result = cli("publish", f"{image}:v1", "--alias", "latest")
    assert result.code == 0
    assert result.out == f"{image}:v1@{repository.tags['v1']}\n"
    assert "publishing only what is in the registry" in result.err
    assert f"{image}:v1: 1 variant, 1 new" in result.err
    document = conforms(json.loads(cli("publish", f"{image}:v1", "--json").out))
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
                "digest": pushed,
                "cuda": None,
                "needs": ["avx2"],
                "zstd": False,
                "why": "the CPU-only variant with the lowest requirements",
            }
        ],
        "dropped": [],
        "stuck": [],
        "others": [],
        "unneeded": [],
    }


@pytest.mark.usefixtures("no_engine")
def test_publish_uses_plain_pull_of_the_matrix(cli, matrix, image, add_variant, variant, monkeypatch):
    add_variant("cpu-x86-64-v3", VARIANT=variant("x86-64-v3"))
    add_variant("cpu-znver4", VARIANT=variant("znver4"))
    stated = "context: .\n    plain_pull: {cuda: none, march: znver4}"
    matrix.write_text(matrix.read_text().replace("context: .", stated).replace("version: v1", "version: v2"))
    monkeypatch.chdir(matrix.parent)
    cli("publish", f"{image}:v1", "-f", matrix).refuses(2, f"has no {image}:v1", f"it has {image}:v2")
    matrix.write_text(matrix.read_text().replace("version: v2", "version: v1"))
    result = cli("publish", f"{image}:v1")
    assert result.code == 0, result.err
    assert "linux/amd64: `docker pull` gets v1-cpu-znver4-" in result.err
    assert "(plain_pull names it); it needs abm, adx" in result.err
    monkeypatch.chdir("/")
    assert "a version's default stays" in cli("publish", f"{image}:v1").err


@pytest.mark.usefixtures("no_engine")
def test_publish_says_that_a_plain_pull_needs_zstd(cli, image, add_variant, variant, conforms):
    add_variant("cpu", packed=DEFAULT.media_type, VARIANT=variant("x86-64"))
    result = cli("publish", f"{image}:v1", "--json")
    assert result.err.endswith("it needs Docker 23 or newer, or another engine that unpacks zstd\n")
    assert conforms(json.loads(result.out))["plain_pull"][0]["zstd"] is True


@pytest.mark.usefixtures("no_engine")
def test_publish_warns_that_a_gpu_only_version_has_no_default(cli, image, add_variant, variant, conforms):
    add_variant("gpu", VARIANT=variant("x86-64-v3", cuda="12.4"))
    result = cli("publish", f"{image}:v1", "--json")
    assert "linux/amd64: `docker pull` gets nothing: there is no CPU-only variant" in result.err
    document = conforms(json.loads(result.out))
    assert document["plain_pull"][0]["reference"] is None
    assert document["plain_pull"][0]["needs"] == []
    assert document["plain_pull"][0]["zstd"] is False


def test_publish_pushes_images_only_in_the_engine(cli, backend, image, repository, add_variant, labels_of):
    add_variant("a")
    own = labels_of("b")
    tag = labels.make_tag("v1", "b", own[labels.INPUT])
    for cell, made_of in (("a", labels_of("a")[labels.INPUT]), ("b", own[labels.INPUT])):
        reference = f"{image}:{labels.make_tag('v1', cell, made_of)}"
        backend.images[reference] = StoredVariant(reference=reference, cell=cell, input_digest=made_of)
    manifests = {}
    backend.push = lambda reference: manifests.update({reference: repository.image(tag, own)})
    backend.get_digest = manifests.get
    result = cli("publish", f"{image}:v1", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["variants"] == 2
    assert list(manifests) == [f"{image}:{tag}"]


def test_publish_refuses_a_cell_pushed_with_other_inputs(cli, backend, image, add_variant, server):
    add_variant("a", "1")
    theirs, ours = (f"{image}:v1-a-{digest(made_of)[7:19]}" for made_of in (b"1", b"2"))
    backend.images[ours] = StoredVariant(reference=ours, cell="a", input_digest=digest(b"2"))
    cli("publish", f"{image}:v1").refuses(7, f"{ours} is in the engine, but the registry has {theirs}")
    assert not server.count("PUT")
    for _ in range(2):
        assert cli("publish", f"{image}:v1", "--choose", theirs).code == 0
    assert not backend.pushed


def test_publish_refuses_a_development_version(cli, backend, image, server):
    for cell, development in (("a", False), ("b", True)):
        reference = f"{image}:v1-{cell}-0123456789ab"
        backend.images[reference] = StoredVariant(
            reference=reference, cell=cell, input_digest=digest(b""), development=development
        )
    cli("publish", f"{image}:v1").refuses(2, "is a development version, which is never pushed")
    assert not backend.pushed
    assert not server.count("PUT")


def test_publish_ignores_remaining_images_of_a_development_version(
    cli, backend, image, repository, add_variant, labels_of
):
    add_variant("a")
    own = labels_of("b")
    for cell, made_of, development in (
        ("a", digest(b"0"), True),
        ("b", digest(b"0"), True),
        ("b", None, False),
    ):
        inputs = made_of or own[labels.INPUT]
        reference = f"{image}:{labels.make_tag('v1', cell, inputs)}"
        backend.images[reference] = StoredVariant(
            reference=reference, cell=cell, input_digest=inputs, development=development
        )
    tag = labels.make_tag("v1", "b", own[labels.INPUT])
    manifests = {}
    backend.push = lambda reference: manifests.update({reference: repository.image(tag, own)})
    backend.get_digest = manifests.get
    result = cli("publish", f"{image}:v1", "--json")
    assert result.code == 0, result.err
    assert list(manifests) == [f"{image}:{tag}"]
    assert json.loads(result.out)["variants"] == 2


@pytest.mark.parametrize("name", ["training:v1", "reg.example/ml/training"])
def test_publish_requires_a_registry_and_a_version(cli, name):
    cli("publish", name).refuses(
        2, "is not an image with a registry and a version", "such as registry.example.com"
    )


def test_publish_of_an_empty_version_exits_with_4(cli, no_engine, image):  # noqa: ARG001
    cli("publish", f"{image}:v1").refuses(4, "imagematrix build --push")


def test_lock_keeps_digests_until_upgrade(cli, backend, matrix, conforms):
    result = cli("lock", "-f", matrix)
    assert (result.code, result.out) == (0, "")
    assert "debian:trixie: new -> sha256:" in result.err
    path = matrix.with_name("imagematrix.lock")
    before = conforms(json.loads(path.read_text()))
    backend.known["debian:trixie"] = backend.newer["debian:bookworm"] = digest(b"newer")
    assert json.loads(cli("lock", "-f", matrix, "--json").out) == before
    result = cli("lock", "-f", matrix, "--upgrade")
    after = {one["name"]: one["digest"] for one in json.loads(path.read_text())["bases"]}
    assert set(after.values()) == {digest(b"newer")}
    assert result.err.count(" -> ") == 2
    matrix.write_text(matrix.read_text().replace("debian:bookworm", "debian:trixie"))
    result = cli("lock", "-f", matrix)
    assert f"debian:bookworm: {digest(b'newer')} -> removed" in result.err
    assert "1 base image" in result.err


def test_frozen_lock_without_a_base_exits_with_2(cli, backend, matrix):  # noqa: ARG001
    cli("build", "-f", matrix, "--frozen").refuses(
        2, "debian:trixie not found in the lock", "run `imagematrix lock -f "
    )
    assert not matrix.with_name("imagematrix.lock").exists()


def test_image_name_decides_between_engine_and_registry(
    engine, image, add_variant, registry, capsys, labels_of
):
    own = labels_of("a", IMAGE=image)
    reference = f"{image}:{labels.make_tag('v1', 'a', own[labels.INPUT])}"
    engine.add_image(own, RepoTags=[reference])
    (local_one,) = find_catalog(f"{image}:v1", None).variants
    assert local_one.reference == reference
    output = capsys.readouterr().err
    assert "has no" in output
    assert "using the engine's images" in output
    add_variant("a")
    published = publish(registry, "v1")
    (variant,) = find_catalog(f"{image}:v1", None).variants
    assert variant.reference == reference
    assert variant.digest != local_one.digest
    assert capsys.readouterr().err == ""
    assert find_catalog(f"{image}@{published.digest}", None).variants == (variant,)
    with pytest.raises(UnknownImageError, match="the engine has no variant of training"):
        find_catalog("training:v1", None)


def test_engine_does_not_replace_an_unreachable_registry(engine, server, image):
    server.fails("GET", "manifests", times=99, status=500)
    with pytest.raises(EngineError, match="answered 500"):
        find_catalog(f"{image}:v1", None)
    assert not engine.requests


def test_run_uses_the_digest_unless_the_engine_has_the_image(
    cli, engine, image, add_variant, registry, profiles
):
    pushed = add_variant("a", VARIANT=json.dumps({"platform": "linux/amd64", "cpu_flags": []}))
    publish(registry, "v1")
    words = ("run", "--dry-run", "--host", profiles["laptop"], f"{image}:v1")
    tag = labels.make_tag("v1", "a", digest(b"1"))
    engine.responses["GET", f"{tag}/json"] = 404, b"{}"
    assert cli(*words).out.endswith(f" {image}:{tag}@{pushed}\n")
    engine.responses["GET", f"{tag}/json"] = 200, json.dumps({"RepoDigests": [f"{image}@{pushed}"]}).encode()
    assert cli(*words).out.endswith(f" {image}:{tag}\n")
    engine.responses["GET", f"{tag}/json"] = (
        200,
        json.dumps({"RepoDigests": [f"{image}@{digest(b'')}"]}).encode(),
    )
    assert cli(*words).out.endswith(f" {image}:{tag}@{pushed}\n")
    engine.responses["GET", f"{tag}/json"] = 500, b'{"message": "no"}'
    assert cli(*words).out.endswith(f" {image}:{tag}@{pushed}\n")
    refused = cli(*(word for word in words if word != "--dry-run"))
    assert refused.code == 8


def test_build_reports_a_tag_moved_during_the_push(
    cli, backend, matrix, make_image, repository, image, monkeypatch
):
    monkeypatch.setattr(Compilers, "get_flags", lambda *_: frozenset())
    backend.pin_by_immovable_name = lambda *_: None
    backend.stop = lambda: None

    @contextlib.contextmanager
    def build(order, log, step):  # noqa: ARG001
        assert not order.labels, "they are written once the image is audited"
        yield make_image("x", layers=[EMPTY], IMAGE=image).made

    backend.make = build
    result = cli("build", "-f", matrix, "--push", "--only", "cuda=none,march=znver4")
    assert result.code == 0, result.err
    assert list(repository.tags) == [result.out.strip().rpartition(":")[2]]

    real = build

    @contextlib.contextmanager
    def slow(order, log, step):
        with real(order, log, step) as made:
            repository.image(order.reference.rpartition(":")[2], {"by": "somebody"})
            yield made

    backend.make = slow
    cli("build", "-f", matrix, "--push", *CPU).refuses(7, "from other inputs")


@pytest.mark.usefixtures("no_engine")
def test_publish_signs_with_a_key(cli, image, repository, labels_of, tmp_path, monkeypatch):
    private = ec.generate_private_key(ec.SECP256R1())
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (tmp_path / "key.pem").write_bytes(
        private.private_bytes(*form, serialization.BestAvailableEncryption(b"secret"))
    )
    own = labels_of("cpu-znver4")
    tag = labels.make_tag(own[labels.VERSION], own[labels.CELL], own[labels.INPUT])
    variant = repository.image(tag, own)
    monkeypatch.delenv("COSIGN_PASSWORD", raising=False)
    refused = cli("publish", f"{image}:v1", "--sign", tmp_path / "key.pem")
    assert (refused.code, "v1" in repository.tags) == (2, False)
    assert "set COSIGN_PASSWORD to its password" in refused.err
    monkeypatch.setenv("COSIGN_PASSWORD", "secret")
    signed = cli("publish", f"{image}:v1", "--sign", tmp_path / "key.pem")
    assert "signed with key.pem: 2 manifests" in signed.err
    assert signed.out == f"{image}:v1@{repository.tags['v1']}\n"
    assert repository.tags[f"{repository.tags['v1'].replace(':', '-')}.sig"]
    assert "signed" not in cli("publish", f"{image}:v1", "--sign", tmp_path / "key.pem").err
    somebodys = repository.image(None, {"by": "somebody"})
    repository.attest(tag, variant, {"mediaType": MANIFEST, "digest": somebodys, "size": 1})
    left = cli("publish", f"{image}:v1", "--sign", tmp_path / "key.pem")
    assert f"what {tag} names stays unsigned" in left.err
