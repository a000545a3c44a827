"""A driver from a folder: its files are complete and match its version, or the plan reports the problem."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from drivers import TEMPLATE, VERSION, library
from matrices import add_include, add_properties

from imagematrix.build.plan import installer
from imagematrix.build.plan.driver import CONTEXT, copy_driver, read_driver_folder
from imagematrix.errors import BuildError, UsageError

PLACE = "usr/lib/x86_64-linux-gnu"
FROM_FOLDER = (
    ("550.163.01]", f"550.163.01, {VERSION}]"),
    add_properties(f"driver: {{{VERSION}: {{driver_from: drivers/new}}}}"),
)
NEW = f"cuda=12.4,compute=8.9,march=znver4,driver={VERSION}"


@pytest.fixture
def folder(unpacked, tmp_path):
    """The folder that the matrix names, with a complete driver."""
    return shutil.copytree(unpacked, tmp_path / "drivers" / "new")


@pytest.fixture
def built(carry_out):
    """Call it with a plan to carry it out; it returns the statuses of the results."""
    return lambda plan: {result.status for result in carry_out(plan)}


def driver_of(plan):
    (item,) = plan.with_status("build")
    return item.identity.components["driver"]


def refusal(folder, platform="linux/amd64"):
    with pytest.raises(UsageError) as caught:
        read_driver_folder(folder, VERSION, platform)
    return str(caught.value).replace(str(folder), "DIR"), caught.value.remedy


def test_driver_libraries_get_their_names_in_the_image(folder, tmp_path):
    (folder / "libGLX_nvidia.so.580.159.04").write_text("not for programs that compute")
    (folder / "libcuda.so.1").symlink_to("libcuda.so.580.159.04")
    driver = read_driver_folder(folder, VERSION, "linux/amd64")
    assert sorted(driver.files) == [
        f"{PLACE}/libcuda.so.{VERSION}",
        f"{PLACE}/libnvidia-ml.so.{VERSION}",
        f"{PLACE}/libnvidia-nvvm.so.{VERSION}",
        f"{PLACE}/libnvidia-ptxjitcompiler.so.{VERSION}",
    ]
    placed = copy_driver(driver, tmp_path)
    assert placed.name == driver.listing.digest.removeprefix("sha256:")
    made = placed / PLACE
    assert (made / "libnvidia-nvvm.so.4").readlink().name == f"libnvidia-nvvm.so.{VERSION}"
    assert (made / "libcuda.so.1").read_bytes() == (folder / f"libcuda.so.{VERSION}").read_bytes()
    assert len(list(made.iterdir())) == 8
    assert {path.lstat().st_mtime for path in placed.rglob("*")} == {315_619_200}
    assert {path.stat().st_mode & 0o777 for path in (placed, made)} == {0o755}


def test_optional_libraries_are_taken_if_present_or_needed(folder):
    library(folder, "libnvidia-gpucomp", VERSION)
    library(folder, "libnvidia-nvvm70", VERSION, soname="libnvidia-nvvm70.so.4", file="libnvidia-nvvm70.so.4")
    needed = library(folder, "libnvidia-made-up", VERSION)
    library(folder, "libnvidia-tileiras", VERSION, "-Wl,--no-as-needed", needed)
    found = {
        name.removeprefix(f"{PLACE}/") for name in read_driver_folder(folder, VERSION, "linux/amd64").files
    }
    assert {
        f"libnvidia-gpucomp.so.{VERSION}",
        "libnvidia-nvvm70.so.4",
        f"libnvidia-made-up.so.{VERSION}",
        f"libnvidia-tileiras.so.{VERSION}",
    } <= found
    assert len(found) == 8
    needed.unlink()
    assert refusal(folder)[0].endswith(f"is not complete: it lacks libnvidia-made-up.so.{VERSION}")


def test_missing_libraries_are_named(folder):
    (folder / f"libnvidia-nvvm.so.{VERSION}").unlink()
    (folder / f"libcuda.so.{VERSION}").rename(folder / "libcuda.so.580.95.05")
    message, remedy = refusal(folder)
    assert message == (
        f"the driver {VERSION} in DIR is not complete: it lacks libcuda.so.{VERSION}, "
        f"libnvidia-nvvm.so.{VERSION}; it has libcuda.so.580.95.05"
    )
    assert "NVIDIA's installer" in remedy


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"inside": "575.57.08"}, f"DIR/libcuda.so.{VERSION} is from the driver 575.57.08, not {VERSION}"),
        ({"soname": "libnvidia-ml.so.1"}, f"DIR/libcuda.so.{VERSION} has the soname libnvidia-ml.so.1"),
    ],
)
def test_library_of_another_driver_is_rejected(folder, changes, expected):
    library(folder, "libcuda", VERSION, **changes)
    assert refusal(folder)[0] == expected


def test_library_of_cuda_compat_is_rejected(folder, tmp_path):
    (tmp_path / "note").write_text('{"CUDA Version": "13.0"}')
    library(folder, "libcuda", VERSION)
    path = folder / f"libcuda.so.{VERSION}"
    section = f".note.cuda.fwd_compatibility={tmp_path / 'note'}"
    subprocess.run(["objcopy", "--add-section", section, path], check=True)
    assert refusal(folder)[0].endswith(f"is from cuda-compat, not from the driver {VERSION}")


def test_files_of_another_platform_or_type_are_rejected(folder):
    assert refusal(folder, "linux/arm64")[0].endswith("is not a library for aarch64")
    (folder / f"libcuda.so.{VERSION}").write_text("no library")
    assert refusal(folder)[0] == f"DIR/libcuda.so.{VERSION} is not a library for x86_64"


def test_unreadable_folder_is_rejected(tmp_path):
    assert refusal(tmp_path / "missing")[0] == "DIR: No such file or directory"


def test_driver_changed_after_the_plan_is_a_build_error(folder, tmp_path):
    driver = read_driver_folder(folder, VERSION, "linux/amd64")
    library(folder, "libnvidia-ml", VERSION, "-Wl,--build-id=none", inside="580.159.04 ")
    with pytest.raises(BuildError, match=rf"changed after the plan was made: {PLACE}/libnvidia-ml\.so\."):
        copy_driver(driver, tmp_path)
    (folder / f"libnvidia-ml.so.{VERSION}").unlink()
    with pytest.raises(BuildError, match="No such file"):
        copy_driver(driver, tmp_path)


def test_driver_is_part_of_the_identity_and_passed_to_the_build(planned, backend, built, folder, monkeypatch):
    found = planned(*FROM_FOLDER, only="march=znver4,cuda=12.4,compute=8.9", template=TEMPLATE)
    by_driver = {item.cell.axes["driver"]: item for item in found.with_status("build")}
    digest = read_driver_folder(folder, VERSION, "linux/amd64").listing.digest
    assert by_driver[VERSION].identity.components["driver"] == digest
    assert "driver" not in by_driver["550.163.01"].identity.components
    assert CONTEXT not in found.bases
    lent = {}
    make = backend.make

    def watched(order, log, step):
        place = Path(order.sources.contexts.get(CONTEXT, "/nowhere"))
        lent[order.reference] = {path.name for path in place.rglob("libcuda*")}
        return make(order, log, step)

    monkeypatch.setattr(backend, "make", watched)
    assert built(found) == {"built"}
    assert lent[by_driver[VERSION].reference] == {"libcuda.so.1", f"libcuda.so.{VERSION}"}
    assert lent[by_driver["550.163.01"].reference] == set()


def test_changed_driver_files_change_the_image(planned, built, folder, tmp_path):
    (tmp_path / ".dockerignore").write_text("drivers\n")
    built(planned(*FROM_FOLDER, only=NEW, template=TEMPLATE))
    library(folder, "libnvidia-gpucomp", VERSION)
    (item,) = planned(*FROM_FOLDER, only=NEW, template=TEMPLATE).with_status("refused")
    assert item.why == "driver changed"


def test_invalid_folder_fails_only_its_own_cells(planned, folder):
    (folder / f"libnvidia-ml.so.{VERSION}").unlink()
    found = planned(*FROM_FOLDER, template=TEMPLATE)
    failed = found.with_status("failed")
    assert {item.cell.axes["driver"] for item in failed} == {VERSION}
    assert {item.why.partition(" in ")[0] for item in failed} == {f"the driver {VERSION}"}
    assert len(found.with_status("build")) > len(failed)


def test_missing_folder_or_installer_fails_only_its_own_cells(planned, tmp_path):
    (tmp_path / "drivers" / "new.run").mkdir(parents=True)
    found = planned(
        FROM_FOLDER[0], (FROM_FOLDER[1][0], FROM_FOLDER[1][1].replace("new", "nev.run")), template=TEMPLATE
    )
    failed = found.with_status("failed")
    assert {item.cell.axes["driver"] for item in failed} == {VERSION}
    assert {item.why for item in failed} == {f"{tmp_path}/drivers/nev.run of the driver {VERSION} not found"}
    assert {item.error.remedy for item in failed} == {"did you mean 'drivers/new.run'?"}
    assert len(found.with_status("build")) > len(failed)


def test_one_line_for_the_installers_of_all_versions(planned, tmp_path, unpacked, monkeypatch):
    """Its image is that of a folder with the same files, also for a version that only `include` names."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / ".dockerignore").write_text("drivers\ncache\n*.gz\n")
    folder = shutil.copytree(unpacked, tmp_path / "drivers" / "new")
    expected = driver_of(planned(*FROM_FOLDER, only=NEW, template=TEMPLATE))
    (folder / ".manifest").write_text(f"NVIDIA\n{VERSION}\n")
    archive = tmp_path / "payload.tar.gz"
    subprocess.run(["tar", "-C", folder, "-czf", archive, "."], check=True)
    installer = tmp_path / "drivers" / f"NVIDIA-Linux-x86_64-{VERSION}.run"
    installer.write_bytes(b"#!/bin/sh\nskip=3\n" + archive.read_bytes())
    shutil.rmtree(folder)
    every = add_properties("driver: {'*': {driver_from: 'drivers/NVIDIA-Linux-{arch}-{version}.run'}}")
    for version in (FROM_FOLDER[0], add_include(f"{{{NEW.replace('=', ': ')}}}")):
        assert driver_of(planned(version, every, only=NEW, template=TEMPLATE)) == expected


@pytest.mark.parametrize(
    ("template", "changes", "why"),
    [
        (
            "FROM debian:trixie\nCOPY --from=imagematrix-driver / /\n",
            (),
            "the driver 550.163.01 has neither driver_base nor driver_from",
        ),
        (
            "FROM debian:trixie\n",
            FROM_FOLDER,
            "the template takes the driver from elsewhere, not from driver_from",
        ),
    ],
)
@pytest.mark.usefixtures("folder")
def test_template_and_matrix_must_agree_on_the_driver(planned, template, changes, why):
    version = VERSION if changes else "550.163.01"
    only = f"cuda=12.4,compute=8.9,march=znver4,driver={version}"
    (item,) = planned(*changes, only=only, template=template).with_status("failed")
    assert item.why == why


def test_source_that_cannot_be_read_fails_its_cells(planned, folder, monkeypatch):
    """Such as a path in a folder that only others can search."""
    shutil.rmtree(folder)
    folder.write_text("an installer")

    def refuse(source, *_):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(source))

    monkeypatch.setattr(installer, "unpack_installer", refuse)
    (item,) = planned(*FROM_FOLDER, only=NEW, template=TEMPLATE).with_status("failed")
    assert item.why == f"{folder}: Permission denied"
