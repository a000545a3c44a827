"""The starter templates: required properties, and hadolint on their Dockerfiles."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from imagematrix.build.dockerfile.cache_folders import find_cache_faults
from imagematrix.build.dockerfile.dockerfile import list_run_platforms, truncate_after_stage
from imagematrix.build.dockerfile.platforms import BUILDER
from imagematrix.build.dockerfile.render import Renderer
from imagematrix.build.matrix.expand import expand_matrix
from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.plan.flags import STAGE
from imagematrix.cli.init import FOLDERS, TEMPLATES
from imagematrix.images.warm import tools

ROOT = Path(__file__).parents[3]
PLAIN = "cpu"  # the template without GPUs
WHEELS = ("pytorch", "pytorch-arm64", "tensorflow", "vllm", "vllm-arm64")  # of wheels: they compile nothing
JAVA = "spark"  # the template without code for a kind of CPU
COMPILED_LATER = "numba"  # the template of a program that is compiled when it runs
# The property that names the lock, and what the lock has to install.
LOCKED = {
    "pytorch": ("lock", "torch=={torch}"),
    "pytorch-arm64": ("lock", "torch=={torch}"),
    "tensorflow": ("lock", "tensorflow=={tensorflow}"),
    "vllm": ("vllm_lock", "vllm=={vllm}"),
    "vllm-arm64": ("vllm_lock", "vllm=={vllm}"),
}
ENVIRONMENT = {"tensorflow": "/opt/tensorflow"}  # and /opt/pytorch
DRIVER_LAST = "COPY --link --from=driver /driver/ /\n"
HADOLINT = Path(sys.executable).with_name("hadolint")


def rendered(path):
    """Return the Dockerfiles of the first image of a matrix by their cells."""
    matrix = load_matrix(path)
    cells = expand_matrix(matrix).cells
    with Renderer(matrix.templates, (image.name for image in matrix.images)) as renderer:
        return {
            cell.id: (cell, renderer.render(cell, "{}:v1".format).text)
            for cell in cells
            if cell.image == cells[0].image
        }


def lint(*dockerfiles):
    command = [HADOLINT, "--no-color", "--config", ROOT / ".hadolint.yaml", *dockerfiles]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_init_offers_every_template(starters):
    assert set(TEMPLATES) == set(starters)
    used = {folder for name in TEMPLATES for folder in FOLDERS.get(name, (name,))}
    assert used == {path.parent.name for path in (ROOT / "templates").glob("*/Dockerfile.j2")}


@pytest.mark.parametrize("name", WHEELS)
def test_wheels_are_trimmed_for_the_gpu_of_the_cell(name, starters):
    result = rendered(starters[name]).values()
    assert len(result) == len({cell.axes["compute"] for cell, _ in result}) > 1
    for cell, text in result:
        trimmed = [
            stage for stage in text.split("\nFROM ") if f"--compute {cell.axes['compute']} /wheels" in stage
        ]
        assert trimmed
        folder = FOLDERS.get(name, (name,))[0]
        command = f"install-wheels {ENVIRONMENT.get(name, '/opt/pytorch')} /opt/{folder}"
        assert all(command in stage for stage in trimmed)
        lock, pin = LOCKED[name]
        content = (ROOT / "templates" / folder / cell.properties[lock]).read_text()
        words = re.sub(r"#.*|\\\n", "", content).split()
        assert words[words.index(pin.format(**cell.axes, **cell.properties)) + 1].startswith("--hash=sha256:")
        assert text.endswith(DRIVER_LAST) != ("FROM pytorch:v1 AS body\n" in text)


def test_vllm_has_the_modules_that_a_pth_file_names(starters):
    modules = "/opt/vllm/nvidia_cutlass_dsl/dsl_packages"
    for name, path in (("vllm", "/opt/vllm"), ("vllm-arm64", f"/opt/vllm:{modules}")):
        assert all(f" PYTHONPATH={path}\n" in text for _, text in rendered(starters[name]).values())


def test_vllm_for_arm64_is_installed_by_the_machine_that_builds(starters):
    for cell, text in rendered(starters["vllm-arm64"]).values():
        assert list_run_platforms(text, []) == {BUILDER}
        assert "--platform=manylinux_2_${minor}_aarch64" in text
        # Of FlashAttention 3, there is code for 9.0 only.
        assert ("/_vllm_fa3_C.abi3.so" in text) == (cell.axes["compute"] != "9.0")


def test_spark_serves_masters_and_workers(starters):
    result = rendered(starters[JAVA]).values()
    assert {cell.axes.get("compute") for cell, _ in result} == {None, "7.5", "8.0", "8.6", "8.9", "9.0"}
    for cell, text in result:
        assert (ROOT / "templates" / JAVA / cell.properties["lock"]).is_file()
        assert ("nvidia" in text) == bool(cell.cuda)
        if cell.cuda:
            assert f"compile.py /src/squares.cu sm_{cell.axes['compute'].replace('.', '')} " in text
            assert text.endswith(DRIVER_LAST)


def test_numba_s_program_is_what_warms_its_image(starters):
    ((cell, text),) = rendered(starters[COMPILED_LATER]).values()
    content = (ROOT / "templates" / COMPILED_LATER / cell.properties["lock"]).read_text()
    assert f"numba=={cell.axes['numba']} " in content
    program, path = re.search(r"^COPY --link (\S+) (\S+)$", text, re.MULTILINE).groups()
    assert (ROOT / "templates" / COMPILED_LATER / program).is_file()
    assert cell.warm_up.command[:2] == ("python3", path)
    assert cell.warm_up.gpus == "none"


def test_vllm_is_warmed_without_weights(starters):
    for cell, _ in rendered(starters["vllm"]).values():
        assert "load_format='dummy'" in cell.warm_up.command[-1]
        assert cell.warm_up.inputs == (("model", "/models/m"),)


@pytest.mark.parametrize("name", ["pytorch", COMPILED_LATER])
def test_images_with_a_warm_up_have_their_caches_in_one_place(name, starters):
    for cell, text in rendered(starters[name]).values():
        assert cell.warm_up
        assert f"RUN install -d -m 1777 {tools.ROOT}\n" in text
        assert find_cache_faults(text) == []


@pytest.mark.parametrize("name", [*WHEELS, JAVA, COMPILED_LATER, "llama.cpp"])
def test_steps_that_use_the_package_index_mount_its_secrets(name, starters):
    for _, text in rendered(starters[name]).values():
        asking = [
            step
            for step in re.split(r"\n(?=[A-Z]+ )", text)
            if re.search(r"pip (install|download) |^    install-wheels ", step, re.MULTILINE)
        ]
        assert asking
        for step in asking:
            assert "--mount=type=secret,id=ca,target=/run/secrets/ca" in step
            assert "--mount=type=secret,id=pip-conf,target=/etc/pip.conf" in step
            assert "--require-hashes" in step or "install-wheels" in step


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in (*WHEELS, JAVA, COMPILED_LATER)])
def test_other_templates_serve_nodes_with_and_without_gpus(name, starters):
    result = rendered(starters[name]).values()
    assert {cell.cuda is None for cell, _ in result} == ({True} if name == PLAIN else {True, False})
    for cell, text in result:
        assert truncate_after_stage(text, STAGE), "without the stage the CPU flags of the code are unknown"
        assert cell.axes["march"] in text
        if cell.cuda:
            assert text.endswith(DRIVER_LAST)
        else:
            code = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
            assert not re.search("nvidia|driver|nvcc|non-free|None", code)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "llama.cpp",
            ["CMAKE_CUDA_ARCHITECTURES=89-real", 'CFLAGS="-O2 -march=x86-64-v4"'],
        ),
        ("pytorch-source", ['TORCH_CUDA_ARCH_LIST="8.9"', "USE_NCCL=1", 'CXXFLAGS="-O2 -march=x86-64-v4"']),
    ],
)
def test_targets_are_passed_to_the_build_system(name, expected, starters):
    ((_, text),) = [
        result for cell, result in rendered(starters[name]).items() if cell.endswith("sm89-x86-64-v4")
    ]
    assert [words for words in expected if words not in text] == []


@pytest.mark.parametrize("name", TEMPLATES)
def test_hadolint_reports_nothing(name, starters, tmp_path):
    paths = []
    for cell, (_, text) in rendered(starters[name]).items():
        paths.append(tmp_path / cell)
        paths[-1].write_text(text)
    done = lint(*paths)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_detects_a_bad_dockerfile(tmp_path):
    path = tmp_path / "Dockerfile"
    path.write_text("FROM debian\nRUN cd /tmp\n")
    done = lint(path)
    assert done.returncode == 1
    assert {"DL3003", "DL3006"} <= set(done.stdout.split())
