"""The catalog of a step in the shared folder: one for all tasks of the step, and for no other step."""

import contextlib
import json
import os
import shutil
import signal
import stat
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

from imagematrix.common import json_documents
from imagematrix.common.record import replace
from imagematrix.errors import ImagematrixError, ProbeError, UsageError
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.integrations.slurm import step_catalog
from imagematrix.integrations.slurm.step import SlurmStep
from imagematrix.integrations.slurm.step_catalog import prepare_folder, share_catalog

STEP = SlurmStep(
    image="training:v1",
    job="17",
    restart="0",
    start="1795878794",
    number="0",
    nodes=("a", "b"),
    node="a",
)
DAY = 24 * 3600
NOBODY = 65534
USER = 4711
STEPS = 50
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")


@pytest.fixture
def folder(tmp_path):
    """The shared folder."""
    prepare_folder(str(tmp_path))
    return tmp_path


@pytest.fixture
def own(folder):
    """This user's folder."""
    made = folder / "steps" / str(os.geteuid())
    made.mkdir(mode=0o700)
    return made


def catalog(version):
    """Return a catalog without variants, which its version tells from others."""
    return Catalog(image="training", version=version, variants=())


def opened(version):
    """Return a function that opens a catalog."""
    return lambda: catalog(version)


def not_opened():
    """Fail, as the catalog of the step is there."""
    raise AssertionError("the catalog was opened")


def taken(folder, step=STEP, version="v1"):
    """Return the version of the catalog that a task takes, which would open `version` if it is the first."""
    return share_catalog(step, str(folder), opened(version)).version


def stored(folder):
    """Return the files in the folders of users."""
    return sorted(path for path in (folder / "steps").glob("*/*") if not path.is_dir())


def test_the_first_task_stores_it_for_all_others(folder):
    assert taken(folder, version="v1") == "v1"
    assert share_catalog(replace(STEP, node="b"), str(folder), not_opened).version == "v1"
    (path,) = stored(folder)
    assert path.parent == folder / "steps" / str(os.geteuid())
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.name.startswith("17.0-")
    said = json.loads(path.read_text())
    assert said | {"catalog": {}} == {
        "schema": "imagematrix.step-catalog/v1",
        "image": "training:v1",
        "job": "17",
        "restart": "0",
        "start": "1795878794",
        "step": "0",
        "catalog": {},
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"image": "other:v9"},
        {"image": f"[::1]:5000/{'a/' * 2000}b@sha256:{'0' * 64}"},  # longer than the name of a file
        {"restart": "1", "start": "1795878818"},
        {"restart": "1"},
        {"start": ""},
        {"job": "18"},
        {"number": "1"},
    ],
)
def test_another_image_run_or_step_has_its_own(folder, changes):
    assert taken(folder, version="v1") == "v1"
    assert taken(folder, replace(STEP, **changes), "v2") == "v2"
    assert taken(folder, version="v3") == "v1"


def test_a_catalog_that_cannot_be_opened_is_an_error_of_each_run(folder):
    """The image of a job's second run is not there: that of the first is no substitute."""

    def missing():
        raise UsageError("no such image")

    assert taken(folder) == "v1"
    again = replace(STEP, image="other:v9", restart="1", start="1795878818")
    with pytest.raises(UsageError, match="no such image"):
        share_catalog(again, str(folder), missing)


@pytest.mark.parametrize("kind", ["folder", "file", "link", "foreign"])
def test_somebody_else_s_names_stop_nobody(folder, kind, tmp_path):
    place = folder / "steps" / str(os.geteuid())
    if kind == "file":
        place.touch()
    elif kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(tmp_path / "elsewhere")
    else:
        place.mkdir()
        place.chmod(0o777)
        if kind == "foreign":
            if os.geteuid():
                pytest.skip("only root can give a folder away")
            os.chown(place, NOBODY, NOBODY)
    assert taken(folder, version="v1") == "v1"
    assert [path.parent.name for path in stored(folder)] == [f"{os.geteuid()}.1"]
    assert not [*(tmp_path / "elsewhere").glob("*")]
    # The name is free again, and the folder that exists goes on being this user's.
    if place.is_dir() and not place.is_symlink():
        place.rmdir()
    else:
        place.unlink()
    assert taken(folder, version="v2") == "v1"
    assert taken(folder, replace(STEP, number="1"), "v2") == "v2"
    assert {path.parent.name for path in stored(folder)} == {f"{os.geteuid()}.1"}


def test_who_takes_all_names_is_told(folder):
    for number in range(16):
        (folder / "steps" / (f"{os.geteuid()}.{number}" if number else str(os.geteuid()))).touch()
    with pytest.raises(UsageError, match="others have taken all names") as caught:
        taken(folder)
    assert "the administrator removes" in str(caught.value.remedy)


