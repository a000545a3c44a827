"""Bringing images into a store, from a registry in memory."""

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from images import MANIFEST, archived, index, layout, link, saved, tar
from storing import CATALOG, LAYERS, NEEDS_SQUASHFS, PUBLISHED, from_registry, listed, put, variant

from imagematrix.errors import AuditError, EngineError, UnknownImageError, UsageError
from imagematrix.images.local_store import image_fetch
from imagematrix.images.local_store.eviction import get_lock_path, remove_stored_image
from imagematrix.images.local_store.folder_writer import WrittenContents, write_folder
from imagematrix.images.local_store.image_fetch import CatalogEntry, FetchOptions, FetchWatcher, fetch_image
from imagematrix.images.local_store.locks import hold_lock
from imagematrix.images.local_store.merged_image import GivenUpError
from imagematrix.images.local_store.origins import ArchiveOrigin, LayoutOrigin, get_layer_path
from imagematrix.images.local_store.stored_layers import StoredLayers
from imagematrix.images.oci.layout import LayoutFolder
from imagematrix.images.oci.manifest import INDEX

pytestmark = NEEDS_SQUASHFS

DIGEST = f"sha256:{'1' * 64}"
UNPACKED = FetchOptions(unpacked=True)


@pytest.fixture
def image(server):
    """An image in the registry."""
    made, name = variant()
    put(server, (made, name))
    return made


@pytest.fixture
def fetch(server, image_store):
    """Call it with the digest of an image to bring it from the registry into the store."""

    def call(digest, entry=PUBLISHED, *, unpacked=False, **watcher):
        how = FetchOptions(unpacked=unpacked), FetchWatcher(**watcher)
        return fetch_image(image_store, from_registry(server), digest, entry, *how)

    return call


