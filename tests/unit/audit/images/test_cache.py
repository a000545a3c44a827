"""The cache of audited layers: reused only for the same bytes and by the same code."""

import contextlib
import io
import json
import os
import signal
import threading
import zlib
from concurrent.futures import CancelledError
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from images import Parts, archived, hardlink, layout, link, tar

from imagematrix.audit.binaries.device_code import DeviceCode
from imagematrix.audit.binaries.driver_file import DriverLibrary
from imagematrix.audit.binaries.notes import Compat
from imagematrix.audit.binaries.objects import File
from imagematrix.audit.images import cache, layer
from imagematrix.audit.images.cache import Cache
from imagematrix.audit.images.layer import Layer, PlainFile
from imagematrix.audit.images.layers import Layers
from imagematrix.audit.images.sources import read_images
from imagematrix.audit.packages.installed_package import Database, InstalledPackage
from imagematrix.common.files import get_cache_folder
from imagematrix.errors import AuditError
from imagematrix.images.oci.tree import Folder, Hardlink, Symlink

CUBIN = (Path(__file__).parents[1] / "data" / "80.cubin").read_bytes()
MEMBERS = (
    "etc/",
    ("opt/k.cubin", CUBIN),
    link("opt/l", "k.cubin"),
    hardlink("opt/h", "opt/k.cubin"),
    "d/.wh.x",
)
DIGEST = f"sha256:{'0' * 64}"
FULL = Layer(
    digest=DIGEST,
    entries={
        "/d": Folder(),
        "/l": Symlink("t"),
        "/h": Hardlink("/f"),
        "/o": PlainFile(),
        "/t": PlainFile(text=b"\xff\0", layer=DIGEST),
        "/p": PlainFile(
            database=Database(
                packages=(InstalledPackage(kind="deb", name="a", version="1", source="b"),), unread=2
            ),
            layer=DIGEST,
        ),
        "/f": PlainFile(
            layer=DIGEST,
            file=File(
                size=7,
                machine=62,
                linked=False,
                code=DeviceCode(cubins=frozenset(["80"]), ptx=frozenset([("80", "8.4")]), compressed=True),
                driver=DriverLibrary(
                    name="libcuda", kind="compat", version=None, compat=Compat(branches=(1, 2))
                ),
                needed=("a", "b"),
                inner=(("i", File(size=0)), ("j", File(size=1, inner=(("k", File(size=2)),)))),
            ),
        ),
    },
    removed=frozenset(["/x"]),
    emptied=frozenset(),
)


def empty(digest):
    return Layer(digest=digest, entries={}, removed=frozenset(), emptied=frozenset())


@pytest.fixture
def kept(tmp_path):
    return Cache(tmp_path / "cache" / "layers")


@pytest.fixture
def entry(kept, tmp_path):
    """The file of the one cached layer."""
    kept.put(FULL)
    (path,) = (tmp_path / "cache" / "layers").iterdir()
    return path


def test_cached_layer_equals_the_read_layer(kept, entry):
    assert kept.get(DIGEST) == FULL
    result = layer.read_layer(io.BytesIO(tar(*MEMBERS)), f"sha256:{'1' * 64}")
    kept.put(result)
    again = kept.get(result.digest)
    assert again == result
    assert list(again.entries) == list(result.entries), "links refer to earlier entries"
    assert oct(entry.parent.stat().st_mode)[-3:] == "700"
    assert oct(entry.stat().st_mode)[-3:] == "600"


@pytest.mark.parametrize("kind", cache.CLASSES)
def test_every_field_of_a_finding_is_serialized(kind):
    """A field of a new class fails here: the class has to be added to the serialized ones."""
    with pytest.raises(ValueError, match="not the fields"):
        cache.load_value(kind, {kind.__name__: dict.fromkeys([*(one.name for one in fields(kind)), "other"])})


def test_cached_layer_is_not_read_again(kept, tmp_path):
    image = Parts(tar(*MEMBERS), tar("a"))
    seen: list[int] = []
    for path in (
        layout(tmp_path / "1", image),
        layout(tmp_path / "2", image),
        archived(tmp_path / "a", image),
    ):
        (result,) = read_images(path, "linux/amd64", Layers(kept, seen.append))
        kernel = result.layers[0].entries["/opt/k.cubin"]
        assert isinstance(kernel, PlainFile)
        assert kernel.file.code.cubins == {"80"}
    assert sum(seen) == sum(len(image.blobs[own]) for own in image.layers)


