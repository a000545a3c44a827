"""The starter templates: llama.cpp's server is built and run, and Docker checks all Dockerfiles."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from imagematrix.facts import marches

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "unit" / "render" / "golden"
# The newest has several times as much to compile.
SDIST = "llama_cpp_python-0.3.2"
CODE = ROOT / "tests" / "unit" / "audit" / "data" / "zstd.fatbin"  # with cubins for 8.0
NEEDS_CHECK = 27  # the first Docker whose BuildKit can check


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory):
    """An archive with the sources of llama.cpp, taken from the Python package that contains them."""
    folder = ROOT / ".cache" / "sources"
    sdist = folder / f"{SDIST}.tar.gz"
    if not sdist.exists():
        name, _, version = SDIST.rpartition("-")
        options = ["--no-deps", "--no-binary", name, "--dest", str(folder)]
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", *options, f"{name}=={version}"], check=True
        )
    place = tmp_path_factory.mktemp("llama.cpp")
    inside = f"{SDIST}/vendor/llama.cpp"
    subprocess.run(["tar", "-xzf", sdist, "-C", place, inside], check=True)
    # Only ggml computes. Optimizing the rest (models' files, options, JSON, HTTP) would take twice as long.
    for target, part in (("llama", "src"), ("common", "common"), ("llama-server", "examples/server")):
        with (place / inside / part / "CMakeLists.txt").open("a") as script:
            script.write(f"target_compile_options({target} PRIVATE -O0)\n")
    with tarfile.open(place / "llama.cpp.tar.gz", "w:gz", compresslevel=1) as archive:
        archive.add(place / inside, "llama.cpp")
    return place / "llama.cpp.tar.gz"


def test_the_plain_starter_is_built_and_selected(engine, tmp_path):
    folder = tmp_path / "project"
    assert engine.imagematrix("init", folder, "--template", "cpu").returncode == 0
    done = engine.imagematrix("build", "-f", folder / "matrix.yaml")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 3
    result = engine.imagematrix("run", "--rm", "--gpus", "none", "hello:v1")
    assert result.stdout.startswith("hello from x86-64-v"), result.stderr

    # The same with an own axis: `--where` decides, or else the default.
    matrix = folder / "matrix.yaml"
    text = matrix.read_text().replace("version: v1", "defaults: {taste: sweet}\n    version: v2")
    matrix.write_text(text.replace("axes:\n", "axes:\n  taste: [sweet, sour]\n"))
    done = engine.imagematrix("build", "-f", matrix)
    assert done.returncode == 0, done.stderr
    words = ("--gpus", "none", "hello:v2")
    assert "hello:v2-sweet-x86-64-v" in engine.imagematrix("select", *words).stdout
    sour = engine.imagematrix("select", "--where", "taste=sour", *words).stdout.strip()
    assert sour.startswith("hello:v2-sour-x86-64-v")
    result = engine.imagematrix("run", "--rm", "--gpus", "none", sour)
    assert result.stdout.startswith("hello from x86-64-v"), result.stderr


def test_llama_cpp_is_built_for_the_cpu_in_its_labels(engine, llama_cpp, tmp_path):
    folder = tmp_path / "project"
    assert engine.imagematrix("init", folder, "--template", "llama.cpp").returncode == 0
    shutil.copy(llama_cpp, folder / "templates" / "llama.cpp")
    matrix = folder / "matrix.yaml"
    text = matrix.read_text().replace("[x86-64-v3, x86-64-v4]", "[x86-64-v2]")
    matrix.write_text(re.sub(r"\{sha256: \w+\}", f"{{archive: {llama_cpp.name}}}", text))
    done = engine.imagematrix("build", "-f", matrix, "--only", "cuda=none")
    assert done.returncode == 0, done.stderr
    (reference,) = done.stdout.split()

    result = engine.docker("run", "--rm", reference, "--version")
    assert "built with cc (Debian 14." in result.stderr
    entry = json.loads(engine.inspect(reference)["Config"]["Labels"]["io.imagematrix.variant"])
    assert set(entry["cpu_flags"]) == marches.required("x86-64-v2", "gcc-14")
    # Features that llama.cpp enables by default (GGML_AVX2) would show here.
    code = _disassembled(engine, reference, tmp_path / "llama-server")
    assert "%xmm" in code
    assert "%ymm" not in code


DRIVERS = """\
schema: imagematrix.matrix/v1
images:
  own: {version: v1, template: own.j2, context: files, development: true}
