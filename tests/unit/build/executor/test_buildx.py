"""Failures of `docker buildx` and how they are classified; docker is a script here."""

import contextlib
import io
import itertools
import json
import os
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from double import Double

from imagematrix.build.executor.buildx import BuildxOptions
from imagematrix.build.executor.caches import ExternalCaches
from imagematrix.build.executor.classic_builder import ClassicBuilder
from imagematrix.build.executor.layout_builder import LayoutBuilder
from imagematrix.build.executor.solver import read_builder_platforms
from imagematrix.build.plan.protocols import BuildRequest, BuildSources, SharedPrefix, StoppedError
from imagematrix.errors import BuildError, EngineError, UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.oci.layout import LayoutImage, MissingBlobError

DIGEST = f"sha256:{'1' * 64}"
MINE = [("mine", 1)]


class Docker(Double):
    """The engine behind the builder, as far as a builder needs it."""

    version = "28.5.2"
    has_manifests = True
    gone = False

    def require(self):
        if self.gone:
            raise EngineError("cannot reach the Docker engine")

    def get_digest(self, _):
        return DIGEST

    def find_pinned_digest(self, place):
        return DIGEST if place == "docker-image://held:1" else None


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Call it with the commands that buildx runs, or with what docker reports of its plugins.

    It returns the file to which the arguments of buildx are written.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def write(build="true", inspect="true", plugin=None):
        own = {"Name": "buildx", "Path": str(folder / "buildx")} | (plugin or {})
        plugins = json.dumps([{"Name": "app", "Path": "/app"}, own])
        (folder / "docker").write_text(
            f"#!/bin/sh\ncase $1 in info) echo '{plugins}';; *) {inspect};; esac\n"
        )
        lines = [
            "#!/bin/sh",
            f'printf "%s\\n" "$@" >> {tmp_path}/asked',
            "for word; do case $word in --metadata-file=*) file=${word#*=};; esac; done",
            "for word; do case $word in type=oci*) dest=${word#*dest=} dest=${dest%%,*};; esac; done",
            f"for word; do case $word in --file=*) cp ${{word#*=}} {tmp_path}/dockerfile;; esac; done",
            f"case $1 in build) {build};; *) {inspect};; esac",
        ]
        (folder / "buildx").write_text("\n".join(lines) + "\n")
        for command in ("docker", "buildx"):
            (folder / command).chmod(0o755)
        return tmp_path / "asked"

    return write


@pytest.fixture
def order(tmp_path):
    (tmp_path / "context").mkdir()
    sources = BuildSources(
        context=tmp_path / "context",
        platform="linux/amd64",
        images={"a:1": "docker-image://a:1@b", "c": "oci-layout:///d@e"},
    )
    own = {"by": "us", labels.CELL: "a=1, b", labels.VARIANT: '{"march":"x"}'}
    return BuildRequest(reference="t:v1", dockerfile="FROM a:1\n", sources=sources, labels=own)


def make(builder, order, log=None):
    steps: list[str] = []
    with builder.make(order, log or io.StringIO(), steps.append) as made:
        return made, steps


def written(**data):
    return f"echo '{json.dumps(data)}' > $file"


@pytest.fixture
def made(layout, tmp_path):
    """The commands with which buildx writes an image of two layers into the given layout."""
    digest = layout(tmp_path / "made", b"lower", b"upper")
    return f"cp -r {tmp_path}/made/blobs/* $dest/blobs/; {written(**{'containerimage.digest': digest})}"


def contents(made):
    return [path.read_bytes() for path in LayoutImage(made.layout, made.digest).layer_files]


def test_layer_bytes_are_removed_with_the_last_image(script, order, made):
    """Empty files stay in their place, because BuildKit does not send blobs that exist."""
    script(made.replace("cp -r", "cp -rn"))
    with LayoutBuilder(Docker(), MINE) as builder:
        with builder.make(order, io.StringIO(), lambda _: None) as first:
            with builder.make(order, io.StringIO(), lambda _: None) as second:
                assert second.digest == first.digest
            assert contents(first) == [b"lower", b"upper"], "one image still uses them"
        blobs = list(first.layout.glob("blobs/sha256/*"))
        assert sum(path.stat().st_size == 0 for path in blobs) == 2
        with builder.make(order, io.StringIO(), lambda _: None) as third:
            image = LayoutImage(third.layout, third.digest)
            assert third.digest == first.digest
            assert list(image.stream_archive("t:v1", ())), "an engine that has the layers needs no bytes"
            with pytest.raises(MissingBlobError):
                list(image.stream_archive("t:v1", image.layers))
        with builder.make(replace(order, unshared=True), io.StringIO(), lambda _: None) as alone:
            assert alone.digest == first.digest
            assert contents(alone) == [b"lower", b"upper"]
        assert not alone.layout.exists()


