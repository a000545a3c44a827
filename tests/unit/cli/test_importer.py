"""`slurm importer`, called as Pyxis does: by a script, from a process that it leases images to."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from images import layout
from storing import NEEDS_SQUASHFS, put, variant, warm

from imagematrix.cli.slurm import importer
from imagematrix.cli.slurm.importer import parse_enroot_uri
from imagematrix.errors import UsageError
from imagematrix.images.local_store.folder import ImageStore

ROOT = Path(__file__).parents[3]
SCRIPT = """\
#!/bin/sh
exec "{python}" -m imagematrix slurm importer --catalog "oci:{layout}" --allow-cpu "$@"
"""


@pytest.fixture
def script(tmp_path):
    """The script that plugstack.conf names."""
    image, _ = variant("cpu", env=("A=1",))
    made = tmp_path / "importer"
    made.write_text(SCRIPT.format(python=sys.executable, layout=layout(tmp_path / "layout", image)))
    made.chmod(0o755)
    return made


@pytest.fixture
def call(script, tmp_path):
    """Call the importer; return how it ended."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("IMAGEMATRIX")},
        "HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(ROOT),
        "IMAGEMATRIX_STORE": str(tmp_path / "store"),
    }

    def called(*words, within=False):
        return subprocess.run(
            words if within else [script, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    return called


@NEEDS_SQUASHFS
def test_get_prints_a_path_and_release_can_be_called_twice(call, tmp_path):
    first = call("get", "docker://training:v1")
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"{first.stdout.strip()}\n"
    squashfs = Path(first.stdout.strip())
    assert squashfs.is_relative_to(tmp_path / "store/enroot/images")
    assert squashfs.read_bytes().startswith(b"hsqs")
    # It is for enroot only: `run` starts images without the added files.
    assert not (tmp_path / "store/images").exists()
    (holder,) = ImageStore(tmp_path / "store/enroot").find_leases().values()
    # This process is root's in a cluster, so the lease names the one that renews it.
    assert holder.keeper.pid == os.getpid()
    for _ in range(2):
        released = call("release")
        assert (released.returncode, released.stdout, released.stderr) == (0, "", "")
    assert squashfs.exists()
    assert ImageStore(tmp_path / "store/enroot").find_leases() == {}
    assert call("get", "docker://training:v1").stdout == first.stdout


STEP = """
("$1" get docker://training:v1; exec true)  # the first task, whose program ends
ls "$2/leases" | wc -l
for lease in "$2"/leases/*; do grep -c "\\"pid\\": $$," "$lease"; done
(exec "$1" release)
ls "$2/leases" | wc -l
"""


@NEEDS_SQUASHFS
def test_an_image_is_leased_to_the_step_and_not_to_its_first_task(call, script, tmp_path):
    daemon = tmp_path / "slurmstepd"
    daemon.symlink_to(shutil.which("sh"))
    done = call(daemon, "-c", STEP, "slurmstepd", script, tmp_path / "store/enroot", within=True)
    path, *rest = done.stdout.split()
    assert Path(path).exists(), done.stderr
    assert rest == ["1", "1", "0"]


class Evicting(ImageStore):
    """A store of which another process removes each image `times` times before it is leased."""

    def __init__(self, times):
        super().__init__("store")
        self.times = times
        self.fetched = 0
        self.leased = []

    def fetch(self):
        self.fetched += 1
        return SimpleNamespace(digest="sha256:1")

    def take_lease(self, digest, pid=None):  # noqa: ARG002 - as in ImageStore
        self.leased.append(digest)
        return SimpleNamespace(path=None, release=self.leased.pop)

    def find(self, digest):
        return digest if self.fetched > self.times else None


def test_an_image_that_goes_before_it_is_leased_is_pulled_again():
    store = Evicting(1)
    assert importer._lease_image(store, store.fetch).digest == "sha256:1"
    assert (store.fetched, len(store.leased)) == (2, 1)
    store = Evicting(importer.TRIES)
    with pytest.raises(UsageError, match="as soon as they come"):
        importer._lease_image(store, store.fetch)
    assert store.leased == []


def test_a_refusal_has_its_reason_on_stderr_and_nothing_on_stdout(call):
    done = call("get", "docker://training:v2")
    assert done.returncode == 4
    assert done.stdout == ""
    assert "training:v2" in done.stderr


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("docker://training:v1", "training:v1"),
        ("docker://registry.example:5000#ml/training:v1", "registry.example:5000/ml/training:v1"),
        ("docker://registry.example/ml/training:v1", "registry.example/ml/training:v1"),
        ("docker://ml/training@sha256:" + "a" * 64, "ml/training@sha256:" + "a" * 64),
    ],
)
def test_a_uri_of_enroot_names_an_image(uri, name):
    assert parse_enroot_uri(uri) == name


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("training:v1", "not an image of a registry"),
        ("dockerd://training:v1", "not an image of a registry"),
        ("podman://training:v1", "not an image of a registry"),
        ("docker://alice@registry.example#ml/training:v1", "names a user"),
        ("docker://alice@training:v1", "names a user"),
        ("docker://", "names no image"),
        ("docker://#training", "names no registry"),
    ],
)
def test_other_uris_are_refused(uri, message):
    with pytest.raises(UsageError, match=message):
        parse_enroot_uri(uri)


def test_get_needs_a_uri(call):
    done = call("get")
    assert done.returncode == 2
    assert "needs the URI of an image" in done.stderr


@NEEDS_SQUASHFS
def test_a_step_gets_the_variant_and_no_warm_image(server, call, script, tmp_path):
    base = variant("cpu")
    name = put(server, base, warm(base[0]))
    script.write_text(script.read_text().replace(f'--catalog "oci:{tmp_path / "layout"}" ', ""))
    got = call("get", f"docker://{name}")
    assert got.returncode == 0, got.stderr
    assert [image.digest for image in ImageStore(tmp_path / "store/enroot").list_intact_images()] == [
        base[0].digest
    ]
