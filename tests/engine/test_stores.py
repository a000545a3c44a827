"""Stores in folders: filled by ordinary users, from a real registry, shared by several machines."""

import gzip
import json
import os
import re
import signal
import stat
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import zstandard
from engines import Registry
from images import hardlink, layout, link, special, tar
from machines import wait_until
from processes import new_folder, remove_folder
from storing import listed, push, variant

from imagematrix.images.local_store.folder import ImageStore

ROOT = Path(__file__).parents[2]
USER = 4711
PORT = 5017
# Python, its libraries and imagematrix are where an ordinary user can read them, for this process only.
SEEN = """
mount --bind "$1" /mnt; mount --bind "$2" /srv; mount --bind "$3" /opt; shift 3
"""
AS_USER = f'exec setpriv --reuid {USER} --regid {USER} --clear-groups -- "$@"'
# Another machine: another name, another boot, and processes of its own.
ELSEWHERE = """
name=$1; shift
hostname "$name"; echo "$name" > /tmp/boot-$$; mount --bind /tmp/boot-$$ /proc/sys/kernel/random/boot_id
"""
# On a real machine, a holder of another one counts for two minutes.
QUICK = """
import sys
from imagematrix.images.local_store import holder, locks
holder.DEAD_S, locks.BEAT_S = 12.0, 0.2  # more than a start takes on a busy machine
holder.Holder.is_alive.__defaults__ = (12.0, None)
from imagematrix.cli import main
main()
"""
# With the lock of an image, and before anything of it is there.
STANDS_STILL = f"""
import time
from imagematrix.images.local_store.eviction import StoreRoom
StoreRoom.require_space = lambda *_: time.sleep(60)
{QUICK}"""
DEBIAN = ROOT / ".cache/bases/trixie.tar"
PACKED = {"zstd": lambda raw: zstandard.compress(raw, 3), "gzip": lambda raw: gzip.compress(raw, 1, mtime=0)}


@pytest.fixture(scope="module")
def registry():
    started = Registry(SimpleNamespace(inside=()), PORT)
    yield started
    started.remove()


@pytest.fixture(scope="module")
def debian():
    subprocess.run([ROOT / "ci/bases", "archives"], check=True)
    return DEBIAN.read_bytes()


@pytest.fixture
def home():
    """A folder of an ordinary user, which others can enter."""
    folder = new_folder()
    folder.chmod(0o755)
    os.chown(folder, USER, USER)
    yield folder
    remove_folder(folder)


@pytest.fixture
def store(home):
    return ImageStore(home / "store")


def command(home, *words, before="", code=("-m", "imagematrix"), machine=None, own=""):
    """Return a command line of imagematrix as an ordinary user with this home, perhaps on another machine."""
    libraries = next(path for path in sys.path if path.endswith("site-packages"))
    apart = ["unshare", "-m", *(["-u", "-p", "--fork", "--mount-proc"] if machine else [])]
    script = f"set -e\n{SEEN}{ELSEWHERE if machine else ''}{before}\n{AS_USER}"
    seen = [sys.base_prefix, libraries, str(ROOT)]
    environment = [own or f"HOME={home}", "PATH=/usr/bin:/bin:/usr/sbin", "PYTHONPATH=/opt:/srv"]
    python = f"/mnt/bin/{Path(sys.executable).resolve().name}"
    given = [*seen, *([machine] if machine else [])]
    return [
        *apart,
        "sh",
        "-c",
        script,
        "sh",
        *given,
        "env",
        "-i",
        *environment,
        python,
        *code,
        *map(str, words),
    ]


def run(home, *words, **how):
    return subprocess.run(command(home, *words, **how), capture_output=True, text=True, check=False)


def pull(home, name, *more, **how):
    return run(home, "pull", name, "--to", home / "store", "--gpus", "none", *more, **how)


def described(root):
    """Return each file's kind, mode, time and content, and which are the same file."""
    found = {}
    same: dict[int, set[str]] = {}
    for path in sorted(Path(root).rglob("*")):
        state = path.lstat()
        name = str(path.relative_to(root))
        content: str | bytes | None = None
        if stat.S_ISLNK(state.st_mode):
            content = str(path.readlink())
        elif stat.S_ISREG(state.st_mode):
            content = path.read_bytes()
            same.setdefault(state.st_ino, set()).add(name)
        found[name] = oct(state.st_mode), int(state.st_mtime), content
    return found, {frozenset(names) for names in same.values() if len(names) > 1}