def test_two_catalogs_of_a_step_end_its_tasks(folder, own):
    assert taken(folder, version="v1") == "v1"
    (path,) = stored(folder)
    second = folder / "steps" / f"{os.geteuid()}.7"
    shutil.copytree(own, second)
    assert taken(folder, version="v2") == "v1"  # they say the same
    (second / path.name).write_text(path.read_text().replace('"version": "v1"', '"version": "v2"'))
    with pytest.raises(ProbeError, match=r"step 17\.0 has different catalogs") as caught:
        taken(folder)
    assert caught.value.exit_code == 5
    assert str(path) in str(caught.value)
    assert str(second / path.name) in str(caught.value)


def test_a_second_catalog_that_comes_while_a_task_stores_its_own_ends_it(folder, monkeypatch):
    """The other task saw no folder, and came to have one of another name."""
    other = folder / "steps" / f"{os.geteuid()}.1"
    real = os.link

    def link(draft, path):
        real(draft, path)
        other.mkdir(mode=0o700)
        text = Path(path).read_text().replace('"version": "v1"', '"version": "v2"')
        (other / Path(path).name).write_text(text)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(ProbeError, match="different catalogs"):
        taken(folder)


def test_a_second_catalog_that_comes_while_a_task_looks_ends_it(folder, monkeypatch):
    """It comes to a folder in which the task has looked already, before the one that the task has found."""
    second = folder / "steps" / f"{os.geteuid()}.1"
    assert taken(folder, version="v1") == "v1"
    (path,) = stored(folder)
    second.mkdir(mode=0o700)
    path.rename(second / path.name)
    real = step_catalog._read_file
    first = iter([str(path)])

    def read(place):
        try:
            return real(place)
        finally:
            if place == next(first, None):
                text = (second / path.name).read_text().replace('"version": "v1"', '"version": "v2"')
                path.write_text(text)

    monkeypatch.setattr(step_catalog, "_read_file", read)
    with pytest.raises(ProbeError, match="different catalogs"):
        taken(folder)


@pytest.mark.parametrize("key", ["image", "job", "restart", "start", "step"])
def test_what_says_that_it_is_of_another_step_is_refused(folder, key):
    assert taken(folder) == "v1"
    (path,) = stored(folder)
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {key: "9\x1b" * 1000}))
    with pytest.raises(UsageError, match=f"{key}: .* it is of another step") as caught:
        taken(folder)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 500
    path.write_text(json.dumps({name: value for name, value in said.items() if name != key}))
    with pytest.raises(UsageError, match=f"{key} is missing"):
        taken(folder)


@pytest.mark.parametrize(
    "hostile",
    [
        lambda path: path.symlink_to("/etc/passwd"),
        lambda path: path.symlink_to(path),
        lambda path: path.mkdir(),
        os.mkfifo,
        lambda path: path.write_text(""),
        lambda path: path.write_text("{"),
        lambda path: path.write_bytes(b"\xff\xfe"),
        lambda path: path.write_text("[" * 100_000),
        lambda path: path.write_text(json_documents.dump_json(catalog("v1").to_json())),
        lambda path: path.write_text(json.dumps({"schema": "imagematrix.step-catalog/v1"})),
    ],
)
def test_what_is_no_catalog_in_its_place_is_refused(folder, hostile):
    assert taken(folder) == "v1"
    (path,) = stored(folder)
    path.unlink()
    hostile(path)
    with pytest.raises(UsageError) as caught:
        taken(folder)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("document", [None, [], "x", {}, {"schema": "imagematrix.host/v1"}])
def test_a_step_without_a_catalog_is_refused(folder, document):
    assert taken(folder) == "v1"
    (path,) = stored(folder)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"catalog": document}))
    with pytest.raises(UsageError, match="catalog"):
        taken(folder)


@needs_root
def test_a_file_of_another_user_is_refused(folder):
    assert taken(folder) == "v1"
    (path,) = stored(folder)
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(UsageError, match="is not a file of this user"):
        taken(folder)


def test_a_catalog_that_is_too_large_is_refused(folder, monkeypatch):
    assert taken(folder) == "v1"
    monkeypatch.setattr(json_documents, "LIMIT", 100)
    with pytest.raises(UsageError, match="too large"):
        taken(folder)


def test_a_catalog_that_vanishes_is_told(folder, monkeypatch):
    monkeypatch.setattr(step_catalog, "_store_catalog", lambda *_: None)
    with pytest.raises(UsageError, match=r"somebody has removed the catalog of step 17\.0"):
        taken(folder)


def test_an_unprepared_folder_is_told(folder):
    (folder / "steps").rmdir()
    with pytest.raises(UsageError, match="No such file or directory") as caught:
        taken(folder)
    assert "the administrator prepares this folder" in str(caught.value.remedy)


