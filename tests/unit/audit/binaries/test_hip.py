"""Bundles of AMD's code objects, plain and compressed."""

import io
import struct
import zlib

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.audit.binaries import hip
from imagematrix.audit.binaries.device_code import DeviceCode
from imagematrix.audit.binaries.window import Window

IDS = ("host-x86_64-unknown-linux-gnu-", "hipv4-amdgcn-amd-amdhsa--gfx90a:sramecc+:xnack-")
TARGET = DeviceCode(objects=frozenset({"gfx90a:sramecc+:xnack-"}))


def bundle(*ids, code=b"code"):
    head, at = b"", 32 + sum(24 + len(one) for one in ids)
    for one in ids:
        head += struct.pack("<QQQ", at, len(code), len(one)) + one.encode()
    return b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(ids)) + head + bytes(8) + code


def compressed(raw, version=2, method=1):
    packed = zstandard.compress(raw) if method else zlib.compress(raw)
    sizes = {1: "<IQ", 2: "<IIQ", 3: "<QQQ"}[version]
    numbers = {1: (len(raw), 0), 2: (0, len(raw), 0), 3: (0, len(raw), 0)}[version]
    return b"CCOB" + struct.pack("<HH", version, method) + struct.pack(sizes, *numbers) + packed


def read(raw):
    return hip.list_bundle_targets(Window(io.BytesIO(raw), 0, len(raw)))


def test_bundle_targets_are_read():
    assert read(bundle(*IDS)) == TARGET


@pytest.mark.parametrize(("version", "method"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_compressed_bundle_targets_are_read(version, method):
    assert read(compressed(bundle(*IDS), version, method)) == TARGET


def test_page_aligned_bundles_are_all_read():
    other = bundle("hipv4-amdgcn-amd-amdhsa--gfx1100")
    result = read(bundle(*IDS).ljust(4096, b"\0") + compressed(other))
    assert result.objects == {"gfx90a:sramecc+:xnack-", "gfx1100"}


@pytest.mark.parametrize(
    "raw",
    [
        bundle(*IDS)[:60],
        bundle(*IDS)[:-10],
        b"__CLANG_OFFLOAD_BUNDLE__" + b"\xff" * 8,
        b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<QQQQ", 1, 0, 0, 4000),
        compressed(bundle(*IDS))[:40],
        compressed(bundle(*IDS), method=0)[:24] + b"junk",
        b"CCOB" + struct.pack("<HH", 9, 1),
        b"CCOB" + struct.pack("<HH", 2, 7),
        b"CCOB",
    ],
)
def test_damaged_bundle_is_reported(raw):
    assert read(raw).damaged


@given(st.binary(max_size=200), st.integers(0, 100))
def test_damaged_bundle_never_crashes(raw, place):
    for whole in (bundle(*IDS), compressed(bundle(*IDS))):
        assert isinstance(read(whole[:place] + raw), DeviceCode)
