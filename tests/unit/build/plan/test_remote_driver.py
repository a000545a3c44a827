"""A driver at an https address: locked by two digests, downloaded by the build that needs it."""

import io
import json
import lzma
import shutil
import tarfile

import pytest
from drivers import TEMPLATE, VERSION

from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.plan import lock
from imagematrix.build.plan.driver import CONTEXT, read_driver_folder
from imagematrix.build.plan.plan import PlanContext
from imagematrix.build.plan.planner import plan
from imagematrix.errors import UsageError

FILE = f"nvidia_driver-linux-x86_64-{VERSION}-archive.tar.xz"
ONE = f"sha256:{'1' * 64}"


@pytest.fixture
def matrix(project, downloads, unpacked, tmp_path):
    """The path of a matrix with the driver at an address of `downloads`, and the bases locked."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        archive.add(unpacked, "driver-archive/lib")
    downloads.files[f"/{FILE}"] = lzma.compress(raw.getvalue())
    (tmp_path / ".dockerignore").write_text("*\n")
    name = f"{downloads.address}/nvidia_driver-linux-{{arch}}-{{version}}-archive.tar.xz"
    path = project(
        ("550.163.01]", f"550.163.01, {VERSION}]"),
        (
            "exclude:\n",
            f'  driver: {{"*": {{driver_from: "{name}"}}, 550.163.01: {{}}, 535.261.03: {{}}}}\nexclude:\n',
        ),
        template=TEMPLATE,
    )
    lock.extend_lock(lock.locate_lock(path), dict.fromkeys(("debian:bookworm", "debian:trixie"), ONE))
    return path


@pytest.fixture
def against(backend):
    """Call it with a matrix to get what `build` plans it against."""

    def call(path):
        drivers = lock.read_lock(lock.locate_lock(path))[1]
        return PlanContext(resolve=backend.resolve, store=backend, drivers=drivers)

    return call


def with_driver(found, *statuses):
    return [item for item in found.with_status(*statuses) if item.cell.axes.get("driver") == VERSION]


@pytest.mark.usefixtures("no_engine")
def test_lock_writes_the_digests_of_the_file_and_of_the_driver(cli, matrix, downloads, unpacked):
    address = f"{downloads.address}/{FILE}"
    said = cli("lock", "-f", matrix)
    assert said.code == 0, said.err
    assert f"downloading {address}: 0 of 0 MB" in said.err
    assert f"{address}: new -> sha256:" in said.err
    assert said.err.endswith("imagematrix.lock: 2 base images, 1 driver\n")
    (locked,) = lock.read_lock(lock.locate_lock(matrix))[1].items()
    assert locked[0] == address
    assert locked[1].driver == read_driver_folder(unpacked, VERSION, "linux/amd64").digest
    before = lock.locate_lock(matrix).read_text()
    downloads.close()
    assert cli("lock", "-f", matrix).code == 0, "what is locked is not downloaded"
    lock.extend_lock(lock.locate_lock(matrix), {"debian:bookworm": ONE})
    assert lock.locate_lock(matrix).read_text() == before


@pytest.mark.usefixtures("no_engine")
def test_plan_needs_no_download(cli, matrix, downloads, against, tmp_path, unpacked):
    (failed, *_) = with_driver(plan(load_matrix(matrix), against(matrix)), "failed")
    assert failed.why == f"{downloads.address}/{FILE} not found in the lock file"
    assert "imagematrix lock" in failed.error.remedy
    assert cli("lock", "-f", matrix).code == 0
    shutil.rmtree(tmp_path / "cache")
    downloads.close()
    (item, *_) = with_driver(plan(load_matrix(matrix), against(matrix)), "build")
    assert item.identity.components["driver"] == read_driver_folder(unpacked, VERSION, "linux/amd64").digest
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("no_engine")
def test_build_downloads_once_and_checks(cli, matrix, downloads, against, backend, carry_out, tmp_path):
    assert cli("lock", "-f", matrix).code == 0
    lent = []
    make = backend.make

    def watched(order, log, step):
        lent.append(order.sources.contexts.get(CONTEXT))
        return make(order, log, step)

    def built():
        return carry_out(plan(load_matrix(matrix), against(matrix)), jobs=2)

    shutil.rmtree(tmp_path / "cache")
    downloads.requests = []
    archive = downloads.files[f"/{FILE}"]
    downloads.files[f"/{FILE}"] = archive + b"x"
    backend.make = watched
    results = built()
    failed = [result for result in results if result.status == "failed"]
    assert {result.item.cell.axes["driver"] for result in failed} == {VERSION}
    assert {"has another content" in str(result.error) for result in failed} == {True}
    assert {result.status for result in results} == {"built", "failed"}
    downloads.files[f"/{FILE}"] = archive
    downloads.requests = []
    assert {result.status for result in built()} == {"built"}
    assert len(downloads.requests) == 2, "the answer to look at, and the content"
    assert len({place for place in lent if place}) == 1


@pytest.mark.usefixtures("no_engine")
def test_files_that_give_another_driver_than_locked_fail(cli, matrix, against):
    """As if a later release of imagematrix took other files out of the same installer."""
    assert cli("lock", "-f", matrix).code == 0
    path = lock.locate_lock(matrix)
    document = json.loads(path.read_text())
    document["drivers"][0]["driver"] = ONE
    path.write_text(json.dumps(document))
    (item, *_) = with_driver(plan(load_matrix(matrix), against(matrix)), "build")
    with pytest.raises(UsageError, match=f"gives the driver sha256:[0-9a-f]+, not {ONE} as locked"):
        item.driver.fetch_folder(print)


@pytest.mark.usefixtures("no_engine")
def test_lock_names_what_it_cannot_download(cli, matrix, downloads):
    downloads.files.clear()
    said = cli("lock", "-f", matrix)
    assert said.code == 8
    assert f"{FILE}: the server answers 404 Not Found" in said.err
    assert lock.read_lock(lock.locate_lock(matrix))[1] == {}


@pytest.mark.usefixtures("no_engine")
def test_locked_driver_of_a_cell_that_fails_stays(cli, matrix):
    assert cli("lock", "-f", matrix).code == 0
    before = lock.locate_lock(matrix).read_text()
    (template,) = (matrix.parent / "templates").rglob("*.j2")
    template.write_text(TEMPLATE.replace("AS compiler", "\nRUN cc {{ march_option }}"))
    assert cli("lock", "-f", matrix).code == 0
    assert lock.locate_lock(matrix).read_text() == before


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"address": "https://x/y", "file": "md5:1", "driver": ONE}, "'md5:1' is not a sha256 digest"),
        ({"address": "https://x/y", "file": ONE}, "driver"),
    ],
)
def test_damaged_entries_are_named(cli, matrix, entry, message):
    path = lock.locate_lock(matrix)
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"drivers": [entry]}))
    said = cli("plan", "-f", matrix)
    assert said.code == 2
    assert message in said.err
    entry = {"address": "https://x/y", "file": ONE, "driver": ONE}
    path.write_text(json.dumps(document | {"drivers": [entry, entry]}))
    assert "https://x/y occurs twice" in cli("plan", "-f", matrix).err
