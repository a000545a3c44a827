"""cuda-compat from a folder or a package: its files, what its note states, and the cells that have it."""

import dataclasses
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from drivers import BRANCHES, VERSION, add_note, library, package
from matrices import add_properties

from imagematrix.build.matrix.expand import expand_matrix
from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.matrix.promised_variants import list_candidates, promise_variant
from imagematrix.build.plan import installer, lock
from imagematrix.build.plan.cell_inputs import expand_with_compat
from imagematrix.build.plan.driver import copy_driver, read_driver_folder
from imagematrix.build.plan.installer import unpack_installer
from imagematrix.build.plan.plan import PlanContext
from imagematrix.build.plan.planner import plan
from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import UserModeDriver

HOSTS = Path(__file__).parents[3] / "hosts"
AMD64 = "linux/amd64"
ONE = f"sha256:{'1' * 64}"
PLACE = "usr/local/cuda/compat"
DEB = "cuda-compat-13-0_580.159.04-1_amd64.deb"
COMPAT = UserModeDriver(mode="compat", version=VERSION, branches=BRANCHES, brands=("nvidia", "tesla"))
FROM_FOLDER = (
    ("550.163.01]", "550.163.01, compat]"),
    add_properties("driver: {compat: {compat_from: drivers/compat}}"),
)
NEW = "cuda=12.4,compute=8.9,march=znver4,driver=compat"
COPIES = "FROM {{ base }} AS compiler\nFROM {{ base }}\nCOPY --from=imagematrix-driver / /\n"
BOTH = COPIES.replace("COPY", "{% if driver == 'compat' %}\nCOPY") + "{% endif %}\n"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The folder with unpacked drivers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "imagematrix" / "drivers"


@pytest.fixture
def folder(compat_folder, tmp_path):
    """The folder that the matrix names."""
    return shutil.copytree(compat_folder, tmp_path / "drivers" / "compat")


def read(folder, platform=AMD64):
    return read_driver_folder(folder, "compat", platform)


def refusal(folder, platform=AMD64):
    with pytest.raises(UsageError) as caught:
        read(folder, platform)
    return str(caught.value).replace(str(folder), "DIR"), caught.value.remedy


def unpack(file):
    return unpack_installer(file, "compat", AMD64, lambda _: None)


def damage(file):
    with pytest.raises(UsageError) as caught:
        unpack(file)
    return str(caught.value).replace(str(file), "DEB")


def archive(target, *members):
    """Write an archive of ar(5) with these members, by names and contents."""
    folder = target.with_suffix(".members")
    folder.mkdir()
    for name, content in members:
        (folder / name).write_bytes(content)
    target.unlink(missing_ok=True)
    subprocess.run(["ar", "rc", target, *[folder / name for name, _ in members]], check=True)
    return target


