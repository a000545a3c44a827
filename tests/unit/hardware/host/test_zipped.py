import shutil
import subprocess
import sys
from pathlib import Path

import imagematrix

PYNVML = """\
class NVMLError(Exception):
    value = 9

def nvmlInit():
    raise NVMLError("it is from the archive")
"""
SAYS = """\
import sys
sys.path.insert(0, sys.argv[1])
from imagematrix.hardware.vendors import marches
from imagematrix.hardware.host import nvml
print(len(marches.get_required_flags("znver4", "gcc-14")) > 20, nvml.read_nvml().message)
"""


def test_the_package_works_from_a_zip_archive(tmp_path):
    files = tmp_path / "files"
    shutil.copytree(Path(imagematrix.__file__).parent, files / "imagematrix")
    (files / "pynvml.py").write_text(PYNVML)
    archive = shutil.make_archive(tmp_path / "node", "zip", files)
    words = [sys.executable, "-I", "-S", "-c", SAYS, archive]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout == "True it is from the archive\n", done.stderr
