"""`imagematrix ls --package`: which variants contain a package, and which hosts get them."""

import json
from pathlib import Path

import pytest
from images import MANIFEST, Parts, saved, tar
from sboms import Attestation, Attested, listed, statement

from imagematrix.images.catalog.catalog import Catalog, Variant

INDEX = "application/vnd.oci.image.index.v1+json"
BASE = tar(("var/lib/dpkg/status", b"Package: openssl\nVersion: 3.0\n\nPackage: libssl3\nVersion: 3.0\n"))
NEWER = tar(("var/lib/dpkg/status", b"Package: openssl\nVersion: 3.5\nArchitecture: amd64\n"))
PYTHON = tar(("opt/a.dist-info/METADATA", b"Name: PyYAML\nVersion: 6\n"))


def push(server, cell, *layers, attestation=None, **facts):
    """Push an image, with an attestation if given; return its Variant."""
    image = Parts(*layers)
    repository = server.repository("ml/t")
    repository.blobs |= image.blobs
    reference = f"{server.address}/ml/t:v1-{cell}-0123456789ab"
    repository.put(None if attestation else f"v1-{cell}-0123456789ab", image.raw, MANIFEST)
    if attestation:
        attested = Attested(image, Attestation(statement(image.digest, *attestation)))
        repository.blobs |= attested.blobs
        for own in attested.blobs.values():
            if b'"layers"' in own:
                repository.put(None, own, MANIFEST)
        repository.put(f"v1-{cell}-0123456789ab", attested.raw, INDEX)
    return Variant(reference=reference, digest=image.digest, platform="linux/amd64", **facts)


@pytest.fixture
def listing(server, tmp_path, cli, no_engine):  # noqa: ARG001 - for its effect
    """Call it with variants and options; it runs `ls` on a saved catalog of the variants."""

    def call(variants, *options):
        catalog = Catalog(image=f"{server.address}/ml/t", version="v1", variants=tuple(variants))
        (tmp_path / "t.json").write_text(json.dumps(catalog.to_json()))
        return cli("ls", "--catalog", tmp_path / "t.json", *options)

    return call


@pytest.fixture
def two(server):
    return (
        push(server, "old", BASE, cpu_flags=frozenset({"avx512f"})),
        push(server, "new", NEWER, PYTHON),
    )


def words(result):
    return [line.split() for line in result.out.splitlines()[2:]]


def test_variants_with_the_package_are_listed(listing, two):
    result = listing(two, "--package", "openssl")
    assert result.code == 0, result.err
    path = "/var/lib/dpkg/status"
    assert words(result) == [
        [two[0].reference, "openssl", "3.0", "deb", path],
        [two[1].reference, "openssl", "3.5", "deb", path],
    ]
    assert "2 of 2 variants of" in result.err
    result = listing(two, "--package", "lib*")
    assert [row[1:3] for row in words(result)] == [["libssl3", "3.0"]]
    assert "1 of 2 variants" in result.err
    assert [row[1] for row in words(listing(two, "--package", "PyYAML"))] == ["pyyaml"]


def test_package_that_no_variant_has_is_said(listing, two):
    result = listing(two, "--package", "log4j*")
    assert (result.code, result.out) == (0, "")
    assert "no variant of" in result.err
    assert "contains a package log4j*" in result.err


def test_document_has_all_variants(listing, two, conforms):
    document = conforms(json.loads(listing(two, "--package", "libssl3", "--json").out))
    assert document["package"] == "libssl3"
    assert [[package["version"] for package in row["packages"]] for row in document["variants"]] == [
        ["3.0"],
        [],
    ]
    assert [row["hosts"] for row in document["variants"]] == [None, None]
    assert document["unserved"] is None


