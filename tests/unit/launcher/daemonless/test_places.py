"""The places of mounts in an image: made inside of it, whatever its links say."""

import os
import stat
from pathlib import Path

import pytest

from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.launcher.daemonless import namespace, places
from imagematrix.launcher.daemonless.container import NETWORK
from imagematrix.launcher.daemonless.options import Bind
from imagematrix.launcher.daemonless.places import (
    SYSTEM,
    fit_container,
    make_node_read_only,
    mount_read_only_sources,
)

RESOLV = Bind(source="/etc/resolv.conf", target="/etc/resolv.conf", read_only=True, of_network=True)


@pytest.fixture
def fit(bare, root, tmp_path):
    """Call it with targets, of binds of a folder, to get those that they are fitted to."""
    (tmp_path / "source").mkdir()
    (tmp_path / "file").touch()

    def call(*targets, files=(), folders=(), **changes):
        binds = tuple(
            target if isinstance(target, Bind) else Bind(source=str(tmp_path / "source"), target=target)
            for target in targets
        )
        found = fit_container(replace(bare, binds=binds, **changes), str(root), files, folders)
        return [bind.target for bind in found.binds]

    return call


@pytest.fixture
def system(root):
    """The root of an image that has what a read-only one needs."""
    for path in SYSTEM:
        (root / path[1:]).mkdir()
    return root


@pytest.mark.parametrize(
    ("link", "inside"),
    [
        ("{outside}", "{outside}"),
        ("../../../../../../../..{outside}", "{outside}"),
        ("../../../outside", "/outside"),
        ("second", "/third"),
        ("./nested/../second", "/third"),
        (".", ""),
        ("/", ""),
    ],
)
def test_links_of_an_image_lead_nowhere_else(fit, root, tmp_path, link, inside):
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "data").symlink_to(link.format(outside=outside))
    (root / "second").symlink_to("/third")
    target = f"{inside.format(outside=outside)}/new"
    assert fit("/data/new") == [target]
    assert (root / target[1:]).is_dir()
    assert not list(outside.iterdir())


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("length", [1, 2, 41])
def test_links_in_circles_are_an_error(fit, system, length, read_only):
    for number in range(length):
        (system / f"link{number}").symlink_to(f"link{(number + 1) % length}")
    with pytest.raises(UsageError, match=r"cannot mount /link0/x: .*Too many levels of symbolic links"):
        fit("/link0/x", read_only=read_only)
    with pytest.raises(UsageError, match=r"cannot start in /link0: .*Too many levels"):
        fit(folder="/link0", read_only=read_only)


def test_a_long_chain_of_links_is_followed(fit, root):
    for number in range(40):
        (root / f"link{number}").symlink_to(f"link{number + 1}")
    assert fit("/link0/x") == ["/link40/x"]


def test_what_is_there_stays(fit, root, tmp_path):
    (root / "etc").mkdir()
    (root / "etc/hosts").write_text("own")
    assert fit(Bind(source=str(tmp_path / "file"), target="/etc/hosts")) == ["/etc/hosts"]
    assert (root / "etc/hosts").read_text() == "own"


@pytest.mark.parametrize("path", SYSTEM)
@pytest.mark.parametrize("kind", ["outside", "inside", "dangling", "file", "missing", "folder"])
def test_a_folder_of_the_system_is_one_itself(fit, root, tmp_path, path, kind):
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "there").mkdir()
    place = root / path[1:]
    links = {"outside": str(outside), "inside": "there", "dangling": "none/x"}
    if kind in links:
        place.symlink_to(links[kind])
    elif kind == "file":
        place.write_text("text")
    elif kind == "folder":
        place.mkdir()
        (place / "own").touch()
    fit()
    assert place.is_dir()
    assert not place.is_symlink()
    assert [one.name for one in place.iterdir()] == (["own"] if kind == "folder" else [])
    assert not list(outside.iterdir())
    assert not list((root / "there").iterdir())


@pytest.mark.parametrize("path", SYSTEM)
@pytest.mark.parametrize("kind", ["link", "file", "missing"])
def test_a_read_only_image_needs_the_folders_of_the_system(fit, system, path, kind):
    fit(read_only=True)
    (system / path[1:]).rmdir()
    if kind == "link":
        (system / path[1:]).symlink_to("/tmp")
    elif kind == "file":
        (system / path[1:]).touch()
    with pytest.raises(UsageError, match=f"--read-only: the image has no folder {path}") as caught:
        fit(read_only=True)
    assert "--read-only" in caught.value.remedy