def test_layers_that_no_other_image_shares_go_with_their_layout(script, order, made):
    """Also where the engine needs the layers of all others to the end."""
    script(made.replace("cp -r", "cp -rn"))
    engine = Docker()
    engine.has_manifests = False
    with LayoutBuilder(engine, MINE) as builder:
        with builder.make(order, io.StringIO(), lambda _: None) as shared:
            pass
        with builder.make(replace(order, unshared=True), io.StringIO(), lambda _: None) as alone:
            assert contents(alone) == [b"lower", b"upper"]
        assert not alone.layout.exists()
        assert contents(shared) == [b"lower", b"upper"]


def test_layer_with_removed_bytes_is_not_rewritten(script, order, made):
    script(made.replace("cp -r", "cp -rn"))
    with LayoutBuilder(Docker(), MINE) as builder:
        with builder.make(order, io.StringIO(), lambda _: None):
            pass
        lower = replace(
            order, dockerfile="FROM scratch\n"
        )  # its layers are not the base's, so their times are rewritten
        with pytest.raises(MissingBlobError), builder.make(lower, io.StringIO(), lambda _: None):
            pass


def test_layers_of_a_base_in_the_engine_are_listed(script, order, made):
    script(made)
    sources = replace(order.sources, images={"a:1": "docker-image://held:1"})
    with (
        LayoutBuilder(Docker()) as builder,
        builder.make(replace(order, sources=sources), io.StringIO(), lambda _: None) as image,
    ):
        assert image.stored_layers == set(LayoutImage(image.layout, image.digest).layers)


class Known(Double):
    """What earlier builds noted."""

    def __init__(self):
        self.bases = {}
        self.cells = {}

    def find_base_layers(self, base, source, together):  # noqa: ARG002
        return self.bases.get(base, ())

    def note_base(self, base, layers):
        self.bases[base] = tuple(layers)

    def find_cell_layers(self, order):
        return self.cells.get(order.reference, ())

    def note_cell(self, order, layers):
        self.cells[order.reference] = tuple(layers)


def remembering(known):
    """Return a builder that uses what earlier builds noted."""
    return LayoutBuilder(Docker(), options=BuildxOptions(build_cache=known))


def test_base_that_an_earlier_command_has_read_is_not_exported(script, order, made):
    """The engine has its layers, and their audits are cached: nobody needs their bytes."""
    arguments = script(made.replace("cp -r", "cp -rn"))
    order = replace(order, sources=replace(order.sources, images={"a:1": "docker-image://held:1"}))
    known = Known()
    with remembering(known) as builder:
        first, _ = make(builder, order)
        assert known.bases == {f"{DIGEST} linux/amd64": LayoutImage(first.layout, first.digest).layers}
    assert arguments.read_text().count("--metadata-file") == 2, "the base and the image"
    with remembering(known) as builder, builder.make(order, io.StringIO(), print) as again:
        assert (again.digest, again.stored_layers) == (first.digest, first.stored_layers)
        assert contents(again) == [b"", b""]
    assert arguments.read_text().count("--metadata-file") == 3
    with remembering(known) as builder:
        make(builder, replace(order, sources=replace(order.sources, platform="linux/arm64")))
        make(builder, replace(order, sources=replace(order.sources, images={})))
    assert arguments.read_text().count("--metadata-file") == 7, "other layers, or none in the engine"


def test_base_of_a_registry_has_its_digest_as_name(script, order, made):
    script(made.replace("cp -r", "cp -rn"))
    order = replace(order, sources=replace(order.sources, images={"a:1": f"docker-image://a:1@{DIGEST}"}))
    known = Known()
    with remembering(known) as builder:
        make(builder, order)
    assert [*known.bases] == [f"{DIGEST} linux/amd64"]
    with remembering(known) as builder, builder.make(order, io.StringIO(), print) as again:
        assert contents(again) == [b"", b""]
        assert again.stored_layers == frozenset(), "the engine does not have them"


