"""GPUs that a runtime gave to a container count while the container's bundle exists."""

import json
import os
from pathlib import Path

import pytest

from imagematrix.launcher.gpu_claims import grants
from imagematrix.launcher.gpu_claims.grants import GpuGrant
from imagematrix.launcher.gpu_claims.shares import compute_remaining
from imagematrix.launcher.gpu_claims.survey import compute_locked_usage
from imagematrix.launcher.gpu_claims.usage import Consumer


@pytest.fixture
def grant(tmp_path):
    """Return a function that makes a grant of nvidia10 to a container whose bundle exists."""

    def make(container="c1", **facts):
        bundle = tmp_path / "bundles" / container
        bundle.mkdir(parents=True)
        return GpuGrant(
            **(
                {"container": container, "bundle": str(bundle), "name": "train.1 (v1)", "keys": ("nvidia10",)}
                | facts
            )
        )

    return make


def test_grant_belongs_to_its_container(locks, grant, gpu):
    grants.write_grant(locks, grant(vram_mib=4000))
    (container,) = compute_locked_usage(locks)["nvidia10"]
    assert container == Consumer(
        kind="container", name="train.1 (v1)", vram_mib=4000, owner_ids=frozenset({"c1"})
    )
    assert compute_remaining(gpu(memory_mib=10000), [container]) == 6000


def test_processes_of_a_container_count_as_its_grant(locks, grant, gpu):
    grants.write_grant(locks, grant(vram_mib=4000))
    process = Consumer(kind="process", name="train", pid=7, owner_ids=frozenset({"c1"}))
    assert (
        compute_remaining(gpu(memory_mib=10000), [*compute_locked_usage(locks)["nvidia10"], process]) == 6000
    )


def test_grant_ends_with_its_bundle(locks, grant):
    ended, running = grant(), grant("c2", keys=("nvidia11",))
    grants.write_grant(locks, ended)
    grants.write_grant(locks, running)
    Path(ended.bundle).rmdir()
    assert set(grants.compute_grant_usage(locks)) == {"nvidia11"}
    assert "grant-c1" in locks.list_names()
    grants.remove_stale_grants(locks)
    assert locks.list_names() == ["grant-c2"]


def test_container_has_one_grant(locks, grant):
    first = grant()
    grants.write_grant(locks, first)
    grants.write_grant(locks, GpuGrant(container="c1", bundle=first.bundle, name="again", keys=("nvidia11",)))
    assert {key: using[0].name for key, using in grants.compute_grant_usage(locks).items()} == {
        "nvidia11": "again"
    }
    grants.remove_grant(locks, "c1")
    assert grants.compute_grant_usage(locks) == {}
    grants.remove_grant(locks, "c1")


def test_file_of_another_user_is_ignored(locks, folder, grant, monkeypatch):
    grants.write_grant(locks, grant())
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert ("nvidia10" in grants.compute_grant_usage(locks)) is (os.getuid() == 0)
    os.chown(f"{folder}/grant-c1", 54322, -1)
    assert grants.compute_grant_usage(locks) == {}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"keys": 7, "bundle": "/"}', json.dumps({"keys": ["nvidia10"]})]
)
def test_malformed_grant_is_ignored(locks, text):
    locks.write("grant-c1", text)
    assert grants.compute_grant_usage(locks) == {}


def test_inaccessible_bundle_counts_as_present(grant, monkeypatch):
    hidden = grant()

    def denied(_):
        raise PermissionError

    monkeypatch.setattr(os, "lstat", denied)
    assert hidden.is_live
