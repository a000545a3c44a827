"""What a store has, says and keeps: its images, its catalogs, the leases of containers."""

import errno
import json
import os
import pwd
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storing import listed

from imagematrix.common import json_documents
from imagematrix.common.record import replace
from imagematrix.common.settings import Site
from imagematrix.errors import EngineError, UsageError
from imagematrix.images.local_store import folder, holder
from imagematrix.images.local_store.folder import (
    FOLDER,
    SQUASHFS,
    ImageStore,
    Lease,
    StoredImage,
    StoredName,
    find_store_folder,
)
from imagematrix.images.local_store.holder import Holder

DIGEST, OTHER = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"
NAME = StoredName(
    references=("r:5000/t:v1-x",),
    image="r:5000/t",
    version="v1",
    variant={"reference": "r:5000/t:v1-x"},
    terms={"prefer": []},
)


@pytest.fixture
def store(image_store):
    for name in ("images", "catalogs", "leases"):
        Path(image_store.path, name).mkdir(parents=True)
    return image_store


def add(store, digest=DIGEST, **changes):
    """Put an image into a store; return its record."""
    place = Path(store.get_folder(digest))
    place.mkdir()
    kind = changes.get("kind", SQUASHFS)
    image = StoredImage(
        **{
            "digest": digest,
            "kind": kind,
            "root": str(place / ("root.squashfs" if kind == SQUASHFS else "root")),
            "size": 5,
            "checksum": OTHER,
            "config": {"config": {"Env": ["A=b"]}},
            "names": (NAME,),
        }
        | changes
    )
    if kind == SQUASHFS:
        Path(image.root).write_bytes(b"12345")
    else:
        Path(image.root).mkdir()
    (place / "image.json").write_text(json.dumps(image.to_json()))
    return image


def failing(code):
    """Return a function that fails with an error of the system."""

    def fail(*_):
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("kind", [SQUASHFS, FOLDER])
def test_an_image_is_found_by_its_digest(store, kind):
    image = add(store, kind=kind)
    assert store.find(DIGEST) == image
    assert store.list_intact_images() == [image]
    assert store.find(OTHER) is None


def test_a_store_that_does_not_exist_is_empty(image_store):
    assert image_store.list_intact_images() == image_store.load_catalogs() == []
    assert image_store.find(DIGEST) is None
    assert image_store.load_catalog("t", "v1") is None
    assert image_store.find_leases() == {}
    image_store.drop_catalog("t", "v1")
    assert not Path(image_store.path).exists()


def test_other_files_in_a_store_are_no_images(store):
    image = add(store)
    for name in ("x", "1" * 63, ".hidden"):
        Path(store.path, "images", name).mkdir()
    assert store.list_intact_images() == [image]


def as_folder(path):
    path.unlink()
    path.mkdir()


def copy_document(place):
    path = place / "image.json"
    path.write_text(path.read_text().replace("1" * 64, "2" * 64))


@pytest.mark.parametrize("name", ["image.json", "root.squashfs"])
def test_an_image_that_is_removed_while_it_is_looked_for_is_none(store, monkeypatch, name):
    """Removing renames the folder. On a network file system, a name may be seen for seconds after it."""
    add(store)
    place = Path(store.get_folder(DIGEST))
    stat, read = os.stat, json_documents.read_json

    def remove(path):
        if str(path).endswith(name) and place.exists():
            place.rename(place.with_name("gone"))

    monkeypatch.setattr(os, "stat", lambda path, **how: remove(path) or stat(path, **how))
    monkeypatch.setattr(json_documents, "read_json", lambda path: remove(path) or read(path))
    assert store.find(DIGEST) is None


