"""The files that enroot reads in an image: what its script starts, in which environment."""

import io
import subprocess
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storing import NEEDS_SQUASHFS, PUBLISHED, from_registry, put, variant

from imagematrix.errors import UsageError
from imagematrix.images.local_store import enroot
from imagematrix.images.local_store.folder import ImageStore
from imagematrix.images.local_store.image_fetch import FetchOptions, fetch_image

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


def files(**settings):
    """Return the added files, by path, for an image with these settings."""
    with tarfile.open(fileobj=io.BytesIO(enroot.make_layer({"config": settings}))) as archive:
        return {one.name: archive.extractfile(one).read().decode() for one in archive.getmembers()}


def started(script, *words):
    """Return what the script starts prints."""
    done = subprocess.run(["sh", "-c", script, "rc", *words], capture_output=True, check=True)
    return done.stdout.decode()


def test_enroot_reads_four_files_and_the_configuration_may_have_nothing():
    assert sorted(files()) == ["etc/environment", "etc/fstab", "etc/rc", "etc/rc.local"]
    assert files()["etc/environment"] == files()["etc/fstab"] == files()["etc/rc.local"] == ""
    assert "exec /bin/sh\n" in files()["etc/rc"]
    assert enroot.make_layer({}) == enroot.make_layer({"config": None})


def test_the_command_follows_the_entrypoint_and_is_replaced_by_words():
    script = files(Entrypoint=["echo", "first"], Cmd=["second"])["etc/rc"]
    assert started(script) == "first second\n"
    assert started(script, "a  b", "$(c)") == "first a  b $(c)\n"


def test_words_are_the_command_if_there_is_no_entrypoint():
    assert started(files(Cmd=["false"])["etc/rc"], "echo", "x") == "x\n"


def test_the_working_folder_is_made_and_entered(tmp_path):
    folder = tmp_path / "it's $(new)"
    assert started(files(WorkingDir=str(folder), Cmd=["pwd"])["etc/rc"]) == f"{folder}\n"


def test_a_relative_working_folder_is_below_the_root():
    assert "cd /app " in files(WorkingDir="app")["etc/rc"]


@pytest.mark.parametrize("settings", [{"WorkingDir": "a\0b"}, {"Env": ["A=\ud800"]}, {"Cmd": "sh"}])
def test_a_damaged_configuration_is_refused(settings):
    with pytest.raises(UsageError, match=f"the image's configuration: config: {next(iter(settings))}: "):
        files(**settings)


def test_variables_stand_in_the_environment_except_those_of_several_lines():
    found = files(Env=["A=1 2", "B=x\n$(echo y)'", "C-D=1\n2"], Cmd=["sh", "-c", 'printf %s "$B"'])
    assert found["etc/environment"] == "A=1 2\n"
    assert started(found["etc/rc"]) == "x\n$(echo y)'"
    assert "C-D" not in found["etc/rc"]  # no shell can set it


@given(st.lists(WORDS, min_size=1, max_size=4))
def test_no_word_of_an_image_is_read_by_the_shell(words):
    assert started(files(Entrypoint=["printf", "%s\\0", *words])["etc/rc"]) == "".join(
        f"{word}\0" for word in words
    )


@NEEDS_SQUASHFS
def test_a_store_keeps_the_added_files(server, tmp_path):
    image, tag = variant("cpu", env=("A=1",), entrypoint=["tool"])
    put(server, (image, tag))
    store = ImageStore(tmp_path / "store")
    how = FetchOptions(added=enroot.make_layer)
    stored = fetch_image(store, from_registry(server), image.digest, PUBLISHED, how)
    listed = subprocess.run(
        ["unsquashfs", "-cat", stored.root, "etc/environment"], capture_output=True, check=True
    )
    assert listed.stdout == b"A=1\n"
    names = subprocess.run(["unsquashfs", "-l", stored.root], capture_output=True, check=True, text=True)
    assert "squashfs-root/data/new" in names.stdout
