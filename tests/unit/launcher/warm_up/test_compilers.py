"""Stubs in the place of compilers: they record what compiles, and no question for a version."""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from imagematrix.launcher.warm_up import compilers

COMPILERS = [
    "cc1",
    "cc1plus",
    "x86_64-linux-gnu-as",
    "as",
    "clang",
    "clang++",
    "clang-19",
    "ld",
    "ld.bfd",
    "ld.lld",
    "lld",
    "aarch64-linux-gnu-ld.gold",
    "ptxas",
    "ptxas-blackwell",
    "nvcc",
    "cicc",
    "nvlink",
    "mold",
]
OTHERS = [
    "gcc",
    "g++",
    "cc",
    "ninja",
    "ldd",
    "ldconfig",
    "asd",
    "python3",
    "alias",
    "ptx",
    "nvcc.profile",
    "clang-format.py",
    "make",
]


def put(root, name, text):
    path = root / name.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def stubbed(tmp_path, monkeypatch):
    """A folder as the root of an image with a compiler at a hostile path, and its stub."""
    monkeypatch.setattr(compilers, "FOLDER", f"{tmp_path}/record")
    monkeypatch.setattr(compilers, "RECORD", f"{tmp_path}/record/calls")
    real = put(tmp_path, "it's a $(folder)/cc1", '#!/bin/sh\necho "real $*"\n')
    raw = io.BytesIO()
    compilers.write_stubs([str(real)], raw)
    raw.seek(0)
    with tarfile.open(fileobj=raw) as archive:
        for member in archive:
            if member.isreg():  # engines replace what is there
                Path("/", member.name).unlink(missing_ok=True)
            archive.extract(member, "/", filter="fully_trusted")
    return real


@pytest.mark.parametrize("name", COMPILERS)
def test_a_compiler_is_known_by_its_name(name):
    assert compilers.is_compiler(name)


@pytest.mark.parametrize("name", OTHERS)
def test_what_compiles_nothing_itself_is_none(name):
    assert not compilers.is_compiler(name)


def test_executables_with_such_names_are_found_and_no_links():
    def member(name, kind=tarfile.REGTYPE, mode=0o755):
        info = tarfile.TarInfo(name)
        info.type, info.mode = kind, mode
        return info

    members = [
        member("usr/bin/ld", tarfile.SYMTYPE),
        member("usr/bin/x86_64-linux-gnu-ld"),
        member("./opt/ptxas"),
        member("usr/bin/as", tarfile.LNKTYPE),
        member("usr/share/as", mode=0o644),
        member("usr/lib/clang", tarfile.DIRTYPE),
        member("opt/python3/site-packages/warp_lang-1.19.0.dist-info/METADATA", mode=0o644),
    ]
    found = compilers.list_programs(members)
    assert found.compilers == ("/opt/ptxas", "/usr/bin/as", "/usr/bin/x86_64-linux-gnu-ld")
    assert found.packages == {"warp-lang": "1.19.0"}


@pytest.mark.parametrize(
    "words", [["--version"], ["-V"], ["-dumpversion"], ["-print-search-dirs"], ["-v", "-V"]]
)
def test_a_question_for_a_version_is_answered_and_not_recorded(stubbed, words):
    done = subprocess.run([stubbed, *words], capture_output=True, text=True, check=True)
    assert done.stdout == f"real {' '.join(words)}\n"
    assert compilers.parse_calls(Path(compilers.RECORD).read_bytes()) == ()


@pytest.mark.parametrize("words", [[], ["x.c"], ["-v", "x.c"], ["--version", "-o", "x"], ["-"]])
def test_every_other_call_is_recorded_and_works(stubbed, words):
    done = subprocess.run([stubbed, *words], capture_output=True, text=True, check=True)
    assert done.stdout == f"real {' '.join(words)}\n"
    (call,) = compilers.parse_calls(Path(compilers.RECORD).read_bytes())
    assert call == " ".join([str(stubbed), *words]).ljust(len(str(stubbed)) + 1)[: compilers.LONGEST]


def test_a_compiler_that_cannot_be_recorded_does_not_run(stubbed):
    Path(compilers.RECORD).unlink()
    Path(compilers.RECORD).mkdir()
    done = subprocess.run([stubbed, "x.c"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (125, "")


def test_a_test_call_runs_nothing_and_is_no_compilation(stubbed):
    done = subprocess.run([stubbed, compilers.TEST_CALL], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    raw = Path(compilers.RECORD).read_bytes()
    assert raw.decode().split() == [compilers.TEST_CALL]
    assert compilers.parse_calls(raw) == ()


def test_a_record_is_bounded():
    raw = b"/usr/bin/cc1 \xff\x1b[31m" + b"x" * 10_000 + b"\n" + b"y\n" * 10_000
    calls = compilers.parse_calls(raw)
    assert len(calls) == compilers.MOST_CALLS
    assert max(map(len, calls)) == compilers.LONGEST
