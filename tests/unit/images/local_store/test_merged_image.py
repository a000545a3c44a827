"""Layers as one stream of files: what a container sees, whatever the layers are."""

import contextlib
import gzip
import io
import os
import tarfile
import tempfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from images import digest, hardlink, link, special, tar
from storing import layer_file

from imagematrix.errors import AuditError
from imagematrix.images.local_store.folder_writer import write_folder
from imagematrix.images.local_store.merged_image import LATEST, LayerFile, MergedImage
from imagematrix.images.oci import layer_entries


def entry(path, kind=tarfile.REGTYPE, *, size=0, **fields):
    info = special(path, kind)
    info.size = size
    for name, value in fields.items():
        setattr(info, name, value)
    return info


def merged(*layers):
    return MergedImage([layer_file(tar(*members), f"layer {place}") for place, members in enumerate(layers)])


def listed(*layers):
    """Return the members as path, and content or target, in their order."""
    return [
        (one.path, one.content.read() if one.content else one.target or None)
        for one in merged(*layers).list_members()
    ]


def test_every_path_comes_once_with_its_final_content():
    assert listed([("a/f", b"1"), ("a/g", b"2"), link("l", "a")], [("a/f", b"3"), ("b", b"4")]) == [
        ("/", None),
        ("/a", None),
        ("/l", "a"),
        ("/a/g", b"2"),
        ("/a/f", b"3"),
        ("/b", b"4"),
    ]


def test_a_hard_link_outlives_the_name_that_it_was_made_of():
    assert listed([("a", b"1"), hardlink("b", "a"), hardlink("c", "a")], [".wh.a"]) == [
        ("/", None),
        ("/b", b"1"),
        ("/c", "/b"),
    ]


def test_attributes_are_those_of_the_topmost_layer_that_lists_the_path():
    own = {"mode": 0o2750, "uid": 7, "gid": 8, "mtime": 99}
    image = merged(
        [
            entry("./", tarfile.DIRTYPE, mode=0o700, mtime=5),
            entry("d", tarfile.DIRTYPE, **own),
            entry("d/f", **own),
        ],
        ["d/g", entry("e/h")],
    )
    found = {one.path: (one.mode, one.uid, one.gid, one.mtime) for one in image.list_members()}
    assert found["/"] == (0o700, 0, 0, 5)
    assert found["/d"] == found["/d/f"] == (0o2750, 7, 8, 99)
    assert found["/e"] == (0o755, 0, 0, 0)
    assert image.latest == 99


@pytest.mark.parametrize(("time", "kept"), [(-1, 0), (1.9, 1), (LATEST, LATEST), (LATEST + 1, LATEST)])
def test_times_are_those_that_squashfs_can_have(time, kept):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(entry("f", mtime=time))
    (_, file) = MergedImage([layer_file(buffer.getvalue())]).list_members()
    assert file.mtime == kept


def test_devices_pipes_and_sockets_are_left_out_and_counted():
    kinds = [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE]
    image = merged(
        [special(f"dev/{place}", kind) for place, kind in enumerate(kinds)],
        [".wh.dev", "x"],
        [special("p", kinds[2])],
    )
    assert [one.path for one in image.list_members()] == ["/", "/x"]
    assert image.left_out == 1


@pytest.mark.parametrize("packed", [bytes, gzip.compress, zstandard.compress])
def test_every_compression_of_layers_is_read(packed):
    raw = tar(("f", b"1" * 9999))
    image = MergedImage([layer_file(packed(raw))])
    assert [one.content.read() for one in image.list_members() if one.content] == [b"1" * 9999]
    assert image.size == 9999


def test_sparse_files_have_their_holes(tmp_path):
    import subprocess

    with (tmp_path / "s").open("wb") as file:
        file.truncate(1 << 16)
        file.seek(1 << 15)
        file.write(b"x")
    raw = subprocess.run(["tar", "-S", "-C", tmp_path, "-c", "s"], check=True, capture_output=True).stdout
    (content,) = [one.content.read() for one in MergedImage([layer_file(raw)]).list_members() if one.content]
    assert content == bytes(1 << 15) + b"x" + bytes((1 << 15) - 1)