def files(root):
    """Return the files in an unpacked image with their content."""
    found = [path for path in sorted(Path(root).rglob("*")) if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


@pytest.mark.parametrize("unpacked", [False, True])
def test_an_image_has_its_merged_files_and_what_its_catalog_says(
    image_store, tmp_path, unpacked, image, fetch
):
    found = fetch(image.digest, unpacked=unpacked)
    root = found.root
    if not unpacked:
        root = tmp_path / "root"
        subprocess.run(
            ["unsquashfs", "-q", "-no-progress", "-d", root, found.root],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    assert files(root) == {
        "etc/os-release": b"ID=test\n",
        "bin/tool": b"#!/bin/true\n",
        "data/new": b"x" * 5000,
    }
    assert found == image_store.find(image.digest)
    assert found.names[0].references == ("t:v1-x",)
    assert found.config["architecture"] == "amd64"
    assert image_store.load_catalog("t", "v1") == CATALOG
    assert listed(image_store, "new") == listed(image_store, "partial") == listed(image_store, "locks") == []


def damaged_by(store, image):
    """Damage the squashfs of an image in a store."""
    root = Path(store.find(image.digest).root)
    root.write_bytes(root.read_bytes()[:-1])


def test_an_image_that_is_there_is_not_fetched_again(server, image_store, image, fetch):
    first = fetch(image.digest)
    server.requests.clear()
    changed = replace(PUBLISHED, catalog=CATALOG | {"variants": [{}]})
    assert fetch(image.digest, changed) == first
    assert server.requests == []
    assert image_store.load_catalog("t", "v1")["variants"] == [{}]


def test_an_image_may_have_names_in_several_catalogs(server, image_store, image):
    source, catalog = from_registry(server), CATALOG | {"image": "mirror/t"}
    mirrored = CatalogEntry(
        references=("mirror/t:v1-x",), variant={"reference": "m"}, catalog=catalog, part=True
    )
    fetch_image(image_store, source, image.digest, PUBLISHED)
    for _ in range(2):
        fetch_image(image_store, source, image.digest, mirrored)
        fetch_image(image_store, source, image.digest, PUBLISHED)
    names = [PUBLISHED.name, mirrored.name]
    assert image_store.find(image.digest).names == tuple(names)
    assert fetch_image(image_store, source, image.digest, PUBLISHED, UNPACKED).kind == "folder"
    assert image_store.find(image.digest).names == tuple(names), "of one that is replaced, too"


def test_a_name_that_is_damaged_damages_the_image(image_store, image, fetch):
    fetch(image.digest)
    other = replace(PUBLISHED, catalog=CATALOG | {"version": "v2"})
    fetch(image.digest, other)
    (path,) = Path(image_store.get_folder(image.digest), "names").iterdir()
    path.write_text('{"schema": "imagematrix.stored-name/v2"}')
    with pytest.raises(UsageError, match=r"is damaged: .*unsupported schema"):
        image_store.find(image.digest)
    fetch(image.digest)
    assert image_store.find(image.digest).names == (PUBLISHED.name,)


def test_a_catalog_without_warm_images_does_not_remove_those_of_the_store(image_store, image, fetch):
    known, more = [{"reference": "t:v1-warm-a-b"}], [{"reference": "t:v1-warm-a-c"}]
    for given, kept in ((known, known), (None, known), (more, more)):
        catalog = CATALOG | ({"warm": given} if given else {})
        fetch(image.digest, replace(PUBLISHED, catalog=catalog))
        assert image_store.load_catalog("t", "v1") == CATALOG | {"warm": kept}


def test_a_part_of_a_catalog_does_not_replace_it(image_store, image, fetch):
    fetch(image.digest, replace(PUBLISHED, part=True))
    assert image_store.load_catalog("t", "v1") is None


def test_a_store_that_cannot_be_written_to_gives_what_it_has(image_store, monkeypatch, image, fetch):
    first = fetch(image.digest)

    def refuse(_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(image_store, "put_catalog", refuse)
    changed = replace(PUBLISHED, catalog=CATALOG | {"variants": [{}]})
    assert fetch(image.digest, changed) == first
    with pytest.raises(UsageError, match=r"cannot be used: .*Read-only file system"):
        fetch(DIGEST, changed)


def test_a_damaged_image_is_replaced(image_store, image, fetch):
    first = fetch(image.digest)
    damaged_by(image_store, image)
    assert fetch(image.digest) == first
    assert listed(image_store, "new") == []


def test_an_image_that_a_container_runs_from_is_not_replaced(image_store, image, fetch):
    fetch(image.digest)
    lease = image_store.take_lease(image.digest)
    with pytest.raises(UsageError, match="cannot be replaced: process"):
        fetch(image.digest, unpacked=True)
    lease.release()
    assert fetch(image.digest, unpacked=True).kind == "folder"
    assert fetch(image.digest).kind == "folder"
    assert listed(image_store, "new") == []


@pytest.mark.parametrize("which", ["lease", "failure"])
def test_an_image_that_is_to_be_replaced_stays_if_that_is_too_late(
    image_store, image, fetch, monkeypatch, which
):
    """A container may start, or Ctrl-C come, just when the earlier one was moved away."""
    fetch(image.digest)
    rename = Path.rename

    def interrupted(path, target):
        if str(target).endswith(".gone"):
            rename(path, target)
            if which == "lease":
                leases.append(image_store.take_lease(image.digest))
                return
            raise KeyboardInterrupt
        rename(path, target)

    leases: list[Any] = []
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(UsageError if which == "lease" else KeyboardInterrupt):
        fetch(image.digest, unpacked=True)
    monkeypatch.undo()
    assert image_store.find(image.digest).kind == "squashfs"
    assert listed(image_store, "new") == []
    for lease in leases:
        lease.release()
    assert fetch(image.digest, unpacked=True).kind == "folder"


def test_links_in_a_shared_store_are_not_followed(image_store, tmp_path, image, fetch):
    """Where a group fills a store, a member could have another one write elsewhere."""
    victim = tmp_path / "victim"
    for part in ("new", "partial"):
        Path(image_store.path, part).mkdir(parents=True)
    folder = tmp_path / "folder"
    folder.mkdir(0o755)
    Path(image_store.path, "new", "x").symlink_to(folder)
    partial = Path(image_store.path, "partial", image.digest[7:])
    partial.symlink_to(tmp_path)
    with pytest.raises(UsageError, match="Not a directory"):
        fetch(image.digest)
    assert folder.stat().st_mode & 0o777 == 0o755
    partial.unlink()
    partial.mkdir()
    for layer in image.layers:
        get_layer_path(partial, layer).symlink_to(victim)
    with pytest.raises(UsageError, match="symbolic links"):
        fetch(image.digest)
    assert not victim.exists()


def test_a_fetch_that_is_interrupted_does_not_wait_for_the_rest_of_a_layer(server, image_store, monkeypatch):
    """A layer that cannot be read is received to its end, to tell whether the registry is to blame."""
    image, name = variant("cpu", b"no tar" * 2_000_000, LAYERS[0], packed=bytes)
    put(server, (image, name))
    seen: list[int] = []

    def note(progress):
        seen.append(progress.received)
        if progress.received > 2_000_000:
            fetching[0]._given_up.set()

    fetching: list[Any] = []
    make = image_fetch._Fetch

    def remember(*words):
        fetching.append(make(*words))
        return fetching[0]

    monkeypatch.setattr(image_fetch, "_Fetch", remember)
    with pytest.raises((AuditError, GivenUpError)):
        fetch_image(
            image_store,
            from_registry(server),
            image.digest,
            PUBLISHED,
            UNPACKED,
            FetchWatcher(on_progress=note),
        )
    assert seen[-1] < 6_000_000


def test_two_processes_that_both_fetch_an_image_leave_one(image_store, tmp_path, image, fetch):
    """As if the first had been stopped for so long that the second thought it dead."""

    class Slow(LayoutOrigin):
        def fetch_layers(self, *words):
            get_lock_path(image_store, image.digest).unlink()
            fetch(image.digest)
            image_store.take_lease(image.digest)
            return super().fetch_layers(*words)

    folder = Path(layout(tmp_path / "layout", image))
    slow = Slow(LayoutFolder(folder, AuditError))
    found = fetch_image(image_store, lambda: contextlib.nullcontext(slow), image.digest, PUBLISHED)
    assert image_store.list_intact_images() == [found]
    assert listed(image_store, "new") == []


def test_the_progress_counts_layers_and_bytes(server, fetch):
    image, name = variant("cpu", LAYERS[0], LAYERS[1], LAYERS[1])
    put(server, (image, name))
    seen: list[Any] = []
    fetch(image.digest, on_progress=seen.append)
    size = sum(len(image.blobs[layer]) for layer in {*image.layers})
    assert (seen[-1].layers, seen[-1].downloaded, seen[-1].received) == (2, 2, size)


def test_a_download_goes_on_where_an_earlier_command_stopped(server, image_store, fetch):
    image, name = variant("cpu", tar(("f", os.urandom(500_000))))
    put(server, (image, name))
    server.fails("GET", "blobs/" + image.layers[0], cut=True)
    server.fails("GET", "blobs/" + image.layers[0], status=403, times=9)
    with pytest.raises(EngineError, match="denies access"):
        fetch(image.digest)
    partial = Path(image_store.path, "partial", image.digest[7:])
    (part,) = partial.iterdir()
    held = part.stat().st_size
    assert held > 1000
    server.faults.clear()
    server.requests.clear()
    seen: list[Any] = []
    fetch(image.digest, on_progress=seen.append)
    assert seen[-1].received == len(image.blobs[image.layers[0]]) - held
    assert not partial.exists()


def test_a_layer_that_is_complete_is_not_downloaded_again(server, image, fetch):
    server.fails("GET", "blobs/" + image.layers[1], status=403, times=99)
    server.fails("HEAD", "blobs/" + image.layers[1], status=403, times=99)
    with pytest.raises(EngineError, match="denies access"):
        fetch(image.digest)
    server.faults.clear()
    done = server.count("GET", image.layers[0])
    fetch(image.digest)
    assert server.count("GET", image.layers[0]) == max(done, 1)


def test_a_layer_with_another_content_is_refused_and_forgotten(server, image_store, fetch):
    image, name = variant("cpu", tar(("f", b"1")))
    put(server, (image, name))
    kept = server.repository("ml/training").blobs
    right = kept[image.layers[0]]
    kept[image.layers[0]] = right[:-1] + b"x"
    with pytest.raises(AuditError, match="does not match its digest"):
        fetch(image.digest)
    assert [*Path(image_store.path, "partial", image.digest[7:]).iterdir()] == []
    kept[image.layers[0]] = right
    assert fetch(image.digest)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one["layers"].pop(), "has 2 layers instead of 1"),
        (lambda one: one["layers"][0].update(size=-1), "is not a number of bytes"),
        (lambda one: one.pop("config"), "there is no image"),
        (lambda one: one.pop("layers"), "there is no image"),
        (lambda one: one["layers"].reverse(), "does not match its digest"),
        (lambda one: one["layers"][0].update(digest="x"), "is not a sha256 digest"),
    ],
)
def test_hostile_manifests_are_refused(server, image_store, change, message, image, fetch):
    document = json.loads(image.raw)
    change(document)
    raw = json.dumps(document).encode()
    wrong = server.repository("ml/training").put("x", raw, MANIFEST)
    with pytest.raises((AuditError, UnknownImageError, UsageError), match=message):
        fetch(wrong)
    assert listed(image_store, "images") == listed(image_store, "new") == []


