"""Layers that arrive while they are read: what is kept of them, and when it is forgotten."""

import os
import threading

import pytest
from distribution import digest

from imagematrix.errors import AuditError, EngineError
from imagematrix.images.local_store.layer_download import LayerDownload
from imagematrix.images.oci.registry import Registry

SIZE = 300_000
CONTENT = os.urandom(SIZE)
CHANGED = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
LAYER = digest(CONTENT)


@pytest.fixture
def kept(server):
    """The blobs of the registry, which has a layer."""
    blobs = server.repository("ml/training").blobs
    blobs[LAYER] = CONTENT
    return blobs


@pytest.fixture
def make_download(server, tmp_path, kept):
    assert kept
    with Registry(f"{server.address}/ml/training") as registry:
        yield lambda size=SIZE, on_bytes=lambda _: None, on_layer=lambda: None: LayerDownload(
            registry, LAYER, size, tmp_path / "layer", on_bytes, on_layer
        )


def fail_after(size, download, error):
    """Raise an error after some bytes were read."""
    with download.open() as stream:
        assert len(stream.read(size)) == size
        raise error


def read(download):
    with download.open() as stream:
        content = b""
        while piece := stream.read(10_000):
            content += piece
        return content


def test_it_is_received_once_and_only_as_it_is_read(make_download, server, tmp_path):
    received: list[int] = []
    layers: list[int] = []
    download = make_download(on_bytes=received.append, on_layer=lambda: layers.append(1))
    assert download.count_missing_bytes() == SIZE
    with download.open() as stream:
        assert stream.read(10) == CONTENT[:10]
        assert sum(received) == 10
    assert read(download) == (tmp_path / "layer").read_bytes() == CONTENT
    assert (sum(received), layers, server.count("GET", LAYER)) == (SIZE, [1], 1)
    assert download.count_missing_bytes() == 0


def test_two_readers_share_one_download(make_download, server):
    download, found = make_download(), []
    readers = [threading.Thread(target=lambda: found.append(read(download))) for _ in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert found == [CONTENT] * 3
    assert server.count("GET", LAYER) == 1


def test_what_was_refused_is_not_received_again_for_a_second_reader(make_download, kept, server, tmp_path):
    kept[LAYER] = CHANGED
    download = make_download()
    for _ in range(2):
        with pytest.raises(AuditError, match="does not match its digest"):
            read(download)
    assert server.count("GET", LAYER) == 1
    assert not (tmp_path / "layer").exists()


@pytest.mark.parametrize("error", [ValueError("damaged"), EOFError("cut"), AuditError("not a tar")])
def test_a_wrong_digest_is_told_in_place_of_what_it_led_to(make_download, kept, tmp_path, error):
    kept[LAYER] = CHANGED
    with pytest.raises(AuditError, match="does not match its digest"):
        fail_after(10, make_download(), error)
    assert not (tmp_path / "layer").exists()
    kept[LAYER] = CONTENT
    assert read(make_download()) == CONTENT


def test_what_is_right_but_no_layer_stays_what_it_is(make_download, tmp_path):
    with pytest.raises(ValueError, match="not a tar"):
        fail_after(10, make_download(), ValueError("not a tar"))
    assert (tmp_path / "layer").read_bytes() == CONTENT


def test_another_error_leaves_what_was_received(make_download, server, tmp_path):
    with pytest.raises(OSError, match="full"):
        fail_after(100_000, make_download(), OSError("the disk is full"))
    assert (tmp_path / "layer").read_bytes() == CONTENT[:100_000]
    received: list[int] = []
    assert read(make_download(on_bytes=received.append)) == CONTENT
    assert sum(received) == 200_000
    assert server.count("GET", LAYER) == 2


def test_a_manifest_that_says_more_than_there_is(make_download, tmp_path):
    with pytest.raises(AuditError, match=r"has 300000 bytes, and its manifest says 300001"):
        read(make_download(SIZE + 1))
    assert not (tmp_path / "layer").exists()


def test_no_more_is_received_than_the_manifest_says(make_download, kept, tmp_path):
    received: list[int] = []
    kept[LAYER] = CONTENT * 3
    assert read(make_download(on_bytes=received.append)) == CONTENT
    assert sum(received) == (tmp_path / "layer").stat().st_size == SIZE
    with pytest.raises(AuditError, match="does not match its digest"):
        read(make_download(10))


@pytest.mark.parametrize("there", [b"x" * 1000, CHANGED, b"x" * 400_000])
def test_what_an_earlier_command_left_is_not_believed(make_download, tmp_path, there):
    (tmp_path / "layer").write_bytes(there)
    with pytest.raises(AuditError, match="does not match its digest"):
        read(make_download())
    assert read(make_download()) == CONTENT


def test_a_transfer_that_keeps_failing_keeps_what_came(make_download, server, tmp_path):
    server.fails("GET", f"blobs/{LAYER}", cut=True)
    server.fails("GET", f"blobs/{LAYER}", status=403, times=9)
    with pytest.raises(EngineError, match="denies access"):
        read(make_download())
    held = (tmp_path / "layer").read_bytes()
    assert held
    assert CONTENT.startswith(held)
    server.faults.clear()
    assert read(make_download()) == CONTENT
