"""The CPU flags that code in files needs, by call graph and dispatch."""

import io
import os
import random
import struct
import sys
import tracemalloc

import pytest
from compiling import CPUID, NEWER, choosing, compiled, scanned

from imagematrix.audit.binaries import elf
from imagematrix.audit.binaries.cpu import dispatch, functions, scan
from imagematrix.audit.binaries.elf import Elf, Section
from imagematrix.audit.binaries.host_code import HostCode
from imagematrix.audit.binaries.window import Window
from imagematrix.hardware.vendors import marches

FUZZED = int(os.environ.get("IMAGEMATRIX_FUZZ", "10000"))
LOOP = "double s = 0; for (int i = 0; i < 64; i++) s += a[i] * 3.5 + i; return s + __builtin_popcount(a[0]);"
PROGRAM = (
    f"double a[64]; double sum(void) {{ {LOOP} }} int main(int n, char **v) {{ a[n] = n; return sum(); }}"
)
TARGET = '__attribute__((target("avx2,fma,popcnt"), noinline))'
FAST = f"{TARGET} static double {{name}}(double *a) {{{{ {LOOP} }}}}\n"
SLOW = f"__attribute__((noinline)) static double slow(double *a) {{ {LOOP} }}\n"
HASWELL = {"avx", "fma", "popcnt"}


@pytest.fixture
def build(tmp_path):
    """Call it with C and options of gcc to get a program or a library with a neutral name."""
    return lambda source, *options: compiled(tmp_path / "built", source, "-O3", *options)


@pytest.mark.parametrize("options", [(), ("-s",), ("-static",), ("-static", "-s"), ("-no-pie",)])
@pytest.mark.parametrize("march", ["x86-64", "x86-64-v2", "haswell", "x86-64-v4"])
def test_program_requires_only_flags_of_its_march(build, march, options):
    code = scanned(build(PROGRAM, f"-march={march}", *options))
    assert code.whole
    assert code.required <= marches.get_required_flags(march, "gcc-14")
    assert bool(code.required) == (march != "x86-64")
    fused = code.required & {"fma", "avx512f"}  # the latter for instructions with the longer encoding
    assert bool(code.required >= {"avx", "popcnt"} and fused) == (march in {"haswell", "x86-64-v4"})
    if "-static" not in options:  # the C library has code for many CPUs in it
        assert code.functions.keys() == code.required


def test_missing_decoder_leaves_everything_unknown(build, monkeypatch):
    monkeypatch.setitem(sys.modules, "iced_x86", None)
    monkeypatch.delitem(sys.modules, "imagematrix.audit.binaries.cpu.x86", raising=False)
    scan._get_decoder.cache_clear()
    try:
        assert scanned(build(PROGRAM, "-march=haswell")) == HostCode(whole=False)
    finally:
        scan._get_decoder.cache_clear()


def test_functions_that_use_a_flag_are_named(build):
    code = scanned(build(PROGRAM, "-march=haswell", "-fno-inline", "-g0"))
    assert "sum" in code.functions["fma"].names
    assert code.functions["avx"].count >= 1


def test_function_clones_are_dispatched_by_the_loader(build):
    clones = PROGRAM.replace("double sum", '__attribute__((target_clones("avx2", "default"))) double sum')
    code = scanned(build(clones))
    assert not code.required
    assert not code.undecided_flags
    assert {"ifunc", "names", "cpuid"} <= set(code.signs)
    assert "sum.avx2" in code.functions["avx"].names[0]


ASKING = "int main(int n, char **v) {{ double a[64] = {{n}}; return {query} ? {name}(a) : slow(a); }}"


def test_code_behind_a_cpu_query_is_not_required(build):
    source = FAST.format(name="other") + SLOW + ASKING.format(query=CPUID, name="other")
    code = scanned(build(source))
    assert not code.required
    assert not code.chosen
    assert code.undecided_flags >= HASWELL  # nothing proves that the query decides
    assert code.signs == ("cpuid",)