def test_base_with_other_layers_than_before_is_exported_again(script, order, made):
    """BuildKit decides in which form an image has the layers of its base."""
    script(made.replace("cp -r", "cp -rn"))
    order = replace(order, sources=replace(order.sources, images={"a:1": "docker-image://held:1"}))
    known = Known()
    known.bases[f"{DIGEST} linux/amd64"] = (DIGEST,)
    with remembering(known) as builder:
        with pytest.raises(MissingBlobError):
            make(builder, order)
        with builder.make(replace(order, unshared=True), io.StringIO(), print) as image:
            assert contents(image) == [b"lower", b"upper"]
            assert known.bases == {f"{DIGEST} linux/amd64": LayoutImage(image.layout, image.digest).layers}


@pytest.fixture
def own(layout, tmp_path, order):
    """An order for an image of two tars without a base, and the commands with which buildx writes it."""
    digest = layout(tmp_path / "made", bytes(1024), bytes(2048))
    copied = f"cp -rn {tmp_path}/made/blobs/* $dest/blobs/"
    built = f"{copied}; {written(**{'containerimage.digest': digest})}"
    return replace(order, dockerfile="FROM scratch\n"), built


def test_layers_of_the_last_build_are_not_rewritten(script, own):
    order, built = own
    script(built)
    known = Known()
    with remembering(known) as builder, builder.make(order, io.StringIO(), print) as first:
        parts = LayoutImage(first.layout, first.digest).parts
        assert known.cells == {}, "it is not stored yet"
        assert all(contents(first))
    layers = known.cells[order.reference]
    assert [(layer.digest, layer.size) for layer in layers] == [(part.digest, part.size) for part in parts]
    with remembering(known) as builder:
        with builder.make(order, io.StringIO(), print) as again:
            assert (again.digest, again.stored_layers) == (first.digest, {part.digest for part in parts})
            assert contents(again) == [b"", b""]
        with builder.make(replace(order, unshared=True), io.StringIO(), print) as alone:
            assert (alone.digest, alone.stored_layers) == (first.digest, frozenset())
            assert all(contents(alone)), "the store has lost them"


def test_failed_image_is_not_noted(script, own):
    order, built = own
    script(built)
    known = Known()
    with remembering(known) as builder, pytest.raises(BuildError):  # noqa: SIM117
        with builder.make(order, io.StringIO(), print):
            raise BuildError("not stored")
    assert known.cells == {}


def test_classic_store_gets_every_layer_again(script, order, made):
    script(made.replace("cp -r", "cp -rn"))
    docker = Docker()
    docker.has_manifests = False
    with LayoutBuilder(docker, MINE) as builder:
        first, _ = make(builder, order)
        assert contents(first) == [b"lower", b"upper"]


def test_image_is_built_in_an_oci_layout(script, order, tmp_path, made):
    arguments = script(f"echo '#5 [2/3] RUN make'; {made}")
    log = io.StringIO()
    with LayoutBuilder(Docker(), MINE) as builder:
        steps: list[str] = []
        with builder.make(order, log, steps.append) as image:
            assert contents(image) == [b"lower", b"upper"], "layers of the base are unchanged"
        manifest = json.loads(LayoutImage(image.layout, image.digest).raw)
        assert "annotations" not in manifest, "labels follow the audit"
        assert steps == ["exporting a:1", "2/3: RUN make"], "the layers of the base are sent first, and once"
        assert image.stored_layers == frozenset(), "the base may not be in the engine"
        assert image.layout.is_dir()
        assert builder.pin_by_digest("a:1", DIGEST) == f"docker-image://a:1@{DIGEST}"
    assert not image.layout.exists(), "images that were not stored are removed"
    words = arguments.read_text().splitlines()
    for word in ("--builder=mine", "--platform=linux/amd64", "--build-context=c=oci-layout:///d@e"):
        assert word in words
    assert (tmp_path / "dockerfile").read_text() == "FROM a:1@b\n"
    assert not [word for word in words if word.startswith("--label")], "the layers may be unknown yet"
    assert "compression=uncompressed" in words[words.index("--output") + 1]
    assert "[2/3] RUN make" in log.getvalue()


def test_base_in_the_engine_is_held(script):
    script()
    docker = Docker()
    docker.pin_by_digest = lambda name, _: "docker-image://held:1" if name == "a:1" else None
    with LayoutBuilder(docker) as builder:
        assert builder.pin_by_digest("a:1", DIGEST) is None
        assert builder.pin_by_immovable_name("a:1", DIGEST) == "docker-image://held:1"
        with pytest.raises(UsageError, match="b:1 is now another image in the engine"):
            builder.pin_by_immovable_name("b:1", DIGEST)
    with LayoutBuilder(Docker(), MINE) as builder:
        assert builder.pin_by_immovable_name("a:1", DIGEST) == f"docker-image://a:1@{DIGEST}"