def test_preparing_makes_a_folder_for_all(tmp_path):
    for _ in range(2):
        prepare_folder(str(tmp_path))
        assert stat.S_IMODE((tmp_path / "steps").stat().st_mode) == 0o1777
        (tmp_path / "steps").chmod(0o755)  # as a run leaves it that is killed
    with pytest.raises(FileNotFoundError):
        prepare_folder(str(tmp_path / "absent"))


def test_a_folder_for_all_is_left_as_it_is(tmp_path, monkeypatch):
    """Only its owner may change its mode, and on a shared file system root may be nobody."""
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps").chmod(0o3777)
    monkeypatch.setattr(os, "chmod", lambda *_: pytest.fail("the mode is changed"))
    prepare_folder(str(tmp_path))


def test_the_first_task_of_a_step_removes_old_files_of_its_user(folder, own, monkeypatch):
    steps = folder / "steps"
    second = steps / f"{os.geteuid()}.3"
    second.mkdir(mode=0o700)
    digits = "0123456789abcdef"
    old = [
        own / f"1.0-{digits}.json",
        own / f"1.0-{digits}.json.0123456789ab",
        second / f"2.0-{digits}.json",
    ]
    kept = [own / "notes", own / f"x1.0-{digits}.json", steps / "other"]
    for path in (*old, *kept):
        path.write_text("")
        os.utime(path, times=(0, time.time() - 8 * DAY))
    young = own / f"3.0-{digits}.json"
    young.write_text("")
    os.utime(young, times=(0, time.time() - 6 * DAY))
    inside = own / f"4.0-{digits}.json"
    inside.mkdir()
    os.utime(inside, times=(0, 0))
    monkeypatch.setattr(time, "time", lambda: 4e9)  # the clock of the node is wrong
    assert taken(folder) == "v1"
    assert [path for path in old if path.exists()] == []
    assert all(path.exists() for path in (*kept, young, inside))


@pytest.fixture
def folders():
    """Shared folders for other users, one for each of many steps."""
    with tempfile.TemporaryDirectory() as above:  # others may not enter those of pytest
        Path(above).chmod(0o755)
        made = [Path(above, str(number)) for number in range(STEPS)]
        for each in made:
            each.mkdir()
            each.chmod(0o755)
            prepare_folder(str(each))
        yield made


@pytest.mark.many
@needs_root
def test_no_step_runs_two_images_while_another_user_takes_the_name_and_frees_it(folders):
    """Each task would store a catalog of its own, so that it shows whose they take."""
    ends = [step_ends(each, versions="0123") for each in folders]
    assert {end for each in ends for end in each} <= {*"0123", ProbeError.__name__}
    assert [each for each in ends if len({*each} - {ProbeError.__name__}) > 1] == []
    assert [each for each in ends if ProbeError.__name__ not in each]
    assert {path.parent.name for each in folders for path in stored(each)} >= {f"{USER}", f"{USER}.1"}


@pytest.mark.many
@needs_root
def test_all_steps_start_while_another_user_takes_the_name_and_frees_it(folders):
    """Nothing was published meanwhile, so the tasks' catalogs are the same, wherever they are."""
    assert {end for each in folders for end in step_ends(each, versions="1111")} == {"1"}


def child(user, work):
    """Start a process of another user, which ends after its work; return its number."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        work()
    finally:
        os._exit(0)


def squat(steps):
    """Create and remove the folder with the user's first name, without end."""
    place = str(steps / str(USER))
    while True:
        for act in (os.mkdir, os.rmdir):
            with contextlib.suppress(OSError):
                act(place)


def step_ends(folder, versions):
    """Run the tasks of a step at the same time; return the catalog of each, or the name of its error.

    Each would store a catalog of its own version.
    """
    squatter = child(NOBODY, lambda: squat(folder / "steps"))
    (start, go), (came, come), (ends, end) = os.pipe(), os.pipe(), os.pipe()

    def task(version):
        os.close(go)

        def waiting():
            """Open a catalog once no task has found one."""
            os.write(come, b".")
            os.read(start, 1)  # until the test closes the other end
            return catalog(version)

        try:
            told = share_catalog(STEP, str(folder), waiting).version
        except ImagematrixError as error:
            told = type(error).__name__
        os.write(end, f"{told}\n".encode())

    tasks = [child(USER, partial(task, version)) for version in versions]
    os.close(come)
    waiting = [os.read(came, 1) for _ in tasks]
    for descriptor in (start, go, came, end):
        os.close(descriptor)
    for pid in tasks:
        os.waitpid(pid, 0)
    os.kill(squatter, signal.SIGKILL)
    os.waitpid(squatter, 0)
    assert all(waiting)
    with os.fdopen(ends) as file:
        found = file.read().split()
    assert len(found) == len(tasks)
    return found
