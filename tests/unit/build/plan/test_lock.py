"""imagematrix.lock: entries stay until they are upgraded."""

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest
from matrices import add_properties

from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.plan import lock
from imagematrix.build.plan.context import list_context
from imagematrix.build.plan.plan import PlanContext
from imagematrix.build.plan.planner import plan
from imagematrix.cli.shared.build_session import lock_and_plan
from imagematrix.errors import UsageError

ONE, TWO = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "imagematrix.lock"


def test_lock_round_trips(path, conforms):
    assert lock.extend_lock(path, {"b:1": TWO, "a:1": ONE})
    assert lock.read_base_digests(path) == {"a:1": ONE, "b:1": TWO}
    document = json.loads(path.read_text())
    conforms(document)
    assert [base["name"] for base in document["bases"]] == ["a:1", "b:1"]
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"
    lock.renew_lock(path, lock.read_base_digests(path), {}, {})
    assert lock.read_base_digests(path) == {}


def test_lock_name_follows_the_matrix(tmp_path):
    assert lock.locate_lock(tmp_path / "matrix.yaml") == tmp_path / "imagematrix.lock"
    assert lock.locate_lock(tmp_path / "other.yaml") == tmp_path / "other.imagematrix.lock"


def test_missing_lock_is_empty(path):
    assert lock.read_base_digests(path) == {}


def test_existing_entries_are_kept(path):
    lock.extend_lock(path, {"a:1": ONE})
    assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600
    assert not lock.extend_lock(path, {"a:1": TWO, "b:1": TWO}), "another digest requires a new plan"
    assert lock.read_base_digests(path) == {"a:1": ONE, "b:1": TWO}
    written = path.stat().st_mtime_ns
    lock.extend_lock(path, {"a:1": TWO})
    assert path.stat().st_mtime_ns == written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[]", "expected an object"),
        ('{"schema": "imagematrix.lock/v2"}', "unsupported schema"),
        ('{"schema": "imagematrix.host/v1"}', "expected 'imagematrix.lock/v1'"),
        ("<<<<<<< ours", "not JSON"),
    ],
)
def test_damaged_lock_is_reported_with_a_remedy(path, text, message):
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        lock.read_base_digests(path)
    assert str(path) in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("bases", "message"),
    [
        ([{"name": "a", "digest": "latest"}], "'latest' is not a sha256 digest"),
        ([{"name": "a", "digest": ONE}, {"name": "a", "digest": TWO}], "a occurs twice"),
        ([{"name": "a"}], r"bases\[0\]: digest is missing"),
        ({}, "expected a list"),
    ],
)
def test_invalid_digests_are_reported(path, bases, message):
    path.write_text(json.dumps({"schema": lock.SCHEMA, "bases": bases}))
    with pytest.raises(UsageError, match=message) as caught:
        lock.read_base_digests(path)
    assert "from version control" in caught.value.remedy


def test_unwritable_lock_is_reported(tmp_path):
    with pytest.raises(UsageError, match="No such file or directory"):
        lock.extend_lock(tmp_path / "nowhere" / "imagematrix.lock", {"a:1": ONE})
    (tmp_path / "imagematrix.lock").mkdir()
    with pytest.raises(UsageError, match="is not a file"):
        lock.extend_lock(tmp_path / "imagematrix.lock", {"a:1": ONE})
    assert len(list(tmp_path.iterdir())) == 1