def test_an_attested_image_is_the_one_image_of_its_index(server, image, fetch):
    attestation = image.entry(annotations={"vnd.docker.reference.type": "attestation-manifest"})
    kept = server.repository("ml/training")
    one = kept.put("one", index(image.entry(), attestation), INDEX)
    two = kept.put("two", index(image.entry(), image.entry()), INDEX)
    assert fetch(one).digest == one
    with pytest.raises(UnknownImageError, match="there is no image"):
        fetch(two)


def test_an_unknown_image_is_an_error(fetch):
    with pytest.raises(UnknownImageError, match="there is no image with the digest sha256:111"):
        fetch(DIGEST)


def test_missing_squashfs_tools_are_said_before_anything_is_fetched(
    server, monkeypatch, tmp_path, image, fetch
):
    server.requests.clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="mksquashfs is not installed"):
        fetch(image.digest)
    assert server.requests == []
    assert fetch(image.digest, unpacked=True)


def from_layout(tmp_path, *images):
    path = Path(layout(tmp_path / "layout", *images))
    return lambda: contextlib.nullcontext(LayoutOrigin(LayoutFolder(path, AuditError)))


def test_layers_of_a_layout_are_read_where_they_are(image_store, tmp_path):
    image, _ = variant()
    found = fetch_image(image_store, from_layout(tmp_path, image), image.digest, PUBLISHED, UNPACKED)
    assert files(found.root)["etc/os-release"] == b"ID=test\n"


