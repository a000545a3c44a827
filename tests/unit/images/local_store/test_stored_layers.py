"""Layers that stay in a store: what a second image receives, and what never comes of them."""

import contextlib
import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from images import layout, tar
from ordinary_user import AS_USER
from storing import LAYERS, NEEDS_SQUASHFS, PUBLISHED, from_registry, listed, put, variant

from imagematrix.build.retire.prune import PruneCandidate
from imagematrix.build.retire.prune_store import remove_image
from imagematrix.errors import AuditError, UsageError
from imagematrix.images.local_store import image_fetch
from imagematrix.images.local_store.eviction import StoreRoom, remove_stored_image
from imagematrix.images.local_store.folder_writer import write_folder
from imagematrix.images.local_store.image_fetch import FetchOptions, FetchWatcher, fetch_image
from imagematrix.images.local_store.origins import ImageParts, LayoutOrigin, get_layer_path
from imagematrix.images.local_store.stored_layers import StoredLayers
from imagematrix.images.oci.layout import LayoutFolder
from imagematrix.images.oci.registry import Registry

pytestmark = NEEDS_SQUASHFS

DIGEST = f"sha256:{'1' * 64}"
OWN = tar(("own", b"of the second image"))


@pytest.fixture
def images(server):
    """Two images in the registry; the second has the layers of the first and one more."""
    first, name = variant()
    second, other = variant("two", *LAYERS, OWN, version="v2")
    put(server, (first, name))
    put(server, (second, other), version="v2")
    return first, second


@pytest.fixture
def fetch(server, image_store):
    """Call it with an image to bring it into the store; returns its folder."""

    def call(image, *, max_size=None, unpacked=True, store=image_store):
        how = FetchOptions(unpacked=unpacked, max_size=max_size)
        found = fetch_image(store, from_registry(server), image.digest, PUBLISHED, how)
        return Path(found.root)

    return call


def received(server):
    """Return the digests of blobs that were sent since the last call."""
    asked = [
        one.path.rpartition("/")[2]
        for one in server.requests
        if "/blobs/" in one.path and one.method == "GET"
    ]
    server.requests.clear()
    return asked


