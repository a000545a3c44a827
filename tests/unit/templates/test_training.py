import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jinja2
import pytest

TEMPLATES = Path(__file__).parents[3] / "templates"
FAKE_CUDA = Path(__file__).parents[2] / "doubles/fake_cuda.cpp"

CPU = {
    "platform": "linux/amd64",
    "base": "debian:trixie",
    "compiler": "gcc-14",
    "march": "x86-64-v2",
    "cuda": None,
    "compute": None,
    "sm": None,
    "nvrtc": None,
    "driver": None,
    "driver_base": None,
}
GPU = CPU | {
    "cuda": "12.4",
    "compute": "8.9",
    "sm": "89",
    "nvrtc": "libnvrtc12",
    "driver": "550.163.01",
    "driver_base": "debian:trixie",
}

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64",
    reason="needs g++ on x86-64",
)


def environment() -> jinja2.Environment:
    return jinja2.Environment(  # noqa: S701, a Dockerfile is not HTML
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(cell) -> str:
    return environment().get_template("training/Dockerfile.j2").render(cell)


def stages(cell) -> dict[str, list[str]]:
    """Return the instructions of each stage by its name; the last one's is ""."""
    result: dict[str, list[str]] = {}
    text = re.sub(r"^#.*\n", "", render(cell), flags=re.MULTILINE).replace("\\\n", "")
    current: list[str] = []
    for line in filter(None, text.splitlines()):
        if line.startswith("FROM "):
            current = result.setdefault(line.partition(" AS ")[2], [])
        current.append(line)
    return result


def run_step(cell, stage) -> str:
    """Return the shell command of a stage's last RUN."""
    return [line for line in stages(cell)[stage] if line.startswith("RUN ")][-1].removeprefix("RUN ")


def test_cpu_only_cell_has_no_gpu_parts():
    text = render(CPU)
    assert list(stages(CPU)) == ["compiler", "program", "body", ""]
    assert not re.search("cuda|driver|nvidia|nvrtc|non-free|None", text.replace("# the driver)", ""))


def test_driver_is_the_last_layer():
    assert stages(GPU)[""][-1] == "COPY --link --from=driver /driver/ /"


def test_program_is_the_command():
    assert 'CMD ["train"]' in stages(CPU)[""]
    assert 'CMD ["train"]' in stages(GPU)[""]


@pytest.mark.parametrize(
    ("change", "differ"),
    [
        ({"driver": "550.90.07"}, {"driver"}),
        ({"driver": "535.261.03", "driver_base": "debian:bookworm"}, {"driver"}),
        ({"compute": "9.0a", "sm": "90a"}, {"kernel"}),
        ({"march": "znver5"}, {"program"}),
    ],
)
def test_cells_share_equal_stages(change, differ):
    one, other = stages(GPU), stages(GPU | change)
    assert {name for name in one if one[name] != other[name]} == differ


def test_cpu_and_gpu_cells_share_the_program_stages():
    for name in ("compiler", "program", "body"):
        assert stages(CPU)[name] == stages(GPU)[name]


# Without nvrtc the compiler comes from wheels, without driver_base the driver from a folder.
@pytest.mark.parametrize("name", sorted(GPU.keys() - {"platform", "compute", "nvrtc", "driver_base"}))
def test_missing_variable_is_an_error(name):
    with pytest.raises(jinja2.UndefinedError, match=name):
        render({key: value for key, value in GPU.items() if key != name})


def test_driver_series_selects_debian_packages():
    assert "libcuda1 libnvidia-ptxjitcompiler1 libnvidia-ml1;" in run_step(GPU, "driver")
    assert (
        "libnvidia-tesla-470-cuda1 libnvidia-tesla-470-ptxjitcompiler1 libnvidia-tesla-470-ml1;"
        in run_step(GPU | {"driver_series": "-tesla-470"}, "driver")
    )


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        (
            "sources.list",
            "deb http://mirror/debian trixie main\n# a remark on main\n",
            "deb http://mirror/debian trixie main contrib non-free\n# a remark on main\n",
        ),
        (
            "sources.list.d/debian.sources",
            "Types: deb\nSuites: trixie\nComponents: main\nSigned-By: /key\n",
            "Types: deb\nSuites: trixie\nComponents: main contrib non-free\nSigned-By: /key\n",
        ),
        (
            "sources.list",
            "deb http://mirror/debian trixie main contrib non-free\n",
            "deb http://mirror/debian trixie main contrib non-free\n",
        ),
    ],
)
def test_non_free_is_enabled_in_both_apt_source_formats(tmp_path, file, before, after):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(before)
    macro = vars(environment().get_template("macros.j2").module)["update_with_non_free"]()
    command = (
        str(macro).replace("\\\n", "").replace("/etc/apt", str(tmp_path)).replace("apt-get update -q", "true")
    )
    subprocess.run(["sh", "-euc", command], check=True)
    assert path.read_text() == after


