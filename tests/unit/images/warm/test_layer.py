"""Layers of caches: the same bytes from an engine's tar and from a folder, and nothing hostile passes."""

import gzip
import io
import os
import random
import socket
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
import zstandard
from cache_folders import read_folder
from images import digest, hardlink, link, special, tar

from imagematrix.errors import AuditError
from imagematrix.images.oci.compression import DEFAULT, Compression
from imagematrix.images.warm.layer import check_layer, write_layer
from imagematrix.images.warm.tools import ROOT
from imagematrix.images.warm.warm_file import read_archive, select_files

FUZZED = int(os.environ.get("IMAGEMATRIX_FUZZ", "3000"))
MAX_SIZE = 1 << 20
GZIP = Compression(type="gzip", level=6)
HOME = ROOT.lstrip("/")
SOURCE = "app_" + 40 * "a"
INDEX, DATA = f"numba/{SOURCE}/m.f-3.py311.nbi", f"numba/{SOURCE}/m.f-3.py311.1.nbc"
SECOND = f"numba/{SOURCE}/m.f-3.py311.2.nbc"
FOLDERS = (HOME, f"{HOME}/numba", f"{HOME}/numba/{SOURCE}")
TIME = 1_700_000_000


@pytest.fixture
def caches(tmp_path):
    """A folder as a warm-up leaves it: Numba's files, a lock, a temporary file, an empty folder, a socket."""
    folder = tmp_path / "warm"
    (folder / "numba" / SOURCE).mkdir(parents=True)
    (folder / "jax").mkdir()
    (folder / INDEX).write_bytes(b"index")
    (folder / DATA).write_bytes(b"data" * 1000)
    (folder / SECOND).hardlink_to(folder / DATA)
    (folder / DATA).chmod(0o700)
    (folder / "inductor" / "locks").mkdir(parents=True)
    (folder / "inductor" / "locks" / "c.lock").touch()
    (folder / "numba" / SOURCE / "m.tmp.0123").write_bytes(b"half")
    os.utime(folder / INDEX, ns=(0, TIME * 10**9 + 987_654_321))
    with socket.socket(socket.AF_UNIX) as listening:
        here = Path.cwd()
        os.chdir(folder / "numba")  # the path of a socket is short
        listening.bind("s")
        os.chdir(here)
    return folder


def as_engine(folder):
    """Return the tar of a folder as engines write it: with its name, owners and whole seconds."""
    buffer = io.BytesIO()

    def plain(info):
        info.mtime = int(info.mtime)
        info.uid, info.gid, info.uname = 1000, 1000, "user"
        return info

    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(folder, arcname="warm", filter=plain)
    return buffer.getvalue()


def written(files, compression=DEFAULT):
    buffer = io.BytesIO()
    layer = write_layer(files, buffer, compression)
    return layer, buffer.getvalue()


def checked(raw, max_size=MAX_SIZE):
    return check_layer(io.BytesIO(raw), digest(raw), max_size)


def unpacked(raw):
    return zstandard.ZstdDecompressor().decompressobj().decompress(raw)


@pytest.mark.parametrize("compression", [DEFAULT, GZIP], ids=str)
def test_a_tar_and_a_folder_give_the_same_layer(caches, compression):
    layer, raw = written(select_files(read_folder(caches)), compression)
    with read_archive(io.BytesIO(as_engine(caches)), MAX_SIZE) as files:
        assert written(select_files(files), compression) == (layer, raw)
    assert layer.paths == tuple(f"{ROOT}/{path}" for path in (DATA, SECOND, INDEX))
    assert layer.tools == ("numba",)
    assert layer.unpacked == 4005
    assert (layer.digest, layer.size) == (digest(raw), len(raw))
    assert checked(raw) == layer