def data(folder, *members, place="./usr/local/cuda-13.0/compat"):
    """Return the tar of a package with the files of a folder, and further members."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as made:
        for path in sorted(folder.iterdir()):
            made.add(path, f"{place}/{path.name}")
        for name, kind, link, content in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, link, len(content)
            made.addfile(member, io.BytesIO(content))
    return raw.getvalue()


def test_compat_is_where_nvidias_runtime_looks_for_it(folder, tmp_path):
    library(folder, "libcudadebugger", VERSION, soname="libcudadebugger.so.1")
    (folder / "libcuda.so.1").symlink_to(f"libcuda.so.{VERSION}")
    driver = read(folder)
    assert driver.compat == COMPAT
    assert sorted(driver.files) == [
        f"{PLACE}/libcuda.so.{VERSION}",
        f"{PLACE}/libnvidia-nvvm.so.{VERSION}",
        f"{PLACE}/libnvidia-ptxjitcompiler.so.{VERSION}",
    ]
    made = copy_driver(driver, tmp_path)
    assert (made / PLACE / "libcuda.so.1").readlink().name == f"libcuda.so.{VERSION}"
    assert [path.name for path in (made / PLACE).glob("libcuda.so.*.*")] == [f"libcuda.so.{VERSION}"]
    assert list((made / "etc/ld.so.conf.d").iterdir()) == []
    assert {path.lstat().st_mtime for path in made.rglob("*")} == {315_619_200}


@pytest.mark.parametrize("compression", ["xz", "gzip", "zstd", "none"])
def test_a_package_gives_the_same_as_a_folder(folder, tmp_path, compression):
    unpacked = unpack(package(folder, tmp_path / DEB, compression))
    assert read(unpacked).digest == read(folder).digest
    assert {path.name for path in unpacked.iterdir()} == {path.name for path in folder.iterdir()}
    assert not Path("/installed").exists()


def test_the_libraries_are_from_one_version(folder):
    library(folder, "libcuda", "575.57.08")
    message, remedy = refusal(folder)
    assert message == f"DIR has several libcuda: 575.57.08, {VERSION}"
    assert remedy == "keep the files of one version"
    for path in folder.glob("libcuda.so.*"):
        path.unlink()
    assert refusal(folder)[0] == "DIR has no libcuda.so.VERSION of cuda-compat"


def test_missing_libraries_are_named(folder):
    (folder / f"libnvidia-nvvm.so.{VERSION}").unlink()
    read(folder)  # cuda-compat 11.4 and older have none
    (folder / f"libnvidia-ptxjitcompiler.so.{VERSION}").rename(folder / "libnvidia-ptxjitcompiler.so.1")
    message, remedy = refusal(folder)
    assert message == (
        f"cuda-compat {VERSION} in DIR is not complete: it lacks libnvidia-ptxjitcompiler.so.{VERSION}; "
        "it has libnvidia-ptxjitcompiler.so.1"
    )
    assert "package cuda-compat" in remedy


def test_the_driver_of_a_node_is_none_of_cuda_compat(folder):
    library(folder, "libcuda", VERSION)
    assert refusal(folder)[0] == (
        f"DIR/libcuda.so.{VERSION} is from a driver without the note of cuda-compat, "
        f"not from cuda-compat {VERSION}"
    )


@pytest.mark.parametrize(
    ("note", "lacks"),
    [
        ({"branches": ()}, "branches of kernel drivers"),
        ({"brands": ()}, "brands of GPUs"),
        ({"brands": (99,)}, "brands of GPUs"),
        ({"branches": "all"}, "branches of kernel drivers"),
    ],
)
def test_a_note_that_proves_nothing_is_refused(folder, note, lacks):
    add_note(library(folder, "libcuda", VERSION), **note)
    message, remedy = refusal(folder)
    assert message == f"DIR/libcuda.so.{VERSION} has a note that lists no {lacks}"
    assert "Tegra" in remedy


def test_each_library_is_checked(folder):
    assert refusal(folder, "linux/arm64")[0].endswith("is not a library for aarch64")
    library(folder, "libnvidia-ptxjitcompiler", VERSION, inside="575.57.08")
    message = f"DIR/libnvidia-ptxjitcompiler.so.{VERSION} is from the driver 575.57.08, not {VERSION}"
    assert refusal(folder)[0] == message
    library(folder, "libnvidia-ptxjitcompiler", VERSION, soname="libcuda.so.1")
    assert refusal(folder)[0].endswith("has the soname libcuda.so.1")
    (folder / f"libnvidia-ptxjitcompiler.so.{VERSION}").write_bytes(b"\x7fELF" + bytes(100))
    assert refusal(folder)[0].endswith("is not a library for x86_64")


def test_other_members_of_a_package_are_not_written(folder, tmp_path, cache):
    outside = tmp_path / "outside"
    outside.mkdir()
    place, libcuda = "./usr/local/cuda-13.0/compat", f"libcuda.so.{VERSION}"
    hostile = (
        (f"../../compat/{libcuda}.1", tarfile.REGTYPE, "", b"climbs"),
        (f"/{outside}/compat/libnvidia-x.so.1", tarfile.REGTYPE, "", b"absolute"),
        (f"{place}/libnvidia-evil.so.1", tarfile.SYMTYPE, "/etc/passwd", b""),
        (f"{place}/libnvidia-hard.so.1", tarfile.LNKTYPE, "/etc/passwd", b""),
        (f"{place}/libnvidia-node.so.1", tarfile.CHRTYPE, "", b""),
        (f"{place}/run.sh", tarfile.REGTYPE, "", b"#!/bin/sh\n"),
        (f"./usr/lib/{libcuda}", tarfile.REGTYPE, "", b"elsewhere"),
    )
    deb = archive(tmp_path / DEB, ("debian-binary", b"2.0\n"), ("data.tar", data(folder, *hostile)))
    unpacked = unpack(deb)
    assert read(unpacked).digest == read(folder).digest
    assert all(path.is_file() and not path.is_symlink() for path in unpacked.iterdir())
    assert list(outside.iterdir()) == []
    assert not (unpacked / "run.sh").exists()
    assert list(cache.iterdir()) == [unpacked]


def test_the_same_library_twice_is_refused(folder, tmp_path):
    twice = (f"./opt/compat/libcuda.so.{VERSION}", tarfile.REGTYPE, "", b"another")
    deb = archive(tmp_path / DEB, ("data.tar", data(folder, twice)))
    assert "File exists" in damage(deb)


def test_a_damaged_package_does_not_enter_the_cache(folder, tmp_path, cache):
    whole = package(folder, tmp_path / DEB).read_bytes()
    deb = tmp_path / DEB
    for cut in (len(whole) // 2, len(whole) - 5):
        deb.write_bytes(whole[:cut])
        assert damage(deb).startswith("DEB is damaged: "), cut
    deb.write_bytes(whole[:8])
    assert damage(deb) == "DEB is damaged: it has 0 members data.tar"
    twice = archive(deb, ("data.tar.xz", b""), ("data.tar", b""))
    assert damage(twice) == "DEB is damaged: it has 2 members data.tar"
    assert not list(cache.iterdir())


def test_expansion_is_limited(folder, tmp_path, monkeypatch, cache):
    deb = package(folder, tmp_path / DEB)
    monkeypatch.setattr(installer, "MOST_BYTES", 1 << 12)
    assert damage(deb) == f"DEB is damaged: it expands to more than {1 << 12} bytes"
    monkeypatch.setattr(installer, "MOST_FILES", 3)
    monkeypatch.setattr(installer, "MOST_BYTES", 1 << 30)
    assert damage(deb) == "DEB is damaged: more than 3 files"
    monkeypatch.setattr(installer, "MEMORY", 1 << 10)
    assert "Memory usage limit" in damage(deb)
    assert list(cache.iterdir()) == []


def test_files_of_the_other_kind_are_named_for_what_they_are(folder, tmp_path):
    deb = package(folder, tmp_path / DEB)
    with pytest.raises(UsageError, match="is a package of Debian") as caught:
        unpack_installer(deb, VERSION, AMD64, print)
    assert caught.value.remedy == "driver_from takes the driver of a node, compat_from takes cuda-compat"
    script = tmp_path / "NVIDIA.run"
    script.write_bytes(b"#!/bin/sh\nskip=3\n")
    assert "is neither a folder nor a package of cuda-compat" in damage(script)


def test_a_cell_has_what_the_note_states(planned, carry_out, folder):
    found = planned(*FROM_FOLDER, only=NEW, template=BOTH)
    (item,) = found.with_status("build")
    assert item.cell.id == "cuda12.4-sm89-drvcompat-znver4"
    assert item.identity.components["driver"] == read(folder).digest
    assert promise_variant(item.cell).driver == COMPAT
    (result,) = carry_out(found)
    assert result.status == "built"
    assert json.loads(result.labels[labels.VARIANT])["driver"] == COMPAT.to_json()


def test_the_version_in_an_image_is_known_once_it_was_read(project, folder):
    path = project(("550.163.01]", "550.163.01, compat, host]"), FROM_FOLDER[1], template=BOTH)
    unread = {cell.driver: cell.driver_version for cell in expand_matrix(load_matrix(path)).cells}
    versions = {None: None, "host": None, "535.261.03": "535.261.03", "550.163.01": "550.163.01"}
    assert unread == versions | {"compat": None}
    read_cells = expand_with_compat(load_matrix(path)).cells
    assert {cell.driver: cell.driver_version for cell in read_cells} == versions | {"compat": VERSION}
    assert folder.is_dir()


def test_other_cells_stay_as_they_are(planned, folder, tmp_path):
    (tmp_path / ".dockerignore").write_text("*\n")
    with_compat = planned(*FROM_FOLDER, template=BOTH)
    without = planned(template=BOTH)
    identities = {item.cell.id: item.identity for item in with_compat.with_status("build")}
    for item in without.with_status("build"):
        assert identities.pop(item.cell.id) == item.identity
    assert {name.split("-")[2] for name in identities} == {"drvcompat"}
    assert folder.is_dir()


def test_a_compat_that_is_too_old_is_infeasible(planned, folder):
    add_note(library(folder, "libcuda", "450.51.06"))
    for name in ("libnvidia-ptxjitcompiler", "libnvidia-nvvm"):
        library(folder, name, "450.51.06")
        (folder / f"{name}.so.{VERSION}").unlink()
    (folder / f"libcuda.so.{VERSION}").unlink()
    (item,) = planned(*FROM_FOLDER, only=NEW, template=BOTH).list_dropped("infeasible")
    assert item.rule == "driver-cuda"
    assert item.why == "cuda-compat 450.51.06 is too old for CUDA 12.4, which needs 525.60.13"


@pytest.mark.parametrize(
    ("changes", "template", "why"),
    [
        (FROM_FOLDER[:1], BOTH, "the driver compat has no compat_from"),
        (
            FROM_FOLDER,
            "FROM {{ base }}\n",
            "the template takes the driver from elsewhere, not from compat_from",
        ),
        (
            (FROM_FOLDER[0], add_properties("driver: {compat: {compat_from: drivers/compot}}")),
            BOTH,
            "drivers/compot of the driver compat not found",
        ),
    ],
)
def test_a_cell_without_its_compat_fails_alone(planned, folder, changes, template, why):
    found = planned(*changes, template=template)
    failed = found.with_status("failed")
    assert {item.cell.axes["driver"] for item in failed} == {"compat"}
    assert {item.why.removeprefix(f"{folder.parents[1]}/") for item in failed} == {why}
    assert all(item.error.remedy for item in failed[:1]) is (why.startswith("the template") is False)
    assert found.with_status("build")


@pytest.mark.parametrize("name", ["compat_from", "driver_from"])
def test_what_is_no_file_is_not_read(planned, tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    value = "compat" if name == "compat_from" else "550.163.01"
    properties = add_properties(f"driver: {{{value}: {{{name}: pipe}}}}")
    template = BOTH.replace("'compat'", f"'{value}'")
    only = NEW.replace("compat", value)
    (item,) = planned(FROM_FOLDER[0], properties, only=only, template=template).with_status("failed")
    assert item.why == f"{tmp_path}/pipe of the driver {value} is neither a file nor a folder"


def test_a_release_may_have_its_own(planned, folder):
    cuda = ('"12.4": {', '"12.4": {compat_from: drivers/compat, ')
    (item,) = planned(FROM_FOLDER[0], cuda, only=NEW, template=BOTH).with_status("build")
    assert item.cell.compat == COMPAT
    assert folder.is_dir()


@pytest.fixture
def locked(project, downloads, compat_folder, cli, no_engine, tmp_path):  # noqa: ARG001 - no engine answers
    """The path of a matrix with the cuda-compat at an address of `downloads`, all of it locked."""
    (tmp_path / ".dockerignore").write_text("*\n")
    deb = package(compat_folder, tmp_path / DEB)
    downloads.files[f"/{DEB}"] = deb.read_bytes()
    place = f"{downloads.address}/cuda-compat-13-0_580.159.04-1_{{arch}}.deb"
    properties = add_properties(f'driver: {{compat: {{compat_from: "{place}"}}}}')
    path = project(FROM_FOLDER[0], properties, template=BOTH)
    lock.extend_lock(lock.locate_lock(path), dict.fromkeys(("debian:bookworm", "debian:trixie"), ONE))
    said = cli("lock", "-f", path)
    assert said.code == 0, said.err
    return path


def plan_locked(path, backend):
    drivers = lock.read_lock(lock.locate_lock(path))[1]
    against = PlanContext(resolve=backend.resolve, store=backend, drivers=drivers)
    return plan(load_matrix(path), against, expression=NEW)


def change_lock(path, change):
    name = lock.locate_lock(path)
    document = json.loads(name.read_text())
    change(document["drivers"][0])
    name.write_text(json.dumps(document))


def test_a_lock_has_what_the_note_states(locked, downloads, backend, compat_folder, tmp_path, conforms):
    document = json.loads(lock.locate_lock(locked).read_text())
    conforms(document)
    (entry,) = document["drivers"]
    assert entry["address"] == f"{downloads.address}/{DEB}"
    assert entry["driver"] == read(compat_folder).digest
    assert entry["compat"] == COMPAT.to_json()
    shutil.rmtree(tmp_path / "cache")
    downloads.close()
    (item,) = plan_locked(locked, backend).with_status("build")
    assert item.cell.compat == COMPAT
    assert item.identity.components["driver"] == read(compat_folder).digest
    (same,) = list_candidates_with_compat(locked)
    assert same.driver == COMPAT


def list_candidates_with_compat(path):
    matrix = load_matrix(path)
    listed = list_candidates(matrix, expand_with_compat(matrix), matrix.images[0]).catalog.variants
    return [one for one in listed if one.reference.endswith("cuda12.4-sm89-drvcompat-znver4")]


def test_a_note_that_is_not_that_of_the_lock_is_refused(locked, backend):
    change_lock(locked, lambda entry: entry["compat"].update(branches=[535, 999]))
    (item,) = plan_locked(locked, backend).with_status("build")
    with pytest.raises(UsageError, match="has another note of cuda-compat than the lock file states"):
        item.driver.fetch_folder(print)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: entry.pop("compat"), "as another kind of driver"),
        (lambda entry: entry["compat"].update(mode="exact"), "compat: its mode is exact"),
        (lambda entry: entry["compat"].update(version="580;rm"), "is not a driver version"),
    ],
)
def test_a_lock_without_the_note_is_refused(cli, locked, change, message):
    change_lock(locked, change)
    said = cli("plan", "-f", locked, "--only", NEW)
    assert said.code == 2
    assert message in said.err + said.out.replace("\n", " ")


def test_cells_whose_compat_is_unknown_are_no_candidates(project, folder):
    path = project(*FROM_FOLDER, template=BOTH)
    assert [one.driver for one in list_candidates_with_compat(path)] == [COMPAT]
    shutil.rmtree(folder)
    assert list_candidates_with_compat(path) == []


def test_hosts_of_the_branches_choose_it(cli, project, folder, tmp_path):
    """A host with an older driver of the note's branches, one of another branch, one that is newer."""
    path = project(*FROM_FOLDER, template=BOTH)
    document = json.loads((HOSTS / "icelake-l40s.json").read_text())
    needed = {}
    for version in ("570.133.20", "560.35.05", "590.44.01"):
        host = tmp_path / f"{version}.json"
        host.write_text(json.dumps(document | {"driver": document["driver"] | {"version": version}}))
        said = cli("plan", "-f", path, "--for", host, "--json")
        images = json.loads(said.out)["for"]["images"]
        needed[version] = [name for name in images[0]["needed"] if "-cpu-" not in name]
    assert needed == {
        "570.133.20": ["training:v1-cuda12.4-sm89-drvcompat-x86-64-v3"],
        "560.35.05": [],
        "590.44.01": [],
    }
    assert folder.is_dir()


@pytest.mark.usefixtures("folder")
def test_plan_warns_of_nccl(cli, planned, tmp_path, monkeypatch):
    (tmp_path / ".dockerignore").write_text("*\n")
    found = planned(*FROM_FOLDER, only="march=znver4,cuda=12.4,compute=8.9", template=BOTH)
    exact, compat = sorted(found.with_status("build"), key=lambda item: item.cell.driver)[1:]
    entry = replace(promise_variant(exact.cell), libraries=(("nccl", "2.27.3"),))
    built = dataclasses.replace(exact, labels={labels.VARIANT: labels.write_variant(entry)})
    plan_ = dataclasses.replace(found, items=(built, compat))
    monkeypatch.setattr("imagematrix.cli.plan.plan_and_compare", lambda *_, **__: plan_)
    said = cli("plan", "-f", tmp_path / "matrix.yaml")
    assert said.err.count("training: NCCL 2.27.3 ends with an error where it finds no libnvidia-ml") == 1
    plan_ = dataclasses.replace(found, items=(built,))
    assert "NCCL" not in cli("plan", "-f", tmp_path / "matrix.yaml").err
