"""pull --to, and prune of a store: answers, messages and errors, with no engine."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from images import archived, layout, tar
from storing import NEEDS_SQUASHFS, listed, put, variant, warm

from imagematrix.images.local_store.folder import ImageStore
from imagematrix.images.local_store.holder import Holder
from imagematrix.images.local_store.locks import hold_lock

pytestmark = [NEEDS_SQUASHFS, pytest.mark.usefixtures("no_engine")]


@pytest.fixture
def pull(cli, profiles, image_store):
    """Call it with words to pull into the store, for a host that every variant here fits."""

    def call(name, *more):
        host = ("--host", profiles["genoa-h200"], "--gpus", "none")
        return cli("pull", name, "--to", image_store.path, *host, *more)

    return call


@pytest.fixture
def published(server):
    return put(server, variant("one"), variant("two"))


def reference(name, cell="two"):
    image, tag = variant(cell)
    return f"{name.removesuffix(':v1')}:{tag}@{image.digest}"


def test_the_answer_is_the_variant_of_the_host_with_its_digest(pull, published, image_store):
    result = pull(published)
    assert (result.code, result.out) == (0, f"{reference(published)}\n")
    first, last = result.err.splitlines()
    assert first == f"pulling {reference(published).partition('@')[0]}"
    assert last.startswith("pulled ")
    assert image_store.find(variant("two")[0].digest).kind == "squashfs"


def test_a_second_pull_has_nothing_to_do(pull, published, server):
    pull(published)
    server.repository("ml/training").blobs.clear()
    result = pull(published)
    assert (result.code, result.out, result.err) == (0, f"{reference(published)}\n", "")


def test_a_wait_at_random_comes_before_a_pull_only(pull, published, monkeypatch):
    """Nodes that start a job together do not all ask the registry at the same time."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    first = pull(published, "--spread", "30")
    assert first.code == 0
    (wait,) = waited
    assert 0 <= wait <= 30
    assert f"waiting {wait:.1f} s before the pull (--spread 30)" in first.err
    assert pull(published, "--spread", "30").err == ""
    assert len(waited) == 1
    assert pull(published, "--spread", "soon").code == 2


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.long)])
def test_all_nodes_that_a_busy_registry_refuses_end(published, server, profiles, tmp_path, count):
    server.busy = True
    words = [sys.executable, "-m", "imagematrix", "pull", published, "--host", profiles["genoa-h200"]]
    words += ["--gpus", "none", "--spread", "1", "--to"]
    pulls = [
        subprocess.Popen([*words, str(tmp_path / f"node{number}")], stderr=subprocess.PIPE)
        for number in range(count)
    ]
    said = [each.communicate(timeout=300)[1] for each in pulls]
    assert [each.returncode for each in pulls] == [0] * count, said
    digest = variant("two")[0].digest
    assert all(ImageStore(tmp_path / f"node{number}").find(digest) for number in range(count))


def test_a_pull_by_another_name_prints_that_name_and_both_are_listed(
    pull, published, server, cli, image_store
):
    pull(published)
    mirror = put(server, variant("one"), variant("two"), repository="mirror/training")
    result = pull(mirror)
    assert (result.code, result.out, result.err) == (0, f"{reference(mirror)}\n", "")
    rows = cli("ls", "--store", image_store.path).out
    assert all(reference(name).partition("@")[0] in rows for name in (published, mirror))


def test_it_may_be_unpacked(pull, published, image_store):
    assert pull(published, "--unpacked").code == 0
    assert image_store.find(variant("two")[0].digest).kind == "folder"


def test_the_json_answer_is_the_selection(pull, published, conforms):
    result = pull(published, "--json")
    document = conforms(json.loads(result.out))
    assert document["digest"] == variant("two")[0].digest


def test_a_layout_and_an_archive_need_no_registry(pull, tmp_path, image_store):
    image, name = variant("one")
    for catalog in (f"oci:{layout(tmp_path / 'layout', image)}", archived(tmp_path / "a.tar", image)):
        result = pull("training:v1", "--catalog", catalog)
        assert (result.code, result.out) == (0, f"training:{name}@{image.digest}\n"), result.err
    assert image_store.load_catalog("training", "v1")


