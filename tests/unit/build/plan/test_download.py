"""Files from https addresses: resumed, compared with their digests, and kept in the cache."""

import contextlib
import fcntl
import hashlib
import os
import threading
from types import SimpleNamespace

import pytest

from imagematrix.build.plan import download
from imagematrix.build.plan.download import fetch_file
from imagematrix.errors import EngineError, UsageError

CONTENT = os.urandom(3 << 20)
DIGEST = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
OTHER = f"sha256:{'0' * 64}"


@pytest.fixture
def server(downloads):
    downloads.files["/driver.run"] = CONTENT
    return downloads


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache" / "imagematrix" / "drivers"


def fetch(server, expected=None, note=lambda _: None):
    return fetch_file(f"{server.address}/driver.run", expected, note)


def test_download_is_kept_by_its_digest(server, cache):
    notes: list[str] = []
    path, digest = fetch(server, note=notes.append)
    assert digest == DIGEST
    assert path.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [path]
    assert notes == [f"downloading {server.address}/driver.run: 0 of 3 MB"]
    server.close()  # offline
    assert fetch(server, DIGEST) == (path, DIGEST)


def test_progress_is_told_now_and_then(server, monkeypatch):
    monkeypatch.setattr(download, "EVERY_S", -1)
    notes: list[str] = []
    fetch(server, note=notes.append)
    assert [note.rpartition(": ")[2] for note in notes] == [f"{size} of 3 MB" for size in (0, 1, 2, 3)]


@pytest.mark.parametrize("ranges", [True, False])
def test_interrupted_download_continues(server, ranges):
    server.ranges = ranges
    server.cut = [10, 1 << 20, 1 << 20]  # the first answer is only looked at
    assert fetch(server, DIGEST)[0].read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests][2:3] == [f"bytes={1 << 20}-"]


def test_download_of_a_killed_process_continues(server, cache):
    server.cut = [0, *[1 << 20] * 1, *[0] * 9]
    with pytest.raises(EngineError):
        fetch(server, DIGEST)
    (part,) = cache.iterdir()
    assert part.stat().st_size == 1 << 20
    server.cut, server.requests = [], []
    assert fetch(server, DIGEST)[0].read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == ["", f"bytes={1 << 20}-"]


def test_old_parts_are_removed_unless_a_process_writes_them(server, cache):
    cache.mkdir(parents=True, mode=0o700)
    for name in ("part-old", "part-new", "part-written"):
        (cache / name).write_bytes(b"a part")
    for name in ("part-old", "part-written"):
        os.utime(cache / name, (0, 0))
    with (cache / "part-written").open("rb") as written:
        fcntl.flock(written, fcntl.LOCK_EX)
        path, _ = fetch(server)
    assert {file.name for file in cache.iterdir()} == {"part-new", "part-written", path.name}


def test_complete_part_is_not_asked_for_again(server, cache, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(hashlib, "file_digest", killed)
        with pytest.raises(KeyboardInterrupt):
            fetch(server, DIGEST)
    server.requests = []
    assert fetch(server, DIGEST)[0].read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == [""]
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("validator", ["ETag", "Last-Modified", None])
def test_part_of_an_older_file_is_not_continued(server, validator):
    server.validator = validator
    server.cut = [0, 1 << 20, *[0] * 9]
    with pytest.raises(EngineError):
        fetch(server)
    server.cut = []
    server.files["/driver.run"] = content = os.urandom(2 << 20)
    path, _ = fetch(server)
    assert path.read_bytes() == content


def test_file_replaced_during_its_download_is_an_error(server):
    server.cut = [0, 1 << 20]

    def replaced(_note):
        server.files["/driver.run"] = os.urandom(2 << 20)

    with pytest.raises(EngineError, match="was replaced during the download"):
        fetch(server, note=replaced)


def test_other_content_than_locked_is_removed(server, cache):
    with pytest.raises(UsageError, match=f"has another content: {DIGEST}, not {OTHER}") as caught:
        fetch(server, OTHER)
    assert "lock --upgrade" in caught.value.remedy
    assert list(cache.iterdir()) == []


def test_missing_file(server):
    with pytest.raises(EngineError, match=r"/none.run: the server answers 404 Not Found"):
        fetch_file(f"{server.address}/none.run", None, lambda _: None)


def test_redirect_to_http_is_not_followed(server):
    server.redirect = "http://127.0.0.1:1/driver.run"
    with pytest.raises(UsageError, match="leads to an address that is not https://"):
        fetch(server)


def test_unreachable_server_and_unknown_authority(server, monkeypatch):
    with pytest.raises(EngineError, match="refused") as caught:
        fetch_file("https://127.0.0.1:1/driver.run", None, lambda _: None)
    assert caught.value.exit_code == 8
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")
    with pytest.raises(EngineError, match="certificate"):
        fetch(server)


def test_size_is_limited(server, monkeypatch):
    monkeypatch.setattr(download, "LARGEST", 1 << 20)
    with pytest.raises(UsageError, match=f"has {3 << 20} bytes"):
        fetch(server)


def test_size_is_limited_if_the_server_does_not_state_it(server, monkeypatch):
    monkeypatch.setattr(download, "LARGEST", 1 << 20)
    server.sized = False
    with pytest.raises(UsageError, match=f"has more than {1 << 20} bytes"):
        fetch(server)


def test_size_that_the_server_does_not_state(server):
    server.sized = False
    notes: list[str] = []
    assert fetch(server, DIGEST, notes.append)[0].read_bytes() == CONTENT
    assert notes == [f"downloading {server.address}/driver.run"]


def test_cache_that_cannot_be_written(server, cache):
    cache.mkdir(parents=True, mode=0o777)
    cache.chmod(0o777)
    with pytest.raises(UsageError, match="others can access this folder"):
        fetch(server)


def test_a_cache_that_others_can_change_is_not_used(server, cache):
    fetch(server)
    cache.chmod(0o777)
    with pytest.raises(UsageError, match="others can access this folder"):
        fetch(server, DIGEST)


def test_complete_part_of_unknown_size_is_not_continued(server, monkeypatch):
    """The server would answer that there is no such range, each time."""

    def killed(*_):
        raise KeyboardInterrupt

    server.sized = False
    with monkeypatch.context() as patched:
        patched.setattr(hashlib, "file_digest", killed)
        with pytest.raises(KeyboardInterrupt):
            fetch(server)
    server.requests = []
    assert fetch(server)[0].read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == ["", ""]


@pytest.mark.parametrize(("length", "size"), [("12", 12), ("", None), ("1" * 5000, None), ("-1", None)])
def test_odd_length_is_none(monkeypatch, length, size):
    answer = SimpleNamespace(headers={"Content-Length": length})
    wanted = download._Download(None, "https://example.org/a", print)
    monkeypatch.setattr(wanted, "_request", lambda _: contextlib.nullcontext(answer))
    wanted._inspect_content()
    assert wanted._size == size


def test_concurrent_downloads_happen_once(server, cache):
    found = []
    threads = [threading.Thread(target=lambda: found.append(fetch(server, DIGEST))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(cache / f"{DIGEST[7:]}.download", DIGEST)] * 4
    assert len(server.requests) == 4 + 1
