"""What an image's own SBOM adds to what its files show."""

import json

import pytest
from images import Parts, layout, tar
from sboms import Attestation, Attested, document, envelope, listed, statement

from imagematrix.audit.images.layers import Layers
from imagematrix.audit.images.sources import read_images
from imagematrix.audit.report import audit_image
from imagematrix.audit.sbom import sbom_reader
from imagematrix.audit.sbom.components import list_components, warn_of_unread

FILES = tar(
    ("var/lib/dpkg/status", b"Package: openssl\nVersion: 3.5\nArchitecture: amd64\n"),
    ("opt/PyYAML-6.0.dist-info/METADATA", b"Name: PyYAML\nVersion: 6.0\n"),
)
OWN = [("deb", "openssl", "files"), ("pypi", "pyyaml", "files")]


def seen(tmp_path, raw):
    """Return the components of an image with this statement, and the problems."""
    image = Parts(FILES)
    made = raw(image.digest) if callable(raw) else raw
    path = layout(tmp_path / "oci", Attested(image, Attestation(made)))
    (found,) = read_images(path, "linux/amd64", Layers(), sboms=True)
    listed_components, problems = list_components(audit_image(found))
    return [(one.package.kind, one.package.name, one.source) for one in listed_components], problems


def test_packages_that_only_the_sbom_names_are_added(tmp_path):
    found, problems = seen(
        tmp_path,
        lambda subject: statement(
            subject,
            listed("openssl", "3.5", "pkg:deb/debian/openssl@3.5?arch=amd64"),
            listed("pyyaml", "6.0", "pkg:pypi/PyYAML@6.0"),
            listed("github.com/x/y", "v1.2", "pkg:golang/github.com/x/y@v1.2"),
            listed("openssl", "3.5"),
            listed("vendored", "2"),
        ),
    )
    assert problems == ()
    assert found == sorted([*OWN, ("golang", "y", "sbom"), ("generic", "vendored", "sbom")])


def test_other_version_than_in_the_files_is_added_and_takes_nothing_away(tmp_path):
    found, _ = seen(
        tmp_path, lambda subject: statement(subject, listed("openssl", "9.9", "pkg:deb/debian/openssl@9.9"))
    )
    assert found == [("deb", "openssl", "files"), ("deb", "openssl", "sbom"), ("pypi", "pyyaml", "files")]


def test_empty_sbom_removes_nothing(tmp_path):
    assert seen(tmp_path, statement) == (OWN, ())


def test_statement_without_a_subject_is_of_the_image_that_lists_it(tmp_path):
    found, problems = seen(tmp_path, statement(None, listed("vendored", "2")))
    assert problems == ()
    assert ("generic", "vendored", "sbom") in found


def test_envelope_of_cosign_is_opened(tmp_path):
    found, _ = seen(tmp_path, lambda subject: envelope(statement(subject, listed("vendored", "2"))))
    assert ("generic", "vendored", "sbom") in found


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"text", "not JSON"),
        (b"[]", "expected an object"),
        (b'{"payload": "a"}', "payload: is not in base64"),
        (statement("sha256:00"), "subject: is not sha256:"),
        (lambda subject: statement(subject, predicateType="https://x"), "predicateType: is not"),
        (
            lambda subject: statement(subject, predicate={"spdxVersion": "SPDX-3.0"}),
            "'SPDX-3.0' is not supported",
        ),
        (lambda subject: statement(subject, predicate=document(packages=[7])), "expected an object"),
        (lambda subject: statement(subject, predicate=document(relationships=7)), "expected a list"),
    ],
)
def test_sbom_that_cannot_be_used_is_told(tmp_path, raw, why):
    found, (problem,) = seen(tmp_path, raw)
    assert found == OWN
    assert problem.startswith("its own SBOM is not used: ")
    assert why in problem


@pytest.mark.parametrize(
    "package",
    [
        listed("", "1"),
        listed("name", ""),
        listed("name", "1\x1b[2J"),
        listed("n" * 201, "1"),
        {"SPDXID": "SPDXRef-x"},
    ],
)
def test_packages_without_a_printable_name_and_version_are_left_out(tmp_path, package):
    assert seen(tmp_path, lambda subject: statement(subject, package)) == (OWN, ())


def test_number_of_packages_in_an_sbom_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(sbom_reader, "MOST", 2)
    few = seen(tmp_path / "few", lambda subject: statement(subject, listed("a", "1")))
    many = seen(tmp_path / "many", lambda subject: statement(subject, listed("a", "1"), listed("b", "1")))
    assert (few[1], "has more than 2" in many[1][0]) == ((), True)


def test_license_that_the_sbom_states_is_kept(tmp_path):
    image = Parts(FILES)
    raw = statement(
        image.digest,
        listed("a", "1", licenseDeclared="MIT"),
        listed("b", "1", licenseDeclared="NOASSERTION"),
    )
    path = layout(tmp_path / "oci", Attested(image, Attestation(raw)))
    (found,) = read_images(path, "linux/amd64", Layers(), sboms=True)
    stated = {one.package.name: one.package.license for one in list_components(audit_image(found))[0]}
    assert (stated["a"], stated["b"]) == ("MIT", None)


def test_elements_of_documents_say_where_they_are_from(tmp_path):
    path = layout(tmp_path / "oci", Parts(FILES))
    (found,) = read_images(path, "linux/amd64", Layers())
    assert list_components(audit_image(found))[0][0].to_json() == {
        "type": "deb",
        "name": "openssl",
        "version": "3.5",
        "arch": "amd64",
        "source_package": None,
        "license": None,
        "path": "/var/lib/dpkg/status",
        "purl": "pkg:deb/debian/openssl@3.5?arch=amd64",
        "source": "files",
    }


def test_unread_entries_are_one_warning(tmp_path):
    damaged = [(f"opt/{number}.dist-info/METADATA", b"") for number in range(7)]
    path = layout(tmp_path / "oci", Parts(tar(*damaged, ("var/lib/dpkg/status", b"x\n\ny\n\n"))))
    (found,) = read_images(path, "linux/amd64", Layers())
    (warning,) = warn_of_unread(audit_image(found).contents)
    assert warning.startswith(
        "9 entries in lists of packages cannot be read: /opt/0.dist-info/METADATA (1), "
    )
    assert warning.endswith(" and 3 more")


@pytest.mark.fuzz
def test_any_document_is_read_or_refused(tmp_path):
    """Every value of a statement replaced by every kind of value."""
    image = Parts(FILES)
    whole = json.loads(statement(image.digest, listed("a", "1", "pkg:pypi/a@1", licenseDeclared="MIT")))

    def variants(value):
        yield from (None, 7, "x", [], {}, [None], {"a": None}, True)
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from ({**value, key: other} for other in variants(inner))
                yield {name: kept for name, kept in value.items() if name != key}
        elif isinstance(value, list):
            for place, inner in enumerate(value):
                yield from ([*value[:place], other, *value[place + 1 :]] for other in variants(inner))

    from dataclasses import replace

    from imagematrix.audit.packages.attested_sboms import Statement

    (found,) = read_images(layout(tmp_path / "oci", image), "linux/amd64", Layers())
    audited = audit_image(found)
    tried = 0
    for changed in variants(whole):
        own = Statement(digest="sha256:1", raw=json.dumps(changed).encode())
        result, _ = list_components(replace(audited, image=replace(found, sboms=(own,))))
        assert [one for one in result if one.source == "files"] == [*list_components(audited)[0]]
        tried += 1
    assert tried > 100