axes:
  cuda: ["13.0"]
  driver: [580.159.04, host]
  compute: ["8.0"]
properties:
  driver:
    580.159.04: {driver_from: drivers/580.159.04}
"""
DRIVER_TEMPLATE = """\
{% import "macros.j2" as debian %}
FROM debian:trixie AS body
COPY code.fatbin /opt/
{{ debian.driver_stage(driver_base, driver) }}
{{ debian.linker_cache_stage("body") }}
FROM body
COPY --link --from=linker-cache /etc/ld.so.cache /etc/ld.so.cache
COPY --link --from=driver /driver/ /
"""


def test_a_driver_comes_from_the_folder_or_the_host(engine, unpacked, tmp_path):
    for folder in ("files", "templates"):
        (tmp_path / folder).mkdir()
    shutil.copytree(unpacked, tmp_path / "drivers" / "580.159.04")
    shutil.copy(ROOT / "templates" / "macros.j2", tmp_path / "templates")
    shutil.copy(CODE, tmp_path / "files" / "code.fatbin")
    (tmp_path / "templates" / "own.j2").write_text(DRIVER_TEMPLATE)
    (tmp_path / "matrix.yaml").write_text(DRIVERS)
    done = engine.imagematrix("build", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    driver, host = done.stdout.split()
    said = engine.docker("run", "--rm", driver, "ldconfig", "-p").stdout
    assert "libnvidia-nvvm.so.4 (libc6,x86-64) => /lib/x86_64-linux-gnu/libnvidia-nvvm.so.4" in said
    found = engine.docker("run", "--rm", driver, "sha256sum", "/usr/lib/x86_64-linux-gnu/libcuda.so.1").stdout
    wanted = hashlib.sha256((unpacked / "libcuda.so.580.159.04").read_bytes()).hexdigest()
    assert found.split()[0] == wanted
    assert "libcuda" not in engine.docker("run", "--rm", host, "ldconfig", "-p").stdout
    assert engine.imagematrix("verify", driver, host).returncode == 0


def _disassembled(engine, reference, file):
    container = engine.docker("create", reference).stdout.strip()
    engine.docker("cp", f"{container}:/usr/local/bin/llama-server", str(file))
    engine.docker("rm", container)
    return subprocess.run(["objdump", "-d", file], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def check(engine):
    """Call it with a Dockerfile and a context to have Docker check it."""
    version = engine.docker("version", "--format", "{{.Server.Version}}").stdout
    if int(version.partition(".")[0]) < NEEDS_CHECK:
        pytest.skip(f"Docker {version.strip()} can't check Dockerfiles, {NEEDS_CHECK} and newer can")
    if "--check" not in engine.docker("buildx", "build", "--help").stdout:
        pytest.skip("this docker buildx has no --check, 0.15 and newer have it")

    def run(dockerfile, context):
        words = ("buildx", "build", "--check", "--file", str(dockerfile), str(context))
        return engine.docker(*words, check=False)

    return run


def test_docker_s_check_reports_nothing(check, tmp_path):
    for golden in sorted(GOLDEN.rglob("*.Dockerfile")):
        done = check(golden, ROOT / "templates" / golden.parent.name)
        assert done.returncode == 0, f"{golden}: {done.stdout}{done.stderr}"
    path = tmp_path / "Dockerfile"
    path.write_text("FROM debian:trixie as body\n")
    done = check(path, tmp_path)
    assert done.returncode != 0
    assert "FromAsCasing" in done.stdout + done.stderr