def test_a_variant_that_is_named_does_not_stand_for_its_version(pull, published, image_store):
    assert pull(reference(published, "one").partition("@")[0]).code == 0
    assert image_store.load_catalogs() == []
    assert pull(published).code == 0
    assert len(image_store.load_catalogs()) == 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["training:v1"], 2, "names no registry, and a store is filled without an engine"),
        (["training:v1", "--max-size", "12"], 2, "--max-size: '12' is not an amount"),
        (["training:v1", "--catalog", "oci:none"], 2, "is not an OCI layout"),
        (["training:v1", "--catalog", "none.tar"], 2, "none.tar: No such file"),
        (["127.0.0.1:1/training:v1"], 8, "cannot be reached"),
    ],
)
def test_errors_name_the_cause(pull, words, code, message):
    pull(*words).refuses(code, message)


@pytest.mark.parametrize("option", [["--unpacked"], ["--max-size", "1G"]])
def test_options_of_stores_take_the_usual_one(cli, published, profiles, monkeypatch, tmp_path, option):
    monkeypatch.setenv("IMAGEMATRIX_STORE", str(tmp_path / "usual"))
    result = cli("pull", published, "--host", profiles["genoa-h200"], "--gpus", "none", *option)
    assert (result.code, result.out) == (0, f"{reference(published)}\n")
    kind = "folder" if option == ["--unpacked"] else "squashfs"
    assert ImageStore(tmp_path / "usual").find(variant("two")[0].digest).kind == kind


def test_without_an_engine_the_store_is_named(cli, published, profiles, monkeypatch, tmp_path):
    monkeypatch.setenv("IMAGEMATRIX_STORE", str(tmp_path / "my images"))
    words = ("pull", published, "--host", profiles["genoa-h200"], "--gpus", "none")
    result = cli(*words)
    assert (result.code, result.out) == (8, "")
    (option,) = re.findall("or add (--to .*), a folder that needs no engine", result.err)
    assert cli(*words, *shlex.split(option)).out == f"{reference(published)}\n"


def test_the_name_of_a_store_is_not_empty(cli, published, profiles):
    cli("pull", published, "--to", "", "--host", profiles["genoa-h200"], "--gpus", "none").fails(
        2, "the store has an empty name"
    )


def test_a_saved_catalog_whose_images_are_in_no_registry_is_no_source(pull, tmp_path, published, cli):
    image, _ = variant("one")
    document = cli("ls", "--catalog", f"oci:{layout(tmp_path / 'l', image)}", "--json").out
    (tmp_path / "c.json").write_text(document)
    pull("training:v1", "--catalog", tmp_path / "c.json").refuses(2, "names no registry")
    without = json.loads(cli("ls", published, "--json").out)
    for one in without["variants"]:
        one["digest"] = None
    (tmp_path / "d.json").write_text(json.dumps(without))
    pull(published, "--catalog", tmp_path / "d.json").fails(2, "has no digest in its catalog")


def test_who_waits_is_told_for_whom(pull, published, image_store, monkeypatch):
    holder = Holder.from_pid()
    Path(image_store.path, "locks").mkdir(parents=True)
    digest = variant("two")[0].digest
    lock = Path(image_store.path, "locks", digest[7:])
    found = []
    find = ImageStore.find

    def later(store, wanted):
        found.append(wanted)
        if len(found) == 3 and lock.exists():
            lock.unlink()
        return find(store, wanted)

    monkeypatch.setattr(ImageStore, "find", later)
    lock.write_bytes(holder.to_bytes())
    result = pull(published)
    assert (result.code, result.out) == (0, f"{reference(published)}\n")
    assert f"waiting for {holder}, which is fetching this image" in result.err


def test_what_makes_room_is_told(pull, server, image_store):
    large = variant("one", tar(("f", os.urandom(900_000))))
    pull(put(server, large))
    larger = variant("one", tar(("g", os.urandom(900_000))), version="v2")
    result = pull(put(server, larger, version="v2"), "--max-size", "1.5M")
    assert result.code == 0
    assert f"removed {server.address}/ml/training:{large[1]} (0.9 MB) to make room" in result.err
    assert image_store.list_digests() == [larger[0].digest]
    pull(put(server, variant("one", tar(("h", os.urandom(3_000_000))))), "--max-size", "1.5M").refuses(
        2, "may have 1500000"
    )


