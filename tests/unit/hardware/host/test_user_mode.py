"""The version of the node's own user-mode driver."""

import os

import pytest

from imagematrix.hardware.host.host import Host
from imagematrix.hardware.host.nvidia import read_user_mode
from imagematrix.hardware.host.nvml import Nvml
from imagematrix.hardware.host.probe import assemble_host, probe
from imagematrix.hardware.host.tree import Tree
from imagematrix.hardware.ld_cache import PATHS, LoaderCache

FOLDER = "usr/lib/x86_64-linux-gnu"
NAME = "libcuda.so.1"


@pytest.fixture
def cached(hosts):
    """Return an ld.so.cache that names these files for libcuda.so.1."""
    return lambda *paths: hosts.loader_cache(
        ("libc.so.6", "/lib/libc.so.6", 0), *((NAME, p, 0) for p in paths)
    )


@pytest.fixture
def node(captured, cached):
    """Write a tree with a driver in the loader's cache; `link` is the target of its link."""

    def write(link="libcuda.so.550.144.03", more=()):
        root = captured({"etc/ld.so.cache": cached(f"/{FOLDER}/{NAME}"), f"{FOLDER}/x": "", **dict(more)})
        (root / FOLDER / NAME).symlink_to(link)
        return root

    return write


def version(root):
    tree = Tree(str(root))
    return read_user_mode(tree), tree.warnings


def test_the_link_of_the_loader_s_choice_names_the_version(node):
    root = node(more={f"{FOLDER}/libcuda.so.550.144.03": ""})
    assert version(root) == ("550.144.03", [])


def test_only_some_paths_of_one_library_are_tried(cached):
    paths = [f"/{number}/{NAME}" for number in range(PATHS + 1)]
    assert [*LoaderCache(cached(*paths)).list_paths(NAME)] == paths[:PATHS]


def test_absolute_links_stay_in_the_tree(node, tmp_path):
    # As Debian's alternatives link it, in three steps.
    root = node("/etc/alternatives/glx--libcuda.so.1")
    assert version(root) == (None, [])
    (root / "etc/alternatives").mkdir()
    (root / "etc/alternatives/glx--libcuda.so.1").symlink_to(f"/{FOLDER}/nvidia/current/{NAME}")
    (root / FOLDER / "nvidia/current").mkdir(parents=True)
    (root / FOLDER / "nvidia/current" / NAME).symlink_to("libcuda.so.535.261.03")
    assert version(root) == (None, [])
    (root / FOLDER / "nvidia/current/libcuda.so.535.261.03").touch()
    assert version(root) == ("535.261.03", [])
    (tmp_path / "libcuda.so.999.1").touch()
    for target in (tmp_path / "libcuda.so.999.1", "../../../../libcuda.so.999.1"):
        (root / FOLDER / NAME).unlink()
        (root / FOLDER / NAME).symlink_to(target)
        assert version(root) == (None, [])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\x00nvidia-application-profiles-550.163.01-rc\x00 535.261.03\x00", "550.163.01"),
        (b"x" * ((1 << 20) - 31) + b"libnvidia-pkcs11.so.580.65.06\x00", "580.65.06"),
        (b"\x00550.163.01\x00", "550.163.01"),
        (b"\x00550.163.01\x00535.261.03\x00", None),
        (b"", None),
    ],
)
def test_a_copy_without_links_states_its_version_in_its_bytes(captured, cached, content, expected):
    root = captured({"etc/ld.so.cache": cached(f"/opt/{NAME}"), f"opt/{NAME}": content})
    assert version(root) == (expected, [])


def test_driver_containers_and_folders_outside_the_loader_s_path(captured, cached):
    root = captured({"usr/local/nvidia/lib64/libcuda.so.1": b"\x00570.86.15\x00"})
    assert version(root) == ("570.86.15", [])
    inner = f"run/nvidia/driver/{FOLDER}"
    other = captured(
        {
            "run/nvidia/driver/etc/ld.so.cache": cached(f"/{FOLDER}/{NAME}"),
            f"{inner}/x/libcuda.so.560.28.03": "",
        },
        root=root.with_name("other"),
    )
    (other / inner / NAME).symlink_to(f"/{FOLDER}/x/libcuda.so.560.28.03")
    assert version(other) == ("560.28.03", [])


