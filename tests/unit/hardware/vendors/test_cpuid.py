import json
import runpy
import sys
from pathlib import Path

import pytest

from imagematrix.hardware.vendors import _data, cpuid, marches

ROOT = Path(__file__).parents[4]
X86 = """\
#define X86_FEATURE_AVX2		( 9*32+ 5) /* "avx2" AVX2 instructions */
#define X86_FEATURE_SHA512		(12*32+ 1) /* SHA512 instructions */
#define X86_FEATURE_NEW			(12*32+ 9) /* "brand_new" */
"""
ARM = "#define HWCAP_SVE\t(1 << 22)\n#define HWCAP2_SME_I16I64\t(1 << 24)\n#define HWCAP3_LSFE\t(1 << 2)\n"


def needed(arch):
    sets = _data.load("marches.json")[arch].values()
    return {flag for flags in sets for text in flags.values() for flag in text.split()}


def test_the_table_has_what_compilers_need_and_kernels_do_not_print():
    printed = frozenset(_data.load("cpuid.json")["printed"]["x86_64"].split())
    assert needed("x86_64") - printed == cpuid.list_unprinted_flags().keys()


@pytest.mark.parametrize("arch", marches.IGNORED)
def test_a_probe_can_see_all_flags_that_compilers_need(arch):
    assert needed(arch) <= cpuid.list_visible_flags(arch)
    assert not {"avx512_made_up"} & cpuid.list_visible_flags(arch)


def test_no_flag_is_printed_on_an_unknown_architecture():
    assert cpuid.list_visible_flags("riscv64") == frozenset()


def test_flags_follow_those_that_they_need():
    seen: set[str] = set()
    for flag, bit in cpuid.list_unprinted_flags().items():
        assert not bit.proofs & cpuid.list_unprinted_flags().keys() - seen
        assert flag not in seen
        seen.add(flag)


def test_regenerating(tmp_path, monkeypatch, capsys):
    for path, text in (
        ("arch/x86/include/asm/cpufeatures.h", X86),
        ("arch/arm64/include/uapi/asm/hwcap.h", ARM),
    ):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    table = tmp_path / "cpuid.json"
    table.write_text((ROOT / "imagematrix/hardware/vendors/cpuid.json").read_text())
    script = str(ROOT / "ci/facts/cpuid.py")
    words = ["--headers", str(tmp_path), "--kernel", "9.1", "--table", str(table), "--as-of", "2030-01-01"]
    monkeypatch.setattr(sys, "argv", [script, *words])
    runpy.run_path(script, run_name="__main__")
    data = json.loads(table.read_text())
    assert (data["as_of"], data["kernel"]) == ("2030-01-01", "9.1")
    assert data["printed"] == {"x86_64": "avx2 brand_new", "aarch64": "lsfe smei16i64 sve"}
    lines = capsys.readouterr().out.splitlines()
    assert "avx512f: missing" in lines
    assert "sha512: the kernel has ('7.1', 'eax'), bit 1" in lines
    assert not any("superfluous" in line for line in lines)