def test_function_named_after_a_cpu_is_dispatched(build):
    source = FAST.format(name="sum_haswell") + SLOW + ASKING.format(query=CPUID, name="sum_haswell")
    code = scanned(build(source))
    assert code.chosen >= HASWELL
    assert not code.undecided_flags


@pytest.mark.parametrize(
    ("declared", "query", "sign"),
    [
        ("unsigned long getauxval(unsigned long);", "getauxval(16)", "getauxval"),
        ("int av_get_cpu_flags(void);", "av_get_cpu_flags()", "av_get_cpu_flags"),
        ("int open(const char *, int);", 'open("/proc/cpuinfo", 0)', "/proc/cpuinfo"),
    ],
)
def test_queries_through_libraries_are_recognized(build, declared, query, sign):
    source = declared + FAST.format(name="other") + SLOW
    source += f"double sum(double *a) {{ return {query} ? other(a) : slow(a); }}"
    code = scanned(build(source, "-shared", "-fPIC"))
    assert not code.required
    assert code.undecided_flags >= HASWELL
    assert sign in code.signs


def test_bytes_after_the_relocations_are_ignored():
    raw = struct.pack("<QQq", 0, 8, 0) + struct.pack("<QQq", 0, 37, 0)
    window = Window(io.BytesIO(raw), 0, len(raw))
    tables = [Section(".rela.dyn", 0, size, 0) for size in (24, 48)]
    result = [
        list(dispatch.find_dispatch_signs(Elf(machine=62, linked=True, sections=(one,)), window))
        for one in tables
    ]
    assert result == [[], ["ifunc"]]


def test_functions_called_by_exported_ones_are_required(build):
    source = FAST.format(name="other") + "double sum(double *a) { return other(a); }"
    assert scanned(build(source, "-shared", "-fPIC")).required >= HASWELL


def test_uncalled_function_is_not_required(build):
    source = FAST.format(name="other") + "double (*sum)(double *) = other;"
    code = scanned(build(source, "-shared", "-fPIC"))
    assert not code.required
    assert code.undecided_flags >= HASWELL


def test_code_in_main_is_required_despite_queries_elsewhere(build):
    asking = f"int asks(void) {{ return {CPUID}; }}"
    code = scanned(build(PROGRAM + asking, "-march=haswell", "-s"))
    assert "cpuid" in code.signs
    assert code.required >= {"avx"}


MUSL = """
_start: xor %rbp, %rbp; lea _DYNAMIC(%rip), %rsi; mov %rsp, %rdi; call start_c; .skip 64, 0x90
start_c: {start_c}
start: mov _init@GOTPCREL(%rip), %rcx; mov main@GOTPCREL(%rip), %rdi; jmp main
asking: cpuid
.weak _DYNAMIC; .hidden _DYNAMIC; .globl _start, _init
.section .init, "ax"
_init: ret
"""


@pytest.mark.parametrize("options", [("-static", "-no-pie"), ("-pie",), ("-pie", "-Wl,--no-relax")])
@pytest.mark.parametrize("start_c", ["", "lea start(%rip), %rax; jmp *%rax; .skip 64, 0x90"])
def test_main_of_musls_programs_is_found(build, tmp_path, options, start_c):
    """Its start code has no frames, so that nothing tells its functions apart in a stripped file."""
    start = tmp_path / "start.s"
    start.write_text(MUSL.format(start_c=start_c))
    code = scanned(build(PROGRAM, str(start), "-march=haswell", "-s", "-nostdlib", "-fPIE", *options))
    assert "cpuid" in code.signs
    assert code.required >= {"avx", "fma"}


@pytest.mark.parametrize("word", ["static", ""])
def test_constructors_are_required(build, word):
    first = f"__attribute__((constructor)) {word} void first(void)"
    source = f"double a[64], b; {first} {{ b = a[0] * a[1] + a[2]; }} int asks(void) {{ return {CPUID}; }}"
    assert scanned(build(source, "-shared", "-fPIC", "-mfma", "-s")).required == {"avx", "fma"}