def test_layer_with_a_wrong_digest_is_not_cached(kept, tmp_path):
    image = Parts(tar(*MEMBERS))
    own = image.layers[0]
    image.blobs[own] = Parts(tar("other")).blobs[Parts(tar("other")).layers[0]]
    for path in (layout(tmp_path / "1", image), archived(tmp_path / "a", image)):
        with pytest.raises(AuditError, match="does not match its digest"):
            list(read_images(path, "linux/amd64", Layers(kept)))
    assert kept.get(own) is None
    assert not (tmp_path / "cache").exists()


def test_audits_are_known_without_reading_them(kept, entry):
    assert kept.has_layer(DIGEST)
    assert not kept.has_layer(f"sha256:{'1' * 64}")
    assert not kept.has_layer("sha256:../../etc/passwd")
    entry.unlink()
    assert not kept.has_layer(DIGEST)
    assert not Cache(None).has_layer(DIGEST)


def test_notes_are_kept(kept):
    kept.put_note("a cell", ("t:v1", ((DIGEST, 1),)))
    assert kept.get_note(tuple[str, tuple[tuple[str, int], ...]], "a cell") == ("t:v1", ((DIGEST, 1),))
    assert kept.get_note(tuple[str, ...], "another") is None
    Cache(None).put_note("a cell", ())
    assert Cache(None).get_note(tuple[str, ...], "a cell") is None


@pytest.mark.parametrize("data", [{}, None, [1], [["a"]]])
def test_damaged_note_is_ignored(kept, tmp_path, data):
    kept.put_note("image", ())
    assert kept.get_note(tuple[str, ...], "image") == ()
    (path,) = (tmp_path / "cache" / "layers").iterdir()
    path.write_bytes(packed(data))
    assert kept.get_note(tuple[str, ...], "image") is None
    path.write_bytes(b"damaged")
    assert kept.get_note(tuple[str, ...], "image") is None


def test_cache_is_invalidated_by_new_code(kept, entry, monkeypatch):
    monkeypatch.setattr(cache, "_list_code", lambda *_: [("audit/elf.py", b"other rules")])
    assert Cache(entry.parent).get(DIGEST) is None
    monkeypatch.undo()
    assert Cache(entry.parent).get(DIGEST) == FULL
    monkeypatch.setattr(cache, "version", lambda _: "a newer decoder")
    assert Cache(entry.parent).get(DIGEST) is None
    assert kept.get(DIGEST) == FULL


def packed(data):
    return zlib.compress(json.dumps(data).encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"text",
        zlib.compress(b"{"),
        packed(cache.dump_value(FULL))[:-5],
        packed([]),
        packed({"Layer": {}}),
        packed({"Layer": None}),
        packed({"Symlink": {"target": "t"}}),
        packed(cache.dump_value(empty("sha256:1"))),
        zlib.compress(b"[" * 100_000),
        zlib.compress(bytes(1 << 20)),
    ],
)
def test_damaged_entry_is_ignored(kept, entry, monkeypatch, raw):
    monkeypatch.setattr(cache, "LARGEST", 1 << 19)
    entry.write_bytes(raw)
    assert kept.get(DIGEST) is None
    kept.put(FULL)
    assert kept.get(DIGEST) == FULL


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def places(data, path=()):
    yield path
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for name, one in inner:
        yield from places(one, (*path, name))


PLACES = list(places(cache.dump_value(FULL)))[1:]


@given(st.sampled_from(PLACES), JSON)
def test_arbitrary_entry_gives_a_layer_or_an_error(path, value):
    data = json.loads(json.dumps(cache.dump_value(FULL)))
    at = data
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    try:
        result = cache.load_value(Layer, data)
    except ValueError:
        return
    assert cache.load_value(Layer, json.loads(json.dumps(cache.dump_value(result)))) == result


@pytest.mark.parametrize(
    "how",
    [
        lambda folder: folder.chmod(0o770),
        lambda folder: folder.chmod(0o704),
        lambda folder: folder.rename(folder.with_name("real")) and folder.symlink_to("real"),
        lambda folder: folder.rename(folder.with_name("real")) and folder.write_bytes(b""),
    ],
)
def test_folder_writable_by_others_is_not_used(kept, entry, how):
    how(entry.parent)
    assert kept.get(DIGEST) is None
    kept.put(FULL)
    assert kept.get(DIGEST) is None


