"""Fatbins, cubins and PTX: real ones, by NVRTC 12.9 and 13.5, fatbinary 12.4 and 13.5, and damaged ones.

The kernel is `extern "C" __global__ void k(float *x) { x[threadIdx.x] *= 2.0f; }`.
"""

import io
from pathlib import Path

import pytest
from fatbins import cubin as cubin_of
from fatbins import entry, fat, library
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.audit.binaries import cubin, elf, fatbin, kernels, objects
from imagematrix.audit.binaries.device_code import NONE, DeviceCode, Fatbins, merge_device_code
from imagematrix.audit.binaries.window import Window

DATA = Path(__file__).parents[1] / "data"


def window(raw):
    return Window(io.BytesIO(raw), 0, len(raw))


def data(name):
    return window((DATA / name).read_bytes())


@pytest.mark.parametrize(
    ("name", "cubins", "ptx"),
    [
        ("lz4", {"80", "90a"}, {"90a"}),  # CUDA 12.4
        ("zstd", {"80", "90a", "100", "100a", "100f"}, {"50", "90a", "100f"}),  # CUDA 13
        ("concatenated", {"80", "90a", "100a", "100f", "120a"}, {"90", "100f"}),  # CUDA 13.5
    ],
)
def test_fatbins_of_every_format_are_read(name, cubins, ptx):
    assert fatbin.read_fatbins(data(f"{name}.fatbin")) == DeviceCode(
        cubins=frozenset(cubins),
        ptx=frozenset((target, "8.8") for target in ptx),
        compressed=name != "lz4",
    )


def test_parts_of_concatenated_entries_share_their_bytes():
    (container,) = fatbin.list_containers(data("concatenated.fatbin"))
    assert [[part.target for part in entry.parts] for entry in container.entries] == [
        ["100f", "90"],
        ["80", "90a"],
        ["100a", "100f", "120a"],
    ]
    assert all(sum(part.size for part in entry.parts) == entry.size for entry in container.entries)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, 0),  # no parts
        (0, 1),  # more bytes than parts
        (0, 3),  # fewer
        (1, 0xFF),  # more than there may be
        (4, 0),  # a wrong size of the table
        (8 + 28, 0),  # a part for no target
        (8 + 20, 0),  # a part without its options
    ],
)
def test_concatenated_entry_with_a_wrong_table_is_damaged(monkeypatch, place, value):
    monkeypatch.setattr(fatbin, "MOST", 1000)
    raw = bytearray((DATA / "concatenated.fatbin").read_bytes())
    raw[16 + fatbin.FIXED + place] = value
    code = fatbin.read_fatbins(window(bytes(raw)))
    assert code.damaged
    assert {target for target, _ in code.ptx} == set()
    assert "80" in code.cubins


@pytest.mark.parametrize("own", [48, 66, 72])
def test_concatenated_entry_without_a_table_is_damaged(own):
    raw = fat(entry(fatbin.CONCATENATED, 80, bytes(8), own=own))
    assert fatbin.read_fatbins(window(raw)) == DeviceCode(damaged=True)


@pytest.mark.parametrize("target", ["80", "90a", "100a", "100f", "120a"])
def test_single_cubin_is_read(target):
    assert cubin.read_cubin(data(f"{target}.cubin")) == DeviceCode(cubins=frozenset({target}))


def test_single_cubin_for_one_capability_is_read_without_its_note():
    raw = (DATA / "120a.cubin").read_bytes()
    assert raw.count(b"sm_120a") == 1
    assert cubin.read_cubin(window(raw.replace(b"sm_120a", b"sm_120 "))).cubins == {"120a"}


def test_handwritten_cubin_of_cublas_is_for_all_gpus_of_its_generation():
    """The header is that of `sgemm_128x128x8_NN` for 50 in cuBLAS 12.4.5.8."""
    header = b"\x7fELF\2\1\1\x33\7" + bytes(39) + (0x3C0D32).to_bytes(4, "little") + bytes(12)
    assert cubin.read_cubin(window(header)) == DeviceCode(cubins=frozenset({"50"}))


def test_single_ptx_file_is_read():
    assert fatbin.read_ptx(data("100f.ptx")) == DeviceCode(ptx=frozenset({("100f", "8.8")}))
    assert fatbin.read_ptx(window(b"// no code\n")) == NONE


@pytest.mark.parametrize("end", [", debug{}.address_size 64\n", "\n"])
@pytest.mark.parametrize("blank", ["\n", " \n\n", "\n// .version 1.0\n", "\n/* .target\n * sm_20 **/\n"])
def test_comments_and_empty_lines_are_no_directives(end, blank):
    text = "{}.version 8.4{}.target sm_90" + end
    result = fatbin.read_ptx(window(text.format(blank, blank, blank).encode()))
    assert result.ptx == {("90", "8.4")}


