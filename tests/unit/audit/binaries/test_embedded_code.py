"""Device code in the data of programs: arrays of cubins and fatbins, texts of PTX, and what only looks so."""

import io
import struct
from pathlib import Path

import pytest
from compiling import compiled

from imagematrix.audit.binaries import elf
from imagematrix.audit.binaries.objects import examine_file
from imagematrix.audit.binaries.window import Window

DATA = Path(__file__).parents[1] / "data"
CUBIN, FATBIN, PTX = ((DATA / name).read_bytes() for name in ("80.cubin", "lz4.fatbin", "100f.ptx"))
SHORT = b".version 8.4\n.target sm_90\n.address_size 64\n.visible .entry k() { ret; }\n"


def _file(path, raw):
    window = Window(io.BytesIO(raw), 0, len(raw))
    return examine_file(path, window, elf.read_elf(window))


@pytest.fixture
def examined(tmp_path):
    """Call it with the bytes of an array, and options of gcc, to get the File of a program with it."""

    def call(*arrays, qualifier="const", options=(), path="/opt/it"):
        texts = ",".join(str(byte) for byte in b"".join(arrays))
        source = f"{qualifier} unsigned char code[] = {{{texts}}};"
        source += "int main(int n, char **v) { return code[n]; }"
        return _file(path, compiled(tmp_path / "it", source, "-O0", *options).read_bytes())

    return call


@pytest.mark.parametrize("qualifier", ["const", "", "static const"])
@pytest.mark.parametrize("before", [b"", b"x", b"\x7fELF\x02\x01\x01", b"\x50\xed\x55\xba", b".version 1"])
def test_arrays_of_cubins_and_fatbins_are_code(examined, qualifier, before):
    code = examined(before, CUBIN, b"text", qualifier=qualifier).code
    assert (code.cubins, code.ptx, code.toolkits, code.linked) == ({"80"}, set(), {"12.9"}, True)
    code = examined(before, FATBIN, b"text", qualifier=qualifier).code
    assert (code.cubins, code.ptx) == ({"80", "90a"}, {("90a", "8.8")})
    assert code.toolkits == {"12.9"}


def test_texts_of_ptx_are_code(examined):
    assert examined(b"x", PTX, b"\0rest").code.ptx == {("100f", "8.8")}
    code = examined(SHORT).code
    assert (code.ptx, code.sizes) == ({("90", "8.4")}, (("compute_90", len(SHORT)),))
    assert examined(SHORT.replace(b"\n", b" ")).code.ptx == {("90", "8.4")}
    assert examined(SHORT.replace(b"8.4\n", b"8.4\n// a\n//b\n\n")).code.ptx == {("90", "8.4")}


def test_several_kinds_are_merged(examined):
    code = examined(CUBIN, SHORT, b"\0", (DATA / "90a.cubin").read_bytes()).code
    assert (code.cubins, code.ptx, code.scattered) == ({"80", "90a"}, {("90", "8.4")}, True)


@pytest.mark.parametrize(
    "raw",
    [
        CUBIN[:2000],  # its sections are missing
        CUBIN[:18] + struct.pack("<H", 62) + CUBIN[20:],  # another machine
        CUBIN[:60] + struct.pack("<H", 0) + CUBIN[62:],  # no sections
        CUBIN[:58] + struct.pack("<H", 40) + CUBIN[60:],  # headers of another size
        CUBIN[:48] + struct.pack("<I", 0) + CUBIN[52:],  # no target
        FATBIN[:600],
        FATBIN[:8],
        b"\x50\xed\x55\xba\x01\x00\x10\x00" + struct.pack("<Q", 1 << 50),
        b".version 8.4\n.target sm_%d\n.address_size 64\n",
        b".version 8.4\n",
        b"libcuda.so.1",
    ],
)
def test_what_only_begins_like_code_is_none(examined, raw):
    assert not examined(raw, b"text" * 20).code


def test_headers_without_end_are_given_up(examined):
    head = b"\x50\xed\x55\xba\x01\x00\x10\x00" + struct.pack("<Q", 1 << 50)
    assert not examined(head * 200, CUBIN).code


def test_stripped_section_headers_hide_nothing(examined, tmp_path):
    examined(CUBIN)
    raw = bytearray((tmp_path / "it").read_bytes())
    raw[40:48], raw[60:64] = bytes(8), bytes(4)
    assert _file("/opt/it", bytes(raw)).code.cubins == {"80"}


def test_libraries_of_nvidia_are_not_searched(examined):
    assert not examined(CUBIN, path="/usr/lib/libnvrtc.so.12").code


def test_name_of_libcuda_is_noted_only_without_code(examined):
    assert examined(b"libcuda.so.1\0").names_cuda
    assert not examined(b"libcuda.so.1\0", CUBIN).names_cuda
    assert not examined(b"libcudart.so.12\0").names_cuda