def test_a_read_only_image_needs_places_but_for_the_network(fit, system):
    (system / "data").mkdir()
    (system / "link").symlink_to("data")
    network = [Bind(source=path, target=path, read_only=True, of_network=True) for path in NETWORK]
    assert fit("/data", "/link", *network, read_only=True) == ["/data", "/data"]
    with pytest.raises(UsageError, match="the image has no /none to mount a folder on"):
        fit("/none", read_only=True)
    with pytest.raises(UsageError, match="the image has no /hosts to mount a file on"):
        fit(Bind(source="/etc/hosts", target="/hosts"), read_only=True)  # the user's own
    with pytest.raises(UsageError, match="the image has no /none to start in"):
        fit(folder="/none", read_only=True)
    (system / "etc").mkdir()
    (system / "etc/resolv.conf").symlink_to("/proc/self/mounts")
    assert fit(RESOLV, read_only=True) == []
    assert sorted(one.name for one in system.iterdir()) == ["data", "dev", "etc", "link", "proc", "sys"]


def test_the_file_of_name_servers_is_where_its_link_leads(fit, root):
    (root / "etc").mkdir()
    (root / "etc/resolv.conf").symlink_to("../run/systemd/resolve/stub.conf")
    assert fit(RESOLV) == ["/run/systemd/resolve/stub.conf"]
    assert (root / "run/systemd/resolve/stub.conf").is_file()
    assert (root / "etc/resolv.conf").is_symlink()


def test_a_link_to_a_file_of_the_system_is_replaced(fit, root):
    (root / "etc").mkdir()
    (root / "etc/resolv.conf").symlink_to("/proc/self/mounts")
    assert fit(RESOLV) == ["/etc/resolv.conf"]
    assert stat.S_ISREG((root / "etc/resolv.conf").lstat().st_mode)


@pytest.mark.parametrize("files", [(), ("/etc/resolv.conf",)])
def test_a_folder_that_is_a_link_to_the_system_has_no_place_for_a_file(fit, root, files):
    (root / "etc").symlink_to("/proc/self")
    with pytest.raises(UsageError):
        fit(RESOLV, files=files)


def test_nothing_else_is_mounted_where_a_link_to_the_system_leads(fit, root):
    (root / "data").symlink_to("/dev/data")
    with pytest.raises(UsageError, match="cannot mount /data: a link of the image leads to /dev/data"):
        fit("/data")
    assert fit("/dev/data", "/proc") == ["/dev/data", "/proc"]  # the runtime's own concern


def test_a_mount_in_another_is_made_in_the_folder_of_the_node(fit, root, tmp_path):
    source = tmp_path / "source"
    (root / "link").symlink_to("data")
    file = Bind(source=str(tmp_path / "file"), target="/link/a/file")
    assert fit("/data", "/link/a/new", file, "/data") == ["/data", "/data/a/new", "/data/a/file", "/data"]
    assert not list((root / "data").iterdir())
    assert (source / "a/new").is_dir()
    assert (source / "a/file").is_file()


@pytest.mark.parametrize("target", ["/data/link/x", "/data/link", "/data/text/x"])
def test_no_link_of_a_folder_of_the_node_is_followed(fit, tmp_path, target):
    (tmp_path / "outside").mkdir()
    (tmp_path / "source/link").symlink_to(tmp_path / "outside")
    (tmp_path / "source/text").touch()
    with pytest.raises(UsageError, match="is no folder itself"):
        fit("/data", target)
    assert not list((tmp_path / "outside").iterdir())


def test_a_link_does_not_lead_above_a_folder_of_the_node(fit, root):
    (root / "link").symlink_to("/data/../x")
    with pytest.raises(UsageError, match=r"cannot mount /link: .* is no folder itself"):
        fit("/data", "/link")


def test_a_mount_in_a_read_only_folder_has_to_be_there(fit, tmp_path):
    (tmp_path / "source/there").mkdir()
    outer = Bind(source=str(tmp_path / "source"), target="/data", read_only=True)
    assert fit(outer, "/data/there") == ["/data", "/data/there"]
    with pytest.raises(UsageError, match=r"cannot mount /data/none: .*/source/none not found"):
        fit(outer, "/data/none")


