"""`imagematrix verify --sbom`: where SBOMs are written, and the packages in verify's own output."""

import json

import pytest
from images import Parts, layout, tar
from sboms import Attestation, Attested, listed, statement

from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import Variant

STATUS = ("var/lib/dpkg/status", b"Package: openssl\nVersion: 3.5\nArchitecture: amd64\n")
FILES = tar(STATUS, ("opt/a.dist-info/METADATA", b"Name: a\nVersion: 1\n"))


@pytest.fixture
def image(tmp_path):
    return layout(tmp_path / "oci", Parts(FILES))


def names(path):
    return [package["name"] for package in json.loads(path.read_text())["packages"]][1:]


def test_sbom_of_one_image_is_a_file(cli, image, tmp_path):
    result = cli("verify", "--sbom", tmp_path / "a.json", image)
    assert result.code == 0, result.err
    assert names(tmp_path / "a.json") == ["openssl", "a"]
    assert "packages       1 deb, 1 pypi\n" in result.out


def test_sbom_is_the_same_each_time(cli, image, monkeypatch):
    first = cli("verify", "--sbom", "-", image).out
    assert json.loads(first)["spdxVersion"] == "SPDX-2.3"
    assert cli("verify", "--sbom", "-", image).out == first
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert (
        json.loads(cli("verify", "--sbom", "-", image).out)["creationInfo"]["created"]
        == "2023-11-14T22:13:20Z"
    )


def test_invalid_epoch_is_a_usage_error(cli, image, monkeypatch, tmp_path):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "now")
    cli("verify", "--sbom", tmp_path / "a.json", image).fails(2, "SOURCE_DATE_EPOCH")
    assert not (tmp_path / "a.json").exists()


def test_sboms_of_several_images_are_files_in_a_folder(cli, tmp_path):
    first, second = Parts(FILES), Parts(tar(STATUS))
    path = layout(tmp_path / "oci", first, second)
    result = cli("verify", "--sbom", tmp_path / "new" / "folder", path)
    assert result.code == 0, result.err
    written = {file.name: names(file) for file in (tmp_path / "new" / "folder").iterdir()}
    assert written == {
        f"sha256-{first.digest[7:]}.spdx.json": ["openssl", "a"],
        f"sha256-{second.digest[7:]}.spdx.json": ["openssl"],
    }
    assert all(name in result.err for name in written)


def test_sbom_of_one_image_goes_into_a_folder_that_exists(cli, image, tmp_path):
    (tmp_path / "folder").mkdir()
    assert cli("verify", "--sbom", tmp_path / "folder", image).code == 0
    (file,) = (tmp_path / "folder").iterdir()
    assert names(file) == ["openssl", "a"]


def test_several_images_do_not_fit_one_file(cli, image, tmp_path):
    file = tmp_path / "a.json"
    file.write_text("kept")
    for target, name in (("-", "stdout"), (file, str(file))):
        cli("verify", "--sbom", target, image, image).refuses(
            2, f"several images cannot be written to {'the file ' if target == file else ''}{name}"
        )
    several = layout(tmp_path / "several", Parts(FILES), Parts(tar(STATUS)))
    assert cli("verify", "--sbom", file, several).code == 2
    assert file.read_text() == "kept"


def test_two_documents_do_not_fit_stdout(cli, image):
    result = cli("verify", "--sbom", "-", "--json", image)
    assert (result.code, result.out) == (2, "")


def test_file_that_cannot_be_written_is_a_usage_error(cli, image):
    cli("verify", "--sbom", "/nowhere/a.json", image).fails(2, "/nowhere/a.json")


def test_contradicting_image_has_an_sbom_too(cli, tmp_path):
    lies = Variant(reference="t:x", digest=None, platform="linux/amd64", cuda="12.4", cubins=("90",))
    path = layout(tmp_path / "oci", Parts(FILES, labels={labels.VARIANT: labels.write_variant(lies)}))
    assert cli("verify", "--sbom", tmp_path / "a.json", path).code == 9
    assert names(tmp_path / "a.json") == ["openssl", "a"]


def test_own_sbom_of_an_image_adds_packages(cli, tmp_path, conforms):
    image = Parts(FILES)
    raw = statement(
        image.digest, listed("vendored", "2"), listed("openssl", "3.5", "pkg:deb/debian/openssl@3.5")
    )
    path = layout(tmp_path / "oci", Attested(image, Attestation(raw)))
    document = conforms(json.loads(cli("verify", "--json", "--sbom", tmp_path / "a.json", path).out))
    assert [(package["name"], package["source"]) for package in document["packages"]] == [
        *(("openssl", "files"), ("vendored", "sbom"), ("a", "files")),
    ]
    assert names(tmp_path / "a.json") == ["openssl", "vendored", "a"]


def test_own_sbom_that_lies_about_its_image_is_told(cli, tmp_path):
    raw = statement(f"sha256:{'0' * 64}", listed("vendored", "2"))
    path = layout(tmp_path / "oci", Attested(Parts(FILES), Attestation(raw)))
    out = cli("verify", "--sbom", tmp_path / "a.json", path).out
    assert "warning        its own SBOM is not used: sha256:" in out
    assert names(tmp_path / "a.json") == ["openssl", "a"]


def test_damaged_list_of_packages_is_a_warning(cli, tmp_path):
    path = layout(tmp_path / "oci", Parts(tar((STATUS[0], b"Package: \x1b[2J\nVersion: 1\n"))))
    result = cli("verify", path)
    assert result.code == 0
    assert "1 entry in lists of packages cannot be read: /var/lib/dpkg/status (1)" in result.out
    assert "\x1b" not in result.out