def test_libraries_for_linking_and_forward_compatibility_are_no_drivers(captured, cached):
    paths = ("/usr/local/cuda/compat", "/usr/local/cuda/lib64/stubs", f"/{FOLDER}")
    root = captured(
        {
            "etc/ld.so.cache": cached("relative.so", *(f"{path}/{NAME}" for path in paths)),
            **{f"{path[1:]}/{NAME}": f"\x00{550 + at}.54.15\x00" for at, path in enumerate(paths)},
        }
    )
    assert version(root) == ("552.54.15", [])


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff" * 400,
        b"glibc-ld.so.cache1.1",
        b"glibc-ld.so.cache1.1" + b"\xff" * 4000,
        b"\x00" * 17 * 2**20,
    ],
)
def test_damaged_caches_name_nothing(captured, raw):
    found, warnings = version(captured({"etc/ld.so.cache": raw}))
    assert found is None
    assert len(warnings) == (len(raw) > 2**20)


def test_old_format_before_the_cache(captured, cached):
    raw = b"ld.so-1.7.0\x00" + bytes(20) + cached(f"/opt/{NAME}")
    assert version(captured({"etc/ld.so.cache": raw, f"opt/{NAME}": "\x00550.163.01\x00"})) == (
        "550.163.01",
        [],
    )


def test_what_cannot_be_opened_or_read_is_unknown(captured, cached, monkeypatch):
    root = captured({"etc/ld.so.cache": cached(f"/opt/{NAME}"), f"opt/{NAME}": "\x00550.163.01\x00"})
    tree, opened = Tree(str(root)), os.open

    def refuse(path, *rest):
        if str(path).endswith(NAME):
            raise PermissionError(13, "Permission denied")
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", refuse)
    assert read_user_mode(tree) is None
    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pread", lambda *_: refuse(NAME))
    assert read_user_mode(tree) is None


def test_the_running_host(captured, tmp_path, monkeypatch, cached):
    library = captured({"libcuda.so.550.163.01": ""}) / "libcuda.so.550.163.01"
    link = tmp_path / NAME
    link.symlink_to(library)
    tree = Tree("/")
    monkeypatch.setattr(Tree, "read_bytes", lambda *_, **__: cached(str(link)))
    assert read_user_mode(tree) == "550.163.01"


def test_a_host_has_it_with_its_driver(node, gpu):
    host = probe(node(more=gpu() | {f"{FOLDER}/libcuda.so.550.144.03": ""}))
    assert host.driver.user_mode == "550.144.03"
    assert Host.from_json(host.to_json()) == host
    mismatch = "driver mismatch: the host's user-mode driver is 550.144.03, the kernel module is 550.163.01"
    assert [warning.startswith(mismatch) for warning in host.warnings].count(True) == 1


def test_nvml_s_mismatch_is_said_once(node, gpu):
    root = node(more=gpu() | {f"{FOLDER}/libcuda.so.550.144.03": ""})
    host = assemble_host(Tree(str(root)), query=lambda: Nvml(error=18, message="mismatch"))
    assert [warning.count("driver mismatch") for warning in host.warnings] == [1]
    assert "550.144.03" in host.warnings[0]


def test_null_without_a_driver_without_the_file_and_in_dumps(node, captured, gpu, dumps):
    root = node(more={"proc/cpuinfo": gpu()["proc/cpuinfo"], f"{FOLDER}/libcuda.so.550.144.03": ""})
    assert probe(root).driver is None
    assert probe(root, smi=dumps / "550-lost.xml").driver.user_mode is None
    host = probe(captured(gpu(), root=root.with_name("bare")))
    assert host.driver.user_mode is None
    assert not any("user-mode" in warning for warning in host.warnings)


def test_invalid_versions_in_documents(load):
    data = load("genoa-h200")
    data["driver"]["user_mode"] = "550"
    with pytest.raises(Exception, match=r"user_mode: invalid driver version '550'"):
        Host.from_json(data)
    del data["driver"]["user_mode"]
    assert Host.from_json(data).driver.user_mode is None