def test_starts_by_users_who_may_only_lease_count(store):
    """As where a group pulls, and others run."""
    add(store)
    place = Path(store.get_folder(DIGEST))
    os.utime(place / "image.json", (1000, 1000))
    (place / "started").symlink_to(place / "nowhere")  # which is opened by nobody
    before = time.time()
    store.take_lease(DIGEST).release()
    assert store.get_last_start(DIGEST) >= before - 1
    assert Path(store.path, "leases", f".started-{'1' * 64}").stat().st_mode & 0o777 == 0o666
    assert store.find_leases() == {}
    store.remove_start_notes(DIGEST)
    assert store.get_last_start(DIGEST) == 1000
    store.take_lease(OTHER).release()
    assert listed(store, "leases") == [], "nothing of an image that is not there"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda place: as_folder(place / "image.json"), "Is a directory"),
        (lambda place: (place / "image.json").write_bytes(b""), "not JSON"),
        (lambda place: (place / "image.json").write_bytes(b"{}"), "schema is missing"),
        (
            lambda place: (place / "image.json").write_text(
                json.dumps({"schema": "imagematrix.stored-image/v2"})
            ),
            "unsupported schema",
        ),
        (lambda place: (place / "root.squashfs").write_bytes(b"1234"), "has 4 bytes instead of 5"),
        (lambda place: (place / "root.squashfs").unlink(), "root.squashfs: No such file"),
        (copy_document, "its image.json is of sha256:222"),
    ],
)
def test_a_damaged_image_is_an_error_with_a_remedy(store, damage, message):
    add(store)
    damage(Path(store.get_folder(DIGEST)))
    with pytest.raises(UsageError, match=message) as caught:
        store.find(DIGEST)
    assert caught.value.remedy
    assert store.list_intact_images() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "tar"}, "kind: 'tar' is not one of squashfs, folder"),
        ({"size": "5"}, "size: expected an integer"),
        ({"config": []}, "config: expected an object"),
        ({"references": [1]}, r"references\[0\]: expected a string"),
    ],
)
def test_fields_of_an_image_are_checked(store, change, message):
    image = add(store)
    Path(store.get_folder(DIGEST), "image.json").write_text(json.dumps(image.to_json() | change))
    with pytest.raises(UsageError, match=message):
        store.find(DIGEST)


@pytest.mark.parametrize("digest", ["", "sha256:1", f"sha256:{'1' * 63}/", "../x"])
def test_only_digests_are_looked_for(store, digest):
    with pytest.raises(UsageError, match="is not a sha256 digest"):
        store.find(digest)


@given(st.text(min_size=1, max_size=60).filter(lambda name: name < "\ud800"))
def test_any_name_of_an_image_is_the_name_of_one_file(name):
    quoted = folder._quote_name(name)
    assert "/" not in quoted
    assert not quoted.startswith(".")
    assert quoted.isascii()


@given(st.text("a./%:", max_size=6), st.text("a./%:", max_size=6))
def test_two_names_are_never_the_same_file(first, second):
    assert (folder._quote_name(first) == folder._quote_name(second)) == (first == second)


def test_catalogs_are_kept_by_image_and_version(store):
    one = {"image": "r:5000/t", "version": "v1", "n": 1}
    two = {"image": "r:5000/t", "version": "v2"}
    other = {"image": "r:5000/u", "version": "v1"}
    for document in (one, two, other, one | {"n": 2}):
        store.put_catalog(document)
    assert store.load_catalog("r:5000/t", "v1") == one | {"n": 2}
    assert store.load_catalogs("r:5000/t") == [one | {"n": 2}, two]
    assert len(store.load_catalogs()) == 3
    store.drop_catalog("r:5000/t", "v1")
    assert store.load_catalog("r:5000/t", "v1") is None


def test_a_damaged_catalog_is_an_error(store):
    Path(store.path, "catalogs", "t%3av1.json").write_bytes(b"[")
    with pytest.raises(UsageError, match="not JSON"):
        store.load_catalog("t", "v1")
    Path(store.path, "catalogs", "t%3av1.json").write_bytes(b'{"image": "t", "version": "v0"}')
    with pytest.raises(UsageError, match=r"t%3av1\.json is not the catalog of t:v1"):
        store.load_catalog("t", "v1")


def test_a_lease_lasts_until_it_is_released(store):
    add(store)
    lease = store.take_lease(DIGEST)
    assert {digest: one.pid for digest, one in store.find_leases().items()} == {DIGEST: os.getpid()}
    assert store.find_leases(OTHER) == {}
    lease.release()
    lease.release()
    assert store.find_leases() == {}


def test_a_lease_ends_with_its_process(store):
    with subprocess.Popen(["sleep", "60"]) as process:
        store.take_lease(DIGEST, process.pid)
        assert store.find_leases(DIGEST)[DIGEST].pid == process.pid
        process.kill()
    assert store.find_leases() == {}
    assert listed(store, "leases") == []


