"""Package URLs: written and read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.audit.packages.installed_package import InstalledPackage
from imagematrix.audit.sbom import purl

DEBIAN = ("debian", "13")


@pytest.mark.parametrize(
    ("package", "distribution", "url"),
    [
        (
            InstalledPackage(kind="deb", name="openssl", version="3.5.4-1~deb13u1", arch="amd64"),
            DEBIAN,
            "pkg:deb/debian/openssl@3.5.4-1~deb13u1?arch=amd64&distro=debian-13",
        ),
        (
            InstalledPackage(
                kind="deb", name="libstdc++6", version="1:14.2+b1", arch="amd64", source="gcc-14"
            ),
            (None, None),
            "pkg:deb/debian/libstdc%2B%2B6@1:14.2%2Bb1?arch=amd64&upstream=gcc-14",
        ),
        (
            InstalledPackage(kind="deb", name="a", version="2", source_version="1+x"),
            ("ubuntu", None),
            "pkg:deb/ubuntu/a@2?upstream=a%401%2Bx",
        ),
        (
            InstalledPackage(kind="rpm", name="openssl-libs", version="1:3.2.2-6.el9", arch="x86_64"),
            ("rhel", "9.6"),
            "pkg:rpm/redhat/openssl-libs@3.2.2-6.el9?arch=x86_64&distro=rhel-9.6&epoch=1",
        ),
        (
            InstalledPackage(kind="rpm", name="Tool", version="3^git-1"),
            ("rocky", "9.6"),
            "pkg:rpm/rocky/Tool@3%5Egit-1?distro=rocky-9.6",
        ),
        (InstalledPackage(kind="rpm", name="tool", version="3-1"), (None, None), "pkg:rpm/tool@3-1"),
        (
            InstalledPackage(kind="apk", name="musl", version="1.2.5-r0", arch="x86_64"),
            (None, None),
            "pkg:apk/alpine/musl@1.2.5-r0?arch=x86_64",
        ),
        (
            InstalledPackage(kind="pypi", name="torch", version="2.8.0+cu128"),
            DEBIAN,
            "pkg:pypi/torch@2.8.0%2Bcu128",
        ),
        (
            InstalledPackage(kind="generic", name="cublasLt", version="12.9.1.4"),
            DEBIAN,
            "pkg:generic/nvidia/cublasLt@12.9.1.4",
        ),
    ],
)
def test_url_has_what_scanners_need(package, distribution, url):
    assert purl.make_purl(package, distribution) == url
    assert purl.parse_purl(url) == (package.kind, package.name, package.version)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("pkg:pypi/PyYAML@6.0", ("pypi", "pyyaml", "6.0")),
        ("pkg:npm/%40angular/core@1.0#sub", ("npm", "core", "1.0")),
        ("pkg:golang/github.com/a/b@v1?x=y", ("golang", "b", "v1")),
        ("pkg:rpm/a@1-1?epoch=0", ("rpm", "a", "1-1")),
        ("pkg:rpm/a@1-1?arch=x&epoch=2&z=1", ("rpm", "a", "2:1-1")),
        ("pkg:deb/debian/a", None),
        ("deb/debian/a@1", None),
        ("pkg:deb/debian/a@1" + "1" * 2000, None),
        ("pkg:npm/x\x1b]0;y\x07/foo@1", None),
        ("pkg:npm/foo@1?\x1b[31m=\n::error::x", None),
        ("pkg:npm/foo@1#\n", None),
        ("", None),
    ],
)
def test_urls_of_other_programs_are_read(url, parts):
    assert purl.parse_purl(url) == parts


NAMES = st.from_regex(r"[a-z0-9][a-z0-9.+_~-]{0,40}", fullmatch=True)
VERSIONS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9.+_~^!*-]{0,40}", fullmatch=True)


@given(st.sampled_from(["deb", "rpm", "apk", "generic"]), NAMES, VERSIONS, st.sampled_from(["", "1:", "12:"]))
def test_what_is_written_is_read(kind, name, version, epoch):
    package = InstalledPackage(kind=kind, name=name, version=f"{epoch}{version}")
    assert purl.parse_purl(purl.make_purl(package, DEBIAN)) == (kind, name, package.version)


def test_image_has_its_repository():
    assert purl.make_image_purl("training", "reg.example.com/ml/training", "sha256:ab", "amd64") == (
        "pkg:oci/training@sha256:ab?arch=amd64&repository_url=reg.example.com%2Fml%2Ftraining"
    )
