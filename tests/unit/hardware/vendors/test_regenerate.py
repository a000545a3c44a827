"""The scripts that generate the tables, with simulated tools and, if installed, real ones."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from imagematrix.hardware.vendors import macros
from imagematrix.hardware.vendors._data import load

ROOT = Path(__file__).parents[4]

GCC = """\
#!/bin/sh
case "$*" in
*--version*) echo "gcc-39 (Stand-in 1-2) 39.1.0" ;;
*=unknown*) echo "cc1: note: valid arguments are: x86-64 haswell newlake native" >&2; exit 1 ;;
*newlake*) printf '#define __AVX2__ 1\\n#define __NEWSET__ 1\\n#define __FLT_RADIX__ 2\\n' ;;
*haswell*) printf '#define __AVX2__ 1\\n' ;;
*) printf '#define __SSE2__ 1\\n' ;;
esac
"""
CLANG = """\
#!/bin/sh
case "$*" in
*--version*) echo "Stand-in clang version 39.0.0" ;;
*--print-supported-cpus*) printf 'Available CPUs:\\n\\n\\tgeneric\\n\\tnewcore\\n' >&2 ;;
*aarch64*=unknown*) echo "clang: error: unsupported argument" >&2; exit 1 ;;
*=unknown*) echo "note: valid target CPU values are: x86-64, haswell" >&2; exit 1 ;;
*newcore*) echo "#define __ARM_FEATURE_ATOMICS 1" ;;
*aarch64*=armv8-a*) ;;
*aarch64*) exit 1 ;;
*) echo "#define __SSE2__ 1" ;;
esac
"""
PTXAS = """\
#!/bin/sh
case "$*" in
*--version*) echo "Cuda compilation tools, release RELEASE, V1.2.3" ;;
*--help*) echo "'compute_90a','lto_90','sm_90a','sm_100','sm_90','sm_75'. Default value: 'sm_75'." ;;
*) echo "ptxas new.ptx, line 1; fatal : Unsupported .version 99.9; current version is '9.9'" >&2; exit 255 ;;
esac
"""


def run(script, *arguments, path=None):
    environment = {"PATH": f"{path}:/usr/bin:/bin" if path else "/nowhere", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "ci" / "facts" / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def program(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def table(tmp_path):
    def copy(name):
        return Path(shutil.copy(ROOT / "imagematrix" / "hardware" / "vendors" / name, tmp_path))

    return copy


def test_marches_table_is_unchanged_without_compilers(table):
    copy = table("marches.json")
    before = copy.read_bytes()
    assert run("marches.py", "--table", copy).returncode == 0
    assert copy.read_bytes() == before


def test_unannounced_features_apply_to_missing_compilers(table):
    copy = table("marches.json")
    before = copy.read_bytes()
    copy.write_bytes(before.replace(b"faminmax ", b"").replace(b" cmpbr", b""))
    assert run("marches.py", "--table", copy).returncode == 0
    after = json.loads(copy.read_text())["aarch64"]["armv9.6-a"]
    assert after
    assert all({"cmpbr", "faminmax"} <= set(flags.split()) for flags in after.values())


def test_compiler_is_merged_into_the_marches_table(table, tmp_path):
    copy = table("marches.json")
    before = json.loads(copy.read_text())
    program(tmp_path / "gcc-39", GCC)
    program(tmp_path / "clang-39", CLANG)
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        str(ROOT / "ci" / "facts" / "marches.py"),
        "--table",
        str(copy),
        "--as-of",
        "2030-01-01",
    ]
    for _ in range(2):
        result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert result.stdout.splitlines() == ["gcc-39 x86_64: 3", "clang-39 x86_64: 2", "clang-39 aarch64: 2"]
        assert result.stderr.splitlines() == ["gcc-39: no flag for __NEWSET__"]
        after = json.loads(copy.read_text())
        assert after["as_of"] == "2030-01-01"
        assert list(after["compilers"])[-2:] == ["gcc-16", "gcc-39"]
        assert after["compilers"]["gcc-39"] == {"x86_64": "(Stand-in 1-2) 39.1.0"}
        assert after["x86_64"]["newlake"] == {"gcc-39": "avx2"}
        assert after["x86_64"]["haswell"] == before["x86_64"]["haswell"] | {
            "clang-39": "sse2",
            "gcc-39": "avx2",
        }
        assert after["aarch64"]["newcore"] == {"clang-39": "atomics"}
        assert "" in after["aarch64"]["armv8-a"].values()
        assert after["x86_64"]["znver4"] == before["x86_64"]["znver4"]


def test_installed_compiler_matches_the_table():
    spec = importlib.util.spec_from_file_location("ci_facts_marches", ROOT / "ci" / "facts" / "marches.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    data = load("marches.json")
    for compiler, arch, command in script.installed():
        if data["compilers"].get(compiler, {}).get(arch) == script.version(command):
            break
    else:
        pytest.skip("no compiler on PATH is one that the table was made with")
    assert script.ask(command, arch) == {
        march: sets[compiler] for march, sets in script.expand(data[arch]).items() if compiler in sets
    }
    assert all(arch in macros.FLAGS for _, arch, _ in script.installed())


def test_products_of_pci_ids_are_added_once(table, tmp_path):
    copy = table("gpus.json")
    before = json.loads(copy.read_text())
    ids = tmp_path / "pci.ids"
    ids.write_text(
        "10dd  Somebody\n\t0001  AD102 [No GPU of NVIDIA]\n"
        "10de  NVIDIA Corporation\n"
        "\t26b9  AD102GL [Another name]\n"
        "\t26ff  AD102GL [New L40]\n\t\t10de 1234  Board of a partner\n"
        "\t1d00  GV100 Engineering Sample\n"
        "# a comment\n\n"
        "\t22bb  AD102 High Definition Audio Controller\n"
        "\t22a4  GH100 [H100 NVSwitch]\n"
        "\t0191  G80 [GeForce 8800 GTX]\n"
        "\t3fff  GZ100 [Unknown chip]\n"
        "\t4fff  GA999 [Unknown chip]\n"
        "10df  Somebody else\n\t0002  AD102 [No GPU of NVIDIA]\n"
    )
    result = run("gpus.py", "--table", copy, "--pci-ids", ids)
    assert result.stdout.splitlines() == ["26ff AD102GL New L40", "1d00 GV100 "]
    assert result.stderr.splitlines() == ["4fff GA999 Unknown chip: chip not in the table"]
    after = json.loads(copy.read_text())
    assert after["chips"]["AD102"]["devices"] == before["chips"]["AD102"]["devices"] | {"26ff": "New L40"}
    assert after["chips"]["GV100"]["devices"]["1d00"] == "GV100"
    once = copy.read_bytes()
    assert run("gpus.py", "--table", copy, "--pci-ids", ids).stdout == ""
    assert copy.read_bytes() == once


def test_pci_ids_without_nvidia_add_nothing(table, tmp_path):
    copy = table("gpus.json")
    before = copy.read_bytes()
    (tmp_path / "pci.ids").write_text("10dd  Somebody\n")
    assert run("gpus.py", "--table", copy, "--pci-ids", tmp_path / "pci.ids").returncode == 0
    assert copy.read_bytes() == before


def test_ptxas_output_updates_the_cuda_table(table, tmp_path):
    copy = table("cuda.json")
    before = json.loads(copy.read_text())
    program(tmp_path / "ptxas", PTXAS.replace("RELEASE", "12.4"))
    result = run("cuda.py", "--table", copy, path=tmp_path)
    assert result.stdout == "CUDA 12.4: PTX ISA 9.9, targets 75 90 90a 100\n"
    after = json.loads(copy.read_text())
    assert after["releases"].pop("12.4") == before["releases"].pop("12.4") | {
        "ptx_isa": "9.9",
        "targets": "75 90 90a 100",
    }
    assert after == before


def test_release_without_a_row_is_rejected(table, tmp_path):
    program(tmp_path / "ptxas", PTXAS.replace("RELEASE", "77.7"))
    result = run("cuda.py", "--table", table("cuda.json"), path=tmp_path)
    assert result.returncode == 1
    assert "CUDA 77.7 has no row" in result.stderr


def test_program_other_than_ptxas_is_rejected(table):
    result = run("cuda.py", "--table", table("cuda.json"), "--ptxas", "/bin/true")
    assert result.returncode == 1
    assert "in the output of ptxas" in result.stderr


@pytest.mark.skipif(not shutil.which("ptxas"), reason="no ptxas on PATH")
def test_installed_ptxas_matches_the_table(table):
    copy = table("cuda.json")
    before = copy.read_bytes()
    result = run("cuda.py", "--table", copy, "--ptxas", shutil.which("ptxas"))
    if "has no row" in result.stderr:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0
    assert copy.read_bytes() == before


@pytest.mark.parametrize("name", ["cuda.json", "gpus.json", "marches.json"])
def test_tables_name_their_sources_and_are_formatted(name):
    text = (ROOT / "imagematrix" / "hardware" / "vendors" / name).read_text()
    data = json.loads(text)
    assert len(data["as_of"]) == len("2026-01-01")
    assert all("://" in source or "@" in source or "Debian" in source for source in data["sources"].values())
    assert text == json.dumps(data, indent=1, ensure_ascii=False) + "\n"
