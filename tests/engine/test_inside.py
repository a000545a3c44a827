"""What `verify --sbom` and `ls --package` say of real images, judged by the package managers in them."""

import json
import subprocess
from pathlib import Path

import pytest
from sboms import listed, statement
from spdx_tools.spdx.parser.jsonlikedict.json_like_dict_parser import JsonLikeDictParser
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from imagematrix.audit.packages.installed_package import APK, DEB, PYPI, RPM

pytestmark = pytest.mark.long

DATA = Path(__file__).parents[1] / "unit/audit/data/rpm/rpmdb.sqlite.gz"
DEBIAN = """\
FROM debian:trixie
RUN apt-get update -q && apt-get install -qy --no-install-recommends python3-venv libssl3t64 rsync
RUN python3 -m venv /opt/venv && apt-get purge -qy rsync
"""
OTHERS = """\
FROM scratch
COPY installed /lib/apk/db/installed
COPY os-release /etc/os-release
COPY rpmdb.sqlite /usr/lib/sysimage/rpm/rpmdb.sqlite
"""
FLAGS = {"old": ["sse4_2"], "new": ["sse4_2", "avx2"]}
SCANNER = """\
FROM debian:trixie
COPY claims.json /claims.json
CMD ["sh", "-c", "cp /claims.json $BUILDKIT_SCAN_DESTINATION/claims.spdx.json"]
"""
ALPINE = """\
C:Q1vhdJzbSqzbRdGR7V6MCnyZOkbvg=
P:musl
V:1.2.5-r10
A:x86_64
L:MIT
o:musl
F:lib
R:ld-musl-x86_64.so.1
Z:Q1jTD2qZ8rq6FyqmZWBHzz9jy1BWc=

P:ssl_client
V:1.37.0-r18
A:x86_64
L:GPL-2.0-only
o:busybox
"""


@pytest.fixture
def written(tmp_path):
    """Call it with the name of an image and values of march to get the folder of its matrix."""

    def write(image, *marches):
        folder = tmp_path / "matrix"
        (folder / "templates").mkdir(parents=True)
        (folder / "templates/image.j2").write_text("FROM debian:trixie\nRUN echo {{ march }} > /variant\n")
        matrix = {
            "schema": "imagematrix.matrix/v1",
            "images": {image: {"version": "v1", "template": "image.j2"}},
            "axes": {"march": list(marches)},
            "facts": {"march": {march: {"flags": FLAGS[march]} for march in marches}},
        }
        (folder / "matrix.yaml").write_text(json.dumps(matrix))
        return folder

    return write


@pytest.fixture(scope="module")
def debian(engine, tmp_path_factory):
    """An image with packages of Debian and a virtual environment, from which a later layer removes one."""
    folder = tmp_path_factory.mktemp("debian")
    (folder / "Dockerfile").write_text(DEBIAN)
    engine.docker("build", "-q", "-t", "inside:debian", str(folder))
    return "inside:debian"


@pytest.fixture(scope="module")
def others(engine, tmp_path_factory):
    """An image with the databases of apk and of rpm."""
    folder = tmp_path_factory.mktemp("others")
    (folder / "Dockerfile").write_text(OTHERS)
    (folder / "installed").write_text(ALPINE)
    (folder / "os-release").write_text("ID=alpine\nVERSION_ID=3.22.1\n")
    with (folder / "rpmdb.sqlite").open("wb") as copy:
        subprocess.run(["gzip", "-dc", DATA], check=True, stdout=copy)
    engine.docker("build", "-q", "-t", "inside:others", str(folder))
    return "inside:others"


def packages(engine, reference, *options):
    """Return the packages that `verify` lists of an image, and its SBOM, after the SPDX project's library."""
    done = engine.imagematrix("verify", "--json", "--sbom", "/dev/stderr", *options, reference)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stderr)
    messages = validate_full_spdx_document(JsonLikeDictParser().parse(document))
    assert [message.validation_message for message in messages] == []
    audited = json.loads(done.stdout)
    assert audited["warnings"] == []
    found = audited["packages"]
    assert len(document["packages"]) == len(found) + 2  # the image itself, and its distribution
    return found


def of_kind(found, kind):
    return sorted((one["name"], one["version"]) for one in found if one["type"] == kind)


