"""Layers that the store has from an earlier build: later builds make the same images without their bytes."""

import gzip
import hashlib
import io
import json
import subprocess
import tarfile

import pytest
import zstandard

BASE = 120  # MB of debian:trixie, uncompressed
OWN = 100  # MB of a cell's own layer
LARGE = f"RUN head -c {OWN}MB /dev/urandom > /x\nRUN echo"


@pytest.fixture
def small(tmp_path):
    """Call it with a number of MB to get a folder with so much disk space."""
    folder = tmp_path / "small"
    folder.mkdir()

    def mounted(size):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}m", "none", folder], check=True)
        return folder

    yield mounted
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def build(engine, tmp_path):
    """Call it to build cells of an image whose Dockerfile ends in `lines`; it returns the ended process.

    Files are in the folder `temporary`, and `cache` has what earlier builds noted.
    """
    (tmp_path / "templates").mkdir()

    def build(image, lines, *options, cells="one", temporary=tmp_path, cache=tmp_path / "cache"):
        name, _, version = image.rpartition(":")
        (tmp_path / "templates/it.j2").write_text(f"FROM debian:trixie\n{lines}\n")
        (tmp_path / "matrix.yaml").write_text(
            "schema: imagematrix.matrix/v1\n"
            f"images: {{'{name}': {{version: {version}, template: it.j2, context: templates}}}}\n"
            f"axes: {{which: [{cells}]}}\n"
        )
        places = {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(cache)}
        return engine.imagematrix("build", "--json", *options, cwd=tmp_path, env=engine.environment | places)

    return build


def digests(done):
    """The digests of built images, by reference."""
    assert done.returncode == 0, done.stderr
    return {cell["reference"]: cell["digest"] for cell in json.loads(done.stdout)["cells"]}


def has_no_space(done):
    # The base's export and the cell's Dockerfile are written there, and either is the first to fail.
    return done.returncode and "no space left on device" in done.stderr.casefold()


