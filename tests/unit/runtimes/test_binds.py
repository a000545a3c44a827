"""The places of folders in an image: made inside of it, whatever its links say."""

import pytest

from imagematrix.errors import UsageError
from imagematrix.record import replace
from imagematrix.runtimes import binds
from imagematrix.runtimes.container import ContainerSpec
from imagematrix.runtimes.options import Bind

SPEC = ContainerSpec(
    name="n", args=("sh",), environment={}, folder="/w/x", binds=(), devices=(), annotations={}
)


@pytest.fixture
def root(tmp_path):
    made = tmp_path / "root"
    made.mkdir()
    return made


@pytest.mark.parametrize("link", ["absolute", "climbing"])
def test_links_of_an_image_lead_nowhere_else(tmp_path, root, link):
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "data").symlink_to(outside if link == "absolute" else "../../../../../outside")
    binds.require_targets([Bind(source=str(tmp_path), target="/data/new")], str(root))
    assert not list(outside.iterdir())
    inside = root / str(outside).lstrip("/") if link == "absolute" else root / "outside"
    assert (inside / "new").is_dir()


def test_what_is_there_stays(root):
    (root / "etc").mkdir()
    (root / "etc/hosts").write_text("own")
    binds.require_targets([Bind(source="/etc/hosts", target="/etc/hosts")], str(root))
    assert (root / "etc/hosts").read_text() == "own"


def test_a_folder_in_another_has_to_be_there(tmp_path, root):
    (tmp_path / "a/there").mkdir(parents=True)
    outer = Bind(source=str(tmp_path / "a"), target="/data")
    binds.require_targets([outer, Bind(source="/etc", target="/data/there")], str(root))
    assert not list((root / "data").iterdir())
    with pytest.raises(UsageError, match=r"cannot mount /data/none: .*/a/none not found"):
        binds.require_targets([outer, Bind(source="/etc", target="/data/none")], str(root))


def test_links_in_circles_are_an_error(root):
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    with pytest.raises(UsageError, match="go in circles"):
        binds.require_targets([Bind(source="/etc", target="/a/x")], str(root))


def test_the_working_folder_is_made_in_the_image(tmp_path, root):
    binds.require_folder(replace(SPEC, read_only=True), str(root))
    binds.require_folder(replace(SPEC, binds=(Bind(source=str(tmp_path), target="/w"),)), str(root))
    assert not (root / "w").exists()
    for _ in range(2):
        binds.require_folder(SPEC, str(root))
    assert (root / "w/x").is_dir()