@pytest.mark.parametrize("what", ["layer", "config", "missing"])
def test_a_damaged_layout_is_refused(image_store, tmp_path, what):
    image, _ = variant()
    source = from_layout(tmp_path, image)
    digest = image.config if what == "config" else image.layers[0]
    path = tmp_path / "layout" / "blobs" / "sha256" / digest[7:]
    if what == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"\n")
    with pytest.raises(AuditError, match=r"does not match its digest|cannot be read"):
        fetch_image(image_store, source, image.digest, PUBLISHED)
    assert listed(image_store, "images") == listed(image_store, "new") == []


def test_an_image_without_its_configuration_is_refused(image_store, tmp_path):
    image, _ = variant()
    source = from_layout(tmp_path, image)
    (tmp_path / "layout" / "blobs" / "sha256" / image.config[7:]).unlink()
    with pytest.raises(AuditError, match="not found in the layout"):
        fetch_image(image_store, source, image.digest, PUBLISHED)


@pytest.mark.parametrize("kind", ["oci", "docker", "docker-links"])
def test_archives_are_read(image_store, tmp_path, kind):
    image, other = variant()[0], variant("other", tar("other"))[0]
    path = tmp_path / "a.tar"
    digest = image.digest
    if kind == "oci":
        archived(path, image, other)
    else:
        saved(path, image, *LAYERS)
        digest = image.config
    if kind == "docker-links":
        text = path.read_bytes()
        names = [{"Config": f"{digest[7:]}.json", "Layers": ["0/layer.tar", "2/layer.tar"]}]
        own = image.blobs[image.config]
        path.write_bytes(
            tar(
                link("2/layer.tar", "../1/layer.tar"),
                ("0/layer.tar", LAYERS[0]),
                ("1/layer.tar", LAYERS[1]),
                (f"{digest[7:]}.json", own),
                ("manifest.json", json.dumps(names).encode()),
            )
        )
        assert path.read_bytes() != text
    seen: list[Any] = []
    found = fetch_image(
        image_store,
        lambda: contextlib.nullcontext(ArchiveOrigin(path)),
        digest,
        PUBLISHED,
        UNPACKED,
        FetchWatcher(on_progress=seen.append),
    )
    assert sorted(files(found.root)) == ["bin/tool", "data/new", "etc/os-release"]
    assert (seen[-1].layers, seen[-1].downloaded) == (2, 2)
    assert listed(image_store, "partial") == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_no_damage_of_an_archive(image_store, tmp_path, monkeypatch, code):
    image = variant()[0]
    archived(tmp_path / "image.tar", image)

    def fail(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UsageError, match=r"the disk of .* is full"):
        fetch_image(
            image_store,
            lambda: contextlib.nullcontext(ArchiveOrigin(tmp_path / "image.tar")),
            image.digest,
            PUBLISHED,
        )


