"""The packages in an image of several layers."""

import io
from pathlib import Path

import pytest
from images import link, tar

from imagematrix.audit.images import layer

STATUS = "var/lib/dpkg/status"
DISTINFO = "opt/venv/lib/python3.13/site-packages/PyYAML-6.0.2.dist-info/METADATA"
YAML = b"Metadata-Version: 2.4\nName: PyYAML\nVersion: 6.0.2\nLicense: MIT\n\nName: other\n"


def deb(*names):
    return b"".join(f"Package: {name}\nVersion: 1.0\nArchitecture: amd64\n\n".encode() for name in names)


@pytest.fixture
def seen(audited_layers):
    """Call it with layers, each a list of members, to get the Contents of an image of them."""
    return lambda *layers: audited_layers(*layers).contents


def names(contents):
    return [(package.kind, package.name) for package in contents.packages]


def test_top_database_counts(seen):
    found = seen([(STATUS, deb("a", "b"))], [(STATUS, deb("b", "c"))])
    assert names(found) == [("deb", "b"), ("deb", "c")]
    assert {package.path for package in found.packages} == {"/var/lib/dpkg/status"}


@pytest.mark.parametrize(
    "whiteout",
    [
        f"{DISTINFO.rpartition('/')[0]}/.wh.METADATA",
        "opt/venv/lib/python3.13/site-packages/.wh.PyYAML-6.0.2.dist-info",
        "opt/.wh..wh..opq",
    ],
)
def test_package_that_a_later_layer_removes_is_not_there(seen, whiteout):
    assert names(seen([(DISTINFO, YAML)])) == [("pypi", "pyyaml")]
    assert names(seen([(DISTINFO, YAML)], [whiteout])) == []


def test_removed_database_has_no_packages(seen):
    members = [("var/lib/dpkg/status.d/a", deb("a")), ("var/lib/dpkg/status.d/b", deb("b"))]
    assert names(seen(members, ["var/lib/dpkg/status.d/.wh.a"])) == [("deb", "b")]


def test_database_behind_a_link_is_read_once(seen):
    members = [
        link("lib", "usr/lib"),
        ("usr/lib/apk/db/installed", b"P:musl\nV:1.2.5-r0\n"),
    ]
    found = seen(members)
    assert [package.path for package in found.packages] == ["/usr/lib/apk/db/installed"]


@pytest.mark.parametrize(
    ("path", "text", "license_name"),
    [
        (DISTINFO, YAML, "MIT"),
        ("usr/lib/python3/dist-packages/PyYAML-6.0.2.egg-info", YAML, "MIT"),
        ("usr/lib/python3/dist-packages/PyYAML-6.0.2.egg-info/PKG-INFO", YAML, "MIT"),
        (
            DISTINFO,
            YAML.replace(b"License: MIT", b"License-Expression: MIT OR Apache-2.0"),
            "MIT OR Apache-2.0",
        ),
        (DISTINFO, YAML.replace(b"License: MIT", b"License: UNKNOWN"), None),
        (DISTINFO, YAML.replace(b"License: MIT", b"License: Copyright 2020\n  all of the text"), None),
        (
            DISTINFO,
            YAML.replace(
                b"License: MIT",
                b"Classifier: License :: OSI Approved :: MIT License\nClassifier: Topic :: Text",
            ),
            "MIT License",
        ),
    ],
)
def test_metadata_of_python_packages_is_read(seen, path, text, license_name):
    (found,) = seen([(path, text)]).packages
    assert (found.kind, found.name, found.version, found.license, found.path) == (
        *("pypi", "pyyaml", "6.0.2", license_name, f"/{path}"),
    )


def test_same_package_in_two_environments_is_listed_twice(seen):
    other = DISTINFO.replace("venv", "other")
    found = seen([(DISTINFO, YAML), (other, YAML)])
    assert [package.path for package in found.packages] == [f"/{other}", f"/{DISTINFO}"]


@pytest.mark.parametrize(
    "text", [b"", b"Name: a\n", b"Name: two words\nVersion: 1\n", b"Name: a\nVersion: \x1b[2J\n"]
)
def test_damaged_metadata_is_told(seen, text):
    found = seen([(DISTINFO, text), ("x/b.dist-info/METADATA", YAML)])
    assert names(found) == [("pypi", "pyyaml")]
    assert found.unread == ((f"/{DISTINFO}", 1),)


def test_damaged_entries_of_a_database_are_told_with_its_path(seen):
    found = seen([(STATUS, deb("a") + b"Package: x\n\n"), ("var/lib/rpm/rpmdb.sqlite", b"text")])
    assert names(found) == [("deb", "a")]
    assert found.unread == ((f"/{STATUS}", 1), ("/var/lib/rpm/rpmdb.sqlite", 1))


def test_libraries_and_driver_are_packages(seen):
    folder = "usr/lib/x86_64-linux-gnu"
    members = [
        (f"{folder}/libcuda.so.550.163.01", b"x"),
        (f"{folder}/libcudart.so.12.4.127", b"\x7fELF"),
        (f"{folder}/stubs/libcuda.so", b"x"),
    ]
    found = seen(members).packages
    assert [(one.kind, one.name, one.version, one.path) for one in found] == [
        ("generic", "cudart", "12.4.127", f"/{folder}/libcudart.so.12.4.127"),
        ("generic", "libcuda", "550.163.01", f"/{folder}/libcuda.so.550.163.01"),
    ]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ([("etc/os-release", b'NAME="x"\nID=debian\nVERSION_ID="13"\n')], ("debian", "13")),
        (
            [("usr/lib/os-release", b"ID='alpine'\n"), link("etc/os-release", "../usr/lib/os-release")],
            ("alpine", None),
        ),
        ([("etc/os-release", b'ID="de bian"\nVERSION_ID=\x1b\n')], (None, None)),
        ([], (None, None)),
    ],
)
def test_distribution_is_read(seen, members, expected):
    assert seen(members or ["opt"]).distribution == expected


def test_empty_database_costs_no_entry():
    entries = layer.read_layer(io.BytesIO(tar((STATUS, b""))), "sha256:0").entries
    assert entries == {f"/{STATUS}": layer.OTHER}


def test_real_rpm_database_is_read(seen):
    import gzip

    data = Path(__file__).parents[1] / "data" / "rpm" / "rpmdb.sqlite.gz"
    found = seen([("usr/lib/sysimage/rpm/rpmdb.sqlite", gzip.decompress(data.read_bytes()))])
    assert [(one.name, one.version, one.arch, one.license) for one in found.packages] == [
        ("more", "1-1", "noarch", "Apache-2.0"),
        ("tool", "1-1", "noarch", "Apache-2.0"),
    ]