def kept(store):
    """Return the files of the layers in a store, the largest last."""
    return sorted(Path(store.path, "layers").iterdir(), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("unpacked", [False, True])
def test_a_second_image_receives_only_what_is_new(server, images, fetch, unpacked):
    first, second = images
    fetch(first, unpacked=unpacked)
    assert {*first.layers} <= {*received(server)}
    root = fetch(second, unpacked=unpacked)
    assert {*received(server)} & {*second.layers} == {second.layers[-1]}
    if unpacked:
        assert sorted(path.name for path in root.rglob("*") if path.is_file()) == [
            "new",
            "os-release",
            "own",
            "tool",
        ]


def test_room_is_required_for_what_is_new_only(images, image_store, fetch, monkeypatch):
    asked = []
    require_space = StoreRoom.require_space
    monkeypatch.setattr(
        StoreRoom, "require_space", lambda room, size: (asked.append(size), require_space(room, size))[1]
    )
    first, second = images
    fetch(first, unpacked=False)
    fetch(second, unpacked=False)
    sizes = [path.stat().st_size for path in kept(image_store)]
    assert len(sizes) == 3
    assert asked[1] == sum(sizes) + sum(sizes) // 4 + len(second.blobs[second.layers[-1]])


def test_layers_stay_while_an_image_has_them(images, image_store, fetch):
    first, second = images
    fetch(first)
    fetch(second)
    assert len(kept(image_store)) == 3
    remove_image(image_store, _as_candidate(second))
    assert len(kept(image_store)) == 2
    remove_image(image_store, _as_candidate(first))
    assert kept(image_store) == []


def _as_candidate(image):
    return PruneCandidate(
        id=image.digest, images=("t",), version="v1", tag="x", names=("t:x",), others=(), size=1
    )


def test_two_images_that_come_at_the_same_time_both_have_the_layers(
    server, images, image_store, fetch, monkeypatch
):
    first, second = images
    third, name = variant("three", *LAYERS, tar(("third", b"1")), version="v3")
    put(server, (third, name), version="v3")
    fetch(first)
    begun: list[Path] = []

    def write(path, members):
        if not begun:
            begun.append(path)
            fetch(third)
        write_folder(path, members)

    monkeypatch.setattr(image_fetch, "write_folder", write)
    received(server)
    fetch(second)
    new = {second.layers[-1], third.layers[-1]}
    assert {*received(server)} & {*second.layers, *third.layers} == new
    assert len(kept(image_store)) == 4


@pytest.mark.parametrize("kind", [UsageError, AuditError, KeyboardInterrupt])
def test_a_fetch_that_fails_takes_no_layers_away(images, image_store, fetch, monkeypatch, kind):
    first, second = images
    fetch(first)
    layers = kept(image_store)

    def fail(*_):
        raise kind("why")

    monkeypatch.setattr(image_fetch, "write_folder", fail)
    with pytest.raises(kind):
        fetch(second)
    assert kept(image_store) == layers
    (partial,) = Path(image_store.path, "partial").iterdir()
    assert len([*partial.iterdir()]) == 1, "the new layer"
    assert {path.stat().st_nlink for path in layers} == {1}


def test_a_part_of_a_layer_stays_where_there_can_be_no_links(server, images, image_store, fetch, monkeypatch):
    first, second = images
    fetch(first)
    partial = Path(image_store.path, "partial", second.digest[7:])
    partial.mkdir()
    content = second.blobs[second.layers[0]]
    get_layer_path(partial, second.layers[0]).write_bytes(content[:100])

    def refuse(self, target):
        if self.suffix == ".link":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        os.link(target, self)

    received(server)
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    opened, started = Registry.open, []
    monkeypatch.setattr(
        Registry,
        "open",
        lambda self, digest, start=0: (started.append(start), opened(self, digest, start))[1],
    )
    fetch(second)
    assert 100 in started


def test_a_link_of_a_killed_command_is_no_obstacle(server, images, image_store, fetch):
    first, second = images
    fetch(first)
    partial = Path(image_store.path, "partial", second.digest[7:])
    partial.mkdir()
    for layer, tar_digest in zip(second.layers[:2], second.diffs[:2], strict=True):
        path = get_layer_path(partial, layer)
        path.hardlink_to(Path(image_store.path, "layers", tar_digest[7:]))
        path.with_suffix(".link").write_bytes(b"")
    received(server)
    fetch(second)
    assert {*received(server)} & {*second.layers} == {second.layers[-1]}
    assert len(kept(image_store)) == 3
    assert listed(image_store, "partial") == []


def test_what_another_command_keeps_meanwhile_stays(images, image_store, fetch, monkeypatch):
    first, _ = images
    list_images = image_store.list_intact_images
    late = Path(image_store.path, "layers", "f" * 64)

    def look():
        late.write_bytes(b"of an image that came just now")
        return list_images()

    fetch(first)
    monkeypatch.setattr(image_store, "list_intact_images", look)
    StoredLayers(image_store).remove_unused()
    assert late.exists()


def test_layers_of_an_image_that_was_evicted_go_with_the_next_fetch(images, image_store, fetch):
    first, second = images
    fetch(second)
    assert remove_stored_image(image_store, second.digest)
    fetch(first)
    assert len(kept(image_store)) == 2


def test_a_damaged_layer_is_received_again_by_the_next_try(server, images, image_store, fetch):
    first, second = images
    fetch(first)
    largest = kept(image_store)[-1]
    content = bytearray(largest.read_bytes())
    content[-20] ^= 1
    largest.write_bytes(content)
    with pytest.raises(AuditError, match="does not match its digest"):
        fetch(second)
    assert image_store.find(second.digest) is None
    received(server)
    fetch(second)
    # The image's own one may be among them, too: it need not have arrived when the damage was found.
    assert len({*received(server)} & {*first.layers}) == 1


@pytest.mark.parametrize("change", ["shorter", "longer", "link", "folder", "pipe"])
def test_what_is_no_such_layer_is_not_used(server, images, image_store, fetch, tmp_path, change):
    first, second = images
    fetch(first)
    victim = tmp_path / "victim"
    path = kept(image_store)[-1]
    content = path.read_bytes()
    victim.write_bytes(content)
    path.unlink()
    if change == "link":
        path.symlink_to(victim)
    elif change == "folder":
        path.mkdir()
    elif change == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(content[:-1] if change == "shorter" else content + b"x")
    received(server)
    fetch(second)
    assert len({*received(server)} & {*second.layers}) == 2
    assert victim.read_bytes() == content
    assert change == "folder" or all(path.is_file() and not path.is_symlink() for path in kept(image_store))


def test_digests_that_are_paths_name_no_file(image_store, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    parts = ImageParts(config={}, layers=(DIGEST,), sizes=(4,), tars=(f"sha256:{victim}",))
    target = tmp_path / "partial"
    target.mkdir()
    with StoredLayers(image_store).link_layers(parts, target):
        pass
    assert (victim.read_bytes(), [*target.iterdir()]) == (b"mine", [])
    get_layer_path(target, DIGEST).write_bytes(b"evil")
    StoredLayers(image_store).keep_layers(parts, target)
    assert victim.read_bytes() == b"mine"


def test_layers_make_room_before_images_do(images, image_store, fetch):
    first, second = images
    fetch(first, unpacked=False)
    room = image_store.find(first.digest).size
    layers = StoredLayers(image_store)
    evicted: list[Any] = []
    StoreRoom(image_store, room + layers.size, evicted.append).make_space(0)
    assert len(kept(image_store)) == 2
    StoreRoom(image_store, room + layers.size, evicted.append).make_space(1)
    assert len(kept(image_store)) == 1
    StoreRoom(image_store, room, evicted.append).make_space(0)
    assert (kept(image_store), evicted) == ([], [])
    fetch(second, unpacked=False)


def test_an_image_stays_below_its_limit_with_its_layers(images, image_store, fetch):
    fetch(images[0], max_size=9_000, unpacked=False)
    assert image_store.find(images[0].digest).size + StoredLayers(image_store).size <= 9_000


def test_layers_make_room_on_a_disk(images, image_store, fetch, monkeypatch):
    first, second = images
    fetch(first)
    state = os.statvfs("/")

    def statvfs(_):
        free = 1 if kept(image_store) else 10**6
        return os.statvfs_result([*state[:4], free, *state[5:]])

    monkeypatch.setattr(os, "statvfs", statvfs)
    room = StoreRoom(image_store, None, print)
    with pytest.raises(UsageError, match="bytes left, and the image needs 10000000"):
        room.require_space(10_000_000)
    assert len(kept(image_store)) == 2, "they would not have been enough"
    room.require_space(state.f_frsize + 10)
    assert kept(image_store) == []
    monkeypatch.undo()
    fetch(second)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_layers_make_room_where_only_a_write_says_that_there_is_none(
    server, images, image_store, fetch, monkeypatch, code
):
    fetch(images[0])

    def write(path, members):
        if kept(image_store):
            raise OSError(code, os.strerror(code))
        write_folder(path, members)

    monkeypatch.setattr(image_fetch, "write_folder", write)
    received(server)
    image, name = variant("three", tar(("other", b"1")), version="v3")
    put(server, (image, name), version="v3")
    fetch(image)
    assert received(server).count(image.layers[0]) == 1, "what had come stays for the second try"


def test_a_disk_that_stays_full_is_an_error(images, image_store, fetch, monkeypatch):
    first, second = images
    fetch(first)

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(image_fetch, "write_folder", fail)
    with pytest.raises(UsageError, match="is full"):
        fetch(second)
    assert listed(image_store, "new") == []


def test_layers_of_a_layout_are_not_kept(image_store, tmp_path):
    image = variant()[0]
    layout(tmp_path / "layout", image)

    @contextlib.contextmanager
    def source():
        yield LayoutOrigin(LayoutFolder(tmp_path / "layout", AuditError))

    fetch_image(image_store, source, image.digest, PUBLISHED)
    assert kept(image_store) == []


def test_a_store_that_refuses_a_folder_for_layers_still_gets_images(images, image_store, fetch, monkeypatch):
    def refuse(self, target):
        if Path(target).parent.name == "layers":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(self, target)

    rename = Path.rename
    monkeypatch.setattr(Path, "rename", refuse)
    fetch(images[0])
    assert kept(image_store) == listed(image_store, "partial") == []


BY_OTHER = """
import sys
from pathlib import Path
from typing import Any
from imagematrix.images.local_store.folder import ImageStore
from imagematrix.images.local_store.stored_layers import StoredLayers
from imagematrix.images.local_store.origins import ImageParts
store, target = ImageStore(sys.argv[1]), Path(sys.argv[1], "partial")
(kept,) = Path(store.path, "layers").iterdir()
tar = f"sha256:{kept.name}"
parts = ImageParts(config={}, layers=(tar,), sizes=(kept.stat().st_size,), tars=(tar,))
with StoredLayers(store).link_layers(parts, target):
    print(len(list(target.iterdir())))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_in_a_shared_store_only_a_file_that_all_may_write_is_used(shared_folder):
    for part in ("layers", "partial"):
        Path(shared_folder, part).mkdir()
    kept = Path(shared_folder, "layers", "1" * 64)
    kept.write_bytes(b"layer")
    for folder in (shared_folder, *shared_folder.iterdir()):
        folder.chmod(0o777)
    for mode, taken in ((0o644, "0\n"), (0o666, "1\n")):
        kept.chmod(mode)
        command = [*AS_USER, sys.executable, "-c", BY_OTHER, str(shared_folder)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        assert done.stdout == taken


def test_progress_counts_layers_that_were_here(server, images, image_store, fetch):
    first, second = images
    fetch(first)
    seen: list[Any] = []
    fetch_image(
        image_store,
        from_registry(server),
        second.digest,
        replace(PUBLISHED, part=True),
        FetchOptions(),
        FetchWatcher(on_progress=seen.append),
    )
    assert (seen[-1].layers, seen[-1].downloaded) == (3, 3)
    assert seen[-1].received == len(second.blobs[second.layers[-1]])