@pytest.mark.parametrize("part", ["layer", "manifest"])
def test_a_damaged_archive_is_refused(image_store, tmp_path, part):
    image, _ = variant()
    path = tmp_path / "a.tar"
    if part == "layer":
        image.blobs[image.layers[0]] = image.blobs[image.layers[1]]
    archived(path, image)
    if part == "manifest":
        path.write_bytes(b"not a tar" * 100)
    with pytest.raises(AuditError, match=r"does not match its digest|cannot be read"):
        fetch_image(image_store, lambda: contextlib.nullcontext(ArchiveOrigin(path)), image.digest, PUBLISHED)
    assert listed(image_store, "images") == listed(image_store, "new") == []


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_layer_that_is_not_what_it_was_called_leaves_only_the_others(server, image_store, fetch, wrong):
    """While others were unpacked beside it."""
    image, name = variant("cpu", *(tar((f"d/{n}", os.urandom(400_000))) for n in range(2)))
    put(server, (image, name))
    blobs = server.repository("ml/training").blobs
    right = blobs[image.layers[wrong]]
    blobs[image.layers[wrong]] = blobs[image.layers[1 - wrong]]
    with pytest.raises(AuditError, match="does not match its digest"):
        fetch(image.digest, unpacked=True)
    assert listed(image_store, "images") == listed(image_store, "new") == []
    sizes = [path.stat().st_size for path in Path(image_store.path, "partial", image.digest[7:]).iterdir()]
    assert len(sizes) <= 1, "of the wrong one nothing is kept"
    blobs[image.layers[wrong]] = right
    assert sorted(files(fetch(image.digest, unpacked=True).root)) == ["d/0", "d/1"]


def test_until_all_layers_are_right_no_file_has_its_name(server, image_store, fetch, monkeypatch):
    image, name = variant("cpu", tar(("etc/first", b"1")), tar(("etc/second", b"2")))
    put(server, (image, name))
    whole, seen = threading.Event(), []
    get_path = WrittenContents.get_path

    def watch(contents, layer, place):
        path = get_path(contents, layer, place)
        if not whole.is_set():
            seen.append(Path(path).relative_to(image_store.path).parts)
        return path

    def note(*words):
        whole.set()
        return write_folder(*words)

    monkeypatch.setattr(WrittenContents, "get_path", watch)
    monkeypatch.setattr(image_fetch, "write_folder", note)
    assert sorted(files(fetch(image.digest, unpacked=True).root)) == ["etc/first", "etc/second"]
    assert sorted({(part, layer, place) for part, _, layer, place in seen}) == [
        ("new", "0", "0"),
        ("new", "1", "0"),
    ]
    assert all(folder.startswith(image.digest[7:]) and ".layers" in folder for _, folder, _, _ in seen)


def test_a_layer_that_an_image_has_twice_is_downloaded_once(server, fetch):
    layer = tar(("d/f", os.urandom(100_000)))
    image, name = variant("cpu", layer, tar("d/.wh.f"), layer)
    put(server, (image, name))
    assert sorted(files(fetch(image.digest, unpacked=True).root)) == ["d/f"]
    assert server.count("GET", f"blobs/{image.layers[0]}") == 1


