"""The starter templates: the plain one is built and run, and Docker checks all Dockerfiles."""

import hashlib
import shutil
from pathlib import Path

import pytest

from imagematrix.build.trim.program import CONTEXT

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "unit" / "build" / "dockerfile" / "golden"
CODE = ROOT / "tests" / "unit" / "audit" / "data" / "zstd.fatbin"  # with cubins for 8.0
NEEDS_CHECK = 27  # the first Docker whose BuildKit can check


@pytest.mark.long
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


@pytest.mark.long
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


# The distribution's driver, packed as NVIDIA packs it, by the program with which NVIDIA does.
PACK = """\
set -eu
sed -i 's/^Components: main$/Components: main non-free/' /etc/apt/sources.list.d/* 2> /dev/null || true
sed -i 's/ main$/ main non-free/' /etc/apt/sources.list 2> /dev/null || true
apt-get update -q
apt-get install -qy --no-install-recommends makeself xz-utils zstd
mkdir /packages /tree /out
cd /packages
for package in libcuda1 libnvidia-ptxjitcompiler1 libnvidia-ml1 libnvidia-nvvm4; do
    apt-get download -q "$package"
done
for package in *.deb; do dpkg -x "$package" .; done
cp -d usr/lib/x86_64-linux-gnu/nvidia/*/lib*.so.* /tree 2> /dev/null || true
find usr -name 'libnvidia-nvvm.so.*' -exec cp -d {} /tree ';'
version=$(ls /tree/libcuda.so.*.*); version=${version#*.so.}
printf 'NVIDIA Accelerated Graphics Driver\\n%s\\nnvidia\\nnvidia\\n' "$version" > /tree/.manifest
printf '#!/bin/sh\\ntouch /installed\\n' > /tree/nvidia-installer
chmod +x /tree/nvidia-installer
for kind in xz gzip zstd; do
    mkdir "/out/$kind"
    file="/out/$kind/NVIDIA-Linux-x86_64-$version.run"
    makeself "--$kind" --complevel 1 --nox11 --quiet /tree "$file" driver ./nvidia-installer
done
cp -a /tree /out/folder
echo "$version" > /out/version
"""


@pytest.mark.long
def test_an_installer_and_a_folder_with_the_same_files_give_the_same_image(engine, tmp_path):
    for folder in ("files", "templates"):
        (tmp_path / folder).mkdir()
    engine.docker("run", "--name", "packing", "debian:trixie", "sh", "-c", PACK)
    engine.docker("cp", "packing:/out", str(tmp_path / "drivers"))
    version = (tmp_path / "drivers" / "version").read_text().strip()
    shutil.copy(ROOT / "templates" / "macros.j2", tmp_path / "templates")
    shutil.copy(CODE, tmp_path / "files" / "code.fatbin")
    (tmp_path / "templates" / "own.j2").write_text(DRIVER_TEMPLATE)
    images = {}
    for kind in ("folder", "xz", "gzip", "zstd"):
        name = "NVIDIA-Linux-{arch}-{version}.run"
        place = "drivers/folder" if kind == "folder" else f"drivers/{kind}/{name}"
        text = DRIVERS.replace("580.159.04, host", version).replace('"13.0"', '"12.4"')
        text = text.replace(
            "580.159.04: {driver_from: drivers/580.159.04}", f'"*": {{driver_from: "{place}"}}'
        )
        (tmp_path / "matrix.yaml").write_text(text)
        done = engine.imagematrix("build", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        images[kind] = done.stdout
    driver = images.pop("folder").strip()
    assert {*images.values()} == {""}, "nothing is left to build"
    said = engine.docker("run", "--rm", driver, "ldconfig", "-p").stdout
    assert "libcuda.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libcuda.so.1" in said
    assert engine.imagematrix("verify", driver).returncode == 0


@pytest.fixture
def check(engine):
    """Call it with a Dockerfile and a context to have Docker check it."""
    version = engine.docker("version", "--format", "{{.Server.Version}}").stdout
    if int(version.partition(".")[0]) < NEEDS_CHECK:
        pytest.skip(f"Docker {version.strip()} can't check Dockerfiles, {NEEDS_CHECK} and newer can")
    if "--check" not in engine.docker("buildx", "build", "--help").stdout:
        pytest.skip("this docker buildx has no --check, 0.15 and newer have it")

    def run(dockerfile, context):
        # What `build` has for the names: the program that trims, and an image of the matrix.
        named = (f"{CONTEXT}={context}", "pytorch:v1=docker-image://debian:trixie")
        words = (*(f"--build-context={each}" for each in named), "--file", str(dockerfile), str(context))
        return engine.docker("buildx", "build", "--check", *words, check=False)

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
