"""Trimming single files: real fatbins, libraries, static libraries, and damaged ones."""

import ctypes
import hashlib
import io
import os
import random
import struct
import subprocess
from pathlib import Path

import pytest
from fatbins import LTO, PTX, SPECIFIC, entry, fat, library

from imagematrix.audit.binaries.window import Window
from imagematrix.build.trim import edits
from imagematrix.build.trim.examination import Amount, TrimStatus, examine_file
from imagematrix.build.trim.rules import VERSION, Rules
from imagematrix.hardware.vendors import device_code

DATA = Path(__file__).parents[2] / "audit" / "data"
FUZZED = int(os.environ.get("IMAGEMATRIX_FUZZ", "5000"))
HOPPER = Rules(computes=("9.0",))
A, B, C = bytes(range(64)), b"b" * 40, b"c" * 128


def examined(raw, rules=HOPPER, path="lib.so"):
    return examine_file(path, Window(io.BytesIO(raw), 0, len(raw)), rules)


def trimmed(raw, rules=HOPPER, path="lib.so"):
    """Return the bytes of a file after trimming."""
    result = examined(raw, rules, path)
    window = Window(io.BytesIO(raw), 0, len(raw))
    pieces = edits.apply_edits(window, result.edits if result else ())
    return b"".join(bytes(piece) for piece in pieces)  # a number stands for zeros


def test_kept_code_moves_to_the_front_and_the_rest_is_zeroed():
    raw = fat(entry(target=80, payload=A), entry(target=90, payload=B), entry(PTX, 90, C), entry(LTO, 70, A))
    staying = fat(entry(target=90, payload=B), entry(LTO, 70, A))
    assert trimmed(raw) == staying.ljust(len(raw), b"\0")
    result = examined(raw)
    assert result.status is TrimStatus.TRIMMED
    assert result.kept == (Amount("cubin", "90", 1, 104), Amount("other", "70", 1, 128))
    assert result.dropped == (Amount("cubin", "80", 1, 128), Amount("ptx", "90", 1, 192))
    assert result.removed_size == 128 + 192


def test_removed_code_can_be_read():
    raw = fat(entry(target=80, payload=A), entry(target=90, payload=B), entry(PTX, 90, C))
    window = Window(io.BytesIO(raw), 0, len(raw))
    removed = b"".join(edits.read_removed_bytes(window, examined(raw).edits))
    assert removed == entry(target=80, payload=A) + entry(PTX, 90, C)


def test_each_fatbin_is_trimmed_by_itself():
    one = fat(entry(target=80, payload=A), entry(target=90, payload=B))
    ptx_only = fat(entry(target=80, payload=A), entry(PTX, 80, B))
    dead = fat(entry(target=70, payload=C))
    raw = one + ptx_only + dead + one
    short, text = fat(entry(target=90, payload=B)), fat(entry(PTX, 80, B))
    expected = short.ljust(len(one), b"\0") + text.ljust(len(ptx_only), b"\0")
    assert trimmed(raw) == expected + dead + short.ljust(len(one), b"\0")
    result = examined(raw)
    assert (result.containers, result.dead, result.missing) == (4, 1, ())
    emptied = trimmed(raw, Rules(computes=("9.0",), drop_dead=True))
    assert emptied == expected + fat().ljust(len(dead), b"\0") + short.ljust(len(one), b"\0")


@pytest.mark.parametrize("drop_dead", [False, True])
def test_file_without_runnable_code_is_unchanged(drop_dead):
    raw = fat(entry(target=70, payload=A), entry(PTX, 100, A)) * 2
    rules = Rules(computes=("7.5", "9.0"), drop_dead=drop_dead)
    assert examined(raw).status is TrimStatus.UNSUPPORTED
    assert examined(raw).missing == ("9.0",)
    assert trimmed(raw) == raw
    assert examined(raw, rules).missing == ("9.0",)


def test_intermediate_code_supports_every_gpu():
    result = examined(fat(entry(LTO, 70, A)))
    assert (result.status, result.missing, result.dead) == (TrimStatus.UNCHANGED, (), 0)