def test_a_file_for_which_there_is_no_room_is_not_begun(server, image_store, fetch, monkeypatch):
    image, name = variant("cpu", tar(("small", b"1"), ("large", bytes(9_000_000))))
    put(server, (image, name))
    state = os.statvfs("/")
    nearly = os.statvfs_result([*state[:4], 5_000_000 // state.f_frsize, *state[5:]])
    monkeypatch.setattr(os, "statvfs", lambda _: nearly)
    with pytest.raises(UsageError, match="bytes left, and the image needs 9000000"):
        fetch(image.digest, unpacked=True)
    assert listed(image_store, "images") == listed(image_store, "new") == []


def test_files_belong_to_the_users_group_in_a_folder_that_gives_its_own(image_store, fetch, image):
    new = Path(image_store.path, "new")
    new.mkdir(parents=True)
    with contextlib.suppress(PermissionError):  # only root may give a folder to any group
        os.chown(new, -1, 4711)
    new.chmod(0o2775)
    root = Path(fetch(image.digest, unpacked=True).root)
    assert {path.lstat().st_gid for path in (root, *root.rglob("*"))} == {os.getegid()}


PULL = """
import sys
sys.path.insert(0, sys.argv.pop())
from storing import PUBLISHED
from imagematrix.images.local_store.folder import ImageStore
from imagematrix.images.local_store.image_fetch import FetchOptions, fetch_image
from imagematrix.images.oci.registry import Registry
from imagematrix.images.local_store.origins import RegistryOrigin
import contextlib
store, name, digest, kind = sys.argv[1:]

@contextlib.contextmanager
def source():
    with Registry(name) as registry:
        yield RegistryOrigin(registry)

fetch_image(ImageStore(store), source, digest, PUBLISHED, FetchOptions(unpacked=kind == "folder"))
"""


@pytest.mark.parametrize("kind", ["folder", "squashfs"])
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.long)])
def test_pulls_that_are_killed_at_random_leave_nothing_that_counts(server, image_store, kind, kills):
    members = [[(f"d{n % 9}/{n}", os.urandom(5000)) for n in range(layer, 800, 4)] for layer in range(4)]
    image, name = variant("cpu", *(tar(*layer) for layer in members))
    put(server, (image, name))
    doubles = Path(__file__).parents[3] / "doubles"
    command = [sys.executable, "-c", PULL, image_store.path, f"{server.address}/ml/training"]
    command += [image.digest, kind, doubles]
    begin = time.monotonic()
    subprocess.run(command, check=True, timeout=300)
    taken = time.monotonic() - begin
    for _ in range(kills):
        if image_store.find(image.digest):
            assert remove_stored_image(image_store, image.digest)
        StoredLayers(image_store).remove_all()
        with subprocess.Popen(command) as process:
            time.sleep(random.uniform(0.3, 1.0) * taken)  # noqa: S311
            process.kill()
        found = image_store.find(image.digest)
        if found and kind == "folder":
            assert len(files(found.root)) == 800
    found = fetch_image(
        image_store, from_registry(server), image.digest, PUBLISHED, FetchOptions(unpacked=kind == "folder")
    )
    if kind == "folder":
        contents = {path: content for layer in members for path, content in layer}
        assert files(found.root) == contents
    else:
        subprocess.run(["unsquashfs", "-lls", found.root], check=True, stdout=subprocess.DEVNULL)
    assert remove_stored_image(image_store, image.digest)
    fetch_image(image_store, from_registry(server), image.digest, PUBLISHED)
    for part in ("new", "locks", "partial"):
        assert listed(image_store, part) == []