def test_hosts_are_those_that_select_gives_the_variant(listing, two, profiles, conforms):
    options = [word for host in ("laptop", "genoa-h200") for word in ("--hosts", profiles[host])]
    document = conforms(json.loads(listing(two, "--package", "openssl", *options, "--json").out))
    named = {row["reference"]: row["hosts"] for row in document["variants"]}
    served = [host.rpartition("/")[2] for hosts in named.values() for host in hosts]
    assert sorted([*served, *(host.rpartition("/")[2] for host in document["unserved"])]) == [
        *("genoa-h200", "laptop"),
    ]
    result = listing(two, "--package", "openssl", *options)
    assert result.out.splitlines()[0].split()[-1] == "hosts"


def test_host_that_gets_nothing_is_told(listing, two, profiles):
    result = listing(two, "--package", "openssl", "--hosts", profiles["grace-hopper"])
    assert result.code == 0
    assert "1 host gets no variant" in result.err
    assert words(result)[0][-1] == "-"


def test_layers_of_several_variants_are_read_once(listing, server, two):
    more = [push(server, f"x{number}", BASE, tar((f"opt/{number}", b"x"))) for number in range(3)]
    server.requests.clear()
    assert listing([*two, *more], "--package", "openssl").code == 0
    blobs = [path for method, path, *_ in server.requests if method == "GET" and "/blobs/" in path]
    assert len(blobs) == len(set(blobs))


def test_own_sbom_of_a_variant_is_read(listing, server):
    variant = push(server, "a", NEWER, attestation=[listed("vendored", "2")])
    result = listing([variant], "--package", "vendored")
    assert words(result) == [[variant.reference, "vendored", "2", "generic", "its", "own", "SBOM"]]


def test_damage_is_told(listing, server):
    variant = push(server, "a", tar(("var/lib/dpkg/status", b"x\n")))
    result = listing([variant], "--package", "a")
    assert result.code == 0
    assert f"{variant.reference}: 1 entry in lists of packages cannot be read" in result.err


def test_variant_that_is_gone_is_an_error(listing, server, two):
    server.repositories.clear()
    result = listing(two, "--package", "openssl")
    assert (result.code, result.out) == (4, ""), result.err
    assert f"the registry has no {two[0].reference}" in result.err


def test_variants_of_the_engine_are_read_there(cli, engine, tmp_path):
    image = Parts(NEWER)
    variant = Variant(reference="t:v1-cpu-0123456789ab", digest=image.config, platform="linux/amd64")
    file = tmp_path / "t.json"
    file.write_text(json.dumps(Catalog(image="t", version="v1", variants=(variant,)).to_json()))
    engine.responses["GET", "/json"] = 200, json.dumps({"Id": image.config}).encode()
    engine.responses["GET", "/get"] = 200, Path(saved(tmp_path / "a.tar", image, NEWER)).read_bytes()
    result = cli("ls", "--catalog", file, "--package", "openssl")
    assert result.code == 0, result.err
    assert [row[:3] for row in words(result)] == [[variant.reference, "openssl", "3.5"]]
    engine.responses["GET", "/json"] = 404, b"{}"
    assert cli("ls", "--catalog", file, "--package", "openssl").code == 4


def test_tag_with_another_image_is_read_by_its_digest(listing, server, two):
    repository = server.repository("ml/t")
    other = Parts(tar("opt/other"))
    repository.blobs |= other.blobs
    repository.put(None, other.raw, MANIFEST)
    repository.tags["v1-old-0123456789ab"] = other.digest
    assert [row[2] for row in words(listing(two, "--package", "openssl"))] == ["3.0", "3.5"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("training", "--package", "a"), "--package looks into one version"),
        (("training:v1", "--hosts", "x"), "--hosts says who gets a package"),
        (("training:v1", "--package", "a", "--size"), "--package has no sizes"),
        (("training:v1", "--package", "a", "--from", "v0"), "--package has no sizes"),
    ],
)
def test_options_that_do_not_go_together_are_refused(cli, options, message):
    cli("ls", *options).refuses(2, message)


def test_empty_name_is_refused(listing, two):
    listing(two, "--package", "").fails(2, "no name given")