def unsquashed(image, folder):
    subprocess.run(
        ["unsquashfs", "-q", "-n", "-d", folder, image.root], check=True, stdout=subprocess.DEVNULL
    )
    return folder


def layer_answers(registry, image):
    """Return the bytes of each answer with an image's first layer that the registry has ended."""
    answer = rf"request\.method=GET [^\n]*/blobs/{image.layers[0]}[^\n]* http\.response\.written=(\d+)"
    return [int(written) for written in re.findall(answer, registry.log)]


def count_held_bytes(store):
    """Return the bytes of layers that a store has received for images that are not complete."""
    return sum(path.stat().st_size for path in Path(store.path, "partial").rglob("*") if path.is_file())


@pytest.mark.long
@pytest.mark.parametrize("packed", PACKED)
def test_an_ordinary_user_gets_the_files_of_a_distribution(registry, debian, home, store, tmp_path, packed):
    image, tag = variant(
        "cpu", debian, tar("etc/.wh.debian_version", ("new", b"x")), version=packed, packed=PACKED[packed]
    )
    name = push(registry, (image, tag), version=packed)
    result = pull(home, name)
    assert (result.returncode, result.stdout) == (
        0,
        f"{registry.address}/ml/training:{tag}@{image.digest}\n",
    ), result.stderr
    stored = store.find(image.digest)
    assert Path(stored.root).stat().st_uid == USER
    found, same = described(unsquashed(stored, tmp_path / "squashed"))
    (tmp_path / "plain").mkdir()
    subprocess.run(["tar", "-C", tmp_path / "plain", "-xpf", DEBIAN], check=True)
    (tmp_path / "plain/etc/debian_version").unlink()
    expected, links = described(tmp_path / "plain")
    del found["new"]
    times = {"etc", "dev"}  # of folders from which something was removed here, or left out
    assert {path: what for path, what in found.items() if path not in times} == {
        path: what
        for path, what in expected.items()
        if path not in times and not what[0].startswith(("0o2", "0o6"))
    }
    assert same == links
    unpacked = pull(home, name, "--unpacked")
    assert unpacked.returncode == 0, unpacked.stderr
    again, _ = described(store.find(image.digest).root)
    assert {path: what[1:] for path, what in again.items() if path not in {*times, "new"}} == {
        path: what[1:] for path, what in found.items() if path not in times
    }
    assert {path for path, what in again.items() if int(what[0], 8) & 0o6000} == set()


@pytest.mark.long
def test_a_squashfs_has_the_same_bytes_on_one_processor_and_on_all(debian, home):
    image, _ = variant("cpu", debian)
    folder = layout(home / "layout", image)
    sums = set()
    for place, before in enumerate(["", "taskset -pc 0 $$ >/dev/null", ""]):
        result = run(
            home,
            "pull",
            "training:v1",
            "--to",
            home / str(place),
            "--gpus",
            "none",
            "--catalog",
            f"oci:{folder}",
            before=before,
        )
        assert result.returncode == 0, result.stderr
        sums.add(ImageStore(home / str(place)).find(image.digest).checksum)
    assert len(sums) == 1