def test_linked_lock_stays_a_link(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    path = tmp_path / "imagematrix.lock"
    path.symlink_to(shared / "our.lock")
    assert lock.extend_lock(path, {"debian:bookworm": f"sha256:{'1' * 64}"})
    lock.renew_lock(path, lock.read_base_digests(path), {"debian:trixie": f"sha256:{'2' * 64}"}, {})
    assert path.is_symlink()
    assert lock.read_base_digests(shared / "our.lock") == {
        "debian:bookworm": f"sha256:{'1' * 64}",
        "debian:trixie": f"sha256:{'2' * 64}",
    }, "another project that shares the lock may have locked it"
    assert [*shared.iterdir()] == [shared / "our.lock"]


def test_concurrent_additions_are_all_kept(path):
    names = [f"base:{number}" for number in range(40)]
    with ThreadPoolExecutor(max_workers=8) as pool:
        assert all(pool.map(lambda name: lock.extend_lock(path, {name: ONE}), names))
    assert lock.read_base_digests(path) == dict.fromkeys(names, ONE)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", ["imagematrix.lock", "other.imagematrix.lock"])
def test_lock_being_written_is_not_part_of_a_context(tmp_path, monkeypatch, name):
    """Two builds may run in the same folder, and a killed one leaves behind what it was writing."""
    (tmp_path / "main.c").write_text("int main() {}")
    seen = []

    def observed(_descriptor):
        assert len(list(tmp_path.iterdir())) == 2, "the draft is not beside the lock"
        seen.append(list(list_context(tmp_path).entries))

    monkeypatch.setattr(os, "fsync", observed)
    lock.extend_lock(tmp_path / name, {"a:1": ONE})
    assert seen == [["main.c"]]


def test_entries_added_during_a_lookup_are_kept(path):
    lock.extend_lock(path, {"old:1": ONE, "a:1": ONE})
    before = lock.read_base_digests(path)
    lock.extend_lock(path, {"b:1": ONE})
    assert lock.renew_lock(path, before, {"a:1": TWO}, {}) == ({"a:1": TWO, "b:1": ONE}, {})
    assert lock.read_base_digests(path) == {"a:1": TWO, "b:1": ONE}


def test_build_plans_again_if_its_base_was_locked_meanwhile(project, backend):
    """Otherwise the image would have another base than the lock, and the next plan would refuse it."""
    path = project()

    def raced(name):
        lock.extend_lock(lock.locate_lock(path), {name: ONE})
        return backend.resolve(name)

    made = lock_and_plan(path, PlanContext(resolve=raced, store=backend), None, push=False, frozen=False)
    assert set(made.bases.values()) == {ONE}
    assert lock.read_base_digests(lock.locate_lock(path)) == made.bases


def test_plan_uses_locked_digests(project, backend):
    locked = {"debian:trixie": ONE}
    planned = plan(load_matrix(project()), PlanContext(resolve=backend.resolve, locked=locked))
    assert planned.bases["debian:trixie"] == ONE
    assert backend.called("resolve") == ["debian:bookworm"]


def test_frozen_lock_must_be_complete(project, backend):
    matrix = load_matrix(project())
    locked = {"debian:trixie": ONE}
    with pytest.raises(UsageError, match="debian:bookworm not found in the lock") as caught:
        plan(matrix, PlanContext(resolve=backend.resolve, locked=locked, frozen=True))
    assert caught.value.remedy.startswith("run `imagematrix lock`")
    against = PlanContext(resolve=backend.resolve, locked=locked | {"debian:bookworm": TWO}, frozen=True)
    assert plan(matrix, against).bases == against.locked
    assert not backend.calls


@pytest.mark.usefixtures("no_engine")
def test_complete_lock_needs_no_lookup(project, cli):
    path = project()
    assert cli("lock", "-f", path).code == 8  # it needs an engine
    lock.extend_lock(
        lock.locate_lock(path), {"debian:bookworm": ONE, "debian:trixie": TWO, "debian:sid": TWO}
    )
    result = cli("lock", "-f", path)
    assert result.code == 0, result.err
    assert "debian:sid" in result.err  # no longer used by any cell
    assert lock.read_base_digests(lock.locate_lock(path)) == {"debian:bookworm": ONE, "debian:trixie": TWO}
    assert cli("lock", "-f", path, "--upgrade").code == 8


@pytest.mark.usefixtures("no_engine")
def test_lock_keeps_the_bases_of_cells_that_fail(project, cli, tmp_path):
    """They fail on this machine, which lacks the driver's files; another may have them."""
    (tmp_path / "driver").mkdir()
    change = add_properties("driver: {535.261.03: {driver_from: driver}}")
    template = (
        "FROM {{ base }}\n{% if driver_from is defined %}\n"
        "COPY --from=imagematrix-driver / /\nCOPY --from=tools:1 / /\n{% endif %}\n"
    )
    path = project(change, template=template)
    locked = dict.fromkeys(("debian:bookworm", "debian:trixie", "tools:1"), ONE)
    lock.extend_lock(lock.locate_lock(path), locked)
    result = cli("lock", "-f", path)
    assert result.code == 0, result.err
    assert lock.read_base_digests(lock.locate_lock(path)) == locked


def test_a_pipe_is_no_lock(tmp_path):
    os.mkfifo(tmp_path / "imagematrix.lock")
    with pytest.raises(UsageError, match=r"imagematrix.lock is not a file"):
        lock.read_base_digests(tmp_path / "imagematrix.lock")


def test_a_name_that_is_too_long_for_a_lock_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="File name too long"):
        lock.read_base_digests(lock.locate_lock(tmp_path / f"{'x' * 245}.yaml"))