DECIDING = {
    "EXPERIMENTAL_BUILDKIT_SOURCE_POLICY": "/policy.json",
    "BUILDX_GIT_LABELS": "full",
    "BUILDKIT_SYNTAX": "x",
    "SOURCE_DATE_EPOCH": "1",
}


def test_output_has_the_names_of_the_dockerfile(script, order):
    place = "imagematrix-held:57e9-word"
    script(f"echo '#4 [1/2] FROM docker.io/library/{place}'; echo '>>> FROM {place}'; exit 1")
    sources = replace(order.sources, images={"reg:5000/base:1": f"docker-image://{place}"})
    log = io.StringIO()
    with LayoutBuilder(Docker()) as builder, pytest.raises(BuildError) as caught:
        make(builder, replace(order, sources=sources), log)
    expected = "#4 [1/2] FROM reg:5000/base:1\n>>> FROM reg:5000/base:1"
    assert (str(caught.value), log.getvalue()) == (expected, f"{expected}\n")


def test_environment_variables_do_not_affect_the_build(script, order, made, tmp_path, monkeypatch):
    arguments = script(f"env > {tmp_path}/environment; {made}")
    for name, value in {
        **DECIDING,
        "BUILDX_CONFIG": "/builders",
        "HTTPS_PROXY": "http://user:word@p",
    }.items():
        monkeypatch.setenv(name, value)
    with LayoutBuilder(Docker()) as builder:
        make(builder, order)
    environment = (tmp_path / "environment").read_text().splitlines()
    assert not [line for line in environment if line.partition("=")[0] in DECIDING]
    assert "BUILDX_CONFIG=/builders" in environment
    words = arguments.read_text().splitlines()
    assert "--build-arg=HTTPS_PROXY=" in words, "no proxy, even if docker's configuration has one"
    assert "--build-arg=no_proxy=" in words


def test_proxy_variables_are_passed_by_name(script, order, made, tmp_path, monkeypatch):
    arguments = script(f"env > {tmp_path}/environment; {made}")
    monkeypatch.setenv("https_proxy", "http://user:word@p")
    monkeypatch.setenv("HTTP_PROXY", "")
    with LayoutBuilder(Docker(), options=BuildxOptions(proxy=True)) as builder:
        make(builder, order)
    words = arguments.read_text().splitlines()
    assert {"--build-arg=https_proxy", "--build-arg=HTTPS_PROXY"} <= set(words), "BuildKit accepts both"
    assert {"--build-arg=HTTP_PROXY=", "--build-arg=http_proxy="} <= set(words)
    environment = (tmp_path / "environment").read_text().splitlines()
    assert {"https_proxy=http://user:word@p", "HTTPS_PROXY=http://user:word@p"} <= set(environment)
    assert not [word for word in words if "user:word" in word], "the value would show in the process list"


def test_remedy_says_that_other_builders_pull_bases_from_registries(script, order):
    script("echo 'failed to resolve source metadata for docker.io/a:1'; exit 1")
    for name, remedy in (("mine", "mine pulls base images from registries"), (None, None)):
        with (
            LayoutBuilder(Docker(), [(name, 1)]) as result,
            pytest.raises(BuildError) as caught,
            result.make(order, io.StringIO(), print),
        ):
            pass
        assert (caught.value.remedy or "").startswith(remedy or "")
        assert bool(caught.value.remedy) == bool(remedy)


def test_concurrent_builds_share_blobs_but_not_layouts(script, order, made):
    script(made)
    with LayoutBuilder(Docker()) as builder, builder.make(order, io.StringIO(), print) as first:
        (first.layout / "blobs/base").touch()
        with builder.make(order, io.StringIO(), print), builder.make(order, io.StringIO(), print) as third:
            assert first.layout != third.layout
            assert (third.layout / "blobs/base").exists()


def test_exported_base_has_the_layers_of_images(script, order, made):
    arguments = script(made)
    with LayoutBuilder(Docker(), options=BuildxOptions(attest=["type=sbom"])) as builder:
        files = builder.export_base_layers("a:1", order.sources, ())
        assert [path.read_bytes() for path in files] == [b"lower", b"upper"]
    words = arguments.read_text().splitlines()
    assert "--provenance=false" in words
    assert not [word for word in words if "sbom" in word], "no attestation of the base alone"
    with ClassicBuilder(Docker()) as builder:
        assert builder.export_base_layers("a:1", order.sources, ()) == ()