FETCH = """
import contextlib, os, sys
from pathlib import Path
from typing import Any
from imagematrix.errors import AuditError
from imagematrix.images.local_store.eviction import get_lock_path, remove_stored_image
from imagematrix.images.local_store.image_fetch import FetchOptions, CatalogEntry, fetch_image
from imagematrix.images.local_store.folder import ImageStore
from imagematrix.images.local_store.origins import LayoutOrigin
from imagematrix.images.oci.layout import LayoutFolder

store, layout, digest, log, how, count = sys.argv[1:]

@contextlib.contextmanager
def source():
    with open(log, "a") as file:
        file.write("fetched\\n")
    yield LayoutOrigin(LayoutFolder(Path(layout), AuditError))

catalog = {"image": "t", "version": "v1"}
published = CatalogEntry(references=("t:v1-x",), variant={}, catalog=catalog)
children = []
for _ in range(int(count)):
    child = os.fork()
    if not child:
        options = FetchOptions(unpacked=how == "unpacked")
        found = fetch_image(ImageStore(store), source, digest, published, options)
        with open(log, "a") as file:
            file.write(f"{found.kind} {os.path.getsize(found.root)}\\n")
        os._exit(0)
    children.append(child)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def test_of_two_hundred_processes_one_fetches_and_all_read(image_store, tmp_path):
    image, _ = variant()
    folder, log = layout(tmp_path / "layout", image), tmp_path / "log"
    subprocess.run(
        [sys.executable, "-c", FETCH, image_store.path, folder, image.digest, log, "squashfs", "200"],
        check=True,
        timeout=300,
    )
    lines = log.read_text().splitlines()
    found = image_store.find(image.digest)
    assert lines.count("fetched") == 1
    assert lines.count(f"squashfs {found.size}") == 200
    assert listed(image_store, "locks") == listed(image_store, "new") == []


@pytest.mark.parametrize("how", ["squashfs", "unpacked"])
def test_a_killed_command_leaves_nothing_that_counts(image_store, tmp_path, how):
    """Killed at many moments: before, during and after the files are written."""
    image, _ = variant("cpu", tar(*[(f"d{number % 9}/{number}", os.urandom(3000)) for number in range(900)]))
    folder, log = layout(tmp_path / "layout", image), tmp_path / "log"
    command = [sys.executable, "-c", FETCH, image_store.path, folder, image.digest, log, how, "1"]
    states = set()
    for wait in (0.01, 0.05, 0.1, 0.2, 0.4):
        log.unlink(missing_ok=True)
        with subprocess.Popen(command, start_new_session=True) as process:
            while not log.exists() and process.poll() is None:
                time.sleep(0.005)
            time.sleep(wait)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        states.add(image_store.find(image.digest) is not None)
        if image_store.find(image.digest):
            break
    options = FetchOptions(unpacked=how == "unpacked")
    again = from_layout(tmp_path / "again", image)
    found = fetch_image(image_store, again, image.digest, PUBLISHED, options)
    assert found.kind == ("folder" if how == "unpacked" else "squashfs")
    if how == "unpacked":
        assert len(files(found.root)) == 900
    # The lock of a command that was killed when the image was there stays until another one takes it.
    assert remove_stored_image(image_store, image.digest)
    fetch_image(image_store, again, image.digest, PUBLISHED, options)
    for name in ("new", "locks", "partial"):
        assert listed(image_store, name) == []


def test_what_dead_processes_left_is_swept(image_store, server, image, fetch):
    fetch(image.digest)
    other = "2" * 64
    new = Path(image_store.path, "new", f"{other}.abc")
    new.mkdir()
    (new / "root").mkdir()
    (new / "root").chmod(0)
    young, old = (Path(image_store.path, "partial", digit * 64) for digit in "34")
    for path in (young, old):
        path.mkdir()
        (path / "x.part").write_bytes(b"x")
    os.utime(old, (0, 0))
    live = Path(image_store.path, "new", f"{'5' * 64}.abc")
    live.mkdir()
    again = variant("again", tar("again"))
    put(server, again)
    with hold_lock(Path(image_store.path, "locks", "5" * 64)):
        fetch(again[0].digest)
    assert not new.exists()
    assert not old.exists()
    assert young.exists()
    assert live.exists()


def test_room_is_required_before_anything_is_downloaded(server, monkeypatch, image, fetch):
    state = os.statvfs("/")
    full = os.statvfs_result([*state[:4], 0, *state[5:]])
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    server.requests.clear()
    with pytest.raises(UsageError, match=r"has 0 bytes left, and the image needs \d+") as caught:
        fetch(image.digest)
    assert "prune --store" in caught.value.remedy
    assert server.count("GET", "blobs/" + image.layers[0]) == 0


def test_a_rename_of_which_the_answer_is_lost_is_done(image_store, monkeypatch, image, fetch):
    rename = Path.rename

    def unanswered(path, to):
        rename(path, to)
        if to.parent.name == "images":
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    monkeypatch.setattr(Path, "rename", unanswered)
    found = fetch(image.digest)
    assert found == image_store.find(image.digest)
    assert listed(image_store, "new") == listed(image_store, "partial") == []


def test_a_rename_that_failed_is_an_error(image_store, monkeypatch, image, fetch):

    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(UsageError, match="Input/output error"):
        fetch(image.digest)
    assert image_store.find(image.digest) is None
    assert listed(image_store, "new") == []