@pytest.mark.parametrize("name", ["zstd.fatbin", "lz4.fatbin"])
@pytest.mark.parametrize(
    "compute", [word for word in device_code.list_capability_words() if word[-1].isdigit()]
)
def test_trimming_real_fatbins_is_idempotent(name, compute):
    raw = (DATA / name).read_bytes()
    rules = Rules(computes=(compute,))
    once = trimmed(raw, rules)
    assert len(once) == len(raw)
    assert trimmed(once, rules) == once
    _check(raw, once, examined(raw, rules), compute)


def test_code_that_is_compressed_together_stays_together():
    raw = (DATA / "concatenated.fatbin").read_bytes()
    result = examined(raw)
    assert [(amount.kind, amount.target) for amount in result.kept] == [("cubin", "80"), ("cubin", "90a")]
    assert result.dropped == (
        *(Amount("cubin", target, 1, size) for target, size in (("100a", 716), ("100f", 717), ("120a", 719))),
        *(Amount("ptx", target, 1, size) for target, size in (("90", 252), ("100f", 252))),
    )
    again = examined(trimmed(raw))
    assert (again.status, again.kept) == (TrimStatus.UNCHANGED, result.kept)


# If one of these hashes changes, raise VERSION in the rules.
GOLDEN = {
    ("zstd.fatbin", "9.0", ()): "7021fe6ba0756baa",
    ("zstd.fatbin", "10.0", ()): "0f4081eee72c6d5b",
    ("zstd.fatbin", "8.6", ("keep_ptx",)): "96af576a3531c943",
    ("zstd.fatbin", "12.0", ()): "6f1f0bee59dd016c",
    ("lz4.fatbin", "8.0", ()): "773f595f68366e60",
    ("lz4.fatbin", "9.0", ()): "e66a7b6a3222bc21",
    ("concatenated.fatbin", "9.0", ()): "aa5481765af00990",
}


