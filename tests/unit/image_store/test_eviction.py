"""Room in a store: what goes, what stays, and who is told."""

import os
from pathlib import Path
from typing import Any

import pytest
from images import tar
from storing import NEEDS_SQUASHFS, PUBLISHED, from_registry, listed, put, variant

from imagematrix.errors import UsageError
from imagematrix.image_store.eviction import Room, lock_of, remove
from imagematrix.image_store.fetching import FetchOptions, Watcher, fetch
from imagematrix.image_store.locks import locked

pytestmark = NEEDS_SQUASHFS


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
                Watcher(evicted=evicted.append if max_size else print),
            )
            fetch(image_store, from_registry(server), image.digest, PUBLISHED, how, watcher)
            started = 1_000_000 + place * 3600
            os.utime(f"{image_store.place(image.digest)}/image.json", (started, started))
            digests.append(image.digest)
        return digests

    return call


def test_the_image_started_least_recently_goes_first(image_store, fill):
    one, two, three = fill("a", "b", "c")
    image_store.lease(one).release()  # started just now
    evicted: list[Any] = []
    Room(image_store, 36_000, evicted.append).make(10_000)
    assert [image.digest for image in evicted] == [two]
    assert image_store.digests() == sorted([one, three])


def test_no_image_goes_while_there_is_room(image_store, fill):
    fill("a", "b")
    evicted: list[Any] = []
    total = sum(image.size for image in image_store.images())
    Room(image_store, total + 5, evicted.append).make(5)
    assert evicted == []
    Room(image_store, total + 4, evicted.append).make(5)
    assert len(evicted) == 1


def test_an_image_that_a_container_runs_from_stays(image_store, fill):
    one, two = fill("a", "b")
    lease = image_store.lease(one)
    os.utime(f"{image_store.place(one)}/started", (0, 0))
    evicted: list[Any] = []
    Room(image_store, 25_000, evicted.append).make(10_000)
    assert [image.digest for image in evicted] == [two]
    with pytest.raises(UsageError, match="images that are in use take 1"):
        Room(image_store, 15_000, evicted.append).make(10_000)
    lease.release()


def test_an_image_larger_than_the_store_may_be_is_refused(image_store, fill):
    (one,) = fill("a")
    with pytest.raises(UsageError, match=r"the image needs 10001 bytes, and .* may have 10000"):
        Room(image_store, 10_000, print).make(10_001)
    assert image_store.digests() == [one]


def test_a_fetch_makes_room_for_its_image_and_keeps_it(image_store, fill):
    evicted: list[Any] = []
    digests = fill("a", "b", "c", "d", max_size=34_000, evicted=evicted)
    assert [image.digest for image in evicted] == digests[:2]
    assert image_store.digests() == sorted(digests[2:])


def test_an_image_that_another_process_changes_is_not_removed(image_store, fill):
    (one,) = fill("a")
    with locked(lock_of(image_store, one)):
        assert not remove(image_store, one)
    assert remove(image_store, one)
    assert remove(image_store, one)
    assert image_store.digests() == listed(image_store, "new") == []


def test_a_container_that_starts_while_its_image_is_removed_keeps_it(image_store, fill, monkeypatch):
    (one,) = fill("a")
    rename = Path.rename

    def started(path, target):
        result = rename(path, target)
        if Path(target).parent.name == "new":
            image_store.lease(one)
        return result

    monkeypatch.setattr(Path, "rename", started)
    assert not remove(image_store, one)
    assert image_store.find(one)