@pytest.mark.parametrize(
    "raw",
    [
        b".version 8.4\n" * 5_000 + b"\n" * 65_000,
        b"\n" * 65_000,
        b"//" * 32_000,
        b"// a\n" * 13_000,
        b"/*" * 32_000,
        b"/**/" * 16_000,
        b".version 8.4\n" + b" \n" * 32_000,
    ],
)
def test_text_without_directives_is_read_once(raw):
    """If its length counted with its cube, each would take hours."""
    assert fatbin.read_ptx(window(raw)) == NONE
    assert fatbin.read_ptx(window(b".version 8.4\n.target sm_90" + b" " * 65_000)).ptx


def test_several_fatbins_with_gaps_are_read():
    raw = fat(entry(target=80)) + bytes(40) + fat(entry(1, 90, b".version 8.4\n.entry k("), entry(8, 70))
    result = fatbin.read_fatbins(window(raw))
    assert result == DeviceCode(cubins=frozenset({"80"}), ptx=frozenset({("90", "8.4")}), scattered=True)


def test_ptx_in_only_some_fatbins_is_scattered():
    one, other = fat(entry(target=80), entry(1, 80)), fat(entry(target=80))
    assert not fatbin.read_fatbins(window(one + one)).scattered
    assert not fatbin.read_fatbins(window(one + fat(entry(8, 70)))).scattered
    result = fatbin.read_fatbins(window(one + other))
    assert result.scattered
    assert result.ptx == {("80", "8.4")}
    assert merge_device_code([fatbin.read_fatbins(window(one)), fatbin.read_fatbins(window(other))]) == result


@pytest.mark.parametrize("left", [16, 40, 79, 90])
def test_truncated_fatbin_is_damaged(left):
    raw = fat(entry(payload=bytes(32)))
    assert not fatbin.read_fatbins(window(raw)).damaged
    assert fatbin.read_fatbins(window(raw[:left])).damaged


@pytest.mark.parametrize(
    "raw", [fat(entry(own=0)), fat(entry(target=0)), fat(entry(target=70000)), b"\x50\xed\x55\xba"]
)
def test_invalid_entry_is_damaged(raw):
    assert fatbin.read_fatbins(window(raw)) == DeviceCode(damaged=True)


def test_too_many_entries_are_damaged(monkeypatch):
    monkeypatch.setattr(fatbin, "MOST", 3)
    assert fatbin.read_fatbins(window(fat(*[entry()] * 2))) == DeviceCode(cubins=frozenset({"90"}))
    assert fatbin.read_fatbins(window(fat(*[entry()] * 9))).damaged


@pytest.mark.parametrize("raw", [b"\x7fELF\x02", bytes(64), b"\x7fELF\x02" + bytes(100)])
def test_cubin_without_a_target_is_damaged(raw):
    assert cubin.read_cubin(window(raw)) == DeviceCode(damaged=True)


WHOLE = (fat(entry(payload=bytes(100)), entry(1)), (DATA / "concatenated.fatbin").read_bytes())


@given(st.sampled_from(WHOLE), st.binary(max_size=400), st.integers(0, 300))
def test_arbitrary_bytes_after_the_magic_never_crash(whole, raw, place):
    spoilt = whole[:place] + raw + whole[place + len(raw) :]
    for read in (fatbin.read_fatbins, cubin.read_cubin, fatbin.read_ptx):
        assert isinstance(read(window(spoilt)), DeviceCode)


def test_linked_code_hides_object_files():
    objects = DeviceCode(cubins=frozenset({"80"}), ptx=frozenset({("80", "8.4")}), linked=False)
    whole = DeviceCode(cubins=frozenset({"90"}))
    assert merge_device_code([objects, whole]) == whole
    assert merge_device_code([objects, NONE]) == objects
    assert merge_device_code([]) == NONE


def parts(code):
    return {(part.count, *sorted(part.cubins), *sorted(part.ptx), part.of_project) for part in code.parts}


def test_fatbins_with_kernels_are_parts():
    """A compiler writes a fatbin even for a source without kernels; 243 of the 606 in spconv have none."""
    raw = fat(entry(target=80, payload=cubin_of("k"))) * 2
    raw += fat(entry(target=52, payload=cubin_of()), entry(1, 52, b".version 8.4\n.target sm_52\n"))
    raw += fat(entry(1, 90, b"//\n.version 8.4\n.visible .entry k(\n"))
    code = fatbin.read_fatbins(window(raw))
    assert parts(code) == {(2, "80", False), (1, ("90", "8.4"), False)}
    assert code.cubins == {"80", "52"}
    assert code.deciding_code.cubins == {"80"}


HANDWRITTEN = b"\x7fELF".ljust(5000, b"\1") + b"\0.shstrtab\0.text.k\0"


