"""Images are in the engine before a job needs them: pulled by digest, under their names, on either store."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from engines import Registry

ROOT = Path(__file__).parents[2]
HOST = ("--host", ROOT / "tests/hosts/laptop.json")
FLAGS = {"old": ["sse4_2"], "new": ["sse4_2", "avx2"]}
MATRIX = {
    "schema": "imagematrix.matrix/v1",
    "axes": {"march": list(FLAGS)},
    "facts": {"march": {name: {"flags": flags} for name, flags in FLAGS.items()}},
}
DOCKERFILE = "FROM debian:trixie\nRUN head -c 5000000 /dev/urandom > /data\nRUN echo {{ march }} > /variant\n"


@pytest.fixture(scope="module", params=["containerd", "classic"])
def node(request):
    """An engine with this store."""
    return request.getfixturevalue("engine" if request.param == "containerd" else "classic")


@pytest.fixture(scope="module")
def registry(node):
    started = Registry(node, 5000)
    yield started
    started.remove()


def remove(node, image):
    ids = node.docker("images", "--quiet", "--no-trunc", image).stdout.split()
    if ids:
        node.docker("rmi", "--force", *set(ids))


@pytest.fixture(scope="module")
def version(node, registry, tmp_path_factory):
    """The name of a published version."""
    folder = tmp_path_factory.mktemp("project")
    image = f"{registry.address}/ml/anywhere"
    for name in ("templates", "context"):
        (folder / name).mkdir()
    (folder / "templates" / "image.j2").write_text(DOCKERFILE)
    described = {image: {"version": "v1", "template": "image.j2", "context": "context"}}
    (folder / "matrix.yaml").write_text(json.dumps({**MATRIX, "images": described}))
    built = node.imagematrix("build", "--push", cwd=folder)
    assert built.returncode == 0, built.stderr
    published = node.imagematrix("publish", f"{image}:v1")
    assert published.returncode == 0, published.stderr
    return f"{image}:v1"


@pytest.fixture(autouse=True)
def _absent(node, version):
    """Let each test begin without the images."""
    remove(node, version.rpartition(":")[0])


@pytest.fixture
def chosen(node, version):
    """The reference and the digest of the variant for the host."""
    document = json.loads(node.imagematrix("select", version, *HOST, "--json").stdout)
    return document["selected"], document["digest"]


def pull(node, name, *options):
    return node.imagematrix("pull", name, *HOST, *options)


def tags(node, name):
    """Return the tags of an image. Docker 29 lists a name with its digest among them."""
    return [tag for tag in node.inspect(name)["RepoTags"] if "@" not in tag]


def test_a_node_that_is_warm_needs_no_registry(node, registry, version, chosen, tmp_path):
    reference, digest = chosen
    (tmp_path / "catalog.json").write_text(node.imagematrix("ls", version, "--json").stdout)
    pulled = pull(node, version)
    assert (pulled.returncode, pulled.stdout) == (0, f"{reference}@{digest}\n"), pulled.stderr
    assert [line.split()[0] for line in pulled.stderr.splitlines()] == ["pulling", "pulled"]
    assert json.loads(pull(node, version, "--json").stdout)["digest"] == digest

    registry.kill()
    try:
        assert node.docker("run", "--rm", pulled.stdout.strip(), "cat", "/variant").stdout == "new\n"
        words = ("--catalog", tmp_path / "catalog.json", version)
        again = pull(node, words[-1], *words[:2])
        assert (again.stdout, again.stderr) == (pulled.stdout, "")
        ran = node.imagematrix("run", "--rm", *HOST, *words, "cat", "/variant")
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "new\n", "")
        assert tags(node, reference) == [reference]
    finally:
        registry.start()


def test_run_pulls_as_pull_does(node, version, chosen):
    reference, _ = chosen
    ran = node.imagematrix("run", "--rm", *HOST, version, "cat", "/variant")
    assert (ran.returncode, ran.stdout) == (0, "new\n"), ran.stderr
    assert [line.split()[0] for line in ran.stderr.splitlines()] == ["pulling", "pulled"]
    assert tags(node, reference) == [reference]
    assert pull(node, version).stderr == ""
    refused = node.imagematrix("run", "--pull", "never", *HOST, "--where", "march=old", version)
    assert refused.returncode == 125, "docker's own policy"


@pytest.mark.long
def test_a_name_that_another_image_has_does_not_move(node, version, chosen):
    reference, digest = chosen
    node.docker("tag", "debian:trixie", reference)
    before = node.inspect(reference)["Id"]
    pulled = pull(node, version)
    assert pulled.stdout == f"{reference}@{digest}\n", pulled.stderr
    assert node.inspect(reference)["Id"] == before
    assert node.docker("run", "--rm", pulled.stdout.strip(), "cat", "/variant").stdout == "new\n"
    node.docker("rmi", reference)


@pytest.mark.long
def test_a_tag_that_moves_before_the_pull_changes_nothing(node, registry, version, chosen, tmp_path):
    reference, digest = chosen
    (tmp_path / "catalog.json").write_text(node.imagematrix("ls", version, "--json").stdout)
    old = node.imagematrix("select", version, *HOST, "--where", "march=old").stdout.strip()
    repository = registry.data / "docker/registry/v2/repositories/ml/anywhere/_manifests/tags"
    link, other = (repository / name.rpartition(":")[2] / "current/link" for name in (reference, old))
    before = link.read_text()
    link.write_text(other.read_text())
    try:
        assert pull(node, version, "--catalog", tmp_path / "catalog.json").stdout == f"{reference}@{digest}\n"
    finally:
        link.write_text(before)
    assert node.docker("run", "--rm", reference, "cat", "/variant").stdout == "new\n"


@pytest.mark.long
def test_a_lost_registry_is_one_error_and_the_next_pull_succeeds(node, registry, version, tmp_path):
    (tmp_path / "catalog.json").write_text(node.imagematrix("ls", version, "--json").stdout)
    registry.kill()
    try:
        for options in ((), ("--catalog", tmp_path / "catalog.json")):
            lost = pull(node, version, *options)
            assert (lost.returncode, lost.stdout, lost.stderr.count("imagematrix: ")) == (8, "", 1), lost
    finally:
        registry.start()
    assert pull(node, version).returncode == 0


def test_ctrl_c_ends_a_pull(node, registry, version, tmp_path):
    """The registry stands still, so that the pull cannot be faster than the signal."""
    (tmp_path / "catalog.json").write_text(node.imagematrix("ls", version, "--json").stdout)
    words = ("pull", version, *HOST, "--catalog", tmp_path / "catalog.json")
    command = [*node.inside, ROOT / ".venv/bin/imagematrix", *words]
    os.killpg(registry._process.pid, signal.SIGSTOP)
    try:
        with subprocess.Popen(
            list(map(str, command)), stderr=subprocess.PIPE, text=True, env=node.environment
        ) as started:
            assert started.stderr.readline().startswith("pulling ")
            started.send_signal(signal.SIGINT)
            assert (started.stderr.read(), started.wait()) == ("", 130)
    finally:
        os.killpg(registry._process.pid, signal.SIGCONT)
    assert pull(node, version).returncode == 0


def test_an_image_that_the_registry_lost_is_unknown(node, registry, version, chosen):
    _, digest = chosen
    revision = registry.data / "docker/registry/v2/repositories/ml/anywhere/_manifests/revisions/sha256"
    link = revision / digest.removeprefix("sha256:") / "link"
    kept = link.read_text()
    link.unlink()
    try:
        lost = pull(node, version)
        assert (lost.returncode, lost.stdout) == (4, ""), lost.stderr
        assert f"cannot pull {version.rpartition(':')[0]}@{digest}: " in lost.stderr
    finally:
        link.write_text(kept)


@pytest.mark.long
def test_an_image_that_only_the_engine_has_stays_as_it_is(node, tmp_path):
    for name in ("templates", "context"):
        (tmp_path / name).mkdir()
    (tmp_path / "templates" / "image.j2").write_text("FROM debian:trixie\nRUN echo {{ march }} > /variant\n")
    described = {"local": {"version": "v1", "template": "image.j2", "context": "context"}}
    (tmp_path / "matrix.yaml").write_text(json.dumps({**MATRIX, "images": described}))
    built = node.imagematrix("build", "--only", "march=new", cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    (reference,) = built.stdout.split()
    pulled = pull(node, "local:v1")
    assert (pulled.returncode, pulled.stderr) == (0, "")
    name, at, _ = pulled.stdout.strip().partition("@")
    assert (name, bool(at)) == (reference, node.store == "containerd"), "the other keeps no manifests"
    assert node.docker("run", "--rm", pulled.stdout.strip(), "cat", "/variant").stdout == "new\n"
    node.docker("rmi", reference)