def test_pointers_are_read_where_they_are_asked_for():
    """From the file, from relocations, and from relocations against symbols of the file."""
    symbols = (
        bytes(24) + struct.pack("<IBBHQQ", 1, 18, 0, 7, 0x5000, 8) + struct.pack("<IBBHQQ", 1, 18, 0, 0, 0, 0)
    )
    relocations = [
        (0x1008, 8, 0, 0x4000),  # relative
        (0x1010, 1, 1, 16),
        (0x1018, 1, 2, 0),  # of another file's symbol
        (0x1020, 1, 3, 0),  # of none
        (0x1028, 7, 1, 0),  # of another kind
        (0x0FF8, 8, 0, 0x4000),  # at other places
        (0x1030, 8, 0, 0x4000),
    ]
    table = b"".join(struct.pack("<QIIq", *row) for row in relocations)
    array = struct.pack("<6Q", 0x3000, 0, 0, 0, 0, 0)
    raw = symbols + table + array
    sections = (
        Section(".dynsym", 0, len(symbols), 2, 0x100),
        Section(".rela.dyn", len(symbols), len(table), 2, 0x200),
        Section(".init_array", len(symbols + table), len(array), 3, 0x1000),
    )
    headers, window = Elf(machine=62, linked=True, sections=sections), Window(io.BytesIO(raw), 0, len(raw))
    places = [range(0x1000, 0x1030), range(0x1000, 0x1008), range(0x10, 0x18)]
    pointers = list(functions.list_pointers(headers, window, places))
    assert pointers == [(0x1000, 0x3000), (0x1008, 0x4000), (0x1010, 0x5010)]
    assert not list(functions.list_pointers(headers, window, []))


def test_constructor_of_another_library_is_not_required(build):
    source = 'void other(void); __attribute__((section(".init_array"))) void (*it)(void) = other;'
    source += FAST.format(name="sum") + "double (*used)(double *) = sum;"
    assert not scanned(build(source, "-shared", "-fPIC")).required


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("/opt/libggml-cpu-haswell.so", True),
        ("/usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v3/libsum.so.1", True),
        ("/opt/haswell/libsum.so", False),
        ("/opt/libsum.so", False),
    ],
)
def test_file_named_after_a_cpu_is_dispatched(build, name, chosen):
    source = FAST.format(name="other") + "double sum(double *a) { return other(a); }"
    code = scanned(build(source, "-shared", "-fPIC"), name)
    assert (code.chosen >= HASWELL) == chosen
    assert (code.required >= HASWELL) == (not chosen)


@pytest.mark.parametrize("options", [(), ("-no-pie",), ("-static-pie",)])
def test_program_requires_its_flags_whatever_its_path(build, options):
    code = scanned(build(PROGRAM, "-march=haswell", *options), "/usr/local/bin/train-znver4")
    assert code.required >= {"avx", "fma"}


def test_library_that_can_be_started_is_no_program(build):
    """Such as libc.so.6, of which the loader takes that in the folder for the CPU."""
    loader = 'const char loader[] __attribute__((section(".interp"))) = "/lib64/ld-linux-x86-64.so.2";'
    source = f"{loader} double sum(double *a) {{ {LOOP} }}"
    library = build(source, "-shared", "-fPIC", "-march=haswell", "-Wl,-soname,libsum.so.1")
    code = scanned(library, "/usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v3/libsum.so.1")
    assert (code.required, code.chosen >= {"avx", "fma"}) == (frozenset(), True)


def test_entry_of_a_library_is_not_run(build):
    """Older linkers state the address of a library's first code, here of a function that asks the CPU."""
    check = "__attribute__((cold)) double sum(double *a)"
    choice = '{ return __builtin_cpu_supports("avx2") ? fast(a) : slow(a); }'
    source = f"{FAST.format(name='fast')}{SLOW}{check} {choice}"
    library = build(source, "-shared", "-fPIC", "-s", "-Wl,-e,sum")
    assert scanned(library).required.isdisjoint(HASWELL)


