"""Images for arm64, built on a machine that has neither such a processor nor an emulator."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from compiling import compiled
from emulating import ARM_GCC, ARM_QEMU, fetch_arm64

from imagematrix.hardware.host.emulators import format_registration
from imagematrix.images.catalog import labels

ROOT = Path(__file__).parents[2]
HOST = ROOT / "tests/hosts/grace-hopper.json"
INDEX = "debian:trixie-slim"  # of both architectures
MATRIX = """\
schema: imagematrix.matrix/v1
images: {{arm: {{version: v1, template: arm.j2}}}}
axes: {{platform: [linux/arm64], march: [neoverse-v2]}}
properties: {{march: {{neoverse-v2: {{base: "{base}", compiler: gcc-14}}}}}}
"""
STAGE = "FROM --platform=$BUILDPLATFORM {{ base }} AS compiler\n"
ELSEWHERE = """\
{% import "macros.j2" as debian %}
FROM {{ base }} AS body
COPY elsewhere.conf /etc/ld.so.conf.d/
COPY elsewhere /opt/elsewhere/

FROM scratch AS driver
COPY driver /driver/usr/local/cuda/compat/

{{ debian.linker_cache_stage("body", version="compat", cross=arch, base=base) }}

FROM body
COPY --link --from=linker-cache /etc/ld.so.cache /etc/ld.so.cache
COPY --link --from=driver /driver/ /
"""
LIBRARIES = {"elsewhere/libelse.so.1.2": "else", "driver/libcuda.so.1": "cuda"}
USE = """\
#include <dlfcn.h>
#include <stdio.h>
int get_else(void);
int main(void) {
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    int (*get)(void) = cuda ? (int (*)(void))dlsym(cuda, "get_cuda") : 0;
    printf("%d %d\\n", get_else(), get ? get() : 0);
}
"""
END = "FROM {{ base }}\nLABEL some=thing\n"


@pytest.fixture(scope="module")
def arm_engine(engine):
    """The shared engine, with the index of the base; images for arm64 are removed at the end."""
    done = subprocess.run(
        [ROOT / "ci/bases", "arm64"], env=engine.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    yield engine
    names = engine.docker("images", "--format", "{{.Repository}}:{{.Tag}}", "training").stdout.split()
    if arm := [name for name in names if "-linux-arm64-" in name]:
        engine.docker("rmi", "--force", *arm)


def run_quickstart(engine):
    """Return what `make quickstart PLATFORM=linux/arm64` prints."""
    done = subprocess.run(
        [ROOT / "ci/quickstart"],
        env=engine.environment | {"PLATFORM": "linux/arm64"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def quickstart(arm_engine):
    """What the quickstart for arm64 prints without an emulator."""
    return run_quickstart(arm_engine)


def inspect(engine, name):
    return json.loads(engine.docker("image", "inspect", name).stdout)[0]


def unpack(engine, image, folder):
    """Write the files of an image to a folder."""
    container = engine.docker("create", "--platform", "linux/arm64", image).stdout.strip()
    with subprocess.Popen(
        ["docker", "export", container], env=engine.environment, stdout=subprocess.PIPE
    ) as exported:
        subprocess.run(["tar", "-C", folder, "-xf", "-"], stdin=exported.stdout, check=True)


def emulate(engine, image, folder, cpu):
    """Run the program of an image for a few steps on a processor of QEMU, and return its report.

    No emulator is registered with the kernel, which all containers of the machine would use.
    """
    unpack(engine, image, folder)
    program = [folder / "usr/local/bin/train", "--steps", "20"]
    cubin = folder / "usr/local/share/training/kernel.cubin"
    options = ["--cubin", cubin] if cubin.exists() else []
    done = subprocess.run(
        ["qemu-aarch64", "-cpu", cpu, "-L", folder, *program, *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def test_quickstart_builds_and_audits_without_an_emulator(quickstart, arm_engine):
    chosen = arm_engine.imagematrix("select", "training:v1", "--host", HOST, "--gpus", "none").stdout.strip()
    assert chosen.startswith("training:v1-linux-arm64-cpu-armv8-a-")
    assert f"$ imagematrix verify {chosen}\n" in quickstart
    assert f"not run: {chosen} needs an arm64 machine, or an emulator" in quickstart
    assert f"\n{format_registration('linux/arm64')}\n" in quickstart


def test_image_is_for_arm64_and_built_on_the_index(quickstart, arm_engine):  # noqa: ARG001 - it builds the image
    chosen = arm_engine.imagematrix("select", "training:v1", "--host", HOST, "--gpus", "none").stdout.strip()
    image = inspect(arm_engine, chosen)
    assert image["Architecture"] == "arm64"
    inputs = labels.read_components(image["Config"]["Labels"])
    assert inputs["platform"] == "linux/arm64"
    assert inputs[f"base {INDEX}"] == inspect(arm_engine, INDEX)["Id"]


def test_image_runs_on_the_oldest_processor(quickstart, arm_engine, tmp_path):  # noqa: ARG001 - it builds it
    chosen = arm_engine.imagematrix("select", "training:v1", "--host", HOST, "--gpus", "none").stdout.strip()
    report = emulate(arm_engine, chosen, tmp_path, "cortex-a53")
    assert report["march"] == "armv8-a"
    assert report["error"] is None
    assert report["final_loss"] < report["initial_loss"]


def test_nodes_of_this_machine_do_not_get_it(quickstart, arm_engine):  # noqa: ARG001 - it builds the image
    names = arm_engine.docker("images", "--format", "{{.Tag}}", "training").stdout
    assert "-linux-arm64-" in names
    refused = arm_engine.imagematrix("explain", "training:v1", "--gpus", "none", "--json")
    verdicts = {
        candidate["reference"]: next(rule["ok"] for rule in candidate["rules"] if rule["rule"] == "platform")
        for candidate in json.loads(refused.stdout)["candidates"]
    }
    assert not any(ok for reference, ok in verdicts.items() if "-linux-arm64-" in reference)


@pytest.mark.long
def test_image_for_a_gpu_has_the_driver_for_its_architecture(arm_engine, tmp_path):
    shutil.copytree(ROOT / "templates", tmp_path / "templates")
    shutil.copy(ROOT / "matrix.arm64.yaml", tmp_path)
    done = arm_engine.imagematrix(
        "build", "-f", tmp_path / "matrix.arm64.yaml", "--only", "compute=9.0", "--json"
    )
    assert done.returncode == 0, done.stderr
    chosen = arm_engine.imagematrix("select", "training:v1", "--host", HOST).stdout.strip()
    assert "-cuda12.4-drv550.163.01-sm90-neoverse-v2-" in chosen
    audit = json.loads(arm_engine.imagematrix("verify", chosen, "--json").stdout)
    assert audit["contradictions"] == []
    assert audit["cubins"] == ["90"]
    loaded = {one["path"]: one["loaded"] for one in audit["drivers"]}
    assert loaded["/usr/lib/aarch64-linux-gnu/libcuda.so.550.163.01"] is True
    report = emulate(arm_engine, chosen, tmp_path, "max")
    assert report["libcuda"] == "550.163.01", "the dynamic linker finds it without a cache"
    assert report["driver_cuda"] == 12040


@pytest.mark.long
def test_images_for_blackwell_have_code_by_nvidia_s_wheels(arm_engine, tmp_path):
    """It needs the Python Package Index, as PIP_CERT says if that is set."""
    shutil.copytree(ROOT / "templates", tmp_path / "templates")
    text = (ROOT / "matrix.arm64.yaml").read_text()
    certificates = os.environ.get("PIP_CERT")
    if certificates:
        text = text.replace("    version: v1 ", "    secrets: [ca]\n    version: v1 ")
    (tmp_path / "matrix.yaml").write_text(text)
    secrets = ["--secret", f"id=ca,src={certificates}"] if certificates else []
    done = arm_engine.imagematrix("build", "-f", tmp_path / "matrix.yaml", "--only", "cuda=13.0", *secrets)
    assert done.returncode == 0, done.stderr
    for compute in ("100", "103", "121"):
        tags = arm_engine.docker("images", "--format", "{{.Tag}}", "training").stdout.split()
        (tag,) = [tag for tag in tags if f"-cuda13.0-drvhost-sm{compute}-neoverse-v2-" in tag]
        audit = json.loads(arm_engine.imagematrix("verify", f"training:{tag}", "--json").stdout)
        assert (audit["contradictions"], audit["cubins"], audit["drivers"]) == ([], [compute], [])
        folder = tmp_path / compute
        folder.mkdir()
        report = emulate(arm_engine, f"training:{tag}", folder, "max")
        assert report["march"] == "neoverse-v2"
        assert report["final_loss"] < report["initial_loss"]


@pytest.fixture
def elsewhere(tmp_path):
    """A folder with a matrix for an image with libraries in other folders, and a program that needs them."""
    fetch_arm64()
    for name, function in LIBRARIES.items():
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True)
        soname = f"-Wl,-soname,lib{function}.so.1"
        compiled(path, f"int get_{function}(void) {{ return 7; }}", "-shared", soname, compiler=ARM_GCC)
    place = tmp_path / "files/elsewhere"
    (place / "libelse.so.1").symlink_to("/opt/elsewhere/libelse.so.1.2")  # which is absent on this machine
    compiled(place / "use", USE, place / "libelse.so.1.2", compiler=ARM_GCC)
    (tmp_path / "files/elsewhere.conf").write_text("/opt/elsewhere\n")
    (tmp_path / "templates").mkdir()
    for name in ("macros.j2", "linker_cache.py"):
        shutil.copy(ROOT / "templates" / name, tmp_path / "templates")
    (tmp_path / "templates/arm.j2").write_text(ELSEWHERE)
    text = MATRIX.format(base=INDEX).replace("template: arm.j2", "template: arm.j2, context: files")
    (tmp_path / "matrix.yaml").write_text(text)
    return tmp_path


def list_cache(ldconfig, folder, cache):
    """Return what ldconfig lists of a cache in a root folder, but that it says who wrote it."""
    done = subprocess.run([*ldconfig, "-r", folder, "-p", "-C", cache], capture_output=True, check=True)
    return [line for line in done.stdout.decode().splitlines() if "=>" in line]


@pytest.mark.long
def test_libraries_elsewhere_are_found_by_the_cache_of_a_cross_build(arm_engine, elsewhere):
    done = arm_engine.imagematrix("build", "-f", elsewhere / "matrix.yaml")
    assert done.returncode == 0, done.stderr
    root = elsewhere / "root"
    root.mkdir()
    unpack(arm_engine, done.stdout.strip(), root)

    ldconfig = [ARM_QEMU, root / "usr/sbin/ldconfig"]
    subprocess.run([*ldconfig, "-r", root, "-X", "-C", "/theirs", "/usr/local/cuda/compat"], check=True)
    entries = list_cache(ldconfig, root, "/etc/ld.so.cache")
    assert entries == list_cache(ldconfig, root, "/theirs")
    assert {"\tlibelse.so.1 (libc6,AArch64) => /opt/elsewhere/libelse.so.1"} < {*entries}
    assert len(entries) > 50

    def use():
        program = ["chroot", root, "/qemu", "/opt/elsewhere/use"]
        return subprocess.run(program, capture_output=True, text=True, check=False)

    shutil.copy(ARM_QEMU, root / "qemu")

    assert use().stdout == "7 7\n"
    (root / "etc/ld.so.cache").unlink()
    assert "libelse.so.1: cannot open shared object file" in use().stderr


@pytest.fixture
def matrix(tmp_path):
    """Call it with a template and a base to get the path of a matrix for one core of Arm."""

    def write(template, base=INDEX):
        (tmp_path / "templates").mkdir(exist_ok=True)
        (tmp_path / "templates/arm.j2").write_text(template)
        path = tmp_path / "matrix.yaml"
        path.write_text(MATRIX.format(base=base))
        return path

    return write


def test_stage_with_the_machine_s_own_compiler_is_an_error(arm_engine, matrix):
    """The table knows the flags of this core, and of no compiler in the image."""
    own = 'COPY --chmod=755 <<"CC" /usr/bin/cc\n#!/bin/sh\necho "#define __x86_64__ 1"\nCC\n'
    done = arm_engine.imagematrix("build", "-f", matrix(STAGE + own + END))
    assert done.returncode == 6
    assert "has no compiler for aarch64: its cc makes code for x86_64" in done.stderr
    assert "install aarch64-linux-gnu-gcc in it" in done.stderr


def test_stage_that_needs_an_emulator_fails_before_it_starts(arm_engine, matrix):
    path = matrix("FROM {{ base }} AS compiler\nRUN true\n" + END)
    planned = arm_engine.imagematrix("plan", "-f", path, "--json")
    assert planned.returncode == 0, planned.stderr
    (cell,) = json.loads(planned.stdout)["cells"]
    assert (cell["execution"]["kind"], cell["execution"]["missing"]) == ("emulated", ["linux/arm64"])
    assert "1 cell cannot be built: its build runs programs for linux/arm64" in planned.stderr
    done = arm_engine.imagematrix("build", "-f", path)
    assert done.returncode == 6
    assert "the builder default has no emulator" in done.stderr
    assert "exec format error" not in done.stderr


@pytest.mark.long
def test_with_an_emulator_programs_for_arm64_run(arm_engine, matrix, emulator):  # noqa: ARG001 - it is for the kernel
    entry = Path("/proc/sys/fs/binfmt_misc/imagematrix-aarch64").read_text()
    assert "\nflags: F\n" in entry, "set-uid programs get no credentials"
    checked = arm_engine.imagematrix("doctor")
    assert "builds for linux/arm64 can run its programs, by imagematrix-aarch64" in checked.stdout
    path = matrix("FROM {{ base }} AS compiler\nRUN uname -m > /machine\n" + END)
    planned = arm_engine.imagematrix("plan", "-f", path)
    assert "emulated, on linux/amd64" in planned.stdout
    assert "cannot be built" not in planned.stderr
    again = run_quickstart(arm_engine)
    assert "\n$ docker run --rm --platform linux/arm64 training:v1-linux-arm64-cpu-armv8-a-" in again
    assert '{"march": "armv8-a"' in again


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.usefixtures("emulator")
def test_only_the_program_differs_between_a_cross_and_an_emulated_build(arm_engine, tmp_path):
    """The compiler is of the same release, but the C++ library in the program is of other packages."""
    built, unpacked = {}, {}
    for version in ("cross", "emulated"):
        folder = tmp_path / version
        shutil.copytree(ROOT / "templates", folder / "templates")
        text = (ROOT / "matrix.arm64.yaml").read_text().replace("version: v1 ", f"version: {version} ")
        (folder / "matrix.yaml").write_text(text)
        template = folder / "templates/training/Dockerfile.j2"
        if version == "emulated":
            template.write_text(without_cross_tools(template.read_text()))
        cell = ("--only", "cuda=none,march=neoverse-n1")
        planned = arm_engine.imagematrix("plan", "-f", folder / "matrix.yaml", *cell, "--json")
        (planned_cell,) = json.loads(planned.stdout)["cells"]
        assert planned_cell["execution"]["kind"] == version
        done = arm_engine.imagematrix("build", "-f", folder / "matrix.yaml", *cell)
        assert done.returncode == 0, done.stderr
        built[version] = inspect(arm_engine, done.stdout.strip())
        unpacked[version] = tmp_path / f"{version}-root"
        unpacked[version].mkdir()
        unpack(arm_engine, done.stdout.strip(), unpacked[version])
        shutil.rmtree(unpacked[version] / "dev")  # of the engine, which diff cannot compare
    cross, emulated = (one["RootFS"]["Layers"] for one in built.values())
    assert [one == other for one, other in zip(cross, emulated, strict=True)].count(False) == 1
    compared = ["diff", "--recursive", "--no-dereference", "--brief", *unpacked.values()]
    found = subprocess.run(compared, capture_output=True, text=True, check=False).stdout
    program = "usr/local/bin/train"
    assert found == "Files {} and {} differ\n".format(*(root / program for root in unpacked.values()))
    releases = [
        re.findall(rb"GCC: \([^)]*\) [\d.]+", (root / program).read_bytes()) for root in unpacked.values()
    ]
    assert releases[0] == releases[1] != []
    variants = [json.loads(one["Config"]["Labels"][labels.VARIANT]) for one in built.values()]
    assert variants[0]["cpu_flags"] == variants[1]["cpu_flags"] != []


def without_cross_tools(template):
    """Return the template with the tools of the image's platform, which an emulator runs."""
    for line, instead in (
        ('native = debian.NATIVE ~ " " if cross else ""', 'native = ""'),
        ('tools = cross ~ "-linux-gnu-" if cross else ""', 'tools = ""'),
        ('{{ " g++-" ~ cross ~ "-linux-gnu" if cross }}', ""),
    ):
        assert line in template
        template = template.replace(line, instead)
    return template


def test_base_of_one_platform_is_an_error_in_a_cross_build(arm_engine, matrix):
    path = matrix(STAGE + "RUN true\n" + END, "debian:trixie")
    planned = arm_engine.imagematrix("plan", "-f", path)
    assert planned.returncode == 2
    assert "the base image debian:trixie is for one platform" in planned.stderr + planned.stdout
    assert "name an index of images for all platforms" in planned.stderr
