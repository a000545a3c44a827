"""SBOMs that builders attached to images, from every kind of store."""

import json

import pytest
from images import MANIFEST, Parts, archived, digest, layout, saved_with_blobs, tar
from sboms import DSSE, Attestation, Attested, envelope, listed, statement

from imagematrix.audit.images import sources
from imagematrix.audit.images.layers import Layers
from imagematrix.audit.images.sources import read_images
from imagematrix.audit.packages import attested_sboms
from imagematrix.audit.packages.attested_sboms import read_sboms

INDEX = "application/vnd.oci.image.index.v1+json"


@pytest.fixture
def image():
    return Parts(tar(("opt/text", b"text")))


@pytest.fixture
def attested(image):
    return Attested(image, Attestation(statement(image.digest, listed("a", "1"))))


def own(reference, **more):
    (found,) = read_images(str(reference), "linux/amd64", Layers(), sboms=True, **more)
    return found.sboms


@pytest.mark.parametrize("write", [layout, archived])
def test_statement_is_read_from_a_layout_and_an_archive(write, tmp_path, image, attested):
    (found,) = own(write(tmp_path / "image", attested))
    assert found.raw == statement(image.digest, listed("a", "1"))
    assert found.problem is None


def test_statement_is_read_from_an_archive_of_docker_save(tmp_path, image, attested):
    (found,) = own(saved_with_blobs(tmp_path / "a.tar", image, blobs=attested.blobs))
    assert found.raw == statement(image.digest, listed("a", "1"))


def pushed(server, attested, *more):
    repository = server.repository("ml/t")
    for one in (attested, *more):
        repository.blobs |= one.blobs
    return repository


@pytest.mark.usefixtures("no_engine")
def test_statement_is_read_from_a_registry(server, image, attested):
    repository = pushed(server, attested)
    repository.put("v1", attested.raw, INDEX)
    repository.put(image.digest, image.raw, MANIFEST)
    for one in attested.blobs.values():
        if one[:1] == b"{":
            repository.put(digest(one), one, MANIFEST)
    (found,) = own(f"{server.address}/ml/t:v1")
    assert found.raw == statement(image.digest, listed("a", "1"))


@pytest.mark.usefixtures("no_engine")
def test_statement_of_cosign_is_read(server, image):
    raw = envelope(statement(image.digest, listed("a", "1")))
    attestation = Attestation(raw, DSSE, "predicateType")
    repository = pushed(server, attestation, image)
    repository.put("v1", image.raw, MANIFEST)
    repository.put(f"sha256-{image.digest[7:]}.att", attestation.raw, MANIFEST)
    (found,) = own(f"{server.address}/ml/t:v1")
    assert found.raw == raw


def test_statements_are_read_only_if_asked_for(tmp_path, attested):
    (found,) = read_images(layout(tmp_path / "oci", attested), "linux/amd64", Layers())
    assert found.sboms == ()


def test_other_statements_are_no_sboms(tmp_path, image):
    other = Attestation(statement(image.digest), predicate="https://slsa.dev/provenance/v0.2")
    assert own(layout(tmp_path / "oci", Attested(image, other))) == ()


@pytest.mark.parametrize("lost", ["statement", "manifest"])
def test_missing_statement_is_told_and_fails_nothing(tmp_path, image, lost):
    raw = statement(image.digest, listed("a", "1"))
    attestation = Attestation(raw)
    whole = Attested(image, attestation)
    del whole.blobs[digest(raw) if lost == "statement" else attestation.digest]
    (found,) = own(layout(tmp_path / "oci", whole))
    assert found.raw == b""
    assert "sha256:" in str(found.problem)


def test_changed_statement_is_refused(tmp_path, image):
    raw = statement(image.digest, listed("a", "1"))
    whole = Attested(image, Attestation(raw))
    whole.blobs[digest(raw)] = raw.replace(b'"a"', b'"b"')
    (found,) = own(layout(tmp_path / "oci", whole))
    assert "does not match its digest" in str(found.problem)


@pytest.mark.parametrize(("larger", "read_whole"), [(0, True), (1, False)])
def test_size_of_a_statement_is_limited(tmp_path, image, monkeypatch, larger, read_whole):
    raw = statement(image.digest, listed("a", "1"))
    monkeypatch.setattr(sources, "LARGEST", len(raw) - larger)
    (found,) = own(layout(tmp_path / "oci", Attested(image, Attestation(raw))))
    assert (found.raw == raw) is read_whole
    assert ("too large" in str(found.problem)) is not read_whole


def test_attestation_that_is_no_manifest_is_told(tmp_path, image):
    attestation = Attestation(b"")
    attestation.raw = b'{"manifests": [], "layers": []}'
    attestation.digest = digest(attestation.raw)
    attestation.blobs[attestation.digest] = attestation.raw
    (found,) = own(layout(tmp_path / "oci", Attested(image, attestation)))
    assert "is not allowed" in str(found.problem)


class Store:
    """A store of attestations, with as many SBOMs in each as there are `names`; it notes what is read."""

    def __init__(self, *names):
        self.read = []
        self._names = names

    def read_manifest(self, name):
        """Return a manifest that lists SBOMs."""
        annotations = {"in-toto.io/predicate-type": attested_sboms.PREDICATE}
        layers = [
            {"mediaType": "x", "digest": digest((name + one).encode()), "size": 1, "annotations": annotations}
            for one in self._names
        ]
        config = {"mediaType": "x", "digest": digest(b""), "size": 0}
        return json.dumps({"schemaVersion": 2, "config": config, "layers": layers}).encode()

    def read_statement(self, name):
        """Return ten bytes."""
        self.read.append(name)
        return bytes(10)

    def find_attached(self, name):
        """Return what cosign attached."""
        return self.read_manifest(name)


@pytest.mark.parametrize(("name", "limit", "most"), [("MOST", 5, 5), ("ALL", 39, 4), ("ALL", 1000, 12)])
def test_all_statements_of_an_image_are_limited_together(monkeypatch, name, limit, most):
    monkeypatch.setattr(attested_sboms, "MOST", 12)
    monkeypatch.setattr(attested_sboms, name, limit)
    store = Store("a", "b", "c")
    found = read_sboms(store, "sha256:0", ["one", "two", "three"])
    assert len(store.read) == most
    kept = sum(len(statement.raw) for statement in found)
    assert kept <= min(limit, most) * 10
    problems = [statement.problem for statement in found if statement.problem]
    assert len(problems) == (most < 12)
    assert all(problem.startswith("the image has more than") for problem in problems)