@pytest.mark.parametrize(
    ("name", "machine", "chosen"),
    [
        ("sum_avx2", elf.X86_64, True),
        ("N_AVX512_SKX", elf.X86_64, True),
        ("sum_avxvnni.part.0", elf.X86_64, True),
        ("sum_avxvnniint8", elf.X86_64, True),
        ("amxfp8_sum", elf.X86_64, True),
        ("sgemm_kernel_ZEN", elf.X86_64, True),
        ("_ZN8simdjson7haswell6stage1EPKhmN", elf.X86_64, True),
        ("_Z7sum_avxPd", elf.X86_64, True),
        ("bgemm_beta_NEOVERSEN2", elf.AARCH64, True),
        ("dot_ARMV9SME", elf.AARCH64, True),
        ("_ZN2np10qsort_simd13QSort_ASIMDHPIsEEvPT_l", elf.AARCH64, True),
        ("_ZN3hwy18N_NEON_WITHOUT_AES4SortEv", elf.AARCH64, True),
        ("put_8tap_neon", elf.AARCH64, True),
        ("hamming_popcnt", elf.X86_64, True),
        ("__aarch64_ldadd4_acq_rel", elf.AARCH64, True),
        ("sum_neon", elf.X86_64, False),  # of another machine
        ("sum_avx2", elf.AARCH64, False),
        ("popcnt", elf.X86_64, False),
        ("zen_garden", elf.X86_64, False),
        ("lse_forward", elf.AARCH64, False),
        ("neon_paint", elf.AARCH64, False),
        ("amxml_parse", elf.X86_64, False),
        ("cortex_step", elf.AARCH64, False),
        ("_Z9" + "9" * 190, elf.X86_64, False),
    ],
)
def test_names_of_functions_tell_their_cpus(name, machine, chosen):
    assert dispatch.is_cpu_specific_name(name, machine) is chosen


def test_code_without_symbols_is_decoded(build):
    source = "\n".join(
        f"double f{n}(double *a, double *b) {{ return a[0] * b[{n}] + a[{n}]; }}" for n in range(20)
    )
    source += "int main(void) { return 0; }"
    code = scanned(build(source, "-mfma", "-s", "-static", "-fno-asynchronous-unwind-tables"))
    assert "fma" in code.undecided_flags


EVEN_NEWER = """
__attribute__((target("avx512f,prefer-vector-width=512"))) void more(double *a) {
    for (int i = 0; i < 64; i++) a[i] = a[i] * 3.5 + i;
}"""


@pytest.mark.parametrize(
    ("new", "old", "probable", "partial"),
    [
        (40, 0, {"avx", "avx2", "fma"}, set()),
        (40, 9, {"avx", "avx2", "fma"}, set()),
        (40, 11, set(), {"avx", "avx2", "fma"}),
        (21, 20, set(), {"avx", "avx2", "fma"}),
        (20, 20, set(), set()),
        (1, 40, set(), set()),
        (19, 0, set(), set()),  # too few functions
    ],
)
def test_share_of_functions_shows_what_a_file_is_compiled_for(build, new, old, probable, partial):
    code = scanned(build(choosing(new, old), "-shared", "-fPIC", "-s"))
    assert not code.required
    assert (code.probable, code.partial) == (probable, partial)
    assert code.undecided_flags >= probable | partial


def test_few_functions_for_even_newer_cpus_are_not_probable(build):
    code = scanned(build(choosing(40, 0) + EVEN_NEWER, "-shared", "-fPIC", "-s"))
    assert code.probable == {"avx", "avx2", "fma"}
    assert "avx512f" in code.undecided_flags


@pytest.mark.parametrize(("wide", "is_probable"), [(20, False), (60, True)])
def test_functions_for_wide_registers_show_only_by_their_majority(build, wide, is_probable):
    """Of bitsandbytes 0.50.2, which chooses by the CPU, a third of the functions uses AVX-512."""
    more = "".join(EVEN_NEWER.replace("void more", f"void more{number}") for number in range(wide))
    code = scanned(build(choosing(40, 0) + more, "-shared", "-fPIC", "-s"))
    assert {"avx", "avx2", "fma"} <= code.probable | code.partial
    assert ("avx512f" in code.probable) is is_probable
    assert ("avx512f" in code.partial) is not is_probable


