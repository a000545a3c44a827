"""Wheels in layers of their own: the same wheel is the same layer on other bases and beside other wheels."""

import base64
import csv
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
CODE = ROOT / "tests" / "unit" / "audit" / "data" / "zstd.fatbin"
PYTHONS = {"3.11": "bookworm", "3.13": "trixie"}
BASE = """\
FROM debian:{suite}
RUN apt-get update -q && apt-get install -qy --no-install-recommends python3-venv
COPY *.whl /srv/wheels/
"""
MATRIX = """\
schema: imagematrix.matrix/v1
images:
  one: {version: v1, template: wheels.j2, secrets: [pip-conf], development: true}
  two: {version: v1, template: wheels.j2, secrets: [pip-conf], development: true}
  bad: {version: v1, template: wheels.j2, secrets: [pip-conf], development: true}
  cross: {version: v1, template: cross.j2, secrets: [pip-conf], development: true}
axes:
  cuda: ["12.4"]
  compute: ["8.0", "9.0"]
  python: ["3.11", "3.13"]
properties:
  python:
    "3.11": {base: "python:bookworm"}
    "3.13": {base: "python:trixie"}
"""
TEMPLATE = """\
{% import "macros.j2" as debian %}
FROM {{ base }} AS body
{{ debian.wheels(image ~ ".txt", base, "/opt/" ~ image, compute=compute, large=["nvidia-large", "code"]) }}
"""
# As in a build for another architecture, but for this one, on a base that need not be an index.
NATIVE = '{% set NATIVE = "--platform=$BUILDPLATFORM" %}'
CROSS = (
    TEMPLATE.replace("macros.j2", "cross_macros.j2")
    .replace('image ~ ".txt"', '"one.txt"')
    .replace('"/opt/" ~ image, ', '"/opt/one", cross="x86_64", ')
)
# Inside an image: each RECORD lists the files that are there, and no folder of packages has another file.
RECORDS = """
import base64, hashlib, importlib.metadata, os, pathlib, sys
listed = set()
for package in importlib.metadata.distributions():
    for file in package.files:
        path = pathlib.Path(os.path.normpath(package.locate_file(file)))
        listed.add(path)
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip("=")
        assert file.hash is None or file.hash.value == digest, path
for folder in (path for path in sys.path if path.startswith("/opt/")):
    for path in pathlib.Path(folder).rglob("*"):
        if path.is_file() and path.suffix != ".pth":
            assert path in listed, path
import code_in, large, nvidia.large, nvidia.small
print(sorted(package.name for package in importlib.metadata.distributions() if package.name != "pip"))
"""


def encoded(content):
    return f"sha256={base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip('=')}"


def wheel(folder, name, files):
    """Write a wheel with files by path, and return its line of a lock."""
    info = f"{name.replace('-', '_')}-1.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = io.StringIO()
    rows = [(path, encoded(content), len(content)) for path, content in files.items()]
    csv.writer(record, lineterminator="\n").writerows([*rows, (f"{info}/RECORD", "", "")])
    path = folder / f"{name.replace('-', '_')}-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, content in [*files.items(), (f"{info}/RECORD", record.getvalue().encode())]:
            entry = zipfile.ZipInfo(file)
            entry.external_attr = (0o100755 if "/scripts/" in file else 0o100644) << 16
            archive.writestr(entry, content)
    return f"{name}==1 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture(scope="module")