@pytest.fixture
def prune(cli, image_store):
    def call(*words):
        return cli("prune", "--store", image_store.path, *words)

    return call


@pytest.fixture
def versions(pull, server):
    """Two versions in the store: the names of their images."""
    names = []
    for version in ("v1", "v2"):
        image = variant("one", tar((version, b"x")), version=version)
        names.append(pull(put(server, image, version=version)).out.strip().partition("@")[0])
    return names


def test_old_versions_are_shown_and_then_removed(prune, versions, image_store):
    shown = prune("--keep", "1")
    assert shown.code == 0
    assert "1 image would be removed" in shown.err
    assert len(image_store.list_digests()) == 2
    done = prune("--keep", "1", "--yes")
    assert (done.code, done.err) == (0, "removed 1 image\n")
    assert [image.names[0].references[0] for image in image_store.list_intact_images()] == versions[1:]
    assert [one["version"] for one in image_store.load_catalogs()] == ["v2"]
    assert prune("--keep", "1", "--yes").err == "nothing to remove\n"


def test_its_json_is_that_of_prune(prune, versions, conforms):
    document = conforms(json.loads(prune("--keep", "1", "--json").out))
    assert [(one["names"], one["status"]) for one in document["images"]] == [
        ([versions[0]], "removed"),
        ([versions[1]], "kept"),
    ]


@pytest.mark.usefixtures("versions")
def test_what_a_container_runs_from_stays(prune, image_store):
    digest = next(one.digest for one in image_store.list_intact_images() if one.names[0].version == "v1")
    lease = image_store.take_lease(digest)
    result = prune("--keep", "1", "--yes")
    assert f"process {os.getpid()} on {os.uname().nodename}" in result.out
    assert result.err == "nothing to remove\n"
    lease.release()


@pytest.mark.usefixtures("versions")
def test_what_came_lately_stays(prune, image_store):
    assert prune("--newer", "1h", "--yes").err == "nothing to remove\n"
    for digest in image_store.list_digests():
        os.utime(f"{image_store.get_folder(digest)}/image.json", (0, 0))
    assert prune("--newer", "1h", "--yes").err == "removed 2 images\n"
    assert image_store.load_catalogs() == []


@pytest.mark.usefixtures("versions")
def test_what_hosts_need_stays(prune, profiles, image_store):
    assert prune("--hosts", profiles["laptop"], "--yes").code == 0
    assert [image.names[0].version for image in image_store.list_intact_images()] == ["v2"]


@pytest.mark.usefixtures("versions")
def test_only_the_named_images_are_considered(prune, server):
    name = f"{server.address}/ml/training"
    assert "2 images" in prune(name, "--protect", "v3").err
    prune(f"{server.address}/ml/trainin", "--protect", "v3").fails(
        4, f"has no variant of {server.address}/ml/trainin"
    )


def test_an_image_that_is_in_use_now_is_not_removed(prune, versions, image_store):
    digest = next(one.digest for one in image_store.list_intact_images() if one.names[0].version == "v1")
    with hold_lock(Path(image_store.path, "locks", digest[7:])):
        result = prune("--keep", "1", "--yes")
    assert result.code == 8
    assert f"{versions[0]} is in use now" in result.err
    assert len(image_store.list_digests()) == 2
    assert listed(image_store, "new") == []


def test_a_store_that_does_not_exist_has_nothing_to_remove(prune, image_store):
    result = prune("--keep", "1", "--yes")
    assert (result.code, result.err) == (0, "nothing to remove\n")
    assert not Path(image_store.path).exists()


def test_the_site_names_registry_store_and_size(cli, profiles, published, server, tmp_path, monkeypatch):
    (tmp_path / "site.toml").write_text(
        f'engine = "oci"\nregistry = "{server.address}/ml"\nstore = "{tmp_path}/shared"\nmax_size = "1T"\n'
    )
    monkeypatch.setattr("imagematrix.common.settings.FILE", str(tmp_path / "site.toml"))
    words = ("pull", "training:v1", "--host", profiles["genoa-h200"], "--gpus", "none")
    assert cli(*words).out == f"{reference(published)}\n"
    assert ImageStore(tmp_path / "shared").find(variant("two")[0].digest)
    for option, value in (("--to", "elsewhere"), ("--max-size", "2T")):
        cli(*words, option, value).refuses(2, f"{option} {value}: ", "users may not override")


