import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from imagematrix.errors import ProbeError
from imagematrix.hardware.host import cpu
from imagematrix.hardware.host.probe import probe

V2 = "fpu lm cmov cx8 fxsr mmx syscall sse sse2 cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"

LSCPU = """\
Architecture:                    x86_64
CPU op-mode(s):                  32-bit, 64-bit
CPU(s):                          16
Vendor ID:                       GenuineIntel
BIOS Vendor ID:                  Somebody
  Model name:                    Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz
    BIOS Model name:             not this one
    Flags:                       fpu lm sse sse2 AVX2
Vulnerability Mds:               Not affected
"""
LSCPU_ARM = """\
Architecture:        aarch64
Vendor ID:           ARM
Model name:          Neoverse-N1
Flags:               fp asimd evtstrm aes
"""


def arm(*cores):
    return "".join(
        f"processor\t: {n}\nFeatures\t: {features}\nCPU implementer\t: {implementer}\nCPU part\t: {part}\n\n"
        for n, (features, implementer, part) in enumerate(cores)
    )


def x86(*flags, vendor="AuthenticAMD"):
    return "".join(
        f"processor\t: {n}\nvendor_id\t: {vendor}\nmodel name\t: AMD EPYC\nflags\t\t: {line}\n"
        f"vmx flags\t: vnmi ept\nbugs\t\t: sysret\n\n"
        for n, line in enumerate(flags)
    )


def test_x86():
    result, warnings = cpu.parse_cpu(x86(V2, V2))
    assert (result.vendor, result.model) == ("AuthenticAMD", "AMD EPYC")
    assert result.flags == frozenset(V2.split())
    assert result.level == "x86-64-v2"
    assert warnings == ()
    assert cpu.parse_arch(x86(V2)) == "x86_64"


def test_flags_are_those_of_every_cpu():
    result, _ = cpu.parse_cpu(x86("lm sse sse2 avx", "lm SSE sse2 avx2"))
    assert result.flags == {"lm", "sse", "sse2"}


def test_hybrid_arm():
    text = arm(
        ("fp asimd sve2 i8mm bf16", "0x41", "0xd46"),
        ("fp asimd sve2 i8mm", "0x41", "0xd4d"),
        ("fp asimd sve2 bf16", "0x41", "0xd4e"),
    )
    result, warnings = cpu.parse_cpu(text)
    assert result.flags == {"fp", "asimd", "sve2"}
    assert (result.vendor, result.model) == ("ARM", "Cortex-A510 + Cortex-A715 + Cortex-X3")
    assert result.level is None
    assert warnings == ()
    assert cpu.parse_arch(text) == "aarch64"


@pytest.mark.parametrize(
    ("implementer", "part", "vendor", "model"),
    [
        ("0x41", "0xd4f", "ARM", "Neoverse-V2"),
        ("0xc0", "0xac3", "Ampere", "Ampere-1"),
        ("0x46", "0x001", "FUJITSU", "A64FX"),
        ("0x4e", "0x004", "NVIDIA", "CPU part 0x004"),
        ("0x99", "junk", "0x99", "CPU part junk"),
    ],
)
def test_arm_names(implementer, part, vendor, model):
    result, _ = cpu.parse_cpu(arm(("fp asimd", implementer, part)))
    assert (result.vendor, result.model) == (vendor, model)


def test_lscpu():
    result, warnings = cpu.parse_cpu(LSCPU)
    assert result.vendor == "GenuineIntel"
    assert result.model == "Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz"
    assert result.flags == {"fpu", "lm", "sse", "sse2", "avx2"}
    assert warnings == ()
    assert cpu.parse_arch(LSCPU) == "x86_64"
    result, _ = cpu.parse_cpu(LSCPU_ARM)
    assert (result.vendor, result.model, result.level) == ("ARM", "Neoverse-N1", None)
    assert cpu.parse_arch(LSCPU_ARM) == "aarch64"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("\t", "   "),
        lambda text: text.replace(" : ", ":").replace("\t: ", "\t\t:\t"),
        lambda text: text * 3,
        lambda text: text.replace("\n\n", "\n\0\n"),
    ],
)
def test_formatting_does_not_matter(change):
    assert cpu.parse_cpu(change(x86(V2, V2))) == cpu.parse_cpu(x86(V2))