def test_a_layer_is_clean(caches):
    _, raw = written(select_files(read_folder(caches)))
    with tarfile.open(fileobj=io.BytesIO(unpacked(raw))) as archive:
        members = archive.getmembers()
    assert [member.name for member in members] == [*FOLDERS, *(f"{HOME}/{n}" for n in (DATA, SECOND, INDEX))]
    assert {(member.uid, member.gid, member.uname) for member in members} == {(0, 0, "")}
    assert [member.mode for member in members] == [0o777] * 3 + [0o755, 0o755, 0o644]
    assert members[4].islnk()
    assert members[4].linkname == f"{HOME}/{DATA}"
    assert members[5].mtime == TIME


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, whose files another user replaces")
def test_another_user_replaces_files_of_the_layer_as_numba_does(caches, tmp_path):
    _, raw = written(select_files(read_folder(caches)))
    subprocess.run(["tar", "-xp"], cwd=tmp_path, input=unpacked(raw), check=True)
    index = tmp_path / HOME / INDEX
    rename = ["sh", "-c", 'touch new && mv -fT new "$0"', index.name]  # one rename, as os.replace
    subprocess.run(rename, cwd=index.parent, user=1000, group=1000, extra_groups=[], check=True)
    assert index.stat().st_uid == 1000


def test_only_what_has_changed_is_kept(caches):
    files = select_files(read_folder(caches), {f"{ROOT}/{SECOND}"})
    assert [file.path for file in files] == [*(f"/{folder}" for folder in FOLDERS), f"{ROOT}/{SECOND}"]
    layer, _ = written(files)
    assert layer.unpacked == 4000  # also where the other name of the file had come first


def test_a_file_that_no_tool_writes_is_named(caches):
    (caches / "numba" / "notes.txt").touch()
    with pytest.raises(AuditError, match=f"no tool of the table writes '{ROOT}/numba/notes.txt'") as error:
        select_files(read_folder(caches))
    assert error.value.remedy


@pytest.mark.parametrize("target", ["/etc/passwd", "../../../../../etc", "m/../../../../../etc", "up/.."])
def test_a_link_that_leaves_the_folder_is_named(caches, target):
    (caches / "numba" / SOURCE / "l.f-1.py311.nbi").symlink_to(target)
    with pytest.raises(AuditError, match="which leads out of"):
        select_files(read_folder(caches))


def test_a_pipe_is_named(caches):
    os.mkfifo(caches / "numba" / SOURCE / "p.f-1.py311.nbi")
    with pytest.raises(AuditError, match="is a pipe"):
        select_files(read_folder(caches))


def test_a_file_that_shrinks_while_it_is_read_is_named(caches):
    files = select_files(read_folder(caches))
    (caches / DATA).write_bytes(b"less")
    with pytest.raises(AuditError, match="is shorter than 4000 bytes"):
        written(files)


def test_links_within_the_folder_are_kept(caches):
    (caches / "numba" / SOURCE / "l.f-1.py311.nbi").symlink_to("m.f-3.py311.nbi")
    (caches / "numba" / SOURCE / "k.f-1.py311.nbi").symlink_to(f"../../{INDEX}")
    (caches / "numba" / SOURCE / "j.f-1.py311.nbi").symlink_to(f"{ROOT}/{INDEX}")
    layer, raw = written(select_files(read_folder(caches)))
    assert checked(raw) == layer
    assert len(layer.paths) == 6


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (tar("other/x"), "is not in /var/cache/warm"),
        (tar("warm/../x"), "leads out"),
        (tar("warm/x")[:700] + b"x" * 2000, "cannot be read"),
        (tar(("warm/x", bytes(MAX_SIZE + 1))), "more than 1048576 bytes"),
    ],
)
def test_an_engines_tar_is_not_believed(raw, why):
    with pytest.raises(AuditError, match=why), read_archive(io.BytesIO(raw), MAX_SIZE):
        pass


def folders(*names):
    """Return the entries of folders as a layer has them."""
    entries = [special(name, tarfile.DIRTYPE) for name in names]
    for entry in entries:
        entry.mode = 0o777
    return entries


def entry(path=f"{HOME}/{INDEX}", **values):
    info = tarfile.TarInfo(path)
    for name, value in values.items():
        setattr(info, name, value)
    return info


