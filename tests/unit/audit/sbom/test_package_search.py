"""Which packages a name or glob finds."""

import pytest

from imagematrix.audit.packages.installed_package import InstalledPackage
from imagematrix.audit.sbom.components import FILES, Component
from imagematrix.audit.sbom.package_search import match_components


def found(pattern, *packages):
    components = [
        Component(package=InstalledPackage(kind=kind, name=name, version="1"), url=None, source=FILES)
        for kind, name in packages
    ]
    return [component.package.name for component in match_components(pattern, components)]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("openssl", ["openssl"]),
        ("OpenSSL", ["openssl"]),
        ("*ssl*", ["openssl", "libssl3"]),
        ("libssl?", ["libssl3"]),
        ("lib[rs]sl3", ["libssl3"]),
        ("PyYAML", ["pyyaml"]),
        ("nvidia_cublas.cu12", ["nvidia-cublas-cu12"]),
        ("cublaslt", ["cublasLt"]),
        ("ssl", []),
    ],
)
def test_names_match_as_people_write_them(pattern, names):
    packages = [
        ("deb", "openssl"),
        ("deb", "libssl3"),
        ("pypi", "pyyaml"),
        ("pypi", "nvidia-cublas-cu12"),
        ("generic", "cublasLt"),
    ]
    assert found(pattern, *packages) == names


def test_spelling_of_other_packages_is_exact():
    assert found("lib_a", ("deb", "lib-a")) == []


def test_package_is_found_by_the_name_of_its_sources():
    package = InstalledPackage(kind="deb", name="libssl3t64", version="3.5.9-1", source="openssl")
    component = Component(package=package, url=None, source=FILES)
    assert match_components("OpenSSL", [component]) == [component]
    assert match_components("open", [component]) == []