def test_files_are_mounted_on_files_and_folders_on_folders(fit, root, tmp_path):
    (root / "folder").mkdir()
    (root / "text").touch()
    with pytest.raises(UsageError, match="cannot mount a file on /folder, which is a folder"):
        fit(Bind(source=str(tmp_path / "file"), target="/folder"))
    with pytest.raises(UsageError, match="cannot mount a folder on /text, which is a file"):
        fit("/text")
    with pytest.raises(UsageError, match="cannot mount /text/x: /text: Not a directory"):
        fit("/text/x")


def test_the_working_folder_is_made_where_links_lead(bare, root):
    (root / "link").symlink_to("/real")
    for _ in range(2):
        found = fit_container(replace(bare, folder="/link/../w/./x"), str(root))
        assert found.folder == "/w/x"
    assert fit_container(replace(bare, folder="/link/x"), str(root)).folder == "/real/x"
    assert (root / "real/x").is_dir()
    (root / "text").touch()
    with pytest.raises(UsageError, match="cannot start in /text/x"):
        fit_container(replace(bare, folder="/text/x"), str(root))


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("folder", ["/proc/self/fd/3", "/dev/fd/3", "/link/fd/3", "/sys/x", "/dev/shm/x"])
def test_no_container_starts_where_the_kernel_has_links_to_the_node(bare, system, folder, read_only):
    (system / "link").symlink_to("..//proc/self")
    with pytest.raises(UsageError, match=f"cannot start in {folder}, which is below /(proc|dev|sys)"):
        fit_container(replace(bare, folder=folder, read_only=read_only), str(system))


@pytest.mark.parametrize("folder", [*SYSTEM, "/dev/shm"])
def test_a_container_starts_in_a_folder_of_the_system_itself(bare, system, folder):
    (system / "link").symlink_to(f"/./{folder}/")
    for given in (folder, "/link"):
        assert fit_container(replace(bare, folder=given), str(system)).folder == folder


@pytest.fixture
def start(bare, system, tmp_path):
    """Call it with a folder to get where a container with `tmp_path/data` at /data starts."""
    (tmp_path / "data").mkdir()

    def call(folder, *, read_only=False, below=()):
        binds = (Bind(source=str(tmp_path / "data"), target="/data", read_only=read_only), *below)
        return fit_container(replace(bare, folder=folder, binds=binds), str(system)).folder

    return call


def test_a_container_starts_where_links_of_a_folder_of_the_node_lead(start, system, tmp_path):
    (tmp_path / "data/here").symlink_to("x/../x/y")
    (tmp_path / "data/out").symlink_to("../../../../srv")
    (tmp_path / "data/back").symlink_to("/data/x")
    (tmp_path / "data/proc").symlink_to("/proc/self/fd/3")
    (tmp_path / "data/x/y").mkdir(parents=True)
    for folder, found in (("here", "/data/x/y"), ("out/new", "/srv/new"), ("back/y/", "/data/x/y")):
        assert start(f"/data/{folder}") == found
    assert (system / "srv/new").is_dir()
    assert not list((system / "data").iterdir())
    with pytest.raises(UsageError, match="cannot start in /data/proc, which is below /proc"):
        start("/data/proc")


def test_the_working_folder_is_made_in_a_folder_of_the_node_that_may_change(start, tmp_path):
    with pytest.raises(UsageError, match="cannot start in /data/new: new: Read-only file system"):
        start("/data/new", read_only=True)
    assert start("/data/new/x") == "/data/new/x"
    assert (tmp_path / "data/new/x").is_dir()
    assert start("/data/new/x", read_only=True) == "/data/new/x"
    (tmp_path / "text").touch()
    file = Bind(source=str(tmp_path / "text"), target="/data/text")
    with pytest.raises(UsageError, match="cannot start in /data/text/x: /data/text: Not a directory"):
        start("/data/text/x", below=[file])


def test_a_later_mount_hides_one_below_it(start, tmp_path):
    (tmp_path / "second/new").mkdir(parents=True)
    (tmp_path / "second/new/l").symlink_to("/proc/self/fd/3")
    second = Bind(source=str(tmp_path / "second"), target="/data/x")
    assert start("/data/x/new", below=[second]) == "/data/x/new"
    with pytest.raises(UsageError, match="which is below /proc"):
        start("/data/x/new/l", below=[second])
    assert start(
        "/data/x/new/l", below=[second, replace(second, source=str(tmp_path / "data"), target="/data")]
    )
    assert (tmp_path / "data/x/new/l").is_dir()


