"""Clamping the times of a tar, which changes nothing else."""

import contextlib
import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagematrix.errors import BuildError
from imagematrix.images.oci.mtimes import clamp_mtimes

FORMATS = (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)
KINDS = (
    tarfile.REGTYPE,
    tarfile.DIRTYPE,
    tarfile.SYMTYPE,
    tarfile.LNKTYPE,
    tarfile.CHRTYPE,
    tarfile.FIFOTYPE,
)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=300).map(
    lambda name: name.replace("/", "_")
)
TIMES = st.one_of(
    st.integers(0, 8**11 - 1),
    st.integers(-(2**40), 2**40),
    st.floats(0, 2**33).map(lambda time: round(time, 6)),
)
MEMBERS = st.lists(
    st.tuples(NAMES, st.sampled_from(KINDS), TIMES, st.binary(max_size=2000), NAMES, st.integers(0, 2**40)),
    max_size=8,
)


def written(members, form):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        for name, kind, time, data, target, owner in members:
            info = tarfile.TarInfo(name)
            info.type, info.uid = kind, owner
            info.mtime = int(time) if form == tarfile.GNU_FORMAT else time
            if kind == tarfile.REGTYPE:
                info.size = len(data)
            if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                info.linkname = target
            if form == tarfile.PAX_FORMAT:
                info.pax_headers = {"SCHILY.xattr.user.x": target, "atime": str(time), "ctime": "1.5"}
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def read(raw):
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        return [
            (
                member.name,
                member.type,
                member.mtime,
                archive.extractfile(member).read() if member.isfile() else b"",
                member.linkname,
                member.uid,
                member.pax_headers,
            )
            for member in archive
        ]


@given(MEMBERS, st.sampled_from(FORMATS), st.sampled_from((0, 1, 2**31)))
@settings(max_examples=300)
def test_only_later_times_are_changed(members, form, latest):
    before = written(members, form)
    after = b"".join(clamp_mtimes(io.BytesIO(before), latest))
    for old, new in zip(read(before), read(after), strict=True):
        assert new[:2] + new[3:6] == old[:2] + old[3:6]
        assert new[2] == min(old[2], latest)
        dropped = {key for key in ("mtime", "atime", "ctime") if float(old[6].get(key, 0)) > latest}
        assert new[6] == {key: value for key, value in old[6].items() if key not in dropped}
    assert b"".join(clamp_mtimes(io.BytesIO(after), latest)) == after
    if not any(float(member[2]) > latest for member in members) and (
        form == tarfile.GNU_FORMAT or latest > 1
    ):
        assert after == before


@given(st.binary(max_size=3000))
def test_arbitrary_bytes_are_rejected_or_kept(raw):
    with contextlib.suppress(BuildError):
        assert len(b"".join(clamp_mtimes(io.BytesIO(raw), 2**40))) <= len(raw)


@given(MEMBERS, st.sampled_from(FORMATS), st.data())
@settings(max_examples=300)
def test_damaged_tar_terminates(members, form, data):
    raw = bytearray(written(members, form))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, min(len(raw), 4096) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BuildError):
        assert len(b"".join(clamp_mtimes(io.BytesIO(bytes(raw)), 0))) <= len(raw)


@pytest.mark.parametrize(("size", "why"), [(511, "truncated"), (512 + 100, "truncated"), (512, "truncated")])
def test_truncated_tar_is_rejected(size, why):
    raw = written([("a", tarfile.REGTYPE, 5, b"data", "", 0)], tarfile.GNU_FORMAT)
    with pytest.raises(BuildError, match=why):
        b"".join(clamp_mtimes(io.BytesIO(raw[:size]), 0))


def test_tar_without_end_blocks_is_accepted():
    raw = written([("a", tarfile.REGTYPE, 0, b"data", "", 0)], tarfile.GNU_FORMAT)[:1024]
    assert b"".join(clamp_mtimes(io.BytesIO(raw), 0)) == raw


def test_size_from_an_extended_header_is_used():
    """The header has size 0, so that data would be read as the next entry."""
    inner = written([("inner", tarfile.REGTYPE, 5, b"", "", 0)], tarfile.GNU_FORMAT)[:512]
    info = tarfile.TarInfo("large")
    info.mtime = 7
    head = info.create_pax_header({**info.get_info(), "size": 0}, "utf-8")
    extended = tarfile.TarInfo._create_pax_generic_header  # type: ignore[attr-defined]  # not public
    record = extended({"size": "512"}, tarfile.XHDTYPE, "utf-8")
    after = b"".join(clamp_mtimes(io.BytesIO(record + head + inner + bytes(1024)), 0))
    assert after[-1536:-1024] == inner
    ((name, _, time, data, *_),) = read(after)
    assert (name, time, data) == ("large", 0, inner)


def test_size_of_a_link_is_ignored():
    info = tarfile.TarInfo("link")
    info.type, info.linkname, info.size = tarfile.LNKTYPE, "a", 4096
    raw = info.tobuf() + bytes(1024)
    assert b"".join(clamp_mtimes(io.BytesIO(raw), 0)) == raw


def test_sparse_file_is_rejected():
    info = tarfile.TarInfo("sparse")
    info.type = tarfile.GNUTYPE_SPARSE
    with pytest.raises(BuildError, match="sparse"):
        b"".join(clamp_mtimes(io.BytesIO(info.tobuf(tarfile.GNU_FORMAT)), 0))


def test_gnu_access_and_change_times_are_clamped():
    head = bytearray(tarfile.TarInfo("a").tobuf(tarfile.GNU_FORMAT))
    head[345:357] = head[357:369] = b"%011o\0" % 99
    (after,) = clamp_mtimes(io.BytesIO(bytes(head)), 5)
    assert after[345:369] == (b"%011o\0" % 5) * 2