def test_beginnings_are_built_once_and_before(script, order, made, tmp_path):
    script(
        f"for word; do case $word in --file=*) cat ${{word#*=}} >> {tmp_path}/built;; esac; done;"
        f" case $* in *cacheonly*) echo begun;; *) {made};; esac"
    )
    base = SharedPrefix("a:1", "FROM a:1 AS one\n")  # it is exported before
    first = SharedPrefix("1", "FROM a:1\nRUN 1\n", frozenset({"a:1"}))
    second = SharedPrefix("2", "FROM a:1\nRUN 1\nRUN 2\n", frozenset({"a:1", "1"}))
    log = io.StringIO()
    with LayoutBuilder(Docker(), MINE) as builder:
        make(
            builder,
            replace(order, shared_prefixes=(base, first, second), dockerfile="FROM a:1\nRUN 3\n"),
            log,
        )
        make(builder, replace(order, shared_prefixes=(base, first), dockerfile="FROM a:1\nRUN 4\n"), log)
        make(
            builder,
            replace(order, shared_prefixes=(SharedPrefix("5", "FROM a:1\nRUN 5\n"),), no_cache=True),
            log,
        )
    lines = (tmp_path / "built").read_text().splitlines()
    assert [line for line in lines if line.startswith("RUN")] == ["RUN 1", "RUN 1", "RUN 2", "RUN 3", "RUN 4"]
    assert log.getvalue().count("begun") == 2


def test_without_cache_every_step_of_each_image_runs(script, order, made):
    asked = script(f'[ -z "$file" ] && exit; {made}')
    first = (SharedPrefix("1", "FROM a:1\nRUN 1\n"),)
    with LayoutBuilder(Docker(), MINE, BuildxOptions(no_cache=True)) as builder:
        builder.export(order.dockerfile, order.sources, first)
        make(builder, replace(order, shared_prefixes=first))
    solves = re.split(r"^build\n", asked.read_text(), flags=re.MULTILINE)[1:]
    assert len(solves) == 3, "what images share is not built before"
    base = [solve for solve in solves if "\n--no-cache\n" not in solve]
    assert len(base) == 1, "only the base, which has no steps"


def test_caches_are_read_by_a_build_and_written_after_it(script, order, made):
    output = r"printf '#1 importing cache manifest from c\n#1 DONE 0.1s\n#2 [2/2] RUN 2\n#2 CACHED\n'"
    asked = script(f'{output}; [ -z "$file" ] && exit; {made}')
    caches = ExternalCaches(["reg/c"], ["reg/c"])
    first = (SharedPrefix("1", "FROM a:1\nRUN 1\n"),)
    order = replace(order, reference="t:v1-one-0123456789ab", shared_prefixes=first)
    with LayoutBuilder(Docker(), MINE, BuildxOptions(caches=caches)) as builder:
        result, steps = make(builder, order)
        assert result.imported
        assert "writing the cache" in steps
        make(builder, replace(order, no_cache=True))
    solves = re.split(r"^build\n", asked.read_text(), flags=re.MULTILINE)[1:]
    found = [re.findall(r"^--cache-(from|to)=.*ref=reg/c:([a-z]+)-", solve, re.MULTILINE) for solve in solves]
    shared, one = ([[("from", name)], [("to", name)]] for name in ("shared", "one"))
    assert found == [[], *shared, *one, []], "the base, what images share, the image, and the check of it"


def test_answers_for_labels_come_from_caches_too(script, order, made):
    """Otherwise a query of the compiler runs the steps that the images would have from their caches."""
    output = r"printf '#1 importing cache manifest from c\n#1 DONE 0.1s\n#2 [2/2] RUN 2\n#2 CACHED\n'"
    asked = script(f'{output}; [ -z "$file" ] && exit; {made}')
    with LayoutBuilder(Docker(), MINE, BuildxOptions(caches=ExternalCaches(["reg/c"], ["reg/c"]))) as builder:
        builder.export(order.dockerfile, order.sources)
        assert re.findall(r"--cache-(from|to)=.*ref=reg/c:export-", asked.read_text()) == ["from", "to"]
        script(f'[ -z "$file" ] && exit; {made}')
        result, _ = make(builder, replace(order, reference="t:v1-one-0123456789ab"))
        assert result.imported, "its labels may be from there"


