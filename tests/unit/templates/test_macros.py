"""The macros that templates share: what they write for each kind of cell."""

import re
import shutil
from pathlib import Path

import pytest

from imagematrix.errors import UsageError
from imagematrix.facts import cuda
from imagematrix.matrix.expand import expand
from imagematrix.matrix.load import load
from imagematrix.render.render import Renderer

ROOT = Path(__file__).parents[3]
DRIVER = '{{ debian.driver_stage(driver_base, driver, driver_series | default("", true)) }}'


@pytest.fixture
def macro(project, tmp_path):
    """Call it with a use of macros, and changes of the good matrix, to get what the last cell has."""

    def call(use, *changes):
        for file in (ROOT / "templates").glob("*.j2"):
            shutil.copy(file, tmp_path / "templates")
        path = project(*changes, template=f'{{% import "macros.j2" as debian %}}\n{use}\n')
        matrix = load(path)
        with Renderer(matrix.templates) as renderer:
            return renderer.render(expand(matrix).cells[-1], lambda _: None)

    return call


def properties(text):
    return "properties:\n", f"properties:\n  driver: {text}\n"


def test_driver_is_installed_from_debian(macro):
    text = macro(DRIVER, properties('{550.163.01: {driver_base: "debian:trixie"}}'))
    assert text.startswith("FROM debian:trixie AS driver\n")
    assert '"$package=550.163.01-*"' in text
    assert text.endswith("find /driver -exec touch -h -d @0 {} +\n")


def test_driver_is_copied_from_a_folder(macro, tmp_path):
    (tmp_path / "new").mkdir()
    text = macro(DRIVER, properties("{550.163.01: {driver_from: new}}"))
    assert text == "FROM scratch AS driver\nCOPY --from=imagematrix-driver / /driver/\n"


def test_host_mode_installs_no_driver(macro):
    assert macro(DRIVER, ("550.163.01", "host")) == "FROM scratch AS driver\nWORKDIR /driver\n"


TOOLKIT = '{{ debian.cuda_stage(base, cuda, "nvcc nvrtc") }}'


def released(release):
    return ('"12.4"', f'"{release}"'), ("550.163.01", "580.159.04")


@pytest.mark.parametrize("release", ["13.0", "13.5"])
def test_toolkit_is_installed_from_pinned_wheels(macro, release):
    text = macro(TOOLKIT, *released(release))
    assert text.startswith("FROM debian:trixie AS cuda\n")
    wheels = re.findall(r'echo "([\w-]+)==([\d.]+)((?: --hash=sha256:[0-9a-f]{64}){2})"', text)
    assert {name for name, _, _ in wheels} == {
        "nvidia-cuda-cccl",
        "nvidia-cuda-crt",
        "nvidia-cuda-nvcc",
        "nvidia-cuda-nvrtc",
        "nvidia-cuda-runtime",
        "nvidia-nvvm",
    }
    versions = {name: version for name, version, _ in wheels}
    assert versions["nvidia-cuda-nvcc"].startswith(f"{release}.")


def test_cuda_12_wheels_have_no_nvcc(macro):
    changes = released("12.9")
    assert 'echo "nvidia-cuda-nvrtc-cu12==12.9.' in macro(TOOLKIT.replace("nvcc ", ""), *changes)
    with pytest.raises(UsageError, match=r"macros\.j2:\d+: .* has no attribute 'nvcc'"):
        macro(TOOLKIT, *changes)


def test_tables_match_the_targets_of_the_wheels(macro):
    names = macro('{% import "cuda_wheels.j2" as known %}{{ known.WHEELS | join(" ") }}').split()
    assert len(names) > 1
    for name in names:
        assert {"100", "103", "120", "121"} <= cuda.release(name).targets
