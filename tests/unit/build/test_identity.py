"""The identity: everything that decides an image's bytes changes it, and nothing else does."""

import os
import shutil

import pytest

from imagematrix.build.identity import Identity, context_digest, identify, tag
from imagematrix.errors import UsageError
from imagematrix.matrix.matrix import Cell, Image


def cell(version="v1", **axes):
    image = Image(name="training", version=version, template="t", context=None)
    return Cell(image=image, axes=axes or {"cuda": "none", "march": "znver4"}, properties={})


SAME = {
    "cell": cell(),
    "dockerfile": "FROM debian\n",
    "bases": {"debian": "sha256:a"},
    "context": "sha256:c",
}


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"dockerfile": "FROM debian \n"}, ("dockerfile",)),
        ({"context": "sha256:d"}, ("context",)),
        ({"bases": {"debian": "sha256:b"}}, ("base debian",)),
        ({"bases": {"debian": "sha256:a", "tool": "sha256:a"}}, ("base tool",)),
        ({"bases": {"ubuntu": "sha256:a"}}, ("base debian", "base ubuntu")),
        ({"cell": cell(platform="linux/arm64")}, ("platform",)),
    ],
)
def test_each_component_changes_it_and_is_named(change, names):
    one, other = identify(**SAME), identify(**(SAME | change))
    assert one.digest != other.digest
    assert one.changed(other.components) == names
    assert other.changed(one.components) == names


def test_nothing_else_changes_it():
    renamed = cell(cuda="none", march="znver3")  # what differs in the bytes differs in the Dockerfile
    assert identify(**SAME).digest == identify(**(SAME | {"cell": renamed})).digest
    assert identify(**SAME).changed(identify(**SAME).components) == ()
    turned = Identity(components=dict(reversed(identify(**SAME).components.items())))
    assert turned.digest == identify(**SAME).digest


def test_a_digest_once_given_stays():
    """Who changes this sends every image of every user to be built again: raise SCHEMA, and say so."""
    assert identify(**SAME).components == {
        "schema": "1",
        "dockerfile": "sha256:2e82491658394d2a150ac8f92efb200f230f6f97b7a6d5b7707893fa495c0b63",
        "context": "sha256:c",
        "platform": "linux/amd64",
        "epoch": "0",
        "base debian": "sha256:a",
    }
    assert (
        identify(**SAME).digest == "sha256:8af8c3f8420bfe3a32acbaf83d27a8bbf4024a4c3e5afac2b75775b0b89ab87a"
    )


def test_a_tag_can_be_read():
    made = identify(**SAME)
    assert tag(cell(), made) == f"v1-cpu-znver4-{made.digest[7:19]}"
    gpu = cell(cuda="12.4", driver="550.163.01", compute="9.0a", march="znver4", os="trixie")
    assert tag(gpu, made) == f"v1-cuda12.4-drv550.163.01-sm90a-znver4-trixie-{made.digest[7:19]}"


def test_a_tag_has_its_limit():
    made = identify(**SAME)
    rest = len(tag(cell(version="", march="a"), made)) - 1
    assert len(tag(cell(version="", march="a" * (128 - rest)), made)) == 128
    with pytest.raises(UsageError, match="longer than the 128 characters of a tag") as caught:
        tag(cell(version="", march="a" * (129 - rest)), made)
    assert "shorten" in caught.value.remedy


@pytest.fixture
def folder(tmp_path):
    """A context with a bit of everything."""
    made = tmp_path / "context"
    (made / "sub").mkdir(parents=True)
    (made / "empty").mkdir()
    (made / "main.c").write_text("int main;")
    (made / "sub" / "run.sh").write_text("true")
    (made / "link").symlink_to("main.c")
    (made / "dangling").symlink_to("/nowhere/at/all")
    (made / os.fsdecode(b"\xff.bin")).write_bytes(b"\xff\x00")
    (made / "ignored.log").write_text("much")
    (made / ".dockerignore").write_text(
        "# what no Dockerfile copies\n\n  **/*.log  \nsecret\n!sub/kept.log\n"
    )
    return made


def _replace(path, new):
    path.unlink()
    new(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "main.c").write_text("int main();"),
        lambda folder: (folder / "sub" / "run.sh").chmod(0o755),
        lambda folder: (folder / "sub").chmod(0o700),
        lambda folder: (folder / "main.c").rename(folder / "other.c"),
        lambda folder: (folder / "main.c").rename(folder / "sub" / "main.c"),
        lambda folder: (folder / "new").touch(),
        lambda folder: (folder / "empty").rmdir(),
        lambda folder: _replace(folder / "link", lambda path: path.symlink_to("./main.c")),
        lambda folder: _replace(folder / "link", lambda path: path.write_text("int main;")),
        lambda folder: _replace(folder / "dangling", lambda path: path.write_text("link /nowhere/at/all")),
        lambda folder: (folder / "sub" / "kept.log").touch(),
        lambda folder: (folder / ".dockerignore").write_text("**/*.log\nsecret\n"),
    ],
)
def test_what_a_build_can_copy_counts(folder, change):
    before = context_digest(folder)
    change(folder)
    assert context_digest(folder) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "ignored.log").write_text("more"),
        lambda folder: (folder / "sub" / "x.log").mkdir(),
        lambda folder: (folder / "secret").mkdir(),
        lambda folder: os.utime(folder / "main.c", (0, 0)),
    ],
)
def test_what_it_cannot_copy_does_not(folder, change):
    before = context_digest(folder)
    change(folder)
    assert context_digest(folder) == before


def test_where_the_folder_lies_does_not_count(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "elsewhere", symlinks=True)
    assert context_digest(tmp_path / "elsewhere") == context_digest(folder)


@pytest.mark.parametrize("name", [".dockerignore", "Dockerfile"])
def test_the_builds_own_files_count_like_any_other(folder, name):
    (folder / ".dockerignore").write_text("*\n!main.c\n")
    (folder / "Dockerfile").write_text("FROM one\n")
    before = context_digest(folder)
    with (folder / name).open("a") as file:
        file.write("# changed\n")
    assert context_digest(folder) == before
    (folder / "main.c").write_text("another")
    assert context_digest(folder) != before


def test_a_link_to_a_folder_is_not_followed(folder):
    (folder / ".dockerignore").unlink()
    (folder / "sub" / "up").symlink_to("..")
    before = context_digest(folder)
    (folder / "sub" / "up").unlink()
    (folder / "sub" / "up").symlink_to("../sub")
    assert context_digest(folder) != before


def test_an_empty_folder_has_a_digest_too(tmp_path):
    (tmp_path / "empty").mkdir()
    assert context_digest(tmp_path / "empty").startswith("sha256:e3b0c442")


@pytest.fixture
def nobody():
    """Run as a user who may read nothing of root's."""
    if os.getuid() == 0:
        os.seteuid(65534)
    yield
    os.seteuid(os.getuid())


def test_a_file_that_cannot_be_read_is_named(folder, request):
    (folder / "main.c").chmod(0)
    request.getfixturevalue("nobody")
    with pytest.raises(UsageError, match=rf"{folder}.*: Permission denied"):
        context_digest(folder)