def test_entry_of_another_user_is_not_read(kept, entry, tmp_path, monkeypatch):
    raw = entry.read_bytes()
    entry.unlink()
    (tmp_path / "elsewhere").write_bytes(raw)
    entry.symlink_to(tmp_path / "elsewhere")
    assert kept.get(DIGEST) is None
    entry.unlink()
    os.mkfifo(entry)
    assert kept.get(DIGEST) is None
    entry.unlink()
    entry.write_bytes(raw)
    assert kept.get(DIGEST) == FULL
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert kept.get(DIGEST) is None


def test_no_folder_is_created_in_another_user_s_home(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    kept.put(FULL)
    assert not list(tmp_path.iterdir())


def test_least_recently_used_entries_are_removed_first(tmp_path):
    folder = tmp_path / "layers"
    digests = [f"sha256:{number:064}" for number in range(4)]
    one = empty(digests[0])
    Cache(folder).put(one)
    (path,) = folder.iterdir()
    small = Cache(folder, limit=7 * path.stat().st_size // 2)
    for age, digest in zip((30, 20, 10), digests, strict=False):
        small.put(empty(digest))
        (path,) = folder.glob(f"{digest[7:]}.*")
        os.utime(path, ns=(0, path.stat().st_mtime_ns - age * 10**9))
    assert small.get(digests[0])
    small.put(empty(digests[3]))
    assert [bool(small.get(digest)) for digest in digests] == [True, False, True, True]


def test_entries_that_another_process_removes_are_skipped(tmp_path, monkeypatch):
    """Other commands of the same user may remove entries at the same time."""
    folder = tmp_path / "layers"
    Cache(folder).put(FULL)
    real = os.scandir

    @contextlib.contextmanager
    def racing(path):
        with real(path) as entries:
            listed = list(entries)
        if Path(path) == folder:  # newer releases of pathlib scan other folders with it
            folder.joinpath(listed[0].name).unlink()
        yield iter(listed)

    with monkeypatch.context() as patch:
        patch.setattr("imagematrix.audit.images.cache.os.scandir", racing)
        Cache(folder, limit=0).put(replace(FULL, digest=f"sha256:{'1' * 64}"))
    assert not list(folder.iterdir())


def test_oversized_layer_is_not_cached(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "LARGEST", 100)
    kept.put(FULL)
    assert not (tmp_path / "cache").exists()


def test_interrupted_write_leaves_no_file(kept, entry, monkeypatch):
    def broken(*_):
        raise OSError

    monkeypatch.setattr(Path, "rename", broken)
    kept.put(empty(f"sha256:{'2' * 64}"))
    assert list(entry.parent.iterdir()) == [entry]


def test_cache_location_follows_xdg(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/caches")
    assert get_cache_folder("layers") == Path("/var/caches/imagematrix/layers")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/someone")
    assert get_cache_folder("layers") == Path("/home/someone/.cache/imagematrix/layers")

    def homeless():
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    assert get_cache_folder("layers") is None
    Cache(None).put(FULL)
    assert Cache(None).get(DIGEST) is None


def test_damaged_layer_stops_parallel_reading(tmp_path):
    image = Parts(*(tar(f"file{number}") for number in range(9)))
    image.blobs[image.layers[4]] = b"bad"
    with pytest.raises(AuditError, match=image.layers[4]):
        list(read_images(layout(tmp_path / "x", image), "linux/amd64", Layers()))


def test_interrupt_does_not_wait_for_a_layer():
    """The signal is repeated, because one that arrives just before the main thread waits does not wake it."""
    reading, interrupted, go_on = (threading.Event() for _ in range(3))

    class Slow:
        def read(self, _size=-1, /):
            reading.set()
            go_on.wait()
            return b""

    def interrupt():
        reading.wait()
        while not interrupted.wait(0.05):
            os.kill(os.getpid(), signal.SIGINT)

    def first(_number, _frame):
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, first)
    sender = threading.Thread(target=interrupt)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            Layers().read_layers([DIGEST], lambda _: contextlib.nullcontext(Slow()))
    finally:
        go_on.set()
        sender.join()
        signal.signal(signal.SIGINT, before)


def test_stopped_layers_are_not_awaited():
    reading, go_on = threading.Event(), threading.Event()

    class Held:
        def read(self, _size=-1, /):
            reading.set()
            go_on.wait()
            return b""

    layers = Layers()
    stopping = threading.Thread(target=lambda: reading.wait() and layers.stop())
    stopping.start()
    with pytest.raises(CancelledError):
        layers.read_layers([DIGEST], lambda _: contextlib.nullcontext(Held()))
    stopping.join()
    with pytest.raises(CancelledError):
        layers.read_layers([DIGEST], lambda _: contextlib.nullcontext(Held()))
    go_on.set()