def test_classic_store_has_no_caches(script):
    script()
    with pytest.raises(UsageError, match="cannot import or export caches"):
        ClassicBuilder(Docker(), options=BuildxOptions(caches=ExternalCaches(["reg/c"])))


def test_layers_of_a_beginning_are_kept_until_an_image_has_them(script, order, layout, tar, tmp_path):
    """BuildKit does not send them again for the image: `cp -n` leaves what is there."""
    digest = layout(tmp_path / "made", tar(("a", b"1")))
    fails = f"if grep -q bad {tmp_path}/dockerfile; then exit 1; fi"
    made = f"cp -rn {tmp_path}/made/blobs/* $dest/blobs/; {written(**{'containerimage.digest': digest})}"
    arguments = script(f"{fails}; {made}")
    dockerfile = "FROM scratch\nCOPY x /\n"
    first = (SharedPrefix("1", dockerfile, exported=True),)
    with LayoutBuilder(Docker(), MINE) as builder:
        with pytest.raises(BuildError):
            make(builder, replace(order, dockerfile=f"{dockerfile}RUN bad\n", shared_prefixes=first))
        good = replace(order, dockerfile=f"{dockerfile}RUN good\n", shared_prefixes=first)
        with builder.make(good, io.StringIO(), lambda _: None) as image:
            assert all(contents(image))
        blobs = list(image.layout.glob("blobs/sha256/*"))
        assert sum(path.stat().st_size == 0 for path in blobs) == 2, "as exported, and compressed"
    assert "--output=type=cacheonly" not in arguments.read_text().splitlines()
    assert arguments.read_text().splitlines().count("build") == 3


def test_beginning_of_another_context_is_another(script, order, tmp_path):
    arguments = script("true")
    first = (SharedPrefix("1", "FROM a:1\nCOPY --from=c /x /x\n"),)
    others = (
        {"context": tmp_path},
        {"images": {"c": "/other"}},
        {"images": {**order.sources.images, "d": "/e"}},
    )
    with LayoutBuilder(Docker(), MINE) as builder:
        for change in ({}, *others):
            builder.export("FROM a:1\n", replace(order.sources, **change), first)
    begun = arguments.read_text().splitlines().count("--output=type=cacheonly")
    assert begun == 3, "d is not in it"


def test_beginning_that_fails_fails_the_images_that_need_it(script, order):
    script("echo 'g++: not found'; exit 1")
    log = io.StringIO()
    with LayoutBuilder(Docker(), MINE) as builder, pytest.raises(BuildError, match="not found"):
        make(builder, replace(order, shared_prefixes=(SharedPrefix("1", "FROM a:1\nRUN g++\n"),)), log)
    assert log.getvalue() == "g++: not found\n"


def test_base_that_cannot_be_exported_fails_the_build(script, order):
    arguments = script("echo 'failed to resolve source metadata for a:1'; exit 1")
    log = io.StringIO()
    with LayoutBuilder(Docker(), MINE) as builder, pytest.raises(BuildError, match="failed to resolve"):
        make(builder, order, log)
    assert "failed to resolve" in log.getvalue()
    assert arguments.read_text().splitlines().count("build") == 2


def test_classic_store_builds_into_the_engine(script, order):
    arguments = script(written(**{"containerimage.config.digest": DIGEST}))
    with ClassicBuilder(Docker()) as builder:
        promised = builder.add_early_labels(order, lambda: {"by": "them"})
        made, _ = make(builder, promised)
        assert builder.pin_by_digest("a:1", DIGEST) is None
        with pytest.raises(BuildError, match="cannot verify that an image is reproducible"):
            make(builder, replace(promised, no_cache=True))
    assert (made.digest, made.layout) == (DIGEST, None)
    words = arguments.read_text().splitlines()
    assert words.count("build") == 1
    assert "--label=by=them" in words
    assert {f"--label={name}=" for name in labels.OCCASIONAL} < {*words}, "none of a base remains"


def test_labels_and_exports_are_those_of_the_store(script, order):
    """Only images in layouts get their labels late, and share layers that are exported once."""
    script()
    for kind, labels_of, exports in ((ClassicBuilder, {"new": "1"}, 1), (LayoutBuilder, order.labels, 4)):
        with kind(Docker(), [(None, 4)]) as builder:
            assert builder.add_early_labels(order, lambda: {"new": "1"}).labels == labels_of
            assert builder.parallel_exports == exports


