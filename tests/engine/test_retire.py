"""Retiring versions from a real registry, whose garbage is collected, and pruning a node."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from engines import Registry

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
LAPTOP = ROOT / "tests/hosts/laptop.json"
FLAGS = {"old": ["sse4_2"], "new": ["sse4_2", "avx2"]}
MATRIX = {
    "schema": "imagematrix.matrix/v1",
    "axes": {"march": list(FLAGS)},
    "facts": {"march": {name: {"flags": flags} for name, flags in FLAGS.items()}},
}
DOCKERFILE = """\
FROM debian:trixie
RUN head -c 3000000 /dev/urandom > /data
RUN echo {{ march }} > /variant
{% if march == 'new' %}RUN echo CHANGE > /change
{% endif %}"""
WORDS = ("--key", "cosign.key", "--tlog-upload=false", "--yes")


class Store:
    """An engine with a registry beside it; `image` is the name of an image there."""

    def __init__(self, engine, registry):
        self.engine, self.registry = engine, registry
        self.image = f"{registry.address}/ml/retired"

    def call(self, *words, **options):
        done = self.engine.imagematrix(*words, **options)
        assert done.returncode == 0, done
        return done.stdout

    def tags(self):
        tags = self.registry.data / "docker/registry/v2/repositories/ml/retired/_manifests/tags"
        return {path.name for path in tags.iterdir()}

    def size(self):
        """Return the bytes of all blobs."""
        blobs = self.registry.data / "docker/registry/v2/blobs"
        return sum(path.stat().st_size for path in blobs.rglob("data"))

    def collect(self, *options):
        """Run the registry's garbage collection, as its documentation says: while nobody pushes."""
        self.registry.kill()
        command = ["docker-registry", "garbage-collect", *options, str(self.registry.folder / "config.yml")]
        subprocess.run(command, check=True, capture_output=True)
        self.registry.start()

    def variants(self, version):
        document = json.loads(self.call("ls", f"{self.image}:{version}", "--json"))
        return {one["reference"]: one["digest"] for one in document["variants"]}

    def pulls(self, version):
        """Pull every variant of a version, run it, and remove it."""
        for reference, digest in self.variants(version).items():
            name = f"{self.image}@{digest}"
            self.engine.docker("pull", name)
            shown = self.engine.docker("run", "--rm", name, "cat", "/variant").stdout.strip()
            assert f"-{shown}-" in reference
            self.engine.docker("rmi", name)


@pytest.fixture(scope="module", params=["containerd", "classic"])
def store(request, start_engine, tmp_path_factory):
    """A store with the versions v1 to v3; v2 is `stable`, and v3 takes one image over from v2."""
    engine = start_engine(request.param)
    registry = Registry(engine, 5000)
    result = Store(engine, registry)
    folder = tmp_path_factory.mktemp("project")
    for name in ("templates", "context"):
        (folder / name).mkdir()
    attest = ("--attest", "type=provenance") if request.param == "containerd" else ()
    if shutil.which("cosign"):
        engine.cosign(folder, "generate-key-pair")
    for version, change in (("v1", "one"), ("v2", "two"), ("v3", "three")):
        described = {result.image: {"version": version, "template": "image.j2", "context": "context"}}
        (folder / "matrix.yaml").write_text(json.dumps({**MATRIX, "images": described}))
        text = DOCKERFILE.replace("CHANGE", change)
        if version == "v1":
            text = text.replace("/data", "/data1")
        (folder / "templates" / "image.j2").write_text(text)
        result.call("build", "--push", *(attest if version != "v3" else ()), cwd=folder)
        aliases = ("--alias", "stable") if version == "v2" else ()
        name = result.call("publish", f"{result.image}:{version}", *aliases).strip()
        if shutil.which("cosign"):
            engine.cosign(folder, "sign", "--recursive", *WORDS, name)
    yield result
    registry.remove()