def test_a_lease_outlives_the_execution_of_another_program(store):
    code = f"""
import os
from imagematrix.images.local_store.folder import ImageStore
ImageStore({store.path!r}).take_lease({DIGEST!r})
os.execvp("sleep", ["sleep", "60"])
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        deadline = time.monotonic() + 30
        while not store.find_leases() and time.monotonic() < deadline:
            time.sleep(0.02)
        while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n" and time.monotonic() < deadline:
            time.sleep(0.02)
        assert store.find_leases()[DIGEST].pid == process.pid
        process.kill()


@pytest.mark.parametrize(
    ("quiet_s", "live"), [(0, True), (folder.QUIET_S - 60, True), (folder.QUIET_S + 60, False)]
)
def test_a_lease_of_another_machine_counts_until_it_is_quiet_for_long(store, quiet_s, live):
    other = replace(Holder.from_pid(), boot="another")
    path = Path(store.path, "leases", f"{'1' * 64}.node7.12.abc")
    path.write_bytes(other.to_bytes())
    seen = time.time() - quiet_s
    os.utime(path, (seen, seen))
    assert bool(store.find_leases()) == live
    assert path.exists() == live
    if live:
        Lease(path=str(path), holder=other).renew()
        assert path.stat().st_mtime > time.time() - 30


@pytest.mark.parametrize("name", ["x", f"{'1' * 64}", f".{'1' * 64}.a"])
def test_other_files_are_no_leases(store, name):
    path = Path(store.path, "leases", name)
    path.write_bytes(b"damaged")
    assert store.find_leases() == {}


@pytest.mark.parametrize("removed", [errno.ENOENT, errno.ESTALE])  # here, and on another machine
def test_a_lease_that_is_removed_while_it_is_read_is_none(store, monkeypatch, removed):
    store.take_lease(DIGEST)
    monkeypatch.setattr(folder, "read_holder", failing(removed))
    assert store.find_leases() == {}


def test_a_lease_that_cannot_be_read_is_an_error(store, monkeypatch):
    store.take_lease(DIGEST)
    monkeypatch.setattr(folder, "read_holder", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        store.find_leases()


def test_a_lease_may_come_before_the_first_image_of_a_store(tmp_path):
    store = ImageStore(tmp_path / "data" / "store")
    lease = store.take_lease(DIGEST)
    assert [*store.find_leases()] == [DIGEST]
    lease.release()
    assert listed(store, "leases") == []


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_store_that_cannot_be_written_to_has_no_leases(store, monkeypatch, code):
    monkeypatch.setattr(folder, "_write_file", failing(code))
    lease = store.take_lease(DIGEST)
    assert lease.path is None
    assert lease.with_container(os.getpid()).path is None
    lease.renew()
    lease.release()


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.ENOSPC, "free space there"), (errno.EIO, "who may write")]
)
def test_a_lease_that_cannot_be_written_is_an_error(store, monkeypatch, code, remedy):
    lease = store.take_lease(DIGEST)
    monkeypatch.setattr(folder, "_write_file", failing(code))
    for call in (lambda: store.take_lease(DIGEST), lambda: lease.with_container(os.getpid())):
        with pytest.raises(EngineError, match="nothing would protect the image") as caught:
            call()
        assert remedy in caught.value.remedy


def test_a_lease_lasts_as_long_as_the_container_or_its_keeper(store):
    with subprocess.Popen(["sleep", "60"]) as keeper, subprocess.Popen(["sleep", "60"]) as first:
        lease = store.take_lease(DIGEST, keeper.pid).with_container(first.pid)
        assert Path(lease.path).stat().st_mode & 0o777 == 0o644
        keeper.kill()
        keeper.wait()
        assert store.find_leases()[DIGEST].pid == first.pid
        first.kill()
        first.wait()
        assert store.find_leases() == {}
    assert listed(store, "leases") == []


def test_a_lease_lasts_while_any_process_is_in_the_container(store):
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
        gone = replace(Holder.from_pid(), pid=ended.pid)
    path = Path(store.path, "leases", f"{'1' * 64}.node7.12.abc")
    for mounts, live in ((str(Path("/proc/self/ns/mnt").readlink()), True), ("mnt:[1]", False)):
        path.write_bytes(replace(gone, mounts=mounts).to_bytes())
        assert bool(store.find_leases()) == live


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_lease_of_another_user_for_a_process_that_is_not_theirs_does_not_count(store):
    lease = store.take_lease(DIGEST)
    os.chown(lease.path, 65534, -1)  # of root's process, it may be a file on NFS
    assert store.find_leases()
    os.chown(lease.path, 12345, -1)
    assert store.find_leases() == {}
    assert not Path(lease.path).exists()


@pytest.mark.parametrize("pid", [0, -1, 1 << 22, 1 << 70])
def test_numbers_of_no_process_are_dead(store, pid):
    path = Path(store.path, "leases", f"{'1' * 64}.node7.12.abc")
    path.write_bytes(replace(Holder.from_pid(), pid=pid).to_bytes())
    assert store.find_leases() == {}


def test_processes_that_are_hidden_live(store, monkeypatch):
    """With hidepid, /proc has no processes of others, and kill(2) knows them."""

    def refuse(pid, number):
        assert number == 0
        raise PermissionError if pid == 4711 else ProcessLookupError

    monkeypatch.setattr(os, "kill", refuse)
    monkeypatch.setattr(holder, "_is_hidden", lambda _: True)
    path = Path(store.path, "leases", f"{'1' * 64}.node7.12.abc")
    for pid, live in ((4711, True), (4712, False)):
        path.write_bytes(replace(Holder.from_pid(), pid=pid, started="1").to_bytes())
        assert bool(store.find_leases()) == live
        if live:
            assert "hidden from this user" in str(store.find_leases()[DIGEST])


def test_starts_are_noted(store):
    add(store)
    document = Path(store.get_folder(DIGEST), "image.json")
    os.utime(document, (1000, 1000))
    assert (store.get_pull_time(DIGEST), store.get_last_start(DIGEST)) == (1000, 1000)
    store.take_lease(DIGEST)
    assert store.get_pull_time(DIGEST) == 1000
    assert store.get_last_start(DIGEST) > time.time() - 60
    assert store.get_last_start(OTHER) == 0


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"IMAGEMATRIX_STORE": "/s", "XDG_DATA_HOME": "/d"}, "/s"),
        ({"XDG_DATA_HOME": "/d"}, "/d/imagematrix/store"),
        ({"XDG_DATA_HOME": "relative"}, "/h/.local/share/imagematrix/store"),
        ({}, "/h/.local/share/imagematrix/store"),
    ],
)
def test_the_default_store_is_that_of_the_environment(monkeypatch, environment, expected):
    for name in ("IMAGEMATRIX_STORE", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/h")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_store_folder(Site()) == expected


def test_without_a_home_there_is_no_default_store(monkeypatch):
    for name in ("IMAGEMATRIX_STORE", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(UsageError, match="no folder for a store"):
        find_store_folder(Site())


@pytest.mark.parametrize(
    ("code", "message", "remedy"),
    [
        (errno.ENOSPC, "the disk of .* is full", "prune --store"),
        (errno.EDQUOT, "the disk of .* is full", "prune --store"),
        (errno.EROFS, "cannot be used: /f: Read-only file system", "may write to"),
        (errno.EIO, "cannot be used: /f: Input/output error", None),
    ],
)
def test_errors_of_the_system_name_the_store(image_store, code, message, remedy):
    with pytest.raises(UsageError, match=message) as caught, image_store.convert_errors():
        raise OSError(code, os.strerror(code), "/f")
    assert (remedy or "") in (caught.value.remedy or "")


def test_it_loads_little():
    heavy = "requests", "tarfile", "zstandard", "pathlib", "docker", "typing"
    code = f"import sys, imagematrix.images.local_store.folder; print([*filter(sys.modules.get, {heavy})])"
    package = Path(folder.__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=package
    )
    assert done.stdout == "[]\n"


def test_its_name_is_not_empty():
    with pytest.raises(UsageError, match="the store has an empty name"):
        ImageStore("")


def test_its_path_is_absolute(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert str(ImageStore("s")) == str(tmp_path / "s")