def test_ls_lists_what_a_store_has(cli, pull, published, image_store, conforms):
    cli("ls", "--store", image_store.path).refuses(2, "there is no store")
    pull(published)
    (row,) = cli("ls", "--store", image_store.path).out.splitlines()[2:]
    assert row.split()[0] == reference(published).partition("@")[0]
    document = conforms(json.loads(cli("ls", published, "--store", image_store.path, "--json").out))
    assert [one["digest"] for one in document["variants"]] == [variant("two")[0].digest]
    every = conforms(json.loads(cli("ls", "--store", image_store.path, "--json").out))
    assert every["versions"] == [document]
    cli("ls", "t:v1", "--store", image_store.path).refuses(4, "has no variant of t:v1")


@pytest.mark.parametrize(
    "option", [("--size",), ("--from", "v1"), ("--package", "x"), ("--catalog", "x"), ("--hosts", "x")]
)
def test_ls_of_a_store_takes_no_option_without_effect(cli, option):
    cli("ls", "t:v1", "--store", "x", *option).refuses(2, f"so {option[0]} has no effect")


def test_a_warm_image_that_fits_is_pulled_in_place_of_its_variant(pull, server, image_store, cli, conforms):
    base = variant("two")
    warm_image, tag = warm(base[0])
    name = put(server, base, (warm_image, tag))
    result = pull(name, "--unpacked")
    image = name.removesuffix(":v1")
    assert (result.code, result.out) == (0, f"{image}:{tag}@{warm_image.digest}\n"), result.err
    stored = image_store.find(warm_image.digest)
    assert Path(stored.root, "var/cache/warm/numba/x.nbi").read_bytes() == b"compiled"
    assert image_store.find(base[0].digest) is None
    document = conforms(json.loads(pull(name, "--unpacked", "--json").out))
    assert (document["digest"], document["warm"]) == (base[0].digest, warm_image.digest)
    server.repository("ml/training").manifests.clear()
    assert pull(f"{image}:v1", "--catalog", write_catalog(image_store), "--unpacked").code == 0, "it is there"

    assert pull(name, "--no-warm", "--unpacked").code != 0
    assert cli("ls", "--store", image_store.path).code == 0


def test_a_store_without_warm_images_knows_of_them(pull, server, image_store):
    """So that a later start may take one: `--no-warm` is about one pull."""
    base = variant("two")
    made = warm(base[0])
    name = put(server, base, made)
    assert pull(name, "--no-warm", "--unpacked").code == 0
    assert image_store.find(made[0].digest) is None
    (document,) = image_store.load_catalogs()
    assert [one["digest"] for one in document["warm"]] == [made[0].digest]


def write_catalog(image_store):
    """Return the file of the only catalog in a store."""
    (document,) = image_store.load_catalogs()
    path = Path(image_store.path).parent / "catalog.json"
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("option", ["--no-warm", None])
def test_the_variant_is_pulled_with_one_warning_if_its_warm_image_is_lost(pull, server, image_store, option):
    base = variant("two")
    lost = warm(base[0])
    name = put(server, base, lost)
    del server.repository("ml/training").manifests[lost[0].digest]
    result = pull(name, *([option] if option else []))
    assert (result.code, result.out) == (0, f"{reference(name)}\n"), result.err
    assert result.err.count("is started, not its warm image") == (0 if option else 1)
    assert image_store.find(base[0].digest)


def test_a_store_lists_a_variant_once_that_it_has_with_a_warm_image(pull, server, image_store, cli):
    base = variant("two")
    name = put(server, base, warm(base[0]))
    assert pull(name).code == pull(name, "--no-warm").code == 0
    assert len(listed(image_store, "images")) == 2
    assert cli("ls", "--store", image_store.path).out.count(base[1]) == 1