def test_a_container_does_not_start_where_a_link_of_the_node_s_tmp_leads(bare, root):
    node = root.parent / "tmp"  # as with Charliecloud, which mounts the node's by itself
    node.mkdir()
    (node / "l").symlink_to("/proc/self/fd/3")
    with pytest.raises(UsageError, match="which is below /proc"):
        fit_container(replace(bare, folder=f"{node}/l"), str(root), folders=[str(node)])


def test_what_a_runtime_mounts_by_itself_is_no_link(fit, root, tmp_path):
    (root / "etc").mkdir()
    (tmp_path / "outside").write_text("outside")
    (root / "etc/hosts").symlink_to(tmp_path / "outside")
    (root / "etc/machine-id").symlink_to("none")
    (root / "tmp").symlink_to(tmp_path)
    files = ("/etc/hosts", "/etc/machine-id", "/etc/resolv.conf", "/etc/none")
    assert fit(RESOLV, files=files, folders=("/tmp",)) == ["/etc/resolv.conf"]
    for name in ("hosts", "machine-id", "resolv.conf"):
        assert stat.S_ISREG((root / "etc" / name).lstat().st_mode)
    assert not (root / "etc/none").exists()
    assert (root / "tmp").is_dir()
    assert not (root / "tmp").is_symlink()
    assert (tmp_path / "outside").read_text() == "outside"


def test_what_a_runtime_mounts_by_itself_is_not_replaced_in_a_read_only_image(fit, system):
    (system / "etc").mkdir()
    assert fit(RESOLV, files=("/etc/resolv.conf",), read_only=True) == []
    (system / "etc/hosts").symlink_to("/x")
    with pytest.raises(UsageError, match="--read-only: the image has no file /etc/hosts"):
        fit(files=("/etc/hosts",), read_only=True)


def test_what_a_runtime_mounts_by_itself_cannot_be_of_another_kind(fit, root):
    (root / "usr").mkdir()
    (root / "usr/hosts").touch()
    (root / "etc").symlink_to("usr")
    with pytest.raises(UsageError, match="the image's /etc is a link"):
        fit(files=("/etc/hosts",))
    (root / "machine-id").mkdir()
    with pytest.raises(UsageError, match="the image has no place for /machine-id: Is a directory"):
        fit(files=("/machine-id",))


def test_a_folder_that_cannot_be_made_is_an_error(fit, monkeypatch):
    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(UsageError, match="the image has no place for dev: Permission denied"):
        fit()


def test_read_only_folders_are_mounted_so_before(bare, monkeypatch, tmp_path):
    monkeypatch.setattr(namespace, "bind_read_only", lambda _, at: at)
    binds = (
        Bind(source=str(tmp_path), target="/a"),
        Bind(source=str(tmp_path), target="/b", read_only=True),
        Bind(source="/etc/hosts", target="/etc/hosts", read_only=True),
    )
    found = mount_read_only_sources(replace(bare, binds=binds), "/at")
    assert [bind.source for bind in found.binds] == [str(tmp_path), "/at/1", "/at/2"]


def test_what_a_runtime_mounts_of_the_node_is_read_only_before(monkeypatch, tmp_path):
    mounted = []
    monkeypatch.setattr(namespace, "mount_read_only", lambda source, at: mounted.append((source, at)))
    (tmp_path / "hosts").touch()
    make_node_read_only([str(tmp_path / "hosts"), str(tmp_path / "none")])
    assert {source for source, _ in mounted} >= {"/sys", "/proc/sys", "/proc/irq"}
    assert all(source == at for source, at in mounted)
    assert [source for source, _ in mounted if source.startswith(str(tmp_path))] == [f"{tmp_path}/hosts"]


def test_an_empty_file_is_made_once(tmp_path):
    places.create_mount_point(str(tmp_path / "new"))
    assert (tmp_path / "new").read_bytes() == b""
    with pytest.raises(FileExistsError):
        places.create_mount_point(str(tmp_path / "new"))
    assert Path(tmp_path / "new").exists()