def test_what_goes_is_what_was_shown_and_the_rest_pulls_after_the_collection(store):
    before, size, versions = store.tags(), store.size(), {v: store.variants(v) for v in ("v1", "v2", "v3")}
    shown = store.call("retire", store.image, "--keep", "1")
    rows = [line.split() for line in shown.splitlines() if line.startswith("v")]
    assert [row[:2] for row in rows[1:]] == [["v1", "remove"], ["v2", "keep"], ["v3", "keep"]]
    document = json.loads(store.call("retire", store.image, "--keep", "1", "--json"))
    assert store.tags() == before, "it only shows"
    gone = {tag for removal in document["removals"] for tag in removal["tags"]}
    assert {tag for tag in before if tag.startswith("v1")} <= gone
    assert all(f"{store.image}:{tag}@" in shown for tag in gone)

    assert store.call("retire", store.image, "--keep", "1", "--yes") == shown
    assert store.tags() == before - gone
    store.collect()
    assert size - store.size() >= 2_900_000, "the layer that only v1 had"
    for version in ("v2", "v3", "stable"):
        store.pulls(version)
    digests = [f"{store.image}@{digest}" for digest in versions["v1"].values()]
    for name in (f"{store.image}:v1", *digests):
        assert store.engine.docker("pull", name, check=False).returncode != 0
    assert (
        "nothing to remove" in store.engine.imagematrix("retire", store.image, "--keep", "1", "--yes").stderr
    )


def test_the_newest_version_for_a_host_is_kept(store):
    document = json.loads(store.call("retire", store.image, "--hosts", LAPTOP, "--json"))
    by_version = {one["version"]: one for one in document["versions"]}
    assert by_version["v3"]["hosts"] == [str(LAPTOP).removesuffix(".json")]
    assert by_version["v2"]["why"] == ["tag stable"]
    assert document["dry_run"]


def test_prune_keeps_what_containers_use_and_what_the_options_name(store):
    engine = store.engine
    engine.docker("tag", "debian:trixie", "somebody:v1")
    names = {}
    for version in ("v2", "v3"):
        names[version] = (
            store.call("pull", f"{store.image}:{version}", "--host", LAPTOP).strip().partition("@")[0]
        )
    used = store.call("pull", f"{store.image}:v2", "--host", LAPTOP, "--where", "march=old").strip()
    engine.docker("create", "--name", "user", used.partition("@")[0])
    young = store.call("prune", "--newer", "1h")
    assert "remove" not in young
    assert young.count("younger") >= 3
    shown = json.loads(store.call("prune", "--keep", "1", "--json"))
    states = {name: one["status"] for one in shown["images"] for name in one["names"]}
    assert states[names["v2"]] == "removed", shown
    assert states[names["v3"]] == "kept"
    assert states[used.partition("@")[0]] == "kept"
    assert names["v2"] in engine.images(), "it only shows"
    text = store.call("prune", "--keep", "1", "--yes")
    assert "container user" in text
    left = engine.images()
    assert names["v2"] not in left
    assert {names["v3"], used.partition("@")[0], "somebody:v1"} <= left
    digest = next(one["id"] for one in shown["images"] if names["v2"] in one["names"])
    assert engine.docker("inspect", digest, check=False).returncode != 0, "no name of it is left"
    engine.docker("rm", "user")
    store.call("prune", "--keep", "1", "--yes")
    assert used.partition("@")[0] not in engine.images()
    ran = engine.docker("run", "--rm", names["v3"], "cat", "/variant")
    assert ran.returncode == 0, ran.stderr
    engine.docker("rmi", "somebody:v1", names["v3"])


def test_garbage_collection_of_what_has_no_tag_breaks_only_attested_images(store):
    """The documentation warns of it, because registries describe it as harmless."""
    store.collect("--delete-untagged")
    digests = store.variants("v2").values()
    pulled = [store.engine.docker("pull", f"{store.image}@{digest}", check=False) for digest in digests]
    attested = store.engine.store == "containerd"
    assert any(one.returncode for one in pulled) == attested