@pytest.mark.parametrize(
    ("output", "gone", "kind", "message", "remedy"),
    [
        ("ld: cannot find -lm", False, BuildError, "ld: cannot find -lm", None),
        ("", False, BuildError, "failed without a message", None),
        ("write x: no space left on device", False, BuildError, "no space left", "free disk space in"),
        (
            "code = Unavailable desc = transport is closing: write x: no space left on device",
            False,
            BuildError,
            "no space left",
            "free disk space in",
        ),
        (
            "rpc error: code = Unavailable desc = EOF",
            False,
            EngineError,
            "stopped during a build",
            "images built so far are kept",
        ),
        ("rpc error: code = Canceled", True, EngineError, "cannot reach the Docker engine", None),
    ],
)
def test_build_failure_is_classified(script, order, output, gone, kind, message, remedy):
    script(f"echo '{output}'; exit 1" if output else "exit 1")
    docker = Docker()
    docker.gone = gone
    with LayoutBuilder(docker) as builder, pytest.raises(kind, match=message) as caught:
        make(builder, order)
    assert (remedy in caught.value.remedy) if remedy else caught.value.remedy is None


def test_stopped_build_raises_stopped_error(script, order):
    script("echo begun; exec sleep 60")
    with LayoutBuilder(Docker()) as builder:
        threading.Timer(0.3, builder.stop).start()
        with pytest.raises(StoppedError):
            make(builder, order)
        with pytest.raises(StoppedError):
            make(builder, order)


SLOTS = [("one", 1), ("three", 3)]


def test_every_slot_is_used_once(script, own, tmp_path):
    order, built = own
    arguments = script(f"echo begin >> {tmp_path}/log; sleep 0.2; {built}; echo end >> {tmp_path}/log")
    with LayoutBuilder(Docker(), SLOTS) as builder, ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: make(builder, order)[0], range(8)))
    assert len({image.digest for image in made}) == 1, "layers of all builders are the same"
    changes = [1 if line == "begin" else -1 for line in (tmp_path / "log").read_text().split()]
    assert max(itertools.accumulate(changes)) == 4
    assert Counter(re.findall("--builder=(.*)", arguments.read_text())) == {"one": 2, "three": 6}


def test_few_builds_are_spread_over_all_builders(script, own):
    order, built = own
    arguments = script(f'[ -z "$file" ] && exit; {built}')
    with LayoutBuilder(Docker(), [("a", 5), ("b", 5), ("c", 5)]) as builder:
        make(builder, order)
        make(builder, order)
        with contextlib.ExitStack() as taken:
            for _ in range(15):
                taken.enter_context(builder._take_solver())
            builder.export("FROM scratch\n", order.sources)  # takes no slot
    assert re.findall("--builder=(.*)", arguments.read_text()) == ["a", "b", "a"]


def test_base_is_pinned_by_name_only_if_all_builders_have_it(script):
    script(inspect=f"echo 'Driver: docker'; [ \"$DOCKER_CONTEXT\" = none ] || echo {DIGEST}")
    with LayoutBuilder(Docker(), [("a", 1), ("b", 2)]) as builder:
        assert builder.pin_by_digest("a:1", DIGEST) is None
        assert not builder.local
    with LayoutBuilder(Docker(), [("a", 1), ("none", 1)]) as builder:
        assert builder.pin_by_digest("a:1", DIGEST) == f"docker-image://a:1@{DIGEST}"


def test_stop_stops_all_builders(script, order):
    script("echo begun; exec sleep 60")
    with LayoutBuilder(Docker(), SLOTS) as builder, ThreadPoolExecutor(2) as threads:
        builds = [threads.submit(make, builder, order) for _ in range(2)]
        threading.Timer(0.3, builder.stop).start()
        assert {type(build.exception()) for build in builds} == {StoppedError}


def test_build_that_ignores_sigterm_is_killed(script, order, monkeypatch):
    monkeypatch.setattr("imagematrix.build.executor.solver.GRACE", 0.2)
    script("trap '' TERM; echo begun; while true; do sleep 0.1; done")
    with LayoutBuilder(Docker()) as builder:
        threading.Timer(0.3, builder.stop).start()
        with pytest.raises(StoppedError):
            make(builder, order)


