"""Names that an engine holds for an answer that the resolver no longer gives."""

from types import SimpleNamespace

import docker
import pytest
from distribution import digest
from double import Double
from resolving import Played

from imagematrix import engine
from imagematrix.cli.front import run
from imagematrix.errors import EngineError, UsageError
from imagematrix.resolver.sweep import sweep


class Held(Double):
    """An engine's images by their names, each with its digest; those in `stuck` cannot be removed."""

    def __init__(self, names):
        self.names = names
        self.stuck = set()
        self.api = self
        self.images = self

    def __call__(self):
        return [{"RepoTags": [name]} for name in self.names] + [{"RepoTags": None}]

    def get(self, name):
        if name not in self.names:
            raise docker.errors.ImageNotFound(name)
        return SimpleNamespace(attrs={"Id": "sha256:id", "RepoDigests": [f"x@{self.names[name]}"]})

    def remove_image(self, name, *, force, noprune):
        assert force
        assert noprune
        if name in self.stuck:
            raise docker.errors.APIError(name, explanation="it is stuck")
        del self.names[name]


@pytest.fixture
def held(monkeypatch):
    """Call it with the names of images, and their digests, to have an engine with them."""

    def hold(names):
        double = Held(names)
        monkeypatch.setattr(engine, "client", lambda: double)
        return double

    return hold


def test_outdated_names_are_removed(front, published, held):
    played = Played("laptop")
    node = front(node=played)
    old = digest(b"of another driver")
    name = f"{node.address}/ml/training"
    keeps = {
        f"{name}:v1": node.pull("v1"),
        f"{name}:v9": old,  # the upstream has no such version: it may have been pushed by hand
        "registry.example:5000/ml/training:v1": old,
    }
    images = held({**keeps, f"{name}:v1-cpu": old})
    notes: list[str] = []
    assert sweep(node.address, notes.append) == [f"{name}:v1-cpu"]
    assert images.names == keeps
    played.name = "rome-a100"
    assert sweep(node.address, notes.append) == [f"{name}:v1"], "nothing fits this node any more"
    assert notes == []
    assert published.digests


def test_names_that_cannot_be_removed_are_reported(front, published, held):
    node = front()
    name = f"{node.address}/ml/training:v1"
    held({name: digest(b"old")}).stuck.add(name)
    notes: list[str] = []
    assert sweep(node.address, notes.append) == []
    assert notes == [f"{name} stays: it is stuck"]
    assert published.digests


def test_sweep_sends_the_token_of_the_resolver(front, published, held, tmp_path, capsys):
    node = front(token="secret")  # noqa: S106
    name = f"{node.address}/ml/training:v1"
    images = held({name: digest(b"old")})
    with pytest.raises(UsageError, match="needs a token") as caught:
        sweep(node.address, print)
    assert caught.value.remedy == "give its --token-file"
    file = tmp_path / "token"
    file.write_text("secret\n")
    assert run(["resolver", "--sweep", "--listen", node.address, "--token-file", str(file)]) == 0
    assert capsys.readouterr().out == f"{name}\n"
    assert images.names == {}
    assert published.digests


def test_nothing_is_removed_without_a_resolver(held):
    images = held({"127.0.0.1:1/ml/training:v1": digest(b"old")})
    with pytest.raises(EngineError, match=r"the resolver at 127\.0\.0\.1:1 cannot be reached"):
        sweep("127.0.0.1:1", print)
    assert len(images.names) == 1


def test_invalid_name_is_rejected(front, held):
    node = front()
    held({f"{node.address}/ml/training:v 1": digest(b"old")})
    with pytest.raises(UsageError, match="invalid name"):
        sweep(node.address, print)
