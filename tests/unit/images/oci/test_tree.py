"""The merged layers, as a container sees them."""

import io
import tarfile

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from images import hardlink, link, special, tar

from imagematrix.audit.images import layer
from imagematrix.errors import AuditError
from imagematrix.images.oci.tree import ImageTree

PTX = b".version 8.4\n.target sm_90\n"
LIB = ("opt/libcuda.so.550.163.01", b"driver")


def tree(*layers):
    return ImageTree(
        layer.read_layer(io.BytesIO(tar(*members)), f"{place}") for place, members in enumerate(layers)
    )


def paths(*layers):
    return [path for path, _ in tree(*layers).list_files()]


@pytest.mark.parametrize(
    ("layers", "left"),
    [
        ([["a/b", "a/c"]], ["/a/b", "/a/c"]),
        ([["a/b", "a/c"], ["a/.wh.b"]], ["/a/c"]),
        ([["a/b", "a/c"], [".wh.a", "a/d"]], ["/a/d"]),
        ([["a/b", "a/c"], ["a/d", "a/.wh..wh..opq"]], ["/a/d"]),
        ([["a/b"], ["a"]], ["/a"]),
        ([["a"], ["a/b"]], ["/a/b"]),
        ([["a/b"], [special("a", tarfile.DIRTYPE)]], ["/a/b"]),
        ([["a/b"], [link("a", "c")]], []),
        ([["a"], [hardlink("b", "a")]], ["/a", "/b"]),
        ([["x/a", link("y", "x"), "y/b"]], ["/x/a", "/x/b"]),
        ([["x/a"], [link("y", "x"), "y/b"]], ["/x/a", "/x/b"]),
        # A link in a lower layer is not followed: overlayfs and podman 4.3.1 hide it with a folder.
        ([["x/a", link("y", "x")], ["y/b"]], ["/x/a", "/y/b"]),
        ([["x/a", link("y", "x")], ["y/a"]], ["/x/a", "/y/a"]),
        ([["x/a", link("y", "x")], ["y/.wh.a"]], ["/x/a"]),
        ([["x/a", link("y", "x")], ["y/.wh..wh..opq"]], ["/x/a"]),
        ([["x/a", link("y", "x")], [special("y", tarfile.DIRTYPE), "y/b"]], ["/x/a", "/y/b"]),
        ([[link("y", "nowhere"), "y/b"]], ["/nowhere/b"]),
        ([[link("a", "b"), link("b", "a")], ["a/c"]], ["/a/c"]),
        ([[".wh.none", "none/.wh..wh..opq"]], []),
        ([["a"], [".wh..wh..opq", "b"]], ["/a", "/b"]),  # overlayfs and podman 4.3.1 ignore an opaque root
    ],
)
def test_later_layers_replace_and_remove_files(layers, left):
    assert paths(*layers) == left


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/usr/lib/l", "/opt/libcuda.so.550.163.01"),
        ("/lib/../lib/l", "/opt/libcuda.so.550.163.01"),
        ("/../../opt/./libcuda.so.550.163.01", "/opt/libcuda.so.550.163.01"),
        ("/loop", None),
        ("/opt", None),
        ("/opt/none", None),
        ("/opt/libcuda.so.550.163.01/x", None),
    ],
)
def test_links_are_followed(path, expected):
    links = (link("usr/lib/l", "../../opt/libcuda.so.550.163.01"), link("lib", "/usr/lib"))
    whole = tree([LIB, *links, link("loop", "loop")])
    led = whole.find(path)
    assert (led and led[0]) == expected


def test_hard_link_is_the_same_file():
    whole = tree([LIB], [hardlink("lib/other", LIB[0])])
    assert whole.find("/lib/other")[1] is whole.find(f"/{LIB[0]}")[1]


@pytest.mark.parametrize(
    "links",
    [
        [hardlink("b", "none")],
        [hardlink("b", "b")],
        [hardlink("b", "c"), hardlink("c", "b")],
        [special("none", tarfile.DIRTYPE), hardlink("b", "none")],
        [link("none", "none"), hardlink("b", "none/none")],
    ],
)
def test_dangling_hard_link_is_rejected(links):
    with pytest.raises(AuditError, match=r"layer 0 links /b to /(none|b|c|none/none), which is not a file"):
        tree(links)


@pytest.mark.parametrize(
    "members",
    [
        [("a.ptx", PTX), hardlink("b", "a.ptx"), "a.ptx"],
        [link("d", "x"), "d/f", special("d", tarfile.DIRTYPE), "d/f"],
        [link("d", "x"), ("x/f", PTX), hardlink("b", "d/f"), special("d", tarfile.DIRTYPE)],
    ],
)
def test_replacing_an_entry_that_others_depend_on_is_rejected(members):
    """Docker and podman refuse any path twice; for containerd, the first counts here."""
    with pytest.raises(AuditError, match="is replaced after another entry that depends on it"):
        tree(members)


def test_last_entry_of_a_path_counts():
    folder = special("d", tarfile.DIRTYPE)
    assert paths(["a", folder, "d/f", "a", folder, link("y", "d"), "y/g", link("y", "d"), "d/f"]) == [
        "/a",
        "/d/f",
        "/d/g",
    ]


def test_folder_names_are_listed():
    whole = tree(["a/x", "a/b/y"])
    assert whole.list_names("/a") == ["b", "x"]
    assert whole.list_names("/a/x") == whole.list_names("/none") == []


NAMES = st.lists(st.sampled_from(["a", "b", "c", ".", ".wh.a", ".wh..wh..opq"]), min_size=1, max_size=4)
MEMBERS = st.tuples(NAMES.map("/".join), st.sampled_from(["file", "folder", "link"]), NAMES.map("/".join))


@given(st.lists(st.lists(MEMBERS, max_size=5), max_size=4))
def test_every_file_of_a_tree_is_found(layers):
    kinds = {"folder": tarfile.DIRTYPE, "link": tarfile.SYMTYPE, "file": tarfile.REGTYPE}
    try:
        whole = tree(*([special(name, kinds[kind], target) for name, kind, target in one] for one in layers))
    except AuditError:  # a later entry replaces a link that files are below
        reject()
    for path, file in whole.list_files():
        assert whole.find(path) == (path, file)