def layered(*members, end=bytes(2 * tarfile.BLOCKSIZE)):
    """Return the tar of a layer, without the padding of tarfile."""
    return _unpadded(tar(*folders(*FOLDERS), *members), end)


def _unpadded(raw, end):
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        archive.getmembers()
        return raw[: archive.offset] + end


def in_format(tar_format, member):
    """Return a layer with one file, in a format of tar."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as archive:
        for info in (*folders(*FOLDERS), member):
            archive.addfile(info)
    return _unpadded(buffer.getvalue(), bytes(1024))


def in_pax(**values):
    """Return a layer whose file has an extended header with these values."""
    return in_format(tarfile.PAX_FORMAT, entry(pax_headers=values))


def named(length):
    """Return a file whose name has this length."""
    return entry(f"{HOME}/numba/{SOURCE}/{'m' * length}.py311.nbi")


HOSTILE = {
    "device": (layered(entry(type=tarfile.CHRTYPE)), "is a device"),
    "block": (layered(entry(type=tarfile.BLKTYPE)), "is a device"),
    "pipe": (layered(entry(type=tarfile.FIFOTYPE)), "is a pipe"),
    "unknown kind": (layered(entry(type=b"Z")), "extended header|no tar as|is of an unknown kind"),
    "contiguous": (layered(entry(type=tarfile.CONTTYPE)), "no tar as imagematrix writes it"),
    "old": (layered(entry(type=tarfile.AREGTYPE)), "no tar as imagematrix writes it"),
    "whiteout": (layered(f"{HOME}/numba/{SOURCE}/.wh.m.f-3.py311.nbi"), "removes something"),
    "opaque": (layered(f"{HOME}/numba/{SOURCE}/.wh..wh..opq"), "removes something"),
    "setuid": (layered(entry(mode=0o4755)), "has the mode 4755"),
    "setgid": (layered(entry(mode=0o2755)), "has the mode 2755"),
    "sticky file": (layered(entry(mode=0o1755)), "has the mode 1755"),
    "sticky folder": (
        _unpadded(tar(entry(HOME, type=tarfile.DIRTYPE, mode=0o1777)), bytes(1024)),
        "has the mode 1777",
    ),
    "writable": (layered(entry(mode=0o666)), "has the mode 666"),
    "unreadable": (layered(entry(mode=0o600)), "has the mode 600"),
    "folder's mode": (_unpadded(tar(special(HOME, tarfile.DIRTYPE)), bytes(1024)), "has the mode 644"),
    "owner": (layered(entry(uid=1000)), "belongs to 1000:0"),
    "group": (layered(entry(gid=5)), "belongs to 0:5"),
    "owner's name": (layered(entry(uname="eve")), "no tar as imagematrix writes it"),
    "xattr": (in_pax(**{"SCHILY.xattr.security.capability": "x"}), "has extended attributes"),
    "comment": (in_pax(comment="x"), "extended header that no file needs"),
    "another path": (in_pax(path=f"{HOME}/../../etc/cron.d/x"), "leads upwards"),
    "same path": (in_pax(path=f"{HOME}/{INDEX}"), "extended header that no file needs"),
    "another size": (in_pax(size="512"), "cannot be read|extended header"),
    "sparse in pax": (
        in_pax(**{"GNU.sparse.major": "0", "GNU.sparse.map": "0,0", "GNU.sparse.size": "99999999"}),
        "is a sparse file",
    ),
    "gnu long name": (in_format(tarfile.GNU_FORMAT, named(60)), "no tar as imagematrix writes it"),
    "sparse file": (layered(entry(type=tarfile.GNUTYPE_SPARSE)), "is a sparse file|cannot be read"),
    "global header": (
        _unpadded(tar(entry("x", type=tarfile.XGLTYPE), *folders(HOME)), bytes(1024)),
        "cannot be read|extended header",
    ),
    "fraction": (in_pax(mtime="1700000000.5"), "no whole second"),
    "negative time": (in_pax(mtime="-1"), "no whole second"),
    "absolute": (layered(f"/{HOME}/{INDEX}"), "is absolute"),
    "upwards": (layered(f"{HOME}/numba/../numba/{SOURCE}/m.f-3.py311.nbi"), "leads upwards"),
    "dotted": (layered(f"./{HOME}/{INDEX}"), "is absolute, leads upwards"),
    "outside": (layered("etc/ld.so.preload"), "is outside /var/cache/warm"),
    "beside": (layered("var/cache/warmer"), "is outside /var/cache/warm"),
    "above": (_unpadded(tar(*folders("var/cache")), bytes(1024)), "is outside /var/cache/warm"),
    "unknown file": (layered(f"{HOME}/numba/{SOURCE}/run.sh"), "no file that a tool of the table keeps"),
    "lock": (layered(f"{HOME}/numba/{SOURCE}/x.lock"), "no file that a tool of the table keeps"),
    "twice": (layered(entry(), entry()), "is there twice"),
    "unsorted": (layered(entry(), f"{HOME}/{DATA}"), "is not in order"),
    "no folder": (_unpadded(tar(*folders(HOME), entry()), bytes(1024)), "is in no folder of the layer"),
    "no file": (layered(), "it has no file"),
    "through a link": (
        _unpadded(tar(*folders(*FOLDERS[:2]), link(f"{HOME}/numba/{SOURCE}", "/etc"), entry()), bytes(1024)),
        "no file that a tool of the table keeps",
    ),
    "through a file": (
        layered(entry(f"{HOME}/{DATA}"), entry(f"{HOME}/{DATA}/m.nbi")),
        "is in no folder of the layer",
    ),
    "link out": (layered(link(f"{HOME}/{INDEX}", "/etc/passwd")), "leads out of"),
    "link up": (layered(link(f"{HOME}/{INDEX}", "../../../../../etc/passwd")), "leads out of"),
    "link through": (layered(link(f"{HOME}/{INDEX}", "a/../../../../../x")), "leads out of"),
    "hard link out": (layered(hardlink(f"{HOME}/{INDEX}", "etc/passwd")), "no file of the layer"),
    "hard link ahead": (
        layered(hardlink(f"{HOME}/{DATA}", f"{HOME}/{INDEX}"), entry()),
        "no file of the layer",
    ),
    "hard link to a folder": (layered(hardlink(f"{HOME}/{INDEX}", HOME)), "no file of the layer"),
    "long name": (
        layered(f"{HOME}/vllm/torch_compile_cache/{'0' * 10}/rank_0_0/artifact_shape_{'.tmp' * 61}/x"),
        "a name of more than 255 characters",
    ),
    "control character": (layered(f"{HOME}/numba/{SOURCE}/m\x1b[2J.py311.nbi"), "cannot be shown"),
    "two lines": (layered(f"{HOME}/numba/{SOURCE}/m\nx.py311.nbi"), "cannot be shown"),
    "hidden in the end": (layered(entry(), end=bytes(1024) + b"payload"), "something follows its end"),
    "zeros at the end": (layered(entry(), end=bytes(10240)), "something follows its end"),
    "no end": (layered(entry(), end=b""), "no tar as imagematrix writes it|cannot be read"),
    "padding": (
        layered((f"{HOME}/{INDEX}", b"x")).replace(b"x" + bytes(511), b"x" + b"y" * 511),
        "no tar as imagematrix writes it",
    ),
    "too large": (layered((f"{HOME}/{INDEX}", bytes(MAX_SIZE + 1))), "its files have more than 1048576"),
    "no tar": (b"x" * 5000, "cannot be read"),
    "empty": (b"", "cannot be read"),
}


@pytest.mark.parametrize(("raw", "why"), HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress], ids=["gzip", "zstd"])
def test_hostile_layers_are_refused(raw, why, pack):
    with pytest.raises(AuditError, match=why) as error:
        checked(pack(raw))
    assert "\n" not in str(error.value)
    assert str(error.value).isprintable()


def test_the_layer_that_the_hostile_ones_are_made_of_is_allowed():
    other_name = hardlink(f"{HOME}/numba/{SOURCE}/n.f-3.py311.nbi", f"{HOME}/{DATA}")
    raw = layered((f"{HOME}/{DATA}", b"x"), entry(), other_name)
    assert len(checked(gzip.compress(raw)).paths) == 3
    assert checked(gzip.compress(in_format(tarfile.PAX_FORMAT, named(200)))).tools == ("numba",)


def test_another_content_than_the_digest_says_is_refused():
    raw = gzip.compress(layered(entry()))
    with pytest.raises(AuditError, match="does not match its digest"):
        check_layer(io.BytesIO(raw), digest(b""), MAX_SIZE)


def test_a_bomb_is_not_unpacked():
    zeros = gzip.compress(layered(entry(), end=bytes(1024) + bytes(1 << 28)))
    start = time.process_time()
    with pytest.raises(AuditError, match="something follows its end"):
        checked(zeros)
    assert time.process_time() - start < 1


class Endless:
    """A blob that never ends: it begins with `head`, and repeats `piece`."""

    def __init__(self, head, piece):
        self._ahead = head
        self._piece = piece

    def read(self, size=-1, /):
        self._ahead = self._ahead or self._piece
        piece, self._ahead = self._ahead[:size], self._ahead[size:]
        return piece


def test_a_blob_without_an_end_is_given_up(monkeypatch):
    monkeypatch.setattr("imagematrix.images.warm.layer.HEADERS", 1 << 20)
    raw = zstandard.ZstdCompressor().compress(layered(entry()))
    skippable = b"\x50\x2a\x4d\x18" + (1 << 20).to_bytes(4, "little") + bytes(1 << 20)
    with pytest.raises(AuditError, match="it has more than 2097152 bytes"):
        check_layer(Endless(raw, skippable), digest(raw), MAX_SIZE)


def test_too_many_entries_are_refused(monkeypatch):
    monkeypatch.setattr("imagematrix.images.warm.layer.MOST", 5)
    files = [entry(f"{HOME}/numba/{SOURCE}/m{number}.py311.nbi") for number in range(3)]
    with pytest.raises(AuditError, match="more than 5 entries"):
        checked(gzip.compress(layered(*files)))


def test_long_paths_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr("imagematrix.images.warm.layer.HEADERS", 7000)
    members = [named(length) for length in range(200, 204)]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info in (*folders(*FOLDERS), *members):
            archive.addfile(info)
    with pytest.raises(AuditError, match="its entries take more than 7000 bytes besides their contents"):
        checked(gzip.compress(_unpadded(buffer.getvalue(), bytes(1024))))


@pytest.mark.fuzz
def test_damaged_layers_are_as_written_or_refused(caches):
    layer, raw = written(select_files(read_folder(caches)))
    whole = unpacked(raw)
    chance = random.Random(53)  # noqa: S311 - reproducible
    outcomes = {True: 0, False: 0}
    numbers = [0, 1, 32, 48, 49, 50, 53, 55, 65, 120, 255]
    for _ in range(FUZZED):
        spoilt = bytearray(whole)
        for _ in range(chance.randint(0, 3)):
            spoilt[chance.randrange(len(whole))] = chance.choice(numbers)
        if chance.random() < 0.5:  # with a right checksum
            at = chance.randrange(len(whole) // 512) * 512
            block = spoilt[at : at + 512]
            block[148:156] = b" " * 8
            spoilt[at + 148 : at + 156] = b"%06o\0 " % sum(block)
        damaged = bytes(spoilt)[: chance.choice([len(whole)] * 4 + [chance.randrange(len(whole))])]
        try:
            found = checked(gzip.compress(damaged, 1))
        except AuditError:
            outcomes[False] += 1
            continue
        outcomes[True] += 1
        # What passes is what would have been written: nothing but contents and allowed values differ.
        assert found.diff_id == digest(damaged)
        assert len(damaged) == len(whole)
        assert found.tools == layer.tools
        assert found.unpacked == layer.unpacked
    assert min(outcomes.values()) > FUZZED / 20
