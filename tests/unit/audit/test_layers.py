"""What layers hold and hide, read from their bytes."""

import gzip
import io
import struct
import tarfile
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from imagematrix.audit.layers import Contents, Layer, contents, read
from imagematrix.errors import AuditError

EM_CUDA, EM_X86_64 = 190, 62


def elf32(target):
    """Return the header of device code for machines of 32 bits, which toolkits up to 6.5 made."""
    ident = b"\x7fELF" + bytes([1, 1, 1, 51, 7]) + bytes(7)
    head = struct.pack("<16sHHIIIIIHHHHHH", ident, 2, EM_CUDA, 1, 0, 0, 0, target, 52, 32, 0, 40, 0, 0)
    return head + bytes(12)


def elf(target=89, abi=7, machine=EM_CUDA):
    """Return the header of device code: from ABI 8 on the target is in the second byte of the flags."""
    flags = target << 8 | 0x04 if abi >= 8 else target << 16 | 0x0500 | target
    ident = b"\x7fELF" + bytes([2, 1, 1, 51, abi]) + bytes(7)
    return struct.pack("<16sHHIQQQIHHHHHH", ident, 2, machine, 1, 0, 0, 0, flags, 64, 56, 0, 64, 0, 0)


def tar(*members):
    """Return a layer: each member a path, or a path with its bytes, or a TarInfo."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            path, data = (member, b"") if isinstance(member, str) else member
            info = tarfile.TarInfo(path)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def special(path, kind, target=""):
    info = tarfile.TarInfo(path)
    info.type, info.linkname = kind, target
    return info


@pytest.fixture
def layer(tmp_path):
    """Call it with members to get the Layer they make."""

    def call(*members, raw=None):
        path = tmp_path / "layer"
        path.write_bytes(tar(*members) if raw is None else raw)
        return read(path)

    return call


@pytest.mark.parametrize(
    ("path", "version"),
    [
        ("usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01", "550.163.01"),
        ("./usr/local/cuda/compat/libcuda.so.580.65.06", "580.65.06"),
        ("/libcuda.so.470.82", "470.82"),
        ("usr/lib/libcuda.so.1", None),
        ("usr/lib/libcuda.so", None),
        ("usr/lib/libcudart.so.12.4.127", None),
        ("usr/lib/libcuda.so.550.163.01.bak", None),
    ],
)
def test_a_user_mode_driver_is_known_by_its_name(layer, path, version):
    found = layer(path).drivers
    assert found == ({f"/{path.lstrip('./')}": version} if version else {})


def test_links_and_folders_are_no_drivers(layer):
    name = "usr/lib/libcuda.so.550.163.01"
    for kind in (tarfile.SYMTYPE, tarfile.DIRTYPE):
        assert layer(special(name, kind, "elsewhere")).drivers == {}


@pytest.mark.parametrize(
    ("code", "target"),
    [
        (elf(89), "89"),
        (elf(120), "120"),
        (elf(90, abi=8), "90"),
        (elf(103, abi=8), "103"),
        (elf32(35), "35"),
        (elf(0), None),
        (elf(machine=EM_X86_64), None),
        (elf()[:30], None),
        (elf()[:4], None),
        (b"", None),
        (b"\x7fELX" + elf()[4:], None),
        (b"\x7fELF" + b"\xff" * 14 + struct.pack("<H", EM_CUDA) + b"\xff" * 44, None),
    ],
)
def test_device_code_is_known_by_its_header(layer, code, target):
    assert layer(("kernel", code)).cubins == ({"/kernel": target} if target else {})


def test_a_layer_may_be_compressed(layer):
    assert layer(raw=gzip.compress(tar(("k", elf())))).cubins == {"/k": "89"}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"no tar at all" * 100,
        tar(("k", elf() * 100))[:3000],
        gzip.compress(tar(("k", elf() * 100)))[:-20],
        gzip.compress(tar(("k", elf())))[:60] + b"\xff" * 60,
    ],
    ids=["empty", "no-tar", "cut-tar", "cut-gzip", "broken-gzip"],
)
def test_a_damaged_layer_cannot_be_audited(layer, raw):
    with pytest.raises(AuditError, match="the layer layer can't be read"):
        layer(raw=raw)


def test_a_layer_that_is_gone(tmp_path):
    with pytest.raises(AuditError, match="No such file"):
        read(tmp_path / "layer")


WHOLE = tar("usr/lib/libcuda.so.550.163.01", "usr/.wh.bin", ("k", elf(89)), ("k8", elf(90, abi=8)))


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_no_damage_ends_in_another_error(tmp_path, changes):
    raw = bytearray(WHOLE)
    for position, value in changes:
        raw[position] = value
    (tmp_path / "layer").write_bytes(raw)
    try:
        assert isinstance(read(tmp_path / "layer"), Layer)
    except AuditError as error:
        assert "can't be read" in str(error)  # noqa: PT017 - much damage does no harm


LIBCUDA = "/usr/lib/libcuda.so.550.163.01"


@pytest.mark.parametrize(
    ("upper", "left"),
    [
        ([], {LIBCUDA: "550.163.01"}),
        (["usr/lib/other"], {LIBCUDA: "550.163.01"}),
        (["usr/lib/.wh.libcuda.so.550.163.01"], {}),
        (["usr/lib/.wh.libcuda.so.550"], {LIBCUDA: "550.163.01"}),
        (["usr/.wh.lib"], {}),
        ([".wh.usr"], {}),
        ([".wh.us"], {LIBCUDA: "550.163.01"}),
        (["usr/lib/.wh..wh..opq"], {}),
        (["usr/.wh..wh..opq"], {}),
        ([".wh..wh..opq"], {}),
        (["usr/lib/x/.wh..wh..opq"], {LIBCUDA: "550.163.01"}),
        (["/usr/.wh.lib"], {}),
        (["//usr/.wh.lib"], {}),
        (["./usr/../usr/.wh.lib"], {}),
        # A layer takes away what is below it, never what it brings itself.
        (["usr/.wh.lib", "usr/lib/libcuda.so.535.261.03"], {"/usr/lib/libcuda.so.535.261.03": "535.261.03"}),
        (["usr/lib/libcuda.so.535.261.03", "usr/.wh.lib"], {"/usr/lib/libcuda.so.535.261.03": "535.261.03"}),
        ([f"opt{LIBCUDA}"], {LIBCUDA: "550.163.01", f"/opt{LIBCUDA}": "550.163.01"}),
    ],
)
def test_what_is_left_to_see(layer, upper, left):
    assert contents([layer(f".{LIBCUDA}"), layer(*upper)]).drivers == left


SYM, HARD, FOLDER = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


@pytest.mark.parametrize(
    ("upper", "left"),
    [
        # What takes the place of a driver hides it, of whatever kind it is.
        ([special(LIBCUDA, SYM, "libcuda.so.535.261.03")], []),
        ([special(LIBCUDA, FOLDER)], []),
        ([special(LIBCUDA, tarfile.FIFOTYPE)], []),
        ([special("usr/lib", SYM, "lib64"), "usr/lib64/x"], []),
        (["usr"], []),
        ([special("usr/lib", FOLDER)], [LIBCUDA]),
        # Another name of the same file is no second driver, and one of another place is.
        ([special("usr/lib/libcuda.so.1", SYM, "libcuda.so.550.163.01")], [LIBCUDA]),
        ([special("opt/libcuda.so.550.163.01", SYM, f"..{LIBCUDA}")], [LIBCUDA]),
        (
            [special("opt/libcuda.so.550.163.01", HARD, f".{LIBCUDA}")],
            [LIBCUDA, "/opt/libcuda.so.550.163.01"],
        ),
        # A link makes a driver of a file with any name, where that is there.
        (
            [special("opt/libcuda.so.535.261.03", SYM, "blob"), "opt/blob"],
            [LIBCUDA, "/opt/libcuda.so.535.261.03"],
        ),
        ([special("opt/libcuda.so.535.261.03", SYM, "blob")], [LIBCUDA]),
        ([special("opt/libcuda.so.535.261.03", SYM, "blob"), special("opt/blob", FOLDER)], [LIBCUDA]),
        ([special("opt/libcuda.so.535.261.03", SYM, "libcuda.so.535.261.03")], [LIBCUDA]),
        (
            [
                special("lib", SYM, "usr/lib"),
                special("opt/libcuda.so.550.163.01", SYM, "/lib/sub/../libcuda.so.550.163.01"),
            ],
            [LIBCUDA],
        ),
    ],
)
def test_drivers_are_seen_as_a_container_sees_them(layer, upper, left):
    assert sorted(contents([layer(f".{LIBCUDA}"), layer(*upper)]).drivers) == sorted(left)


def test_a_file_that_is_hidden_makes_no_driver_of_a_link(layer):
    lower = layer("opt/blob", special("opt/libcuda.so.535.261.03", SYM, "blob"))
    assert contents([lower, layer("usr/x")]).drivers == {"/opt/libcuda.so.535.261.03": "535.261.03"}
    assert contents([lower, layer("opt/.wh.blob")]).drivers == {}


def test_the_last_entry_of_a_path_counts(layer):
    twice = layer(f".{LIBCUDA}", special(f".{LIBCUDA}", SYM, "nowhere"), special("opt", FOLDER), "opt")
    assert contents([twice]).drivers == {}
    assert contents([layer("opt/libcuda.so.535.1"), twice]).drivers == {}


def test_device_code_with_two_names_has_both(layer):
    both = contents([layer(("a", elf(80)), special("b", HARD, "a")), layer(".wh.a")])
    assert both.cubins == {"/b": "80"}
    lower, upper = layer(("a", elf(80))), layer(special("b", HARD, "/a"))
    assert contents([lower, upper]).cubins == {"/a": "80", "/b": "80"}


def test_device_code_is_hidden_and_replaced_like_any_file(layer):
    lower, upper = layer(("a", elf(80)), ("b", elf(80))), layer(".wh.a", ("b", elf(90)))
    assert contents([lower, upper]) == Contents(drivers={}, cubins={"/b": "90"})
    assert contents([upper, lower]).cubins == {"/a": "80", "/b": "80"}
    assert contents([]) == Contents(drivers={}, cubins={})


def test_programs_are_told_by_their_machine(layer):
    def program(path, mode):
        info = tarfile.TarInfo(path)
        info.mode = mode
        return info

    data = elf(machine=EM_X86_64)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for info in (program("bin/sh", 0o755), program("lib/libc.so.6", 0o644)):
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    found = layer(raw=buffer.getvalue())
    assert found.programs == {"/bin/sh": EM_X86_64}
    assert contents([found, layer("bin/.wh.sh")]).programs == {}


def test_device_code_of_any_size_takes_no_memory(tmp_path):
    """All that is told of it is in the header."""
    info = tarfile.TarInfo("kernel")
    info.size = 1 << 28
    path = tmp_path / "layer"
    with path.open("wb") as file:
        file.write(info.tobuf() + elf(90))
        file.truncate(tarfile.BLOCKSIZE + info.size + 2 * tarfile.BLOCKSIZE)
    tracemalloc.start()
    try:
        assert read(path).cubins == {"/kernel": "90"}
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