def test_the_same_empty_layer_may_come_twice():
    assert listed([], []) == [("/", None)]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([["../x"]], "leads out of the image"),
        ([["a/../../x"]], "leads out of the image"),
        ([[hardlink("a", "../../etc/passwd")]], "leads out of the image"),
        ([[hardlink("a", "none")]], "which is not a file"),
        ([["x" * 4097]], "has 4097 characters"),
        ([[link("l", "x" * 4097)]], "has 4097 characters"),
        ([["/".join("a" * 258)]], "258 levels"),
        ([[link("l", "/".join("a" * 250)), f"l/{'/'.join('b' * 9)}"]], "259 levels"),
        ([["a", "a/b"]], "has entries in /a, which is no folder"),
        ([["a", link("l", "a"), "l/b"]], "has entries in /l, which is no folder"),
        ([[link("l", "l"), "l/b"]], "has entries in /l, which is no folder"),
        ([[("a", b"1"), hardlink("b", "a"), "a"]], "is replaced after another entry"),
    ],
)
def test_layers_that_no_engine_would_unpack_are_refused(layers, message):
    with pytest.raises(AuditError, match=message):
        merged(*layers)


def test_a_layer_that_is_damaged_between_the_two_readings_is_refused():
    """Its headers were read before, so only the content of a file can tell."""
    raw = gzip.compress(tar(("a", os.urandom(9_000_000))))
    raws = [raw, raw[: len(raw) // 2]]
    image = MergedImage([LayerFile(open=lambda: layer_file(raws.pop(0)).open(), name="l")])
    members = image.list_members()
    next(members)
    with pytest.raises(AuditError, match="the layer l cannot be read"):
        next(members).content.read(9_000_000)


def test_as_many_levels_as_are_allowed_work():
    assert len(listed(["/".join("a" * 256)])) == 257


def test_the_number_of_entries_is_limited(monkeypatch):
    monkeypatch.setattr(layer_entries, "MOST", 2)
    assert len(listed(["a"], ["b"])) == 3
    for layers in ([["a", "b", "c", "d"]], [["a", "b"], ["c"]]):
        with pytest.raises(AuditError, match="more than 2 files"):
            merged(*layers)


@pytest.mark.parametrize("end", [1, 700, 1300])
def test_a_truncated_layer_is_refused(end):
    with pytest.raises(AuditError, match="the layer l cannot be read"):
        MergedImage([layer_file(tar(("a", b"x" * 3000))[:end], "l")])


def test_a_layer_is_compared_with_its_digests():
    raw = tar("a")
    other = digest(b"")
    layer = layer_file(gzip.compress(raw))
    good = LayerFile(open=layer.open, name="l", tar=digest(raw))
    assert [one.path for one in MergedImage([good]).list_members()] == ["/", "/a"]
    for wrong in ({"tar": other}, {"digest": other}):
        with pytest.raises(AuditError, match=f"{other} does not match its digest"):
            MergedImage([LayerFile(open=layer.open, name="l", **wrong)])


def test_a_layer_that_changes_between_the_two_readings_is_refused():
    raws = [tar(("a", b"1")), tar(("a", b"2"))]
    layer = LayerFile(open=lambda: layer_file(raws.pop(0)).open(), name="l", digest=digest(raws[0]))
    image = MergedImage([layer])
    with pytest.raises(AuditError, match="does not match its digest"):
        for _ in image.list_members():
            pass


def test_a_layer_that_loses_a_file_between_the_two_readings_is_refused():
    raws = [tar(("a", b"1")), tar(("a", b"22"))]
    image = MergedImage([LayerFile(open=lambda: layer_file(raws.pop(0)).open(), name="l")])
    with pytest.raises(AuditError, match="it changed while it was read"):
        for _ in image.list_members():
            pass


# A model of engines: each layer is unpacked into a folder of its own, in order, then overlayfs merges them.
NAMES = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4).map("/".join)
KINDS = st.sampled_from(["file", "file", "folder", "link", "hard", "whiteout", "opaque"])
LAYER = st.lists(st.tuples(NAMES, KINDS, NAMES), max_size=6, unique_by=lambda member: member[0])


def unpack(members, lower, number):  # noqa: C901 - one branch for each kind of entry
    """Return the entries of a layer by path: "folder", ("link", target), or the identity of a file."""
    upper: dict[str, object] = {}
    removed: set[str] = set()
    opaque: set[str] = set()

    def parents(path):
        parts = path.split("/")
        return ["/".join(parts[:count]) for count in range(1, len(parts))]

    def resolved(path, tree, made):
        """Follow links in the parents of a path; in `made`, missing folders appear."""
        done: list[str] = []
        ahead, hops = path.split("/")[:-1], 0
        while ahead:
            name = ahead.pop(0)
            here = "/".join([*done, name])
            kind = tree.get(here)
            if kind and kind[0] == "link" and hops < 40:
                hops += 1
                ahead = kind[1].split("/") + ahead
                continue
            if kind != "folder":
                if not made:
                    return None
                if kind:
                    reject()  # engines refuse an entry below a file, and below links in a loop
                replace(here, "folder")
            done.append(name)
        return "/".join([*done, path.rpartition("/")[2]])

    def replace(path, kind):
        if not (kind == "folder" and upper.get(path) == "folder"):
            for other in [one for one in upper if one.startswith(f"{path}/")]:
                del upper[other]
            upper[path] = kind

    for path, kind, _ in members:
        if kind in ("whiteout", "opaque"):
            for parent in [*parents(path), *([path] if kind == "opaque" else [])]:
                replace(parent, "folder")
            (removed if kind == "whiteout" else opaque).add(path)
    for place, (path, kind, target) in enumerate(members):
        if kind in ("whiteout", "opaque"):
            continue
        where = resolved(path, upper, made=True)
        if kind == "hard":
            found = None
            for tree in (upper, lower):
                at = resolved(target, tree, made=False)
                found = tree.get(at) if at and found is None and tree.get(at) != "folder" else found
            if found is None:
                reject()
            replace(where, found)
        else:
            replace(where, {"file": (number, place), "folder": "folder", "link": ("link", target)}[kind])
    return upper, removed, opaque


def overlay(lower, upper, removed, opaque):
    def hidden(path):
        parts = path.split("/")
        above = ["/".join(parts[:count]) for count in range(1, len(parts))]
        return (
            path in removed
            or any(parent in removed or parent in opaque for parent in above)
            or any(parent in upper and upper[parent] != "folder" for parent in above)
            or (path in upper and not (upper[path] == lower[path] == "folder"))
        )

    return {path: kind for path, kind in lower.items() if not hidden(path)} | upper


def on_disk(root):
    """Return what an unpacked image has, in the terms of the model; a file's content is its identity."""
    found: dict[str, object] = {}
    for path in sorted(Path(root).rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()))
        else:
            found[name] = "folder" if path.is_dir() else tuple(map(int, path.read_bytes().split()))
    return found