def test_functions_named_after_a_cpu_are_no_part_of_the_share(build):
    code = scanned(build(choosing(40, 1, "kernel_avx2_"), "-shared", "-fPIC"))
    assert (code.probable, code.partial) == (frozenset(), frozenset())


def test_required_flags_are_not_probable(build):
    own = "__attribute__((constructor)) static void first(void) { c[0] = c[1] * c[2]; }"
    code = scanned(build(choosing(40, 0) + f"double c[64]; {NEWER} {own}", "-shared", "-fPIC"))
    assert code.required == {"avx"}
    assert code.probable == {"avx2", "fma"}


def go_program(settings):
    """Return a program that states how Go compiled it, in the bytes that Go writes."""
    lines = "\\n".join(["path\\tit", "build\\t-compiler=gc", *settings, ""])
    magic = "\\xff Go buildinf:\\x08\\x02"
    text = f'const char it[] __attribute__((section(".go.buildinfo"), used)) = "{magic}" "{lines}";'
    return f"{text} int main(void) {{ return 0; }}"


@pytest.mark.parametrize(
    ("settings", "required"),
    [
        ((r"build\tGOAMD64=v1",), set()),
        (
            (r"build\tGOARCH=amd64", r"build\tGOAMD64=v2"),
            {"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"},
        ),
        ((r"build\tGOAMD64=v5",), set()),
        ((r"dep\tbuild\tGOAMD64=v3",), set()),
        ((r"build\tGOARM64=v8.0",), set()),
        ((r"build\tGOARM64=v8.0,lse",), {"atomics"}),
        ((r"build\tGOARM64=v9.0,crypto,new",), {"atomics", "aes", "pmull", "sha1", "sha2"}),
        ((), set()),
    ],
)
def test_settings_of_go_are_proof(build, settings, required):
    assert scanned(build(go_program(settings))).required == required


def test_level_of_go_is_proof_without_a_decoder(build, monkeypatch):
    monkeypatch.setattr(scan, "_get_decoder", lambda _: None)
    code = scanned(build(go_program((r"build\tGOAMD64=v3",))))
    assert code.required >= {"avx2", "bmi2", "fma", "sse4_2"}
    assert not code.whole


def test_other_bytes_in_the_section_of_go_are_ignored(build):
    source = go_program((r"build\tGOAMD64=v3",)).replace("buildinf", "something")
    assert not scanned(build(source)).required


def test_unbounded_constructor_does_not_own_the_following_code(build):
    loads = "vaddpd %ymm0, %ymm0, %ymm0\\n" * 20
    bare = f'asm(".section .text\\nbare: ret\\n{loads} ret\\n.previous\\n'
    bare += '.section .init_array,\\"aw\\"\\n.quad bare\\n.previous");'
    source = f"int main(void) {{ return 0; }} int asks(void) {{ return {CPUID}; }}" + bare
    code = scanned(build(source, "-s", "-no-pie", "-fno-toplevel-reorder"))
    assert code.undecided_flags == {"avx"}
    assert not code.required


def test_data_in_code_sections_is_ignored(build):
    table = 'asm(".section .text\\n.globl it\\nit: vaddpd %ymm0, %ymm0, %ymm0\\nret\\n.previous");'
    code = scanned(build(table + "int main(void) { return 0; }", "-s"))
    assert not code.functions  # a single instruction outside known functions


def test_tzcnt_runs_on_any_cpu(build):
    source = "int main(int n, char **v) { return __builtin_ctz(n); }"
    assert not scanned(build(source, "-march=x86-64")).functions
    assert not scanned(build(source, "-mbmi")).functions