def test_packages_are_those_that_dpkg_and_pip_list(engine, debian):
    found = packages(engine, debian)
    query = ["dpkg-query", "-W", "-f", "${db:Status-Abbrev}|${Package}|${Version}|${Architecture}\n"]
    rows = [line.split("|") for line in engine.docker("run", "--rm", debian, *query).stdout.splitlines()]
    installed = sorted(
        (name, version, arch) for status, name, version, arch in rows if status.strip() == "ii"
    )
    assert (
        sorted((one["name"], one["version"], one["arch"]) for one in found if one["type"] == DEB) == installed
    )
    assert {"libssl3t64", "openssl"} & {name for name, _, _ in installed}
    assert "rsync" not in {name for name, _, _ in installed}
    pip = engine.docker("run", "--rm", debian, "/opt/venv/bin/pip", "list", "--format=json").stdout
    in_venv = [one for one in found if one["type"] == PYPI and one["path"].startswith("/opt/venv/")]
    assert of_kind(in_venv, PYPI) == sorted((one["name"], one["version"]) for one in json.loads(pip))
    source = engine.docker(
        "run", "--rm", debian, "dpkg-query", "-W", "-f", "${source:Package}", "libc6"
    ).stdout
    assert [one["source_package"] for one in found if one["name"] == "libc6"] == [source]


def test_databases_of_apk_and_rpm_are_read(engine, others):
    found = packages(engine, others)
    assert of_kind(found, APK) == [("musl", "1.2.5-r10"), ("ssl_client", "1.37.0-r18")]
    assert of_kind(found, RPM) == [("more", "1-1"), ("tool", "1-1")]
    assert {one["purl"] for one in found if one["name"] == "musl"} == {
        "pkg:apk/alpine/musl@1.2.5-r10?arch=x86_64&distro=alpine-3.22.1"
    }


def test_registry_and_engine_give_the_same_packages(engine, registry, debian):
    name = f"{registry.address}/ml/inside:debian"
    engine.docker("tag", debian, name)
    engine.docker("push", "-q", name)
    here = packages(engine, debian)
    engine.docker("rmi", name)
    assert packages(engine, name) == here


def test_variants_and_hosts_with_a_package_are_found(engine, registry, written):
    image = f"{registry.address}/ml/inside"
    folder = written(image, "old", "new")
    done = engine.imagematrix("build", "--push", cwd=folder)
    assert done.returncode == 0, done.stderr
    built = sorted(done.stdout.split())
    assert engine.imagematrix("publish", f"{image}:v1", cwd=folder).returncode == 0
    hosts = Path(__file__).parents[1] / "hosts" / "laptop.json"
    question = ("ls", f"{image}:v1", "--package", "libc6", "--hosts", hosts, "--json")
    done = engine.imagematrix(*question)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert sorted(row["reference"] for row in document["variants"]) == built
    for row in document["variants"]:
        (package,) = row["packages"]
        assert package["purl"].startswith("pkg:deb/debian/libc6@2.41")
    named = [row["hosts"] for row in document["variants"]]
    assert len([host for hosts_of in named for host in hosts_of]) + len(document["unserved"]) == 1
    missing = engine.imagematrix("ls", f"{image}:v1", "--package", "log4j*")
    assert (missing.returncode, missing.stdout) == (0, "")
    assert f"no variant of {image}:v1 contains a package log4j*" in missing.stderr
    assert engine.imagematrix("ls", f"{image}:v2", "--package", "libc6").returncode == 4


@pytest.fixture
def scanner(engine, registry, tmp_path):
    """The name of a scanner for BuildKit, which claims two packages of every image."""
    libc = listed("libc6", "9.9", "pkg:deb/debian/libc6@9.9?arch=amd64")
    claims = statement(None, listed("vendored", "2.0"), libc)
    (tmp_path / "scanner").mkdir()
    (tmp_path / "scanner/claims.json").write_bytes(claims)
    (tmp_path / "scanner/Dockerfile").write_text(SCANNER)
    name = f"{registry.address}/ml/scanner:v1"
    engine.docker("build", "-q", "-t", name, str(tmp_path / "scanner"))
    engine.docker("push", "-q", name)
    return name


def test_own_sbom_of_an_image_adds_and_removes_nothing(engine, registry, written, scanner):
    image = f"{registry.address}/ml/attested"
    folder = written(image, "old")
    attest = ("--attest", f"type=sbom,generator={scanner}")
    done = engine.imagematrix("build", "--push", *attest, cwd=folder)
    assert done.returncode == 0, done.stderr
    reference = done.stdout.strip()
    assert engine.imagematrix("publish", f"{image}:v1", cwd=folder).returncode == 0
    engine.docker("rmi", "-f", reference, check=False)
    for name in (reference, f"{image}:v1"):
        found = packages(engine, name)
        assert [one["name"] for one in found if one["source"] == "sbom"] == ["libc6", "vendored"]
        libc = {one["source"]: one["version"] for one in found if one["name"] == "libc6"}
        assert libc["sbom"] == "9.9"
        assert libc["files"].startswith("2.41")
    rows = engine.imagematrix("ls", f"{image}:v1", "--package", "vendored").stdout.splitlines()[2:]
    assert [row.split() for row in rows] == [[reference, "vendored", "2.0", "generic", "its", "own", "SBOM"]]