def test_unwritable_log_ends_the_build(script, order):
    class Full(io.StringIO):
        def write(self, _):
            raise OSError(28, "No space left on device")

    script("echo begun; exec sleep 60")
    with ClassicBuilder(Docker()) as builder, pytest.raises(OSError, match="No space left"):
        make(builder, order, Full())


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("Platforms:        linux/amd64, linux/386", [("linux/amd64", {"linux/386"})]),
        ("Platforms:        linux/arm64*", [("linux/arm64", set())]),
        ("Platforms: linux/arm64*, linux/arm/v7", [("linux/arm64", {"linux/arm/v7"})]),
        (
            "Platforms: linux/arm64*, linux/amd64, linux/amd64/v2, linux/386",
            [("linux/amd64", {"linux/amd64/v2", "linux/386"})],
        ),
        (
            "Platforms: linux/arm64*, linux/amd64*, linux/amd64/v2, linux/386",
            [("linux/amd64", {"linux/amd64/v2", "linux/386"})],
        ),
        (
            "Name: a\nPlatforms: linux/amd64, linux/arm64\nLabels:\nName: b\nPlatforms: linux/arm64",
            [("linux/amd64", {"linux/arm64"}), ("linux/arm64", set())],
        ),
        ("Status: inactive", []),
        ("Platforms:\nLabels:", []),
    ],
)
def test_platforms_of_a_builder_s_machines(script, lines, expected):
    script(inspect=f"echo '{lines}'")
    found = read_builder_platforms("mine")
    assert [(one.native, one.emulated) for one in found] == expected
    assert {one.name for one in found} <= {"mine"}


@pytest.mark.parametrize(("driver", "more"), [("docker", False), ("docker-container", True)])
def test_only_buildkit_outside_the_engine_has_emulators_of_its_own(script, driver, more):
    script(inspect=f"printf 'Driver: {driver}\\nPlatforms: linux/amd64\\n'")
    (found,) = read_builder_platforms("mine")
    assert found.may_emulate_more is more


@pytest.mark.parametrize(
    ("inspect", "kind", "message"),
    [
        ("echo 'ERROR: no builder \"mine\" found' >&2; exit 1", UsageError, "builder 'mine' not found"),
        ("echo 'unknown command' >&2; exit 1", EngineError, "buildx does not work: unknown command"),
    ],
)
def test_unavailable_builder_is_reported(script, inspect, kind, message):
    script(inspect=inspect)
    with pytest.raises(kind, match=message) as caught:
        LayoutBuilder(Docker(), MINE)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ({"Err": "failed to fetch metadata: exit status 3"}, "does not work: failed to fetch metadata"),
        ({"Name": "compose"}, "docker has no such plugin"),
    ],
)
def test_missing_buildx_is_reported(script, plugin, message):
    script(plugin=plugin)
    with pytest.raises(EngineError, match=message) as caught:
        LayoutBuilder(Docker())
    assert "docker-buildx" in caught.value.remedy


def test_unusable_docker_command_is_reported(tmp_path, monkeypatch):
    (tmp_path / "docker").write_text("#!/bin/sh\necho 'can not evaluate field ClientInfo' >&2\nexit 125\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(EngineError, match="does not work: can not evaluate field ClientInfo"):
        LayoutBuilder(Docker())


def test_missing_or_old_docker_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="cannot start `docker`"):
        LayoutBuilder(Docker())
    docker = Docker()
    docker.version = "library-import"  # of a build from the sources: it is taken for new
    with pytest.raises(EngineError, match="cannot start `docker`"):
        LayoutBuilder(docker)
    docker.version = "20.10.24+dfsg1"
    with pytest.raises(EngineError, match="too old for builds"):
        LayoutBuilder(docker)
    docker.version = None
    with pytest.raises(EngineError, match="Podman, which has no BuildKit") as caught:
        LayoutBuilder(docker)
    assert "--builder" in caught.value.remedy


def test_docker_context_is_used_as_such(script, order, monkeypatch, tmp_path, made):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    for driver, expected in (("docker", "other -"), ("docker-container", "- unix:///nowhere/docker.sock")):
        script(
            f'echo "${{DOCKER_CONTEXT:--}} ${{DOCKER_HOST:--}}" > {tmp_path}/where; {made}',
            inspect=f"echo 'Driver:        {driver}'; echo {DIGEST}",
        )
        with LayoutBuilder(Docker(), [("other", 1)]) as builder:
            make(builder, order)
            own = builder.pin_by_digest("a:1", DIGEST)
        assert (tmp_path / "where").read_text().strip() == expected
        assert own == (None if driver == "docker" else f"docker-image://a:1@{DIGEST}")
