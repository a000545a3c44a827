"""systemd reads the services in the documentation."""

import re
import shutil
import subprocess
import sys
import urllib.request

import pages
import pytest
from resolving import HOSTS
from system_calls import expand_groups, filter_command

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


def list_allowed_calls(unit):
    """Return the system calls that a unit allows; those of @default are always allowed (systemd.exec(5))."""
    allowed = expand_groups("@default")
    for line in re.findall(r"^SystemCallFilter=(.*)$", unit.read_text(), re.MULTILINE):
        names = line.removeprefix("~").split()
        allowed = allowed - expand_groups(*names) if line[0] == "~" else allowed | expand_groups(*names)
    return sorted(allowed)


def test_the_resolver_answers_with_the_system_calls_of_its_unit(units, published, upstream, tmp_path):
    (unit,) = (file for file in units if file.name == "imagematrix-resolver.service")
    command = [*filter_command(allowed=list_allowed_calls(unit)), sys.executable, "-m", "imagematrix"]
    command += ["resolver", "--upstream", upstream.address, "--listen", "127.0.0.1:0"]
    command += ["--health", "127.0.0.1:0", "--host", str(HOSTS / "laptop.json")]
    command += ["--state", str(tmp_path / "state"), "--changed", str(tmp_path / "changed")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = re.search(r" on (\S+), health on \S+\n", process.stderr.readline())[1]
            with urllib.request.urlopen(f"http://{address}/v2/ml/training/manifests/v1") as answer:
                assert answer.headers["Docker-Content-Digest"] == published.digests["cpu-v3"]
        finally:
            process.terminate()
        process.wait(30)
        assert process.stderr.read().startswith("ml/training:v1 is ")
    assert (tmp_path / "changed").exists()
    assert list((tmp_path / "state").rglob("*"))
