"""Room in a store: what goes, what stays, and who is told."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from images import tar
from ordinary_user import AS_USER
from storing import NEEDS_SQUASHFS, PUBLISHED, from_registry, listed, put, variant

from imagematrix.errors import UsageError
from imagematrix.images.local_store.eviction import StoreRoom, get_lock_path, remove_stored_image
from imagematrix.images.local_store.folder import ImageStore
from imagematrix.images.local_store.image_fetch import FetchOptions, FetchWatcher, fetch_image
from imagematrix.images.local_store.locks import hold_lock

pytestmark = NEEDS_SQUASHFS

BY_OTHER = """
import sys
from imagematrix.images.local_store.eviction import StoreRoom, find_other_owner, remove_stored_image
from imagematrix.images.local_store.folder import ImageStore
store = ImageStore(sys.argv[1])
StoreRoom(store, 0, lambda _: None).make_space(0, kept="none")
digests = store.list_digests()
print([(find_other_owner(store, digest), remove_stored_image(store, digest)) for digest in digests])
"""


@pytest.fixture
def fill(server, image_store):
    """Call it with cells to fetch an image of each, an hour after the other; returns their digests."""

    def call(*cells, max_size=None, evicted=()):
        digests = []
        for place, cell in enumerate(cells):
            image, name = variant(cell, tar((cell, os.urandom(10_000))))
            put(server, (image, name), version=f"v{cell}")
            how, watcher = (
                FetchOptions(max_size=max_size),
                FetchWatcher(on_eviction=evicted.append if max_size else print),
            )
            fetch_image(image_store, from_registry(server), image.digest, PUBLISHED, how, watcher)
            started = 1_000_000 + place * 3600
            os.utime(f"{image_store.get_folder(image.digest)}/image.json", (started, started))
            digests.append(image.digest)
        return digests

    return call


def test_the_image_started_least_recently_goes_first(image_store, fill):
    one, two, three = fill("a", "b", "c")
    image_store.take_lease(one).release()  # started just now
    evicted: list[Any] = []
    StoreRoom(image_store, 36_000, evicted.append).make_space(10_000)
    assert [image.digest for image in evicted] == [two]
    assert image_store.list_digests() == sorted([one, three])


def test_no_image_goes_while_there_is_room(image_store, fill):
    fill("a", "b")
    evicted: list[Any] = []
    total = sum(image.size for image in image_store.list_intact_images())
    StoreRoom(image_store, total + 5, evicted.append).make_space(5)
    assert evicted == []
    StoreRoom(image_store, total + 4, evicted.append).make_space(5)
    assert len(evicted) == 1


def test_an_image_that_a_container_runs_from_stays(image_store, fill):
    one, two = fill("a", "b")
    lease = image_store.take_lease(one)
    os.utime(f"{image_store.get_folder(one)}/started", (0, 0))
    evicted: list[Any] = []
    StoreRoom(image_store, 25_000, evicted.append).make_space(10_000)
    assert [image.digest for image in evicted] == [two]
    with pytest.raises(UsageError, match="images that are in use or belong to others take 1"):
        StoreRoom(image_store, 15_000, evicted.append).make_space(10_000)
    lease.release()


def test_an_image_larger_than_the_store_may_be_is_refused(image_store, fill):
    (one,) = fill("a")
    with pytest.raises(UsageError, match=r"the image needs 10001 bytes, and .* may have 10000"):
        StoreRoom(image_store, 10_000, print).make_space(10_001)
    assert image_store.list_digests() == [one]


def test_a_fetch_makes_room_for_its_image_and_keeps_it(image_store, fill):
    evicted: list[Any] = []
    digests = fill("a", "b", "c", "d", max_size=34_000, evicted=evicted)
    assert [image.digest for image in evicted] == digests[:2]
    assert image_store.list_digests() == sorted(digests[2:])


def test_an_image_that_another_process_changes_is_not_removed(image_store, fill):
    (one,) = fill("a")
    with hold_lock(get_lock_path(image_store, one)):
        assert not remove_stored_image(image_store, one)
    assert remove_stored_image(image_store, one)
    assert remove_stored_image(image_store, one)
    assert image_store.list_digests() == listed(image_store, "new") == []


def test_a_container_that_starts_while_its_image_is_removed_keeps_it(image_store, fill, monkeypatch):
    (one,) = fill("a")
    rename = Path.rename

    def started(path, target):
        result = rename(path, target)
        if Path(target).parent.name == "new":
            image_store.take_lease(one)
        return result

    monkeypatch.setattr(Path, "rename", started)
    assert not remove_stored_image(image_store, one)
    assert image_store.find(one)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_an_image_whose_folders_another_user_owns_stays_as_it_is(server, shared_folder):
    store = ImageStore(shared_folder)
    image, name = variant("cpu", tar(("folder/file", b"content")))
    put(server, (image, name))
    fetch_image(store, from_registry(server), image.digest, PUBLISHED, FetchOptions(unpacked=True))
    place = Path(store.get_folder(image.digest))
    for shared in (shared_folder, place, *shared_folder.iterdir()):
        shared.chmod(0o777)

    def by_other():
        words = [*AS_USER, sys.executable, "-c", BY_OTHER, store.path]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()

    assert by_other() == "[('root', False)]"
    assert listed(store, "new") == []
    assert (place / "root" / "folder" / "file").exists()
    for inside in (place / "root", place / "root" / "folder"):
        inside.chmod(0o777)
    assert by_other() == "[]"  # it made room
    assert listed(store, "images") == listed(store, "new") == []