@pytest.mark.parametrize(
    ("code", "required"),
    [
        ("pfadd %mm1, %mm0; femms", {"3dnow"}),
        ("pswapd %mm1, %mm0", {"3dnowext"}),
        ("prefetchw (%rdi)", set()),
        (".byte 0xd5, 0x10, 0x01, 0xc0", {"apx"}),  # add r16, rax
        (".byte 0x66, 0xd5, 0x10, 0x01, 0xc0", {"apx"}),  # add r16w, ax
        (".byte 0xd5, 0x90, 0xaf, 0xc8; vpaddd %ymm0, %ymm1, %ymm2", {"apx", "avx2"}),  # imul ecx, r16d
        (".byte 0xd5, 0x18, 0x81, 0xc0, 1, 2, 3, 4; nop", {"apx"}),  # add r16, 0x04030201
        (".byte 0xd5, 0x10, 0x74, 0x00", set()),  # reserved
        (".byte 0xd5, 0x10, 0xd5", set()),
    ],
)
def test_instructions_that_are_no_longer_or_not_yet_usual_are_known(build, code, required):
    assert scanned(build(f'int main(void) {{ asm volatile("{code}"); return 0; }}')).required == required


def test_data_that_looks_like_apx_is_ignored(build):
    data = 'asm(".section .text\\n.rept 99\\n.byte 0xd5, 0x10, 0x01, 0xc0\\n.endr\\n.previous");'
    assert not scanned(build(data + "int main(void) { return 0; }", "-s")).functions


def test_file_without_sections_is_not_decoded(build):
    raw = bytearray(build(PROGRAM, "-march=haswell").read_bytes())
    raw[40:48] = bytes(8)
    window = Window(io.BytesIO(raw), 0, len(raw))
    assert not scan.scan_file("/opt/it", elf.read_elf(window), window).whole


def test_places_of_functions_take_little_memory():
    """There are hundreds of thousands in large libraries."""
    count, width, size = 100_000, 24, 100
    raw = b"".join(
        struct.pack("<IIiI8x", width - 4, 1, (count - number) * size - number * width, size)
        for number in range(count)
    )
    section = Section(".eh_frame", 0, len(raw), 0, address=0)
    window = Window(io.BytesIO(raw), 0, len(raw))
    tracemalloc.start()
    try:
        starts, sizes = functions.list_functions(Elf(machine=62, linked=True, sections=(section,)), window)
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()
    assert list(starts) == [8 + number * size for number in range(1, count + 1)]
    assert set(sizes) == {size}


def test_every_flag_is_announced_by_compilers():
    from imagematrix.audit.binaries.cpu.x86 import X86
    from imagematrix.hardware.vendors import macros

    table = X86()._table
    flags = frozenset().union(*table.values())
    assert flags <= set(macros.FLAGS["x86_64"].values()) - marches.IGNORED["x86_64"]
    for march in ("haswell", "znver4", "sapphirerapids"):
        needed = marches.get_required_flags(march, "gcc-14") - dict(marches.LEVELS)["x86-64-v1"]
        assert needed - flags == {"lahf_lm"}  # in all 64-bit CPUs but the first


@pytest.mark.fuzz
def test_damaged_files_never_crash(build):
    """With mutated headers, tables and code; `make fuzz` tries more."""
    raw = build(PROGRAM, "-march=haswell", "-shared", "-fPIC").read_bytes()
    chance = random.Random(14)  # noqa: S311 - nothing is secret
    sections = int.from_bytes(raw[40:48], "little")
    frames = next(elf.read_elf(Window(io.BytesIO(raw), 0, len(raw))).find_sections(".eh_frame"))
    parts = (
        (16, 64),
        (64, 1024),
        (sections, len(raw)),
        (frames.offset, frames.offset + frames.size),
        (0, len(raw)),
    )
    scans = 0
    for _ in range(FUZZED):
        spoilt = bytearray(raw)
        for _ in range(chance.randint(1, 6)):
            spoilt[chance.randrange(*chance.choice(parts))] = chance.choice(
                (0, 1, 0x7F, 0xFF, chance.randrange(256))
            )
        window = Window(io.BytesIO(spoilt), 0, len(spoilt))
        headers = elf.read_elf(window)
        if headers and scan.is_decodable(headers, window):
            code = scan.scan_file("/opt/it", headers, window)
            assert code.required | code.chosen <= code.functions.keys()
            scans += 1
    assert scans > FUZZED / 2