def test_missing_flags():
    result, warnings = cpu.parse_cpu("processor : 0\nvendor_id : AuthenticAMD\nmodel name : EPYC\nflags :\n")
    assert result.flags == frozenset()
    assert result.level is None
    assert len(warnings) == 1
    assert "CPU flags unknown" in warnings[0]
    assert cpu.parse_arch("flags : fpu sse") is None


def test_empty():
    result, warnings = cpu.parse_cpu("")
    assert (result.vendor, result.model, result.flags, result.level) == (None, None, frozenset(), None)
    assert len(warnings) == 3


def test_power_names_its_model():
    result, warnings = cpu.parse_cpu("processor\t: 0\ncpu\t\t: POWER9, altivec supported\n")
    assert result.model == "POWER9, altivec supported"
    assert len(warnings) == 2


def test_vendors_with_surrounding_spaces():
    assert cpu.parse_cpu(x86(V2, vendor="  Shanghai  "))[0].vendor == "Shanghai"


@given(st.text() | st.binary().map(lambda raw: raw.decode("utf-8", "replace")))
def test_any_text_is_a_cpu(text):
    result, _ = cpu.parse_cpu(text)
    assert all(flag == flag.lower() and flag for flag in result.flags)
    cpu.parse_arch(text)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["flags", "Features", "vendor_id", "CPU part", "CPU implementer", "Architecture"]
            ),
            st.text(max_size=20),
        )
    )
)
@settings(max_examples=50)
def test_any_values_are_a_cpu(lines):
    text = "\n".join(f"{key}\t: {value}" for key, value in lines)
    cpu.parse_cpu(text)
    cpu.parse_arch(text)


def test_flags_of_other_systems_get_the_kernel_s_names():
    info = {
        "vendor_id_raw": "GenuineIntel",
        "brand_raw": "Intel(R) Core(TM) i9",
        "flags": ["sse3", "sse4.1", "rdrnd", "sha", "em64t", "avx1.0", "avx512vnni", "avx2", 7],
    }
    result, warnings = cpu.convert_cpu(info)
    assert result.flags == {"pni", "sse4_1", "rdrand", "sha_ni", "lm", "avx", "avx512_vnni", "avx2", "7"}
    assert (result.vendor, result.model, result.level) == ("GenuineIntel", "Intel(R) Core(TM) i9", None)
    assert warnings == ()


X86 = "processor\t: {}\nmodel name\t: x\nflags\t\t: lm avx avx2\n\n"


@pytest.mark.parametrize(
    "text",
    [
        X86.format(0) + "processor\t: 1\nmodel name\t: x\n\n",
        X86.format(0) + "processor\t: 1\nflags\t\t: \n\n",
        X86.format(0) + "processor\t: 1\nvmx flags\t: vnmi\n\n",
        "processor : 0\nflags : lm\n\nprocessor : 1\nflags : \n\nprocessor : 2\nflags : lm avx",
    ],
)
def test_flags_are_unknown_if_one_cpu_lists_none(text):
    result, warnings = cpu.parse_cpu(text)
    assert (result.flags, result.level) == (frozenset(), None)
    assert "flags of some CPUs unknown" in warnings[0]


@pytest.mark.parametrize(
    "text",
    [
        X86.format(0) + X86.format(1),
        (X86.format(0) + X86.format(1)).replace("\t", " "),
        # old kernels on arm64 write all CPUs and then what they have in common
        "Processor\t: AArch64\nprocessor\t: 0\nprocessor\t: 1\nFeatures\t: fp asimd\n\nHardware\t: x\n",
        "Architecture: x86_64\nFlags: lm avx\n",
    ],
)
def test_flags_are_known_if_every_cpu_lists_them(text):
    result, warnings = cpu.parse_cpu(text)
    assert result.flags
    assert not any("flags" in warning for warning in warnings)