def names_by_file(found):
    files: dict[object, set[str]] = {}
    for path, kind in found.items():
        if kind != "folder" and kind[0] != "link":
            files.setdefault(kind, set()).add(path)
    return files


@settings(deadline=None)
@given(st.lists(LAYER, max_size=3))
def test_an_unpacked_image_is_what_engines_and_overlayfs_make_of_its_layers(layers):
    expected: dict[str, object] = {}
    archives = []
    for number, members in enumerate(layers):
        expected = overlay(expected, *unpack(members, expected, number))
        raw = []
        for place, (path, kind, target) in enumerate(members):
            folder, _, name = path.rpartition("/")
            raw.append(
                {
                    "file": (path, f"{number} {place}".encode()),
                    "folder": special(path, tarfile.DIRTYPE),
                    "link": link(path, target),
                    "hard": hardlink(path, target),
                    "whiteout": f"{folder}/.wh.{name}" if folder else f".wh.{name}",
                    "opaque": f"{path}/.wh..wh..opq",
                }[kind]
            )
        archives.append(raw)
    try:
        image = merged(*archives)
    except AuditError:  # a path is replaced that other entries depend on
        reject()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        write_folder(root, image.list_members())
        found = on_disk(root)
        assert found == expected
        for names in names_by_file(expected).values():
            assert len({(root / name).stat().st_ino for name in names}) == 1


@pytest.mark.parametrize("folders", [1, 2])
def test_names_take_no_more_memory_than_any_image_needs(monkeypatch, folders):
    """An archive of a few kB can name as many folders as it likes."""
    deep = tar(*(f"{number}/{'a/' * 200}f" for number in range(10)))
    size = 10 * sum(range(2, 2 + 2 * 202, 2))
    monkeypatch.setattr(layer_entries, "LONGEST_NAMES", size)
    with (
        pytest.raises(AuditError, match=r"paths (have|of) more than \d+ characters")
        if folders == 2
        else contextlib.nullcontext()
    ):
        MergedImage([layer_file(deep)] * folders)


def test_a_path_that_is_too_deep_is_refused_when_it_is_read():
    with pytest.raises(AuditError, match="has 301 levels"):
        MergedImage([layer_file(tar(f"{'a/' * 300}f"))])
