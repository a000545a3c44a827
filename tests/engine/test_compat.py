"""Images with cuda-compat: built from the distribution's libcuda with a note, audited, and selected."""

import json
import shutil
from pathlib import Path

import pytest
from drivers import add_note, compile_show, package

ROOT = Path(__file__).parents[2]
HOSTS = ROOT / "tests" / "hosts"
CODE = ROOT / "tests" / "unit" / "audit" / "data" / "zstd.fatbin"  # with cubins for 8.0
MATRIX = """\
schema: imagematrix.matrix/v1
images:
  forward: {version: v1, template: forward.j2, context: files}
axes:
  cuda: ["12.4"]
  driver: [compat]
  compute: ["8.0"]
properties:
  driver:
    compat: {compat_from: drivers/compat}
"""
TEMPLATE = """\
{% import "macros.j2" as debian %}
FROM debian:trixie AS body
COPY code.fatbin show /opt/
{{ debian.driver_stage(driver_base, driver) }}
{{ debian.linker_cache_stage("body", version=driver) }}
FROM body
COPY --link --from=linker-cache /etc/ld.so.cache /etc/ld.so.cache
COPY --link --from=driver /driver/ /
"""
FETCH = """\
set -eu
sed -i 's/^Components: main$/Components: main non-free/' /etc/apt/sources.list.d/* 2> /dev/null || true
sed -i 's/ main$/ main non-free/' /etc/apt/sources.list 2> /dev/null || true
apt-get update -q
mkdir /packages /out
cd /packages
apt-get download -q libcuda1 libnvidia-ptxjitcompiler1 libnvidia-nvvm4
for package in *.deb; do dpkg -x "$package" .; done
find usr -name 'lib*.so.*.*' -type f -exec cp {} /out ';'
"""


@pytest.fixture(scope="module")
def debian_compat(engine, tmp_path_factory):
    """A folder with Debian's driver, whose libcuda has the note; and its version."""
    folder = tmp_path_factory.mktemp("debian") / "compat"
    engine.docker("run", "--name", "fetching", "debian:trixie", "sh", "-c", FETCH)
    engine.docker("cp", "fetching:/out", str(folder))
    (libcuda,) = folder.glob("libcuda.so.*")
    add_note(libcuda, branches=(470, 535, 550))
    return folder, libcuda.name.removeprefix("libcuda.so.")


@pytest.fixture
def project(debian_compat, tmp_path):
    """A folder with a matrix and a template, whose driver is Debian's as a cuda-compat; and its version."""
    source, version = debian_compat
    for folder in ("files", "templates"):
        (tmp_path / folder).mkdir()
    shutil.copytree(source, tmp_path / "drivers" / "compat")
    shutil.copy(ROOT / "templates" / "macros.j2", tmp_path / "templates")
    shutil.copy(CODE, tmp_path / "files" / "code.fatbin")
    compile_show(tmp_path / "files" / "show")
    (tmp_path / "templates" / "forward.j2").write_text(TEMPLATE)
    (tmp_path / "matrix.yaml").write_text(MATRIX)
    return tmp_path, version


@pytest.mark.long
def test_a_cell_with_cuda_compat_is_built_audited_and_selected(engine, project):
    folder, version = project
    done = engine.imagematrix("build", cwd=folder)
    assert done.returncode == 0, done.stderr
    image = done.stdout.strip()
    assert image.startswith("forward:v1-cuda12.4-drvcompat-sm80-")

    # A package with the same files is the same image.
    package(folder / "drivers/compat", folder / "drivers/compat.deb")
    text = MATRIX.replace("drivers/compat}", "drivers/compat.deb}")
    (folder / "matrix.yaml").write_text(text)
    done = engine.imagematrix("build", cwd=folder)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr

    audit = json.loads(engine.imagematrix("verify", "--json", image).stdout)
    drivers = {driver["path"]: driver for driver in audit["drivers"]}
    libcuda = drivers[f"/usr/local/cuda/compat/libcuda.so.{version}"]
    assert (libcuda["kind"], libcuda["version"], libcuda["loaded"]) == ("compat", version, True)
    assert audit["contradictions"] == []

    found = engine.docker("run", "--rm", image, "/opt/show").stdout
    assert found == "/usr/local/cuda/compat/libcuda.so.1 12040\n"
    listed = engine.docker(
        "run", "--rm", image, "sh", "-c", "cat /etc/ld.so.conf.d/*; ls /usr/local/cuda/compat"
    )
    assert "compat" not in listed.stdout.splitlines()[0]
    assert listed.stdout.count(f"libcuda.so.{version}") == 1

    answers = {}
    document = json.loads((HOSTS / "rome-a100.json").read_text())
    for driver in ("535.261.03", "470.256.02", version, "525.147.05", "570.133.20"):
        host = folder / f"{driver}.json"
        host.write_text(json.dumps(document | {"driver": document["driver"] | {"version": driver}}))
        chosen = engine.imagematrix("select", "--host", host, "forward:v1")
        answers[driver] = (chosen.returncode, chosen.stdout.strip())
    assert answers == {
        "535.261.03": (0, image),
        "470.256.02": (0, image),
        version: (3, ""),  # not newer than the node's
        "525.147.05": (3, ""),  # a branch that the note lacks
        "570.133.20": (3, ""),
    }
    desktop = [gpu | {"brand": "geforce", "name": "NVIDIA GeForce RTX 3090"} for gpu in document["gpus"]]
    driver = document["driver"] | {"version": "535.261.03"}
    (folder / "desktop.json").write_text(json.dumps(document | {"driver": driver, "gpus": desktop}))
    refused = engine.imagematrix("select", "--host", folder / "desktop.json", "forward:v1")
    assert refused.returncode == 3
    assert "cuda-compat is not supported on" in refused.stderr


@pytest.mark.long
def test_a_line_for_the_folder_in_a_file_of_ldconfig_stops_the_build(engine, project):
    folder, _ = project
    (folder / "matrix.yaml").write_text(MATRIX.replace("version: v1", "version: v2"))
    line = "RUN echo /usr/local/cuda/compat > /etc/ld.so.conf.d/cuda-compat.conf\n"
    text = TEMPLATE.replace("COPY code.fatbin", f"{line}COPY code.fatbin")
    (folder / "templates" / "forward.j2").write_text(text)
    done = engine.imagematrix("build", cwd=folder)
    assert done.returncode == 6
    assert "remove this line: with it, the older of two drivers is loaded" in done.stderr
    # Without `version`, nothing would load it.
    (folder / "templates" / "forward.j2").write_text(TEMPLATE.replace(", version=driver", ""))
    done = engine.imagematrix("build", cwd=folder)
    assert done.returncode == 9
    assert "the dynamic loader does not find /usr/local/cuda/compat/libcuda.so." in done.stderr
