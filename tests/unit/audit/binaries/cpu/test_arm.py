"""The CPU flags of AArch64 code, with instruction words from the GNU assembler instead of a compiler."""

import pytest
from compiling import assembled, scanned

from imagematrix.audit.binaries.cpu.arm import TABLE, Arm
from imagematrix.hardware.vendors import macros

WORDS = {
    0xF8210040: "atomics",  # ldadd x1, x0, [x2]
    0xC8A07C41: "atomics",  # cas x0, x1, [x2]
    0x48207C82: "atomics",  # casp x0, x1, x2, x3, [x4]
    0xB8208041: "atomics",  # swp w0, w1, [x2]
    0xB8BFC041: "lrcpc",  # ldapr w1, [x2]
    0x99000041: "ilrcpc",  # stlur w1, [x2]
    0x9AC34C41: "crc32",  # crc32x w1, w2, x3
    0x4E284841: "aes",  # aese v1.16b, v2.16b
    0x0EE3E041: "pmull",  # pmull v1.1q, v2.1d, v3.1d
    0x0E23E041: "",  # pmull v1.8h, v2.8b, v3.8b
    0x5E034041: "sha2",  # sha256h q1, q2, v3.4s
    0x4E839441: "asimddp",  # sdot v1.4s, v2.16b, v3.16b
    0x4E83A441: "i8mm",  # smmla v1.4s, v2.16b, v3.16b
    0x6E43EC41: "bf16",  # bfmmla v1.4s, v2.8h, v3.8h
    0x2F43D041: "asimdrdm",  # sqrdmlah v1.4h, v2.4h, v3.h[0]
    0x6EC3C441: "fcma",  # fcmla v1.2d, v2.2d, v3.2d, #0
    0x1E7E0041: "jscvt",  # fjcvtzs w1, d2
    0x1EE32841: "fphp",  # fadd h1, h2, h3
    0x1EE24041: "",  # fcvt s1, h2
    0x1E632841: "",  # fadd d1, d2, d3
    0x4E431441: "asimdhp",  # fadd v1.8h, v2.8h, v3.8h
    0x04E30041: "sve",  # add z1.d, z2.d, z3.d
    0x45009841: "svei8mm",  # smmla z1.s, z2.b, z0.b
    0x45C30041: "sve2",  # saddlb z1.d, z2.s, z3.s
    0x04323B12: "sve2",  # eor3 z18.d, z18.d, z18.d, z24.d
    0x04AB366A: "sve2",  # xar z10.d, z10.d, z19.d, #53
    0x04636041: "sve2",  # mul z1.h, z2.h, z3.h
    0x044D911A: "sve2",  # urshr z26.s, p4/m, z26.s, #24
    0x04CF8091: "sve2",  # sqshlu z17.d, p0/m, z17.d, #36
    0x05700EF9: "sve2",  # ext z25.b, {z23.b-z24.b}, #131
    0x05AD964E: "sve2",  # splice z14.s, p5, {z18.s-z19.s}
    0x05622A76: "sve2",  # tbl z22.h, {z19.h-z20.h}, z2.h
    0x25350008: "sve2",  # whilege p8.b, w0, w21
    0x25350408: "sve",  # whilelt p8.b, w0, w21
    0x25B63331: "sve2",  # whilerw p1.s, x25, x22
    0x649087E2: "sve2",  # faddp z2.s, p1/m, z2.s, z31.s
    0x64BD4263: "sve2",  # fmlalb z3.s, z19.h, z5.h[6]
    0x64BB80F2: "sve2",  # fmlalb z18.s, z7.h, z27.h
    0x6488A9CA: "sve2",  # fcvtnt z10.h, p2/m, z14.s
    0x651CA8B2: "sve2",  # flogb z18.s, p2/m, z5.s
    0x650ABAD1: "sve2",  # fcvtx z17.s, p6/m, z22.d
    0x851CB0A3: "sve2",  # ldnt1w {z3.s}, p4/z, [z5.s, x28]
    0xE580371E: "sve2",  # stnt1d {z30.d}, p5, [z24.d, x0]
    0x64608360: "svebf16",  # bfdot z0.s, z27.h, z0.h
    0x64FA485F: "svebf16",  # bfmlalb z31.s, z2.h, z2.h[7]
    0x658ABEA8: "svebf16",  # bfcvt z8.h, p7/m, z21.s
    0x64A1E76E: "svef32mm",  # fmmla z14.s, z27.s, z1.s
    0x05AB0013: "svef64mm",  # zip1 z19.q, z0.q, z11.q
    0xA52D1724: "svef64mm",  # ld1row {z4.s}, p5/z, [x25, x13, lsl #2]
    0x4522E320: "sveaes",  # aese z0.b, z0.b, z25.b
    0x452CF064: "svesm4",  # sm4ekey z4.s, z3.s, z12.s
    0x4526F5E4: "svesha3",  # rax1 z4.d, z15.d, z6.d
    0x4518B526: "svebitperm",  # bdep z6.b, z9.b, z24.b
    0x5F3258D3: "fphp",  # fmls h19, h6, v2.h[7]
    0x5F079020: "fphp",  # fmul h0, h1, v7.h[0]
    0x0F1CE59C: "asimdhp",  # scvtf v28.4h, v12.4h, #4
    0x2F1CFD5D: "asimdhp",  # fcvtzu v29.4h, v10.4h, #4
    0x5E30D841: "fphp",  # faddp h1, v2.2h
    0x5E30F841: "fphp",  # fmaxp h1, v2.2h
    0x5EB0C841: "fphp",  # fminnmp h1, v2.2h
    0x7E30D841: "",  # faddp s1, v2.2s
    0x7E70F841: "",  # fmaxp d1, v2.2d
    0x4EA3DC41: "faminmax",  # famax v1.4s, v2.4s, v3.4s
    0x6EA3DC41: "faminmax",  # famin v1.4s, v2.4s, v3.4s
    0x4EE3DC41: "faminmax",  # famax v1.2d, v2.2d, v3.2d
    0x4EC31C41: "faminmax",  # famax v1.8h, v2.8h, v3.8h
    0x2EC31C41: "faminmax",  # famin v1.4h, v2.4h, v3.4h
    0x658E8041: "faminmax",  # famax z1.s, p0/m, z1.s, z2.s
    0x654F8041: "faminmax",  # famin z1.h, p0/m, z1.h, z2.h
    0x4E23DC41: "",  # fmulx v1.4s, v2.4s, v3.4s
    0x6EA3D441: "",  # fabd v1.4s, v2.4s, v3.4s
    0x4E431C41: "asimdhp",  # fmulx v1.8h, v2.8h, v3.8h
    0x65848041: "sve",  # fmaxnm z1.s, p0/m, z1.s, z2.s
    0x04BF5820: "sme",  # rdsvl x0, #1
    0x04215840: "sme",  # addsvl x0, x1, #2
    0x04615FA0: "sme",  # addspl x0, x1, #-3
    0x04BF5020: "sve",  # rdvl x0, #1
    0x04215040: "sve",  # addvl x0, x1, #2
    0x043F57FF: "sve",  # addvl sp, sp, #-1
    0xD65F0BFF: "paca",  # retaa
    0xD65F0FFF: "paca",  # retab
    0xD71F0C1F: "paca",  # brab x0, sp
    0xD61F087F: "paca",  # braaz x3
    0xD73F0801: "paca",  # blraa x0, x1
    0xD63F089F: "paca",  # blraaz x4
    0xDAC10020: "paca",  # pacia x0, x1
    0xDAC13FE1: "paca",  # autdzb x1
    0xDAC143E2: "paca",  # xpaci x2
    0x9AC23020: "pacg",  # pacga x0, x1, x2
    0xF8200420: "paca",  # ldraa x0, [x1]
    0xF87FFC20: "paca",  # ldraa x0, [x1, #-8]!
    0xF8BFF7E3: "paca",  # ldrab x3, [sp, #4088]
    0xD503233F: "",  # paciasp
    0xD503211F: "",  # pacia1716
    0xD50320FF: "",  # xpaclri
    0xD65F03C0: "",  # ret
    0xD61F0020: "",  # br x1
    0xF85F8FE0: "",  # ldr x0, [sp, #-8]!
    0xF8626820: "",  # ldr x0, [x1, x2]
    0xDAC01041: "",  # clz x1, x2
    0x9AC22020: "",  # lsl x0, x1, x2
    0x8B030041: "",  # add x1, x2, x3
}


