"""Containers that jobs of Slurm leave in an engine."""

import json
from urllib.parse import parse_qs, urlsplit

import pytest

from imagematrix.errors import EngineError, UsageError
from imagematrix.images.engine import transport
from imagematrix.integrations.slurm import containers


@pytest.fixture
def left(engine):
    """Call it with names to let an engine have these containers of job 77; some fail to go, with a status."""

    def call(*names, **stuck):
        engine.add_image(None)
        facts = {"ImageID": engine.images[0]["Id"], "Labels": {containers.LABEL: "77"}}
        listed = [{"Id": f"id-{name}", "Names": [f"/{name}"]} | facts for name in names]
        engine.responses["GET", "/containers/json"] = (200, json.dumps(listed).encode())
        for name in names:
            status = stuck.get(name, 204)
            answer = b"" if status == 204 else b'{"message": "no"}'
            engine.responses["DELETE", f"/containers/id-{name}"] = (status, answer)
        return engine

    return call


def removed(engine):
    """Return what was asked to be removed."""
    return [urlsplit(one) for one in engine.requests if "/containers/id-" in one]


@pytest.mark.parametrize(
    ("job", "labels"),
    [("77", {containers.LABEL: "77"}), ("", {}), ("7 7", {}), ("\u0667", {}), ("1" * 11, {})],
)
def test_a_container_has_the_number_of_the_job_that_started_it(job, labels):
    assert containers.make_labels({"SLURM_JOB_ID": job}) == labels
    assert containers.make_labels({}) == {}
    if not labels:
        with pytest.raises(UsageError, match=r"SLURM_JOB_ID .* is not the number of a job"):
            containers.get_job({"SLURM_JOB_ID": job})


def test_the_containers_of_the_job_are_removed(left):
    engine = left("b", "a")
    assert containers.remove_containers("77") == ("a", "b")
    query = urlsplit(engine.requests[0]).query
    assert json.loads(parse_qs(query)["filters"][0]) == {"label": [f"{containers.LABEL}=77"]}
    assert [one.path.rpartition("/")[2] for one in removed(engine)] == ["id-b", "id-a"]
    assert parse_qs(removed(engine)[0].query) == {"v": ["True"], "link": ["False"], "force": ["True"]}


def test_a_container_of_an_image_that_a_job_made_is_not_the_job_s(left):
    """Such as by docker commit, which keeps the labels."""
    engine = left("a", "b")
    engine.add_image({containers.LABEL: "77"})
    listed = json.loads(engine.responses["GET", "/containers/json"][1])
    listed[1]["ImageID"] = engine.images[1]["Id"]
    engine.responses["GET", "/containers/json"] = (200, json.dumps(listed).encode())
    assert containers.remove_containers("77") == ("a",)
    assert [one.path.rpartition("/")[2] for one in removed(engine)] == ["id-a"]


@pytest.mark.parametrize("status", [404, 409])
def test_a_container_that_somebody_else_removes_is_no_error(left, status):
    engine = left("a", "b", a=status)
    assert containers.remove_containers("77") == ("a", "b")
    assert len(removed(engine)) == 2


def test_a_container_that_cannot_be_removed_is_an_error(left):
    left("a", a=500)
    with pytest.raises(EngineError):
        containers.remove_containers("77")


def test_after_a_job_without_containers_docker_py_is_not_loaded(left, monkeypatch):
    left()
    monkeypatch.setattr(transport, "open_client", lambda: pytest.fail("it was loaded"))
    assert containers.remove_containers("77") == ()


def test_the_epilog_prints_what_it_removed(left, monkeypatch, cli):
    left("a")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert cli("slurm", "epilog") == (0, "container a\n", "")


def test_a_node_without_an_engine_has_nothing_to_remove(monkeypatch, cli):
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert cli("slurm", "epilog") == (0, "", "")


def test_the_epilog_needs_a_job(monkeypatch, cli):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    code, out, error = cli("slurm", "epilog")
    assert (code, out) == (2, "")
    assert "let Slurm start it, as Epilog" in error
