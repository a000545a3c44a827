"""A store on a full disk: removing images is the remedy, so it needs no room."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from images import layout, tar
from storing import listed, variant

from imagematrix.images.local_store import disk_reserve

ROOT = Path(__file__).parents[4]
APART = ["unshare", "--map-root-user", "--mount"]  # as an ordinary user too, whose file systems vanish
DISK = """
set -e
mount -t tmpfs -o size=4m,nr_inodes=200 none "$1"
for version in v1 v2; do
    "$2" -m imagematrix pull "training:$version" --catalog "oci:$3" --gpus none --to "$1" --unpacked
done >&2
"""
FULL = {
    "blocks": """
cat /dev/zero > "$1/filling" 2> /dev/null || true
! echo more 2> /dev/null > "$1/more"
""",
    "inodes": """
number=0
while touch "$1/filling-$number" 2> /dev/null; do number=$((number + 1)); done
""",
}
PRUNE = '"$2" -m imagematrix prune --store "$1" --keep 1 --yes >&2; ls "$1/images"'
SPENT = """
rm -r "$1/reserve"
cat /dev/zero >> "$1/filling" 2> /dev/null || true
"""


@pytest.fixture(scope="module", autouse=True)
def _namespaces():
    if subprocess.run([*APART, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no user namespaces")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A layout with two versions of an image."""
    made = [
        variant("cpu", tar(("f", version.encode() * 1000)), version=version)[0] for version in ("v1", "v2")
    ]
    return made, layout(tmp_path_factory.mktemp("images") / "layout", *made)


def on_a_full_disk(images, folder, *script):
    """Run a script on a small disk with both images; return how it ended, and which of them it then lists."""
    made, source = images
    words = [*APART, "sh", "-c", DISK + "".join(script), "sh", folder, sys.executable, source]
    done = subprocess.run(words, cwd=ROOT, check=False, capture_output=True, text=True)
    return done, [image.digest.removeprefix("sha256:") in done.stdout for image in made]


@pytest.mark.parametrize("full", FULL)
def test_prune_frees_a_disk_without_any_room(images, tmp_path, full):
    done, there = on_a_full_disk(images, tmp_path, FULL[full], PRUNE)
    assert (done.returncode, there) == (0, [False, True]), done.stderr
    assert "removed 1 image" in done.stderr


def test_without_the_reserve_prune_says_how_to_go_on(images, tmp_path):
    done, _ = on_a_full_disk(images, tmp_path, FULL["blocks"], SPENT, PRUNE)
    assert done.returncode == 2
    assert f"free a few kB there, such as with `rm -rf {tmp_path}/layers {tmp_path}/partial`" in done.stderr
    freed = f'echo > "$1/filling"; {PRUNE}'
    assert on_a_full_disk(images, tmp_path, FULL["blocks"], SPENT, freed)[1] == [False, True]


def test_what_was_spent_is_there_again_once_there_is_room(image_store):
    Path(image_store.path).mkdir()
    disk_reserve.fill_reserve(image_store)
    whole = listed(image_store, "reserve")
    Path(image_store.path, "reserve", whole[0]).unlink()
    disk_reserve.fill_reserve(image_store)
    assert listed(image_store, "reserve") == whole


def test_a_reserve_that_was_made_on_a_full_disk_is_filled_later(image_store, monkeypatch):
    Path(image_store.path).mkdir()

    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "urandom", fail)
    for _ in range(2 * disk_reserve.FILES):
        disk_reserve.fill_reserve(image_store)
    assert listed(image_store, "reserve") == []
    monkeypatch.undo()
    Path(image_store.path, "reserve", "0").write_bytes(b"")  # a command was killed before it had written it
    disk_reserve.fill_reserve(image_store)
    sizes = [path.stat().st_size for path in Path(image_store.path, "reserve").iterdir()]
    assert sizes == [disk_reserve.SIZE] * disk_reserve.FILES


def test_layers_are_spent_before_the_reserve(image_store):
    layers = Path(image_store.path, "layers")
    layers.mkdir(parents=True)
    disk_reserve.fill_reserve(image_store)
    for name in "12":
        (layers / (name * 64)).write_bytes(b"layer")
    left = []

    def act():
        left.append((len(listed(image_store, "layers")), len(listed(image_store, "reserve"))))
        if len(left) < 4:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    disk_reserve.call_with_reserve(image_store, act)
    assert left == [(2, 4), (1, 4), (0, 4), (0, 3)]