def test_instructions_have_their_flags():
    assert {word: Arm()._find_flag(word) for word in WORDS} == WORDS


def test_every_flag_is_announced_by_compilers():
    announced = set(" ".join(macros.FLAGS["aarch64"].values()).split())
    unannounced = macros.list_unannounced_flags("armv9.6-a")
    assert {flag for _, _, flag in TABLE} - {""} <= announced | unannounced
    assert all(value & ~mask == 0 for mask, value, _ in TABLE)


@pytest.fixture
def build(tmp_path):
    """Call it with functions, as `assembled` takes them, to get the flags of a library for aarch64."""

    def call(**functions):
        return scanned(assembled(tmp_path / "built", **functions))

    return call


RET = 0xD65F03C0
SDOT, SVE = 0x4E839441, 0x04E30041


@pytest.mark.parametrize(
    "jump",
    [
        "0x94000000 + ((hidden - 0f) / 4)",  # bl
        "0x14000000 + ((hidden - 0f) / 4)",  # b
        "0x54000000 + ((hidden - 0f) / 4 << 5)",  # b.eq
        "0xB4000000 + ((hidden - 0f) / 4 << 5)",  # cbz
        "0x36000000 + ((hidden - 0f) / 4 << 5)",  # tbz
    ],
)
def test_functions_called_by_exported_ones_are_required(build, jump):
    code = build(exported=(jump.replace("0f", "exported"), RET), hidden=(SDOT, RET), hidden_too=(SVE, RET))
    assert code.required == {"asimddp"}
    assert code.undecided_flags == {"sve"}


