"""Streams of Zstandard, by each of the ways to decompress them."""

import importlib.util
import io
import random
import shutil
import subprocess
import sys

import pytest
import zstandard
from reading import Lost, pieces

from imagematrix.errors import EngineError
from imagematrix.images.oci.decompression import DecompressedStream
from imagematrix.images.oci.unzstd import WINDOW_LOG, unzstd

CONTENT = random.Random(0).randbytes(300_000) + bytes(3_000_000)  # noqa: S311 - no secret
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\0\0\0none"
# Python's own library is in 3.14 and newer.
WAYS = {
    "library": True,
    "standard": importlib.util.find_spec("compression") is not None,
    "program": shutil.which("zstd") is not None,
}


@pytest.fixture(params=[name for name, there in WAYS.items() if there])
def way(request, monkeypatch):
    """Only one way to decompress."""
    hidden = {"library": (), "standard": ("zstandard",), "program": ("zstandard", "compression")}
    for name in hidden[request.param]:
        monkeypatch.setitem(sys.modules, name, None)
    return request.param


def packed(content=CONTENT, **parameters):
    made = zstandard.ZstdCompressionParameters.from_level(3, write_checksum=True, **parameters)
    compressor = zstandard.ZstdCompressor(compression_params=made).compressobj()
    return compressor.compress(content) + compressor.flush()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [7_001, 1 << 20, 1 << 25])
def test_frames_are_one_stream(size):
    stream = unzstd(io.BytesIO(packed() + SKIPPABLE + packed(b"more")))
    assert pieces(stream, size) == CONTENT + b"more"
    assert stream.read(1) == b""
    assert unzstd(io.BytesIO(packed())).read(-1) == CONTENT


@pytest.mark.usefixtures("way")
def test_a_skippable_frame_may_come_first():
    assert DecompressedStream(io.BytesIO(SKIPPABLE + packed())).read() == CONTENT


@pytest.mark.parametrize("damage", ["garbage behind", "changed", "window"])
def test_a_damaged_stream_is_an_error(way, damage):
    raw = bytearray(packed())
    if damage == "garbage behind":
        raw += b"garbage"
    elif damage == "changed":
        raw[150_000] ^= 1
    else:
        raw = packed(bytes(10), window_log=WINDOW_LOG + 1)
    if (way, damage) == ("library", "window"):
        with pytest.raises(ValueError, match="memory"):
            unzstd(io.BytesIO(raw)).read(-1)
        return
    with pytest.raises(ValueError, match=r"\w"):
        unzstd(io.BytesIO(raw)).read(-1)


def test_a_truncated_stream_gives_less_or_an_error(way):
    stream = unzstd(io.BytesIO(packed()[:200_000]))
    if way == "library":
        assert len(stream.read(-1)) < len(CONTENT)
    else:
        with pytest.raises((ValueError, EOFError)):
            stream.read(-1)


@pytest.mark.usefixtures("way")
def test_an_error_of_the_source_is_raised_as_it_is():
    with pytest.raises(ConnectionResetError, match="went away"):
        pieces(unzstd(Lost(packed())), 1 << 20)


def test_a_program_does_not_outlive_its_stream(monkeypatch, way):
    if way != "program":
        pytest.skip("has no program")
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *words, **how: started.append(popen(*words, **how)) or started[-1]
    )
    stream = unzstd(io.BytesIO(packed() * 20))
    assert stream.read(10) == CONTENT[:10]
    assert started[0].poll() is None
    del stream
    assert started[0].poll() is not None


def test_a_machine_without_any_way_has_a_remedy(monkeypatch, tmp_path):
    for name in ("zstandard", "compression"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match="compressed with zstd") as caught:
        unzstd(io.BytesIO(packed()))
    assert "apt install zstd" in caught.value.remedy
