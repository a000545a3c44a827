"""Documents of SPDX, judged by the library of the SPDX project."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spdx_tools.spdx.parser.jsonlikedict.json_like_dict_parser import JsonLikeDictParser
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

from imagematrix.audit.images.image import AuditedImage
from imagematrix.audit.packages.installed_package import InstalledPackage
from imagematrix.audit.report import audit_image
from imagematrix.audit.sbom import spdx
from imagematrix.audit.sbom.components import FILES, SBOM, Component
from imagematrix.audit.sbom.purl import make_purl
from imagematrix.errors import UsageError

IMAGE = AuditedImage(
    reference="reg.example.com/ml/training:v1-cpu",
    digest=f"sha256:{'ab' * 32}",
    platform="linux/amd64",
    layers=(),
    created="2026-11-26T09:30:00.123456789Z",
)
TOOL = "imagematrix-0.1.0"
TIME = "2026-11-26T09:30:00Z"


def component(package, source=FILES):
    return Component(package=package, url=make_purl(package, ("debian", "13")), source=source)


OPENSSL = component(
    InstalledPackage(
        kind="deb", name="openssl", version="3.5.4-1", arch="amd64", source="ssl", path="/var/lib/dpkg/status"
    )
)
SEVERAL = [
    OPENSSL,
    component(
        InstalledPackage(
            kind="rpm", name="a", version="1:2-3", license="GPLv2+ and MIT", path="/var/lib/rpm/x"
        )
    ),
    component(
        InstalledPackage(kind="apk", name="libstdc++", version="14", license="mit and apache-2.0", path="/x")
    ),
    component(
        InstalledPackage(kind="pypi", name="b", version="1!2.0+cu128", license="LicenseRef-Own", path="/y")
    ),
    component(
        InstalledPackage(kind="pypi", name="b", version="1!2.0+cu128", license="LicenseRef-Own", path="/z")
    ),
    component(
        InstalledPackage(kind="generic", name="libcuda", version="550.163.01", path="/usr/lib/libcuda.so.1")
    ),
    Component(package=InstalledPackage(kind="generic", name="@x/y z", version="?"), url=None, source=SBOM),
]


def valid(document):
    """Assert that a document obeys SPDX's rules; return it."""
    parsed = JsonLikeDictParser().parse(json.loads(json.dumps(document)))
    assert [message.validation_message for message in validate_full_spdx_document(parsed)] == []
    return document


def written(components=SEVERAL, image=IMAGE, time=TIME, distribution=(None, None)):
    audited = audit_image(image)
    audited = replace(audited, contents=replace(audited.contents, distribution=distribution))
    return valid(spdx.make_document(audited, components, TOOL, time))


def test_document_is_valid_and_lists_every_package():
    document = written()
    assert [package["name"] for package in document["packages"]] == [
        *("reg.example.com/ml/training:v1-cpu", "openssl", "a", "libstdc++", "b", "b", "libcuda", "@x/y z"),
    ]
    own = [package["SPDXID"] for package in document["packages"]]
    assert len(set(own)) == len(own)
    assert {relation["relatedSpdxElement"] for relation in document["relationships"]} == set(own)


def test_package_has_its_url_and_where_it_was_found():
    _, openssl, *_ = written()["packages"]
    assert openssl["versionInfo"] == "3.5.4-1"
    assert openssl["sourceInfo"] == "found in /var/lib/dpkg/status; built from the source package ssl"
    assert openssl["externalRefs"][0] == {
        "referenceCategory": "PACKAGE-MANAGER",
        "referenceType": "purl",
        "referenceLocator": "pkg:deb/debian/openssl@3.5.4-1?arch=amd64&distro=debian-13&upstream=ssl",
    }


def test_package_that_only_an_sbom_names_says_so():
    assert written()["packages"][-1]["sourceInfo"] == "named by the image's own SBOM, not found in its files"