@pytest.mark.parametrize(("version", "code"), [("14", 0), ("12", 1)])
def test_wrong_compiler_version_fails_the_build(tmp_path, monkeypatch, version, code):
    for name, script in (("apt-get", "true"), ("gcc", f"echo {version}")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    step = run_step(CPU, "compiler")
    done = subprocess.run(["sh", "-c", step], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr == ("the compiler here is gcc-12, not gcc-14\n" if code else "")


def test_templates_name_no_mirror():
    text = "".join(path.read_text() for path in TEMPLATES.rglob("*") if path.is_file())
    assert set(re.findall(r"https?://[^/\s]+/", text)) == {"https://github.com/"}


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """Return a copy of the build context in which the compile steps of the Dockerfile have run."""
    folder = tmp_path_factory.mktemp("training") / "context"
    shutil.copytree(TEMPLATES / "training", folder)
    for stage in ("program", "kernel-compiler"):
        done = subprocess.run(
            ["sh", "-c", run_step(GPU, stage)], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
    return folder


def train(context, *options, **variables) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [context / "train", *options],
        env=os.environ | {"LD_LIBRARY_PATH": str(context / "none")} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.count("\n") == 1
    return done.returncode, json.loads(done.stdout), done.stderr


@needs_compiler
def test_loss_decreases_on_the_cpu(context):
    code, report, output = train(context, "--steps", "50")
    assert code == 0
    assert set(report) == {
        *(
            "march",
            "compiler",
            "isa",
            "cuda",
            "cubin",
            "libcuda",
            "driver_cuda",
            "cuinit",
            "device",
            "compute",
        ),
        *("backend", "steps", "seed", "initial_loss", "final_loss", "check", "samples_per_second", "threads"),
        "error",
    }
    assert report["march"] == "x86-64-v2"
    assert report["compiler"].startswith("gcc ")
    assert {"SSE4_2", "SSSE3", "POPCNT"} <= set(report["isa"])
    assert not {"AVX", "FMA", "BMI2"} & set(report["isa"])
    assert report["backend"] == "cpu"
    assert report["cuda"] is report["cubin"] is report["device"] is report["error"] is None
    assert report["final_loss"] < report["initial_loss"] / 2
    assert report["samples_per_second"] > 0
    assert len(re.findall(r"step +\d+  loss \d", output)) > 2


@needs_compiler
def test_same_seed_gives_the_same_loss(context):
    losses = [train(context, "--steps", "5", "--seed", seed)[1]["final_loss"] for seed in ("7", "7", "8")]
    assert losses[0] == losses[1] != losses[2]


@needs_compiler
def test_constant_loss_is_a_failure(context):
    code, report, output = train(context, "--steps", "0")
    assert code == 1
    assert report["error"] == "the loss did not fall"
    assert "the loss did not fall" in output


@needs_compiler
@pytest.mark.parametrize(
    "options", [["--steps"], ["--steps", "-1"], ["--steps", ""], ["--seed", "1x"], ["--what", "1"]]
)
def test_invalid_option_prints_usage(context, options):
    done = subprocess.run([context / "train", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "usage: train" in done.stderr


@pytest.fixture(scope="module")
def gpu_options(context) -> tuple[str, ...]:
    """Put a libcuda that runs kernel.cu on the CPU, and a file for it to load, beside the program."""
    library = context / "fake" / "libcuda.so.999.12"
    library.parent.mkdir()
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{context}", "-o", library, FAKE_CUDA]
    subprocess.run(command, check=True)
    library.with_name("libcuda.so.1").symlink_to(library.name)
    # An ELF header up to its flags, which name the target.
    (context / "kernel.cubin").write_bytes(b"\x7fELF".ljust(48, b"\0") + (89).to_bytes(4, "little"))
    (context / "kernel.txt").write_text("12.4 sm_89\n")
    return ("--cubin", str(context / "kernel.cubin"), "--steps", "2")


@needs_compiler
def test_gpu_kernels_match_the_cpu(context, gpu_options):
    code, report, output = train(context, *gpu_options, LD_LIBRARY_PATH=str(context / "fake"))
    assert code == 0, output
    assert (report["backend"], report["device"], report["compute"]) == ("gpu", 'Fake "GPU"', "8.9")
    assert (report["libcuda"], report["driver_cuda"]) == ("999.12", 12040)
    assert (report["cuda"], report["cubin"]) == ("12.4", "sm_89")
    assert report["check"]["gpu_loss"] == pytest.approx(report["check"]["cpu_loss"], rel=1e-5)
    assert report["final_loss"] == pytest.approx(report["check"]["cpu_loss"], rel=1e-5)


@needs_compiler
def test_missing_gpu_is_reported_and_the_cpu_is_used(context, gpu_options):
    code, report, output = train(
        context, *gpu_options, LD_LIBRARY_PATH=str(context / "fake"), FAKE_CUDA="cuInit=100"
    )
    assert code == 0
    assert report["backend"] == "cpu"
    assert report["cuinit"] == {"code": 100, "name": "CUDA_ERROR_NO_DEVICE"}
    assert report["device"] is None
    assert "cuInit answered 100 CUDA_ERROR_NO_DEVICE" in output


@needs_compiler
@pytest.mark.parametrize(
    ("fails", "error"),
    [
        ("cuInit=803", "cuInit answered 803 CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        ("cuModuleLoadData=209", "cuModuleLoadData answered 209 CUDA_ERROR_NO_BINARY_FOR_GPU"),
        ("cuMemAlloc=2", "cuMemAlloc answered 2 unknown"),
        ("cuCtxSynchronize=700", "cuCtxSynchronize answered 700 CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("idle", "the GPU computes something else than the CPU"),
    ],
)
def test_cuda_errors_are_reported_without_a_cpu_fallback(context, gpu_options, fails, error):
    code, report, output = train(
        context, *gpu_options, LD_LIBRARY_PATH=str(context / "fake"), FAKE_CUDA=fails
    )
    assert code == 1
    assert report["error"] == error
    assert report["backend"] is None
    assert error in output


@needs_compiler
@pytest.mark.parametrize(("release", "library"), [("12.4", "libnvrtc.so.12"), ("11.8", "libnvrtc.so.11.2")])
def test_kernel_needs_the_compiler_of_its_cuda_release(context, tmp_path, release, library):
    done = subprocess.run(
        [context / "compile_kernel", "kernel.cu", "sm_89", release, tmp_path],
        cwd=context,
        env=os.environ | {"LD_LIBRARY_PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        pytest.skip(f"{library} is installed")
    assert done.returncode == 1
    assert library in done.stderr or "NVRTC is of CUDA" in done.stderr
    assert list(tmp_path.iterdir()) == []