@pytest.mark.parametrize(
    "payload",
    [b"", b"neither", b".version 8.4\n" + b"//\n" * 2000, b"\x7fELF".ljust(64) + b"\0.text.k", HANDWRITTEN],
)
def test_fatbin_counts_unless_it_is_known_to_have_no_kernels(payload):
    assert [part.count for part in fatbin.read_fatbins(window(fat(entry(payload=payload)))).parts] == [1]


@pytest.mark.parametrize("name", ["lz4", "zstd", "concatenated"])
def test_kernels_in_compressed_code_are_found(name, monkeypatch):
    seen: list[bytes] = []
    monkeypatch.setattr(kernels, "list_kernel_names", seen.append)
    assert fatbin.read_fatbins(data(f"{name}.fatbin")).parts == ()
    monkeypatch.undo()
    (head,) = seen
    names = kernels.list_kernel_names(head)
    assert head.startswith(elf.MAGIC) or name == "concatenated"
    assert names is not None
    assert names.split(b"\0")[0] == b"k"


OWN = "_ZN6open3d1t8geometry6kernelE"
INSTANCE = "_ZN3cub15DeviceScanKernelIN6Open3D4core5PointEEE"
OTHER = "_ZN5cublas6kernelE"


def test_code_of_a_project_s_own_kernels_decides():
    """As in Open3D, into which NVIDIA's libraries for older GPUs are linked."""
    raw = b"".join(
        fat(entry(target=target, payload=cubin_of(name)))
        for target, name in [(80, OWN), (90, INSTANCE), (60, OTHER), (60, OTHER), (75, "_Z1kPf")]
    )
    code = fatbin.read_fatbins(window(raw), kernels.make_kernel_pattern("/site-packages/open3d/libx.so"))
    assert parts(code) == {
        (1, "80", True),
        (1, "90", True),
        (2, "60", False),
        (1, "75", False),
    }
    assert code.cubins == {"60", "75", "80", "90"}
    assert code.deciding_code.cubins == {"80", "90"}
    assert code.deciding_code.deciding_code == code.deciding_code
    assert fatbin.read_fatbins(window(raw)).deciding_code.cubins == code.cubins


def test_ptx_is_scattered_only_among_parts_that_decide():
    raw = fat(entry(1, 75, b".version 8.5 .entry " + OWN.encode())) + fat(
        entry(target=60, payload=cubin_of(OTHER))
    )
    assert fatbin.read_fatbins(window(raw)).deciding_code.scattered
    code = fatbin.read_fatbins(window(raw), kernels.make_kernel_pattern("open3d.so")).deciding_code
    assert (code.scattered, code.ptx) == (False, {("75", "8.4")})


@pytest.mark.parametrize(
    ("path", "name", "own"),
    [
        ("/usr/lib/libOpen3D.so.0.20", OWN, True),
        ("/usr/lib/libOpen3D.so.0.20", INSTANCE, True),
        ("/usr/lib/libOpen3D.so.0.20", "_Z1kILi16Open3DE", False),  # another length
        ("/site-packages/lmdeploy/lib/_turbomind.cpython-312.so", "_ZN9turbomind1kE", True),
        ("onnxruntime/capi/libonnxruntime_providers_cuda.so", "_ZN11onnxruntime4cuda1kE", True),
        ("/site-packages/fbgemm_gpu_py.so", "_ZN10fbgemm_gpu1kE", True),
        ("/site-packages/spconv/core_cc.so", "_ZN4cumm1kE", False),
        ("/opt/libcutlass_cuda.so", "_ZN7cutlass4cuda1kE", False),  # everyone has kernels of these templates
        ("/opt/_C.so", "_ZN1C1kE", False),
        ("/opt/open3d/k.so", OWN, False),  # no Python package
    ],
)
def test_kernels_are_the_project_s_by_namespaces_with_its_name(path, name, own):
    pattern = kernels.make_kernel_pattern(path)
    assert bool(pattern and pattern.search(name.encode())) is own


def test_a_library_s_path_shows_its_project(tmp_path):
    raw = fat(entry(target=80, payload=cubin_of(OWN))) + fat(entry(target=60, payload=cubin_of(OTHER)))
    path = library(tmp_path / "libopen3d.so", raw)
    with path.open("rb") as file:
        own = Window(file, 0, path.stat().st_size)
        for name, cubins in [("/lib/libopen3d.so", {"80"}), ("/lib/libx.so", {"60", "80"})]:
            examined = objects.examine_file(name, own, elf.read_elf(own))
            assert examined is not None
            assert examined.code.deciding_code.cubins == cubins


def test_parts_of_several_sections_are_together():
    one = Fatbins(count=1, cubins=frozenset({"80"}), ptx=frozenset())
    both = merge_device_code([DeviceCode(cubins=frozenset({"80"}), parts=(one,))] * 2)
    assert both.parts == (one, one)