def test_licenses_are_expressions_or_texts():
    document = written()
    stated = {package["name"]: package["licenseDeclared"] for package in document["packages"]}
    assert stated["libstdc++"] == "MIT AND Apache-2.0"
    assert stated["openssl"] == "NOASSERTION"
    texts = {text["licenseId"]: text["extractedText"] for text in document["hasExtractedLicensingInfos"]}
    assert texts == {stated["a"]: "GPLv2+ and MIT", stated["b"]: "LicenseRef-Own"}


def test_image_is_described_with_its_digest():
    image = written()["packages"][0]
    assert image["versionInfo"] == IMAGE.digest
    assert image["checksums"] == [{"algorithm": "SHA256", "checksumValue": "ab" * 32}]
    assert image["externalRefs"][0]["referenceLocator"].startswith(
        f"pkg:oci/training@{IMAGE.digest}?arch=amd64&"
    )


@pytest.mark.parametrize("reference", ["./layout", "training:v1", "/a/b.tar", "reg.example.com/UPPER"])
def test_image_that_is_in_no_registry_has_no_url(reference):
    assert "externalRefs" not in written(image=replace(IMAGE, reference=reference))["packages"][0]


@pytest.mark.parametrize(("release", "stated"), [("13", {"versionInfo": "13"}), (None, {})])
def test_distribution_is_a_package(release, stated):
    system = written(distribution=("debian", release))["packages"][1]
    assert system.items() >= {"name": "debian", "primaryPackagePurpose": "OPERATING_SYSTEM"}.items()
    assert {key: value for key, value in system.items() if key == "versionInfo"} == stated


def test_same_input_gives_the_same_document():
    assert json.dumps(written()) == json.dumps(written())
    assert written()["documentNamespace"].startswith(f"https://imagematrix.io/spdx/sha256-{'ab' * 32}/")


def test_other_content_gives_another_namespace():
    names = {
        written()["documentNamespace"],
        written(SEVERAL[1:])["documentNamespace"],
        written(time="2026-11-26T09:30:01Z")["documentNamespace"],
    }
    assert len(names) == 3


@pytest.mark.parametrize(
    ("stated", "epoch", "time"),
    [
        ("2026-11-26T09:30:00.123456789Z", None, "2026-11-26T09:30:00Z"),
        ("2026-11-26T10:30:00+01:00", None, "2026-11-26T09:30:00Z"),
        ("2026-11-26T10:30:00+01:00", "0", "1970-01-01T00:00:00Z"),
        ("x", "99999999999", "5138-11-16T09:46:39Z"),
        (None, None, "1970-01-01T00:00:00Z"),
        ("yesterday", None, "1970-01-01T00:00:00Z"),
        ("0001-01-01T00:00:00+14:00", None, "1970-01-01T00:00:00Z"),
        ("0001-01-01T00:00:00Z", None, "0001-01-01T00:00:00Z"),
    ],
)
def test_time_is_that_of_the_image_or_of_the_environment(stated, epoch, time):
    assert spdx.get_creation_time(replace(IMAGE, created=stated), epoch) == time


@pytest.mark.parametrize("epoch", ["", "-1", "1.5", "now", "100000000000", "\N{ARABIC-INDIC DIGIT ONE}"])
def test_invalid_epoch_is_refused(epoch):
    with pytest.raises(UsageError, match="SOURCE_DATE_EPOCH"):
        spdx.get_creation_time(IMAGE, epoch)


TEXT = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40)


@given(
    st.lists(
        st.builds(
            lambda name, version, license_name: component(
                InstalledPackage(kind="pypi", name=name, version=version, license=license_name, path="/x")
            ),
            TEXT,
            TEXT,
            st.none()
            | TEXT
            | st.sampled_from(["MIT", "GPL-2.0+", "MIT OR BSD", "(MIT", "GPL-2.0-only WITH x"]),
        ),
        max_size=3,
        unique_by=lambda one: (one.package.name, one.package.version),
    )
)
def test_any_names_versions_and_licenses_give_a_valid_document(components):
    written(components)
