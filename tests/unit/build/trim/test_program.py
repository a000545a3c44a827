"""The program for build stages: one file that needs only Python."""

import subprocess
import sys
import zipfile

import pytest
from fatbins import entry, fat

from imagematrix.build.trim import program

RAW = fat(entry(target=80, payload=bytes(64)), entry(target=90))


@pytest.fixture
def run(tmp_path):
    """Call it with arguments to run the program with an isolated Python that has no installed packages."""
    (file,) = program.write_program(tmp_path).iterdir()

    def call(*words):
        command = [sys.executable, "-I", "-S", file, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    return call


def test_program_needs_only_python(run, tmp_path):
    env = tmp_path / "env"
    env.mkdir()
    (env / "a.fatbin").write_bytes(RAW)
    (env / "b.fatbin").write_bytes(fat(entry(target=70)))
    done = run("--compute", "9.0", "--compute", "8.9", env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        f"unchanged: {env}/a.fatbin: 0 of 208 bytes removed\n"
        f"unsupported: {env}/b.fatbin: 0 of 80 bytes removed, nothing for 8.9 9.0\n"
    )
    done = run("--compute", "9.0", "--keep-ptx", "--drop-dead", "--include-nvidia", env / "a.fatbin")
    assert done.stdout == f"trimmed: {env}/a.fatbin: 128 of 208 bytes removed\n"
    assert (env / "a.fatbin").read_bytes() == fat(entry(target=90)).ljust(len(RAW), b"\0")


def test_errors_fail_the_build(run, tmp_path):
    done = run("--compute", "90", tmp_path)
    assert done.returncode == 1
    assert done.stderr == "trim: invalid compute capability: '90'\ndid you mean '9.0'?\n"
    assert run("--compute", "9.0", tmp_path / "missing").returncode == 1
    assert run(tmp_path).returncode == 2


def test_reasons_are_told(run, tmp_path):
    (tmp_path / "a.fatbin").write_bytes(fat(entry(target=90)))
    (tmp_path / "x-1.dist-info").mkdir()
    (tmp_path / "x-1.dist-info" / "RECORD").write_text("a.fatbin,sha256=other,1\n")
    wheel = tmp_path / "y-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("y/a.fatbin", RAW)
    assert run("--compute", "9.0", tmp_path).stdout.splitlines() == [
        f"unchanged: {tmp_path}/a.fatbin: 0 of 80 bytes removed",
        f"damaged: {wheel}: 0 of {wheel.stat().st_size} bytes removed: it has no single RECORD",
        f"altered, or trimmed before: {tmp_path}/a.fatbin: RECORD had another hash",
    ]


def test_program_is_reproducible(tmp_path):
    one, other = program.write_program(tmp_path), program.write_program(tmp_path)
    assert one != other
    assert one.name == other.name
    (file,) = one.iterdir()
    assert file.read_bytes() == (other / file.name).read_bytes()
    assert file.stat().st_mtime_ns == (other / file.name).stat().st_mtime_ns == 0
