"""Device code in wheels of several vendors, compared with NVIDIA's cuobjdump."""

import re
import subprocess
import sys
import zipfile

import pytest

from imagematrix.audit.binaries import elf, objects
from imagematrix.audit.binaries.window import Window

pytestmark = pytest.mark.long

JUDGE = "nvidia-cuda-cuobjdump==13.5.37"
WHEELS = (
    "bitsandbytes==0.50.2",
    "ctranslate2==4.8.5",
    "nvidia-cuda-runtime-cu12==12.9.79",
    "nvidia-nvjpeg-cu12==12.4.0.76",
)
LINE = re.compile(r"\.sm_(\d+[af]?)\.(cubin|ptx)$", re.MULTILINE)
FILE = re.compile(r".*\.(so[.\d]*|a|cubin|fatbin)")


def downloaded(folder, wheel):
    options = ["-q", "--no-deps", "--only-binary=:all:", "-d", folder]
    pip = [sys.executable, "-m", "pip", "download", *options, wheel]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot download {wheel}: {done.stderr[-200:]}")
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """Call it with a file to get the cubins and the PTX that cuobjdump lists; None if it fails."""
    folder = tmp_path_factory.mktemp("judge")
    with downloaded(folder, JUDGE) as archive:
        program = folder / archive.extract("nvidia/cu13/bin/cuobjdump", folder)
    program.chmod(0o755)

    def call(path):
        words = [program, "--list-elf", "--list-ptx", path]
        result = subprocess.run(words, capture_output=True, text=True, check=False)
        if "fatal" in result.stderr:  # code of targets that it no longer supports
            return None
        listed = LINE.findall(result.stdout)
        return tuple({target for target, kind in listed if kind == wanted} for wanted in ("cubin", "ptx"))

    return call


@pytest.mark.parametrize("wheel", WHEELS)
def test_targets_match_those_of_cuobjdump(judge, wheel, tmp_path):
    compared = 0
    with downloaded(tmp_path, wheel) as archive:
        for name in filter(FILE.fullmatch, archive.namelist()):
            path = tmp_path / archive.extract(name, tmp_path)
            with path.open("rb") as file:
                window = Window(file, 0, path.stat().st_size)
                result = objects.examine_file(name, window, elf.read_elf(window))
            listed = judge(path)
            if result and result.code.cuda and listed is not None:
                assert (result.code.cubins, {target for target, _ in result.code.ptx}) == listed, name
                compared += 1
    assert compared