@pytest.mark.parametrize("case", GOLDEN)
def test_rules_version_pins_the_output_bytes(case):
    name, compute, options = case
    rules = Rules(computes=(compute,), **dict.fromkeys(options, True))
    written = trimmed((DATA / name).read_bytes(), rules)
    assert (VERSION, hashlib.sha256(written).hexdigest()[:16]) == ("4", GOLDEN[case])


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A library with three fatbins."""
    fatbins = (
        fat(entry(target=80, payload=A), entry(target=90, payload=B)),
        fat(entry(target=90, payload=B), entry(target=90, payload=C, suffix=SPECIFIC), entry(PTX, 90, C)),
        fat(entry(target=70, payload=A)),
    )
    return library(tmp_path_factory.mktemp("built") / "libx.so", *fatbins)


def test_trimmed_library_keeps_its_structure_and_loads(built, tmp_path):
    path = tmp_path / "libx.so"
    raw = built.read_bytes()
    path.write_bytes(trimmed(raw))
    assert examined(raw).removed_size == (64 + 64) + (64 + 128)
    result = [
        subprocess.run(
            ["readelf", "-SlW", one.name], cwd=one.parent, capture_output=True, text=True, check=True
        )
        for one in (built, path)
    ]
    assert result[0].stdout == result[1].stdout
    assert ctypes.CDLL(str(path)).answer() == 42


def static_library(path):
    """Make a static library of two objects, each with a fatbin, in an empty folder."""
    folder = path.parent
    (folder / "raw").write_bytes(fat(entry(target=80, payload=A), entry(target=90, payload=B)))
    for name in ("one", "other"):
        (folder / f"{name}.c").write_text(f"int {name}(void) {{ return 1; }}\n")
        subprocess.run(["gcc", "-c", f"{name}.c", "-o", f"{name}.o"], cwd=folder, check=True)
        section = "--add-section=__nv_relfatbin=raw"
        subprocess.run(["objcopy", section, f"{name}.o"], cwd=folder, check=True)
    subprocess.run(["ar", "rc", path, "one.o", "other.o"], cwd=folder, check=True)
    return path.read_bytes()


def test_static_library_is_trimmed(tmp_path):
    path = tmp_path / "libx.a"
    raw = static_library(path)
    after = trimmed(raw, path="libx.a")
    assert examined(raw).containers == 2
    assert after.count(fat(entry(target=90, payload=B))) == 2
    assert after.count(A) == 0
    path.write_bytes(after)
    subprocess.run(["ar", "t", path], check=True, capture_output=True)


def test_static_library_of_which_members_cannot_be_found_is_damaged(tmp_path):
    raw = static_library(tmp_path / "libx.a")
    second = raw.index(b"other.o/") + 58  # the end of its member's header
    without_header = raw[:second] + b"\0\0" + raw[second + 2 :]
    for damaged in (raw[:-100], raw[: second - 30], without_header, raw + b"more"):
        assert examined(damaged).status is TrimStatus.DAMAGED
        assert trimmed(damaged) == damaged


@pytest.mark.parametrize(
    ("path", "soname"),
    [
        ("libcublas.so.12", None),
        ("libcudnn_ops-0a1b2c3d.so.9", None),
        ("libother.so", "libnccl.so.2"),
        ("libcuda.so.550.163.01", None),
        ("libcutensornet.so.2", None),
        ("libcustatevec.so.1", None),
        ("libcufftMp.so.11", None),
        ("libcublasmp.so.0", None),
    ],
)
def test_nvidia_libraries_are_skipped(tmp_path, path, soname):
    file = library(tmp_path / "it.so", fat(entry(target=80), entry(target=90)), soname=soname)
    raw = file.read_bytes()
    assert examined(raw, path=path).status is TrimStatus.NVIDIA
    assert trimmed(raw, path=path) == raw
    assert examined(raw, Rules(computes=("9.0",), nvidia=True), path=path).status is TrimStatus.TRIMMED


@pytest.mark.parametrize("drop_dead", [True, False])
def test_nvidia_library_with_its_code_elsewhere_is_not_called_unsupported(tmp_path, drop_dead):
    """The fatbin of cuFFT has an empty cubin for 5.2."""
    raw = library(tmp_path / "it.so", fat(entry(target=52))).read_bytes()
    rules = Rules(computes=("9.0",), nvidia=True, drop_dead=drop_dead)
    result = examined(raw, rules, path="libcufft.so.11")
    assert (result.status, result.missing, result.edits) == (TrimStatus.NVIDIA, (), ())
    assert examined(raw, rules, path="libother.so").status is TrimStatus.UNSUPPORTED


def test_nvidia_static_library_is_skipped():
    assert examined(b"!<arch>\n", path="libcublas_static.a") is None


@pytest.mark.parametrize("raw", [b"\x7fELF", b"\x7fELF" + bytes(100), b"!<arch>\n", b"", b"text"])
def test_files_without_device_code_are_skipped(raw):
    assert examined(raw) is None


GOOD = fat(entry(target=80, payload=A), entry(target=90, payload=B))


@pytest.mark.parametrize(
    "raw",
    [
        GOOD + fat(entry(target=80, payload=A))[:-8],
        GOOD + fat(entry(target=80, payload=A[:-4])),
        GOOD + fat(entry(target=0)),
        GOOD + struct.pack("<IHHQ", 0xBA55ED50, 2, 16, 0),
        GOOD + struct.pack("<IHHQ", 0xBA55ED50, 1, 24, 0) + bytes(8),
        GOOD + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 8) + bytes(8),
        GOOD + b"\x50\xed\x55\xba",
    ],
)
def test_damaged_file_is_unchanged(raw):
    assert examined(raw).status is TrimStatus.DAMAGED
    assert trimmed(raw) == raw


def test_file_with_too_many_fatbins_is_damaged(monkeypatch):
    monkeypatch.setattr("imagematrix.build.trim.examination.MOST", 5)
    assert examined(GOOD).status is TrimStatus.TRIMMED
    assert examined(GOOD * 2).status is TrimStatus.DAMAGED


def test_overlapping_sections_are_not_trimmed(built):
    raw = bytearray(built.read_bytes())
    start = struct.unpack_from("<Q", raw, 40)[0]
    count = struct.unpack_from("<H", raw, 60)[0]
    assert examined(bytes(raw)).status is TrimStatus.TRIMMED
    headers = [start + 64 * number for number in range(count)]
    code = raw.find(b"\x50\xed\x55\xba")
    (section,) = (at for at in headers if struct.unpack_from("<Q", raw, at + 24)[0] == code)
    other = next(at for at in headers[1:] if struct.unpack_from("<I", raw, at + 4)[0] == 1)
    struct.pack_into("<QQ", raw, other + 24, code + 16, 32)
    assert examined(bytes(raw)).status is TrimStatus.DAMAGED
    struct.pack_into("<QQ", raw, other + 24, code - 16, 32)
    assert examined(bytes(raw)).status is TrimStatus.DAMAGED
    struct.pack_into("<H", raw, 60, 0xFFF0)
    assert section
    assert examined(bytes(raw)).status is TrimStatus.DAMAGED  # the section headers are beyond the end


def test_library_that_was_cut_off_is_damaged_if_it_has_device_code(built, tmp_path):
    raw = built.read_bytes()
    assert examined(raw[:-10]).status is TrimStatus.DAMAGED  # at its end are the headers of the sections
    assert trimmed(raw[:-10]) == raw[:-10]
    assert examined(library(tmp_path / "it.so").read_bytes()[:-10]) is None


def test_damaged_library_of_nvidia_is_unchanged(built):
    assert examined(built.read_bytes()[:-10], path="libcublas.so.12").status is TrimStatus.DAMAGED


@pytest.mark.fuzz
def test_damaged_files_are_trimmed_correctly_or_not_at_all(built):
    chance = random.Random(20)  # noqa: S311 - reproducible
    whole = built.read_bytes()
    start = whole.find(b"\x50\xed\x55\xba") - 16
    table = struct.unpack_from("<Q", whole, 40)[0]
    places = [*range(start, start + 1200), *range(table, len(whole)), *range(64)]
    numbers = [0, 1, 2, 8, 16, 24, 64, 80, 90, 255]
    outcomes = dict.fromkeys([None, *TrimStatus], 0)
    for _ in range(FUZZED):
        spoilt = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            spoilt[chance.choice(places)] = chance.choice([*numbers, chance.randrange(256)])
        raw = bytes(spoilt)[: chance.choice([len(whole)] * 9 + [chance.randrange(len(whole))])]
        result = examined(raw)
        outcomes[result and result.status] += 1
        if result and result.edits:
            _check(raw, trimmed(raw), result, "9.0")
    assert outcomes[TrimStatus.TRIMMED] > FUZZED / 10
    assert outcomes[TrimStatus.DAMAGED] > FUZZED / 10
    assert outcomes[None] > 0


def _check(before, after, result, compute):
    """Check that only whole fatbins of a file were changed, and that they contain the expected entries."""
    assert len(after) == len(before)
    at = 0
    for edit in result.edits:
        assert before[at : edit.start] == after[at : edit.start]
        old, new = _parsed(before, edit.start), _parsed(after, edit.start)
        assert edit.end - edit.start == 16 + sum(map(len, old))
        cubins = [one for one in old if one[0] == 2 and device_code.can_run_cubin(_target(one), compute)]
        texts = [one for one in old if one[0] == 1 and device_code.can_compile_ptx(_target(one), compute)]
        assert cubins or texts
        staying = cubins or texts
        assert new == [one for one in old if one in staying or one[0] not in (1, 2)]
        end = edit.start + 16 + sum(map(len, new))
        assert after[end : edit.end] == bytes(edit.end - end)
        at = edit.end
    assert before[at:] == after[at:]
    assert not examined(after, Rules(computes=(compute,))).edits


def _parsed(raw, at):
    magic, version, header, size = struct.unpack_from("<IHHQ", raw, at)
    assert (magic, version, header) == (0xBA55ED50, 1, 16)
    end = at + 16 + size
    at += 16
    entries = []
    while at < end:
        own, payload = struct.unpack_from("<IQ", raw, at + 4)
        entries.append(raw[at : at + own + payload])
        at += own + payload
    assert at == end
    return entries


def _target(raw):
    number, flags = struct.unpack_from("<I8xQ", raw, 28)
    return f"{number}{'a' if flags & 1 << 20 else 'f' if flags & 1 << 21 else ''}"