def test_a_download_that_was_killed_goes_on(registry, home, store):
    image, tag = variant("cpu", tar(("f", os.urandom(60_000_000))), version="killed", packed=bytes)
    name = push(registry, (image, tag), version="killed")
    size = len(image.blobs[image.layers[0]])
    words = "pull", name, "--to", home / "store", "--gpus", "none"
    # It is killed as soon as it has some of the layer.
    with subprocess.Popen(
        command(home, *words), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as process:
        while count_held_bytes(store) < 1_000_000:
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    held = count_held_bytes(store)
    assert 0 < held < size, "it was killed too late"
    assert store.find(image.digest) is None
    # The registry ends its answer when it sees that the reader is gone.
    wait_until(lambda: len(layer_answers(registry, image)) == 1, "the end of the first answer")
    result = pull(home, name)
    assert result.returncode == 0, result.stderr
    wait_until(lambda: len(layer_answers(registry, image)) == 2, "the end of the second answer")
    assert layer_answers(registry, image)[1] == size - held
    assert listed(store, "partial") == listed(store, "new") == listed(store, "locks") == []


def test_the_next_version_receives_only_the_layers_that_are_new(registry, home, store):
    large = tar(("f", os.urandom(5_000_000)))
    first, tag = variant("cpu", large, version="first", packed=bytes)
    second, other = variant("cpu", large, tar(("g", os.urandom(1_000_000))), version="second", packed=bytes)
    assert pull(home, push(registry, (first, tag), version="first")).returncode == 0
    result = pull(home, push(registry, (second, other), version="second"))
    assert result.returncode == 0, result.stderr
    assert re.search(r": 1\.0 MB in \d", result.stderr), result.stderr
    assert layer_answers(registry, second) == [len(large)], "once, for the first version"
    assert len(listed(store, "layers")) == 2
    assert Path(unsquashed(store.find(second.digest), home / "root"), "f").stat().st_size == 5_000_000
    removed = run(home, "prune", "--store", store.path, "--protect", "first", "--yes")
    assert store.list_digests() == [first.digest], removed.stderr
    assert len(listed(store, "layers")) == 1


def test_several_machines_share_a_store(registry, home):
    image, tag = variant("cpu", tar(("f", os.urandom(20_000_000))), version="shared", packed=bytes)
    name = push(registry, (image, tag), version="shared")
    words = "pull", name, "--to", home / "store", "--gpus", "none"
    started = [
        subprocess.Popen(
            command(home, *words, machine=f"node{place}"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in range(6)
    ]
    ended = [(*process.communicate(timeout=300), process.returncode) for process in started]
    assert {(out, code) for out, _, code in ended} == {
        (f"{registry.address}/ml/training:{tag}@{image.digest}\n", 0)
    }
    wait_until(lambda: layer_answers(registry, image), "the end of the registry's answer")
    assert layer_answers(registry, image) == [len(image.blobs[image.layers[0]])]
    for _, said, _ in ended:
        for waited in re.findall("waiting for (.*), which", said):
            assert re.fullmatch(r"process \d+ on node\d", waited)


def test_another_machine_takes_over_from_one_that_died(registry, home, store):
    image, tag = variant("cpu", tar(("f", b"x")), version="dead", packed=bytes)
    name = push(registry, (image, tag), version="dead")
    words = "pull", name, "--to", home / "store", "--gpus", "none"
    with subprocess.Popen(
        command(home, *words, machine="node1", code=("-c", STANDS_STILL)),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    ) as process:
        lock = Path(store.path, "locks", image.digest[7:])
        deadline = time.monotonic() + 60
        while not lock.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        child = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        os.kill(int(child), signal.SIGKILL)  # the first process of its PID namespace: `unshare` waits for it
    assert lock.exists()
    assert store.find(image.digest) is None
    result = pull(home, name, machine="node2", code=("-c", QUICK))
    assert result.returncode == 0, result.stderr
    assert re.search(r"waiting for process \d+ on node1, which", result.stderr)


# A small disk for the store, whose content is told at the end.
DISK = 'mkdir -p "{store}"; mount -t tmpfs -o size={size},mode=1777 tmpfs "{store}"'
LEFT = """
import os, sys
from imagematrix.cli import main
from imagematrix.images.local_store.eviction import StoreRoom
if "estimates" in os.environ["HOME"]:
    StoreRoom.require_space = lambda *_: None
try:
    main()
finally:
    for part in ("images", "new"):
        print(part, os.listdir(f"{sys.argv[4]}/{part}"), file=sys.stderr)
"""


def test_a_full_disk_is_told_before_anything_is_downloaded(registry, home, store):
    image, tag = variant("cpu", tar(("f", os.urandom(20_000_000))), version="full", packed=bytes)
    name = push(registry, (image, tag), version="full")
    result = pull(home, name, before=DISK.format(store=store, size="30m"))
    assert result.returncode == 2
    assert re.search(r"store has \d+ bytes left, and the image needs \d+", result.stderr)
    assert layer_answers(registry, image) == []


@pytest.mark.long
@pytest.mark.parametrize("how", [(), ("--unpacked",)])
@pytest.mark.parametrize("size", ["4m", "24m"], ids=["downloading", "writing"])
def test_a_disk_that_fills_up_leaves_no_image(registry, home, store, how, size):
    members = [(str(number), os.urandom(200_000) * 5) for number in range(60)]
    image, tag = variant("cpu", tar(*members), version="fills", packed=PACKED["zstd"])
    name = push(registry, (image, tag), version="fills", repository=f"ml/fills{len(how)}{size}")
    own = f"HOME={home}/estimates"
    result = pull(home, name, *how, before=DISK.format(store=store, size=size), code=("-c", LEFT), own=own)
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert "is full (" in result.stderr
    assert result.stderr.splitlines()[-2:] == ["images []", "new []"]


def test_a_read_only_store_gives_what_it_has(registry, home, store):
    image, tag = variant("cpu", version="has")
    other, other_tag = variant("cpu", tar("other"), version="lacks")
    has, lacks = (
        push(registry, (image, tag), version="has"),
        push(registry, (other, other_tag), version="lacks"),
    )
    assert pull(home, has).returncode == 0
    before = f"mount --bind {store} {store}; mount -o remount,bind,ro {store}"
    again = pull(home, has, before=before)
    assert (again.returncode, again.stderr) == (0, "")
    refused = pull(home, lacks, before=before)
    assert refused.returncode == 2
    assert "cannot be used: " in refused.stderr
    assert "Read-only file system" in refused.stderr


# Each list is a layer.
LAYERS = {
    "whiteouts": [["a/b", "a/c", "d/e/f", "g"], ["a/.wh.b", ".wh.d", ".wh.g", "h"]],
    "opaque": [["a/b", "a/c/d"], ["a/.wh..wh..opq", "a/e"]],
    "hard links": [[("a", b"1"), hardlink("b", "a"), hardlink("c/d", "a")], [".wh.a"]],
    "links to folders": [["usr/lib/x", link("lib", "usr/lib")], ["usr/lib/y", ("usr/lib/x", b"2")]],
    "other kinds": [
        ["a/b", link("l", "a"), "f"],
        [special("f", tarfile.DIRTYPE), "f/g", ("l", b"file"), link("a", "f")],
    ],
    "modes": [[("su", b"", 0o755), ("x", b"", 0o640)], [("x", b"y", 0o600)]],
}


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_an_unpacked_image_is_what_umoci_makes_of_it(home, layers):
    image, _ = variant("cpu", *(tar(*members) for members in layers))
    folder = layout(home / "layout", image)
    document = json.loads((home / "layout/index.json").read_text())
    document["manifests"][0]["annotations"] = {"org.opencontainers.image.ref.name": "v1"}
    (home / "layout/index.json").write_text(json.dumps(document))
    result = run(
        home,
        "pull",
        "training:v1",
        "--to",
        home / "store",
        "--gpus",
        "none",
        "--unpacked",
        "--catalog",
        f"oci:{folder}",
    )
    assert result.returncode == 0, result.stderr
    subprocess.run(
        [
            "setpriv",
            "--reuid",
            str(USER),
            "--regid",
            str(USER),
            "--clear-groups",
            "env",
            f"HOME={home}",
            "umoci",
            "unpack",
            "--rootless",
            "--image",
            f"{folder}:v1",
            home / "bundle",
        ],
        check=True,
        capture_output=True,
    )
    ours, same = described(ImageStore(home / "store").find(image.digest).root)
    theirs, links = described(home / "bundle/rootfs")
    folders = {path for path, what in theirs.items() if what[2] is None}
    assert {path: what if path not in folders else what[0] for path, what in ours.items()} == {
        path: what if path not in folders else what[0] for path, what in theirs.items()
    }
    assert same == links


MOUNTED = """
chmod 666 /dev/fuse; mkdir -m 777 "$1/at"
exec setpriv --reuid {user} --regid {user} --clear-groups unshare -rm sh -c '
    squashfuse "$2" "$1/at" && cat "$1/at/etc/os-release"; umount "$1/at"' sh "$1" "$2"
"""


def test_an_ordinary_user_mounts_it(home, store):
    if not Path("/dev/fuse").exists():
        pytest.skip("there is no /dev/fuse")
    image, _ = variant()
    saved = f"oci:{layout(home / 'layout', image)}"
    assert pull(home, "training:v1", "--catalog", saved).returncode == 0
    script = MOUNTED.format(user=USER)
    root = store.find(image.digest).root
    mounted = ["unshare", "-m", "sh", "-c", script, "sh", home, root]
    done = subprocess.run(mounted, capture_output=True, text=True, check=False)
    assert done.stdout == "ID=test\n", done.stderr
