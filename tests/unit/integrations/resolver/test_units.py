"""systemd reads the services in the documentation."""

import shutil
import subprocess

import pages
import pytest

PAGE = pages.ROOT / "docs" / "how-to" / "one-name-for-a-cluster.md"
EXPOSURE = 25  # in tenths; systemd calls up to 5.0 "medium"


@pytest.fixture
def units(tmp_path):
    """The files of the units, with a program that exists."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd is not installed")
    files = []
    for block in pages.blocks(PAGE.read_text()):
        if block.language == "ini" and block.mark[1].endswith((".service", ".path")):
            files.append(tmp_path / block.mark[1])
            files[-1].write_text(block.text.replace("/usr/local/bin/imagematrix", "/bin/true"))
    return files


def analyze(*words):
    return subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, check=False)


def test_systemd_accepts_the_units(units):
    done = analyze("verify", *units)
    assert (done.returncode, done.stderr) == (0, "")
    assert {file.name for file in units} == {
        "imagematrix-resolver.service",
        "imagematrix-resolver-sweep.path",
        "imagematrix-resolver-sweep.service",
    }


def test_the_unit_names_the_port_for_health():
    """Without it, nobody could ask whether the resolver answers while clients keep it busy."""
    (unit,) = (
        block.text
        for block in pages.blocks(PAGE.read_text())
        if "ExecStart" in block.text and "--state" in block.text
    )
    words = next(line for line in unit.splitlines() if line.startswith("ExecStart=")).split()
    assert words[words.index("--health") + 1] == "127.0.0.1:5051"


def test_units_are_sandboxed(units):
    for file in units:
        if file.suffix == ".service":
            done = analyze("security", "--offline=yes", f"--threshold={EXPOSURE}", "--no-pager", file)
            assert done.returncode == 0, done.stdout
