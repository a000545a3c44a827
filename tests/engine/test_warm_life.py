"""A warm image from its publication to its end: it goes with its variant, and serves no other."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from types import SimpleNamespace

import pytest
from engines import Registry
from podman import Podman
from warming import PROGRAM, publish_images

LAUNCH = """\
import sys
import imagematrix as im

name, folder = sys.argv[1:]
choice = im.select(im.probe(), im.open_catalog(name))
mounted = {folder: {"bind": "/program", "mode": "ro"}}
container = im.launch(choice, ["sh", "/program/run"], environment={"NUMBA_DEBUG_CACHE": "1"}, volumes=mounted)
container.wait()
print(container.logs().decode(), end="")
container.remove()
"""
HIT = "[cache] data loaded from"


class Life:
    """A published version with a warm image, on a node: `name` is the version's, `program` its input."""

    def __init__(self, node, registry, folder):
        self.node, self.registry, self.folder = node, registry, folder
        self.name = publish_images(node, registry, folder)["usual"]
        self.image = self.name.rpartition(":")[0]
        self.program = folder / "program"
        self.program.mkdir()
        (self.program / "run").write_text(PROGRAM)
        self.staging = f"{registry.address}/staging/usual"
        self.staged = self.warm(self.name, self.staging)
        self.call("publish", self.name, "--warm", self.staged, "--yes")
        document = self.read("ls", self.name)
        (variant,), (warm,) = document["variants"], document["warm"]
        self.variant, self.base = variant["reference"], variant["digest"]
        self.warm_image, self.digest = warm["reference"], warm["digest"]

    def call(self, *words, **options):
        done = self.node.imagematrix(*words, cwd=self.folder, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def read(self, *words):
        return json.loads(self.call(*words, "--json"))

    def warm(self, name, staging):
        """Warm up a version; return the name of what is staged."""
        words = ("--input", f"program={self.program}", "--staging", staging)
        return self.call("warm", name, *words).partition("@")[0]

    def run(self, *options, name=None, environment=None):
        """Start the program; return what it says of its caches."""
        mounted = ("-e", "NUMBA_DEBUG_CACHE=1", "-v", f"{self.program}:/program")
        words = ("run", "--rm", *options, *mounted, name or self.name, "sh", "/program/run")
        return self.call(*words, env=environment or self.node.environment)

    def remove_images(self, image):
        """Remove an image from the engine, with all its names."""
        if ids := self.node.docker("images", "--quiet", "--no-trunc", image).stdout.split():
            self.node.docker("rmi", "--force", *set(ids))


@pytest.fixture(scope="module")
def life(engine, tmp_path_factory):
    registry = Registry(engine, 5000)
    yield Life(engine, registry, tmp_path_factory.mktemp("project"))
    registry.remove()


def test_its_layer_is_counted_and_its_bytes_are_audited(life):
    document = life.read("ls", "--size", life.name)
    (variant,), (warm,) = document["variants"], document["warm"]
    *below, layer = warm["layers"]
    assert below == variant["layers"]
    assert warm["adds"] == document["layers"][layer]["size"] > 0
    assert document["total"] == variant["size"] + warm["adds"] == warm["size"]
    assert [line.split()[0] for line in life.call("ls", "--size", life.name).splitlines()[2:4]] == [
        life.variant,
        life.warm_image,
    ]
    assert life.read("verify", life.warm_image)["digest"] == life.digest
    assert f"{life.warm_image.rpartition(':v1-')[2]} <- selected in its place" in life.call(
        "explain", life.name
    )


def test_the_library_starts_it(life):
    command = [*life.node.inside, sys.executable, "-c", LAUNCH, life.name, str(life.program)]
    done = subprocess.run(
        command, env=life.node.environment, cwd=life.folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert HIT in done.stdout


@pytest.fixture
def podman(life, tmp_path):
    """Podman beside the node's engine, which may pull from the registry without TLS."""
    if not shutil.which("podman"):
        lacks = pytest.fail if os.environ.get("CI") else pytest.skip
        lacks("podman is not installed")
    settings = tmp_path / "registries.conf"
    settings.write_text(f'[[registry]]\nlocation = "{life.registry.address}"\ninsecure = true\n')
    environment = {**life.node.environment, "CONTAINERS_REGISTRIES_CONF": str(settings)}
    service = Podman(SimpleNamespace(environment=environment, inside=life.node.inside))
    yield service
    service.remove()


def test_podman_starts_it(life, podman):
    assert HIT in life.run(environment=podman.environment)


def test_a_copy_of_the_version_has_it_and_its_base_may_have_another_name(life):
    other = f"{life.registry.address}/copied/usual"
    life.call("copy", life.name, other)
    (copied,) = life.read("ls", f"{other}:v1")["warm"]
    assert (copied["digest"], copied["base"]) == (life.digest, life.base)
    assert HIT in life.run(name=f"{other}:v1")
    # Warmed up by another name, it is the same.
    life.remove_images(life.image)
    staged = life.warm(f"{other}:v1", f"{life.registry.address}/staging/copied")
    assert staged.rpartition(":")[2] == life.staged.rpartition(":")[2]
    document = life.read("publish", life.name, "--warm", staged, "--yes")
    assert [one["digest"] for one in document["warm"]] == [life.digest]
    life.remove_images(other)


def test_an_archive_and_a_layout_have_it(life, tmp_path):
    for name in (f"{life.image}@{life.base}", f"{life.image}@{life.digest}"):
        life.node.docker("pull", name)
    archive = tmp_path / "images.tar"
    life.node.docker("save", "-o", str(archive), f"{life.image}@{life.base}", f"{life.image}@{life.digest}")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "layout", filter="data")
    for catalog in (archive, f"oci:{tmp_path}/layout"):
        assert life.read("select", life.name, "--catalog", catalog)["warm"] == life.digest
    store = ("--to", tmp_path / "store", "--catalog", f"oci:{tmp_path}/layout")
    assert life.call("pull", life.name, *store).endswith(f"@{life.digest}\n")
    life.remove_images(life.image)


def test_prune_keeps_it_for_the_hosts_that_start_it(life, tmp_path):
    life.remove_images(life.image)
    assert HIT in life.run()
    assert life.node.docker("images", "--format", "{{.Tag}}", life.image).stdout.split() == [
        life.warm_image.rpartition(":")[2]
    ]
    host = life.read("probe")
    for vendor, status in ((host["cpu"]["vendor"], "kept"), ("of no CPU", "removed")):
        host["cpu"]["vendor"] = vendor
        (tmp_path / "node.json").write_text(json.dumps(host))
        done = life.node.imagematrix("prune", life.image, "--hosts", tmp_path / "node.json", "--json")
        (image,) = json.loads(done.stdout)["images"]
        assert image["status"] == status, done.stderr


def test_it_serves_no_other_version_and_goes_with_its_own(life):
    """The next version takes the image over, which then has another digest."""
    assert HIT in life.run()
    checked = life.node.imagematrix("outdated", cwd=life.folder)
    assert "-warm-" not in checked.stdout + checked.stderr
    matrix = life.folder / "matrix.yaml"
    matrix.write_text(matrix.read_text().replace('"version": "v1"', '"version": "v2"'))
    life.call("build", "--push")
    life.call("publish", f"{life.image}:v2")
    document = life.read("ls", f"{life.image}:v2")
    assert "warm" not in document
    assert document["variants"][0]["digest"] != life.base
    refused = life.node.imagematrix("publish", f"{life.image}:v2", "--warm", life.staged, "--yes")
    assert refused.returncode == 4
    assert f"belongs to {life.base}, which is no variant of {life.image}:v2" in refused.stderr
    assert HIT not in life.run(name=f"{life.image}:v2")
    retired = life.read("retire", life.image, "--keep", "1", "--yes")
    assert {removal["digest"] for removal in retired["removals"]} >= {life.base, life.digest}
    tags = life.registry.data / "docker/registry/v2/repositories/ml/usual/_manifests/tags"
    assert not [path.name for path in tags.iterdir() if path.name.startswith("v1")]
    assert HIT not in life.run(name=f"{life.image}:v2")
    pruned = life.read("prune", life.image, "--keep", "1", "--yes")
    assert life.warm_image in [name for image in pruned["images"] for name in image["names"]]
    assert life.warm_image not in life.node.docker("images", "--format", "{{.Repository}}:{{.Tag}}").stdout