def project(engine, tmp_path_factory):
    """A folder with a matrix, and bases with two Pythons and wheels in /srv/wheels."""
    folder = tmp_path_factory.mktemp("wheels")
    templates = folder / "templates"
    templates.mkdir()
    shutil.copy(ROOT / "templates" / "macros.j2", templates)
    macros = (ROOT / "templates" / "macros.j2").read_text()
    assert NATIVE in macros
    (templates / "cross_macros.j2").write_text(macros.replace(NATIVE, '{% set NATIVE = "" %}'))
    (templates / "wheels.j2").write_text(TEMPLATE)
    (templates / "cross.j2").write_text(CROSS)
    (folder / "matrix.yaml").write_text(MATRIX)
    (folder / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /srv/wheels\n")
    wheels = folder / "wheels"
    wheels.mkdir()
    (pin,) = re.findall(r'set PIP = "(.*)"', (templates / "macros.j2").read_text())
    (wheels / "pip.txt").write_text(pin)
    download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-r"]
    subprocess.run([*download, wheels / "pip.txt", "-d", wheels], check=True)
    shared = {"nvidia/__init__.py": b""}
    large = wheel(
        wheels,
        "nvidia-large",
        shared | {"nvidia/large/__init__.py": b"", "nvidia/large/it": CODE.read_bytes()},
    )
    small = wheel(wheels, "nvidia-small", shared | {"nvidia/small/__init__.py": b""})
    code = wheel(wheels, "code", {"code_in/__init__.py": b"", "code_in/it.fatbin": CODE.read_bytes()})
    tool = wheel(
        wheels,
        "tool",
        {
            "large.py": b"def main():\n    print('it works')\n",
            "tool-1.data/data/share/tool/it": b"data",
            "tool-1.data/scripts/script": b"#!python\nimport large\nlarge.main()\n",
            "tool-1.dist-info/entry_points.txt": b"[console_scripts]\nentry = large:main\n",
        },
    )
    other = wheel(wheels, "other", {"other.py": b""})
    (templates / "one.txt").write_text(large + small + code + tool)
    (templates / "two.txt").write_text(tool + other + code + large + small)
    (templates / "bad.txt").write_text(re.sub("sha256:.{4}", "sha256:0000", large))
    for suite in PYTHONS.values():
        engine.docker(
            "build", "-t", f"python:{suite}", "-f", "-", str(wheels), input=BASE.format(suite=suite)
        )
    return folder


def build(engine, folder, *only):
    words = [word for expression in only for word in ("--only", expression)]
    return engine.imagematrix("build", "--json", *words, "--secret", "id=pip-conf,src=pip.conf", cwd=folder)


def layers(engine, reference, suite):
    """Return the layers of an image without those of its base."""
    below = engine.inspect(f"python:{suite}")["RootFS"]["Layers"]
    return engine.inspect(reference)["RootFS"]["Layers"][len(below) :]


def test_a_wheel_is_the_same_layer_in_every_image(engine, project):
    done = build(engine, project, "image=one")
    assert done.returncode == 0, done.stderr
    done_two = build(engine, project, "image=two,compute=8.0")
    assert done_two.returncode == 0, done_two.stderr
    found, references = {}, {}
    for document in (done, done_two):
        for cell in json.loads(document.stdout)["cells"]:
            key = cell["image"], cell["axes"]["python"], cell["axes"]["compute"]
            references[key] = cell["reference"]
            found[key] = layers(engine, cell["reference"], PYTHONS[cell["axes"]["python"]])
    assert len(found) == 6
    # NVIDIA's small wheel, and above it the large one.
    nvidia = found["one", "3.11", "8.0"][:2]
    assert all(result[:2] == nvidia for result in found.values())
    assert all(len(result) == 4 for result in found.values())
    # Another Python has another path, and so have other environments.
    assert not set(found["one", "3.11", "8.0"][2:]) & set(found["one", "3.13", "8.0"])
    assert not set(found["one", "3.13", "8.0"][2:]) & set(found["two", "3.13", "8.0"])
    # Trimmed for another GPU, only the layer with device code differs.
    differing = [
        a == b for a, b in zip(found["one", "3.13", "8.0"], found["one", "3.13", "9.0"], strict=True)
    ]
    assert differing == [True, True, True, False]

    def inside(image, *command):
        return engine.docker(
            "run", "--rm", "--env=PYTHONDONTWRITEBYTECODE=1", references[image], *command
        ).stdout

    for image in found:
        bin_folder = f"/opt/{image[0]}/bin"
        names = ["code", "nvidia-large", "nvidia-small", *(["other"] if image[0] == "two" else []), "tool"]
        assert inside(image, f"{bin_folder}/python3", "-c", RECORDS) == f"{names}\n"
    image = "one", "3.13", "8.0"
    assert inside(image, "/opt/one/bin/pip", "check") == "No broken requirements found.\n"
    assert inside(image, "/opt/one/bin/entry") == inside(image, "/opt/one/bin/script") == "it works\n"
    assert inside(image, "cat", "/opt/one/share/tool/it") == "data"
    assert "INSTALLER" not in inside(image, "find", "/opt", "-name", "INSTALLER", "-path", "*-1.dist-info*")


def test_wheels_for_another_architecture_are_the_layers_that_its_own_pip_installs(engine, project):
    only = "compute=8.0,python=3.13"
    built = []
    for image in ("one", "cross"):
        done = build(engine, project, f"image={image},{only}")
        assert done.returncode == 0, done.stderr
        (cell,) = (cell for cell in json.loads(done.stdout)["cells"] if cell["reference"])
        built.append(layers(engine, cell["reference"], "trixie"))
    assert built[0] == built[1]


def test_a_wheel_with_another_hash_fails_with_the_words_of_pip(engine, project):
    done = build(engine, project, "image=bad,compute=8.0,python=3.13")
    assert done.returncode == 6
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr + done.stdout
