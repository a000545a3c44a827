"""Paths of a container, found among the image's files as its kernel would find them."""

import stat
from pathlib import Path

import pytest

from imagematrix.launcher.daemonless.path_resolution import ImageFiles, InMountError, LinkLoopError


@pytest.fixture
def image(root):
    """The files of an image with links, in which something is mounted at /m."""
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/sh").touch()
    (root / "bin").symlink_to("usr/bin")
    (root / "usr/link").symlink_to("/bin/../../..//etc")
    (root / "usr/bin/self").symlink_to("sh")
    (root / "to-m").symlink_to("../m/./x")
    with ImageFiles(str(root), ("/m",)) as files:
        yield files


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/", "/"),
        ("", "/"),
        ("/..", "/"),
        ("/bin/sh", "/usr/bin/sh"),
        ("/bin/self", "/usr/bin/sh"),
        ("//bin/./../bin/sh/", "/usr/bin/sh"),
        ("/none", None),
        ("/bin/none/x", None),
        ("/usr/link", None),
    ],
)
def test_a_path_is_found_through_links(image, path, found):
    assert image.find(path) == found


@pytest.mark.parametrize(
    ("path", "where"),
    [("/m", ("/m", "")), ("/m/a/./b", ("/m", "a/b")), ("/to-m", ("/m", "x")), ("/to-m/y", ("/m", "x/y"))],
)
def test_what_is_mounted_is_not_looked_into(image, path, where):
    for look in (image.find, image.make_folder):
        with pytest.raises(InMountError) as caught:
            look(path)
        assert (caught.value.where, caught.value.beyond) == where
    assert image.find_kind(path if path != "/m" else "/m/x") in (None, stat.S_IFLNK)


def test_a_file_is_no_folder(image):
    with pytest.raises(LinkLoopError):
        image.find("/bin/sh/x")
    assert image.find_kind("/bin/sh/x") is None


def test_places_are_made_where_links_lead(image, root):
    assert image.make_folder("/usr/link/a") == "/etc/a"
    assert image.make_place("/usr/link/b/c", folder=False) == "/etc/b/c"
    assert image.make_place("/usr/link/b/d", folder=True) == "/etc/b/d"
    assert (root / "etc/b/c").is_file()
    assert (root / "etc/b/d").is_dir()
    image.add_mount("/etc/b")
    with pytest.raises(InMountError):
        image.find("/etc/b/c")


def test_an_empty_file_or_folder_replaces_anything_but_a_folder(image, root):
    image.replace("/bin", stat.S_IFDIR)
    assert not list((root / "bin").iterdir())
    image.replace("/usr/link", stat.S_IFREG)
    assert image.find_kind("/usr/link") == stat.S_IFREG
    image.replace("/usr/link", stat.S_IFREG)
    with pytest.raises(LinkLoopError):
        image.replace("/usr/bin", stat.S_IFREG)


def test_nothing_stays_open(root):
    before = [*Path("/proc/self/fd").iterdir()]
    with ImageFiles(str(root)) as files:
        files.make_folder("/a/b/c")
    assert len([*Path("/proc/self/fd").iterdir()]) == len(before)
