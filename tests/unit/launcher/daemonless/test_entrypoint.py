"""The program of a container is looked up in the image as the container's kernel would."""

import pytest

from imagematrix.common.record import replace
from imagematrix.launcher.daemonless.container import ContainerSpec
from imagematrix.launcher.daemonless.entrypoint import (
    NotExecutableError,
    ProgramNotFoundError,
    require_program,
)
from imagematrix.launcher.daemonless.options import Bind

BARE = ContainerSpec(name="n", args=("x",), environment={}, folder="/", binds=(), devices=(), annotations={})


@pytest.fixture
def image(tmp_path):
    """Call it with a command and PATH to look it up in an image of a merged /usr."""
    root = tmp_path / "root"
    (root / "usr/bin").mkdir(parents=True)
    (root / "etc").mkdir()
    for name, mode in (("sh", 0o755), ("text", 0o644)):
        (root / "usr/bin" / name).write_text("")
        (root / "usr/bin" / name).chmod(mode)
    (root / "bin").symlink_to("/usr/bin")
    (root / "usr/bin/python").symlink_to("../../etc/alternatives/python")
    (root / "etc/alternatives").symlink_to("../usr/bin")
    (root / "usr/bin/outside").symlink_to("../../../../../../../../bin/sh")
    (root / "usr/bin/loop").symlink_to("loop")

    def call(name, path="/nowhere:/bin", **changes):
        require_program(replace(BARE, args=(name,), environment={"PATH": path}, **changes), str(root))

    return call


def test_programs_are_found_through_links_of_the_image(image):
    image("sh")
    image("/bin/sh")
    image("/usr/bin/../bin/./sh")
    image("outside")  # .. at the root stays there, and the image has a /bin/sh
    image("bin/sh", folder="/usr")
    image("./sh", folder="/bin")


def test_programs_are_found_in_what_is_mounted(image, tmp_path):
    (tmp_path / "data/bin").mkdir(parents=True)
    for name in ("train", "text"):
        (tmp_path / "data/bin" / name).touch(0o755 if name == "train" else 0o644)
    binds = (
        Bind(source=str(tmp_path / "data"), target="/data"),
        Bind(source=str(tmp_path / "data/bin/train"), target="/usr/bin/text"),
    )
    image("/data/bin/train", binds=binds)
    image("train", "/data/bin", binds=binds)
    image("text", "/bin", binds=binds)
    with pytest.raises(NotExecutableError):
        image("/data/bin/text", binds=binds)
    with pytest.raises(ProgramNotFoundError):
        image("/data/bin/none", binds=binds)


def test_no_program_is_looked_for_where_the_kernel_has_links_to_the_node(image, tmp_path):
    place = "/proc/self/fd/3/../bin"
    (tmp_path / "data").mkdir()
    (tmp_path / "data/link").symlink_to(place)
    (tmp_path / "root/link").symlink_to(place)
    binds = (Bind(source=str(tmp_path / "data"), target="/data"),)
    for folder in (place, "/link", "/data/link"):
        for given in ((f"{folder}/sh",), ("sh", f"/bin:{folder}")):
            with pytest.raises(ProgramNotFoundError, match="is looked for in /proc, which has no program"):
                image(*given, binds=binds)
        with pytest.raises(ProgramNotFoundError, match="sh is looked for in /proc"):
            image("./sh", folder=folder, binds=binds)


@pytest.mark.parametrize("name", ["none", "/usr/none", "/sh", "python", "loop", "/usr/bin/sh/x"])
def test_a_program_that_the_image_lacks_is_exit_code_127(image, name):
    with pytest.raises(ProgramNotFoundError, match=f"{name} not found in the image") as caught:
        image(name)
    assert caught.value.exit_code == 127


@pytest.mark.parametrize("name", ["text", "/usr/bin", "/etc"])
def test_what_cannot_be_executed_is_exit_code_126(image, name):
    with pytest.raises(NotExecutableError, match=f"{name} is not executable") as caught:
        image(name)
    assert caught.value.exit_code == 126