def test_base_that_was_read_before_is_not_exported_again(engine, build, small, tmp_path):
    """Builds then need disk space for their own layers only, and make the same bytes."""
    cache, space = tmp_path / "cache", small(BASE // 6)

    def numbered(number, **where):
        return build(f"known-base:v{number}", "RUN echo {{ which }} > /n", cells=number, **where)

    assert has_no_space(numbered(1, temporary=space))
    numbered(1)
    ((built, digest),) = digests(numbered(2, temporary=space)).items()
    assert engine.docker("run", "--rm", built, "cat", "/n").stdout == "2\n"
    audited = max((cache / "imagematrix/layers").iterdir(), key=lambda path: path.stat().st_size)
    audited.write_bytes(b"damaged")
    assert has_no_space(numbered(3, temporary=space)), "the base is read again"
    (again,) = digests(numbered(3))
    assert engine.docker("run", "--rm", again, "cat", "/n").stdout == "3\n"
    engine.docker("rmi", built)
    assert digests(numbered(2, cache=tmp_path / "empty")) == {built: digest}


def contents(engine, image):
    """Return the digests of the large file of an image and of its last line."""
    return engine.docker("run", "--rm", image, "sha256sum", "/x", "/last").stdout.split()[::2]


def verify(engine, image, tmp_path):
    """Compare every byte of an image with its labels and digests."""
    empty = engine.environment | {"XDG_CACHE_HOME": str(tmp_path / "empty")}
    verified = engine.imagematrix("verify", image, env=empty)
    assert verified.returncode == 0, verified.stderr


def test_a_changed_last_line_does_not_export_the_layers_below(engine, build, small, tmp_path):
    """The engine has them; a cell that is new takes those of the others."""
    (first,) = digests(build("last-line:v1", f"{LARGE} 1 > /last"))
    lines = f"{LARGE} 2 > /last"
    space = small(BASE // 6)
    both = digests(build("last-line:v2", lines, cells="one, two", temporary=space))
    large, last = contents(engine, first)
    for image in both:
        assert contents(engine, image)[0] == large
        assert contents(engine, image)[1] != last
    verify(engine, "last-line:v2", tmp_path)
    again = build("last-line:v2", lines, "--verify-reproducible", cells="one, two", temporary=space)
    assert has_no_space(again), "what is verified is made from the start"
    engine.docker("rmi", "--force", first, *both)
    again = build("last-line:v2", lines, cells="one, two", temporary=tmp_path)
    assert digests(again) == both, "the engine has none of the layers, so both are whole again"


def test_a_registry_does_not_get_the_layers_again(engine, registry, build, small, tmp_path):
    """It has those of the base, too, since the first push of an image that is built on it."""
    image = f"{registry.address}/last-line"
    (first,) = digests(build(f"{image}:v1", f"{LARGE} 1 > /last", "--push"))
    space = small(BASE // 6)
    both = digests(build(f"{image}:v2", f"{LARGE} 2 > /last", "--push", cells="one, two", temporary=space))
    large, _ = contents(engine, first)
    assert {contents(engine, one)[0] for one in both} == {large}
    for one in both:
        verify(engine, one, tmp_path)
    lines = f"{LARGE} 3 > /last"
    elsewhere = build(f"{registry.address}/elsewhere:v1", lines, "--push", temporary=space)
    assert has_no_space(elsewhere), "this repository has none of the layers"


def recompressed(saved):
    """Return an image that `docker save` wrote with all its layers in gzip: other blobs, the same content."""
    with tarfile.open(fileobj=io.BytesIO(saved)) as archive:
        files = {one.name: archive.extractfile(one).read() for one in archive if one.isfile()}

    def put(raw):
        digest = hashlib.sha256(raw).hexdigest()
        files[f"blobs/sha256/{digest}"] = raw
        return {"digest": f"sha256:{digest}", "size": len(raw)}

    def blob(entry):
        return files[f"blobs/{entry['digest'].replace(':', '/')}"]

    index = json.loads(files["index.json"])
    manifest = json.loads(blob(index["manifests"][0]))
    for layer in manifest["layers"]:
        if layer["mediaType"].endswith("zstd"):
            raw = zstandard.ZstdDecompressor().decompressobj().decompress(blob(layer))
            layer |= {"mediaType": layer["mediaType"].replace("zstd", "gzip"), **put(gzip.compress(raw, 1))}
    index["manifests"][0] |= put(json.dumps(manifest).encode())
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as archive:
        for name, raw in (files | {"index.json": json.dumps(index).encode()}).items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    return written.getvalue()


def test_an_engine_that_has_the_layers_in_another_form_gets_them(engine, build):
    """Its image has the same content, so that only loading the next image shows that a blob is missing."""
    (first,) = digests(build("other-form:v1", f"{LARGE} 1 > /last"))
    saved = subprocess.run(
        ["docker", "save", first], env=engine.environment, check=True, capture_output=True
    ).stdout
    before = engine.inspect(first)
    engine.docker("rmi", first)
    subprocess.run(["docker", "load"], env=engine.environment, check=True, input=recompressed(saved))
    after = engine.inspect(first)
    assert (after["RootFS"], after["Id"] != before["Id"]) == (before["RootFS"], True)
    (second,) = digests(build("other-form:v2", f"{LARGE} 2 > /last"))
    assert contents(engine, second)[0] == contents(engine, first)[0]


@pytest.mark.long
def test_a_base_is_exported_once(engine, build, small):
    """There is disk space for the base, of which four cells need no more than one."""
    own = 4 * OWN
    base = f"FROM debian:trixie\nRUN head -c {own}MB /dev/urandom > /x\n"
    engine.docker("buildx", "build", "--tag=base-of-several:1", "-", input=base)
    space = small(BASE // 2 + own + BASE // 2)
    lines = "FROM base-of-several:1\nRUN echo {{ which }} > /n"
    done = build("over-one-base:v1", lines, cells="1, 2, 3, 4", temporary=space)
    assert len(digests(done)) == 4


def test_layers_that_cells_share_are_exported_once(build, small):
    """There is disk space for the layer, exported and compressed, but not with each of four cells."""
    own = 4 * OWN
    space = small(BASE + 5 * own // 2)
    lines = f"RUN head -c {own}MB /dev/urandom > /x\nRUN echo {{{{ which }}}} > /n"
    done = build("over-one-layer:v1", lines, "--jobs=4", cells="1, 2, 3, 4", temporary=space)
    assert len(digests(done)) == 4