GERMAN = """\
Architektur:                  x86_64
CPU Operationsmodus:          32-bit, 64-bit
Herstellerkennung:            GenuineIntel
Modellname:                   Intel(R) Xeon(R) Platinum 8375C CPU @ 2.90GHz
Markierungen:                 fpu lm sse sse2 AVX2
"""


@pytest.mark.parametrize("colon", [":", "\N{FULLWIDTH COLON}"])
def test_lscpu_in_another_language(colon):
    result, warnings = cpu.parse_cpu(GERMAN.replace(":", colon))
    assert (result.vendor, result.flags) == ("GenuineIntel", {"fpu", "lm", "sse", "sse2", "avx2"})
    assert cpu.parse_arch(GERMAN) == "x86_64"
    assert warnings == ("CPU model unknown",)


def as_json(text):
    items = [line.split(":", 1) for line in text.splitlines()]
    result = [{"field": f"{key.strip()}:", "data": value.strip()} for key, value in items]
    return json.dumps({"lscpu": [result[0] | {"children": result[1:]}]})


FRENCH = "Architecture : x86_64\nDrapeaux : fpu lm sse sse2\nIdentifiant constructeur : AuthenticAMD\n"


def test_a_translation_that_keeps_english_keys():
    assert cpu.parse_cpu(FRENCH)[0].flags == {"fpu", "lm", "sse", "sse2"}
    assert cpu.parse_arch(FRENCH) == "x86_64"


@pytest.mark.parametrize("name", ["lscpu.json", "lscpu.txt"])
def test_a_captured_tree_with_lscpu_instead_of_cpuinfo(tmp_path, name):
    (tmp_path / name).write_text(as_json(LSCPU) if name.endswith("json") else LSCPU)
    host = probe(tmp_path)
    assert (host.arch, host.cpu) == ("x86_64", cpu.parse_cpu(LSCPU)[0])


@pytest.mark.parametrize("text", [LSCPU, LSCPU_ARM, GERMAN])
def test_lscpu_as_json(text):
    assert cpu.parse_cpu(as_json(text)) == cpu.parse_cpu(text)
    assert cpu.parse_arch(as_json(text)) == cpu.parse_arch(text)


@pytest.mark.parametrize(
    "text",
    ["{", "{}", '{"lscpu": 1}', '{"lscpu": [1, {"field": 2}, {"data": []}]}', "{" * 100_000, '{"lscpu": {}}'],
)
def test_invalid_json_of_lscpu_is_ignored(text):
    assert cpu.parse_cpu(text)[0].flags == frozenset()


def test_the_items_of_lscpu_are_taken_in_turn():
    """Where each is taken from the front of a list, this takes a quarter of a minute."""
    text = json.dumps({"lscpu": [{}] * 250_000}, separators=(",", ":"))
    assert cpu.parse_cpu(text)[0].flags == frozenset()


def test_json_that_is_too_long_for_lscpu_is_ignored():
    text = as_json(LSCPU)
    assert cpu.parse_cpu(text + " " * (cpu.JSON_LIMIT - len(text)))[0].flags
    assert cpu.parse_cpu(text[:-1] + " " * cpu.JSON_LIMIT + "}")[0].flags == frozenset()


def test_other_systems_without_facts():
    result, warnings = cpu.convert_cpu({"flags": "sse", "brand_raw": ""})
    assert result.flags == frozenset()
    assert result.model is None
    assert warnings


def test_py_cpuinfo_is_the_last_resort(monkeypatch):
    import cpuinfo

    monkeypatch.setattr(cpuinfo, "get_cpu_info", lambda: {"flags": ["lm", "sse"], "brand_raw": "x"})
    assert cpu.read_from_library()[0].flags == {"lm", "sse"}
    monkeypatch.setattr(cpuinfo, "get_cpu_info", dict)
    with pytest.raises(ProbeError, match="detected no CPU"):
        cpu.read_from_library()

    def fail():
        raise OSError("no such thing")

    monkeypatch.setattr(cpuinfo, "get_cpu_info", fail)
    with pytest.raises(ProbeError, match="no such thing"):
        cpu.read_from_library()
