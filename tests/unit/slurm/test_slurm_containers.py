"""Containers that jobs of Slurm leave in an engine."""

from types import SimpleNamespace

import docker.errors
import pytest
import requests

from imagematrix.errors import EngineError, UsageError
from imagematrix.slurm import containers


class Api:
    """The containers of an engine; removing `stuck` fails with a status."""

    def __init__(self, labels, stuck=None):
        self.labels = labels
        self.stuck = stuck or {}
        self.removed = []

    def containers(self, *, filters, **how):
        assert how == {"all": True}
        name, _, value = filters["label"].partition("=")
        found = [one for one, labels in self.labels.items() if labels.get(name) == value]
        return [{"Id": f"id-{one}", "Names": [f"/{one}"] if one else []} for one in found]

    def remove_container(self, identifier, *, v, force):
        assert v
        assert force
        if status := self.stuck.get(identifier):
            response = requests.Response()
            response.status_code = status
            raise docker.errors.APIError("no", response)
        self.removed.append(identifier)


def engine(*labels, **stuck):
    made = {name: {containers.LABEL: job} for name, job in labels}
    return SimpleNamespace(api=Api(made, stuck.get("stuck")), close=lambda: None)


@pytest.mark.parametrize(
    ("job", "labels"),
    [("77", {containers.LABEL: "77"}), ("", {}), ("7 7", {}), ("\u0667", {}), ("1" * 11, {})],
)
def test_a_container_has_the_number_of_the_job_that_started_it(job, labels):
    assert containers.labels_of({"SLURM_JOB_ID": job}) == labels
    assert containers.labels_of({}) == {}
    if not labels:
        with pytest.raises(UsageError, match=r"SLURM_JOB_ID .* is not the number of a job"):
            containers.job_of({"SLURM_JOB_ID": job})


def test_only_the_containers_of_the_job_are_removed():
    client = engine(("b", "77"), ("a", "77"), ("c", "78"))
    assert containers.remove(client, "77") == ("a", "b")
    assert client.api.removed == ["id-b", "id-a"]


@pytest.mark.parametrize("status", [404, 409])
def test_a_container_that_somebody_else_removes_is_no_error(status):
    client = engine(("a", "77"), ("b", "77"), stuck={"id-a": status})
    assert containers.remove(client, "77") == ("a", "b")
    assert client.api.removed == ["id-b"]


def test_a_container_that_cannot_be_removed_is_an_error():
    with pytest.raises(EngineError):
        containers.remove(engine(("a", "77"), stuck={"id-a": 500}), "77")


def test_the_epilog_prints_what_it_removed(monkeypatch, cli, tmp_path):
    socket = tmp_path / "docker.sock"
    socket.touch()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{socket}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setattr("imagematrix.engine.transport.client", lambda: engine(("a", "77"), ("c", "78")))
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