def test_function_that_queries_the_cpu_leaves_code_undecided(build):
    code = build(exported=(0xD5380600, RET), other=(SDOT, RET))  # mrs x0, id_aa64isar0_el1
    assert not code.required
    assert code.undecided_flags == {"asimddp"}
    assert code.signs == ("cpuid",)


def test_outline_atomics_are_dispatched(build):
    code = build(__aarch64_ldadd4_relax=(0xB8210040, RET))
    assert code.chosen == {"atomics"}


def test_code_outside_functions_needs_several_instructions(build):
    assert "sve" not in build(exported=(RET,)).functions
    raw = bytes.fromhex("4100e304") * 8
    assert Arm().count_by_flag(raw) == {"sve": 8}


CALL = 0x94000002  # bl +8
PAGE, PLACE = 0xB0000000, 0x91004000  # adrp x0, +0x1000; add x0, x0, #16


@pytest.mark.parametrize(
    ("words", "addresses", "slots"),
    [
        ((PLACE, PAGE, PLACE), {0x401010}, set()),
        ((0xF0FFFFE0, PLACE), {0x3FF010}, set()),  # adrp x0, -0x1000
        ((0x10000080,), {0x400014}, set()),  # adr x0, +16
        ((PAGE, 0xF9400800), set(), {0x401010}),  # ldr x0, [x0, #16]
        ((0xD2A00800, 0xF2820000), {0x401000}, set()),  # movz x0, #0x40, lsl #16; movk x0, #0x1000
        ((0xF9400800, RET), set(), set()),  # of a register with anything in it
    ],
)
def test_addresses_that_are_computed_for_a_call_are_found(words, addresses, slots):
    body = b"".join(word.to_bytes(4, "little") for word in (*words, CALL, PAGE))
    call, end = Arm().list_calls(body, 0x400004)
    assert (call.target, call.addresses, call.slots) == (0x40000C + 4 * len(words), addresses, slots)
    assert end == (0, frozenset(), frozenset())


def test_main_is_found_in_the_linkers_table(tmp_path):
    """As in programs that glibc starts: adrp x0, :got:main; ldr x0, [x0, :got_lo12:main]."""
    load = "0xF9400000 + ((table - _start) / 8 << 10)"
    code = assembled(
        tmp_path / "built",
        *("-static", "-no-pie", "-Wl,-Ttext=0x10000"),
        _start=(0x90000000, load, RET, 0),
        table=("hidden", 0),
        hidden=(SVE, RET),
        asking=(0xD5380600, RET),  # mrs x0, id_aa64isar0_el1
    )
    assert scanned(code).required == {"sve"}


EXCLUSIVE = (
    0xC85F7C20,  # ldxr x0, [x1]
    0xC85FFC20,  # ldaxr x0, [x1]
    0xC8027C20,  # stxr w2, x0, [x1]
    0x085F7C20,  # ldxrb w0, [x1]
)
OTHERS = (
    0xC8DFFC20,  # ldar x0, [x1]
    0xC87F0820,  # ldxp x0, x2, [x1], for which there is no atomic instruction
    0xC8A07C41,  # cas x0, x1, [x2]
    0xF8210040,  # ldadd x1, x0, [x2]
)


def test_exclusive_loads_and_stores_are_older_than_atomic_instructions():
    arm = Arm()
    assert {word: arm.has_older(frozenset([word])) for word in EXCLUSIVE} == dict.fromkeys(EXCLUSIVE, True)
    assert not arm.has_older(frozenset(OTHERS))
    assert arm.find_flags(frozenset(OTHERS)) == arm.newer_flags
