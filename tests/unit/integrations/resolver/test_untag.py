"""Removing names from an engine that the resolver now answers with another image."""

import os
from urllib.parse import unquote

import docker
import pytest
import requests
from distribution import digest
from double import Double, response
from resolving import SimulatedNode

from imagematrix.cli.dispatch import run_command
from imagematrix.errors import EngineError, UsageError
from imagematrix.images.engine import transport
from imagematrix.images.engine.endpoint import find_address
from imagematrix.integrations.resolver import untag as sweeping
from imagematrix.integrations.resolver.node import ReloadedHost
from imagematrix.integrations.resolver.untag import DockerNames, untag


class Held(Double):
    """An engine with images by name, each with its digest; names in `stuck` cannot be removed."""

    def __init__(self, names):
        self.names = names
        self.stuck = set()
        self.api = self
        self.base_url, self.timeout = "http+docker://localhost", 60

    def images(self):
        return [{"RepoTags": [name]} for name in self.names] + [{"RepoTags": None}]

    def get(self, resource, **_):
        name = unquote(resource.removeprefix(f"{self.base_url}/images/").removesuffix("/json"))
        return response({"Id": "sha256:id", "RepoDigests": [f"x@{self.names[name]}"]})

    def remove_image(self, name, *, force, noprune):
        assert force
        assert noprune
        if name in self.stuck:
            raise docker.errors.APIError(name, explanation="it is stuck")
        del self.names[name]


@pytest.fixture
def held(monkeypatch):
    """Call it with names of images and their digests to get an engine with them."""

    def hold(names):
        double = Held(names)
        monkeypatch.setattr(transport, "open_client", lambda: double)
        return double

    return hold


def test_outdated_names_are_removed(front, published, held):
    machine = SimulatedNode("laptop")
    node = front(node=machine)
    old = digest(b"of another driver")
    name = f"{node.address}/ml/training"
    keeps = {
        f"{name}:v1": node.pull("v1"),
        f"{name}:v9": old,  # the upstream has no such version: it may have been pushed by hand
        "registry.example:5000/ml/training:v1": old,
    }
    images = held({**keeps, f"{name}:v1-cpu": old})
    notes: list[str] = []
    assert untag(DockerNames(node.address), node.address, notes.append) == [f"{name}:v1-cpu"]
    assert images.names == keeps
    machine.name = "rome-a100"
    assert untag(DockerNames(node.address), node.address, notes.append) == [f"{name}:v1"], (
        "nothing fits this node any more"
    )
    assert notes == []
    assert published.digests


def test_nothing_is_removed_while_the_node_cannot_be_read(front, published, held, tmp_path):
    assert published.digests
    node = front(node=ReloadedHost.from_file(tmp_path / "host.json"))
    status, message = node.pull("v1")
    assert status == 502
    assert "the node cannot be read: " in message
    engine = held({f"{node.address}/ml/training:v1": digest(b"of this node")})
    assert untag(DockerNames(node.address), node.address, pytest.fail) == []
    assert engine.names


def test_names_that_cannot_be_removed_are_reported(node, published, held):
    name = f"{node.address}/ml/training:v1"
    held({name: digest(b"old")}).stuck.add(name)
    notes: list[str] = []
    assert untag(DockerNames(node.address), node.address, notes.append) == []
    assert notes == [f"{name} was not removed: the Docker engine at {find_address()} refused: it is stuck"]
    assert published.digests


def test_engine_that_stops_is_an_error(node, published, held):
    images = held({f"{node.address}/ml/training:v1": digest(b"old")})

    def gone(*_, **__):
        raise requests.ConnectionError("the engine restarts")

    notes: list[str] = []
    images.remove_image = gone
    assert untag(DockerNames(node.address), node.address, notes.append) == []
    assert "was not removed: cannot reach the Docker engine" in notes[0]
    images.get = gone
    with pytest.raises(EngineError, match="cannot reach the Docker engine"):
        untag(DockerNames(node.address), node.address, notes.append)
    assert published.digests


def test_sweep_sends_the_token_of_the_resolver(front, published, held, tmp_path, capsys):
    node = front(token="secret")  # noqa: S106
    name = f"{node.address}/ml/training:v1"
    images = held({name: digest(b"old")})
    with pytest.raises(UsageError, match="needs a token") as caught:
        untag(DockerNames(node.address), node.address, print)
    assert caught.value.remedy == "pass it with --token-file"
    file = tmp_path / "token"
    file.write_text("secret\n")
    assert run_command(["resolver", "--sweep", "--listen", node.address, "--token-file", str(file)]) == 0
    assert capsys.readouterr().out == f"{name}\n"
    assert images.names == {}
    assert published.digests


def test_nothing_is_removed_without_a_resolver(held):
    images = held({"127.0.0.1:1/ml/training:v1": digest(b"old")})
    with pytest.raises(EngineError, match=r"the resolver at 127\.0\.0\.1:1 cannot be reached"):
        untag(DockerNames("127.0.0.1:1"), "127.0.0.1:1", print)
    assert len(images.names) == 1


def test_invalid_name_is_rejected(node, held):
    held({f"{node.address}/ml/training:v 1": digest(b"old")})
    with pytest.raises(UsageError, match="invalid name"):
        untag(DockerNames(node.address), node.address, print)


CTR = """\
#!/bin/sh
# ctr, with the images in the file $HELD; `stuck` in a name keeps it.
[ "$1 $2 $3" = "--namespace k8s.io images" ] || exit 9
case $4 in
list) echo "REF TYPE DIGEST SIZE PLATFORMS LABELS"; cat "$HELD" ;;
remove)
    case $5 in *stuck*) echo "ctr: it is stuck" >&2; exit 1 ;; esac
    grep -v "^$5 " "$HELD" > "$HELD.new"; mv "$HELD.new" "$HELD"; echo "$5" ;;
esac
"""
REGISTRY = "registry.example:5000"
NAMESPACE = ["--upstream", REGISTRY, "--namespace", "k8s.io"]


@pytest.fixture
def containerd(tmp_path, monkeypatch):
    """Call it with names of images and their digests to simulate a containerd with them; returns its file."""

    def hold(names):
        program, file = tmp_path / "bin/ctr", tmp_path / "held"
        program.parent.mkdir()
        program.write_text(CTR)
        program.chmod(0o755)
        lines = (
            f"{name} application/vnd.oci.image.manifest.v1+json {digest} 3.1 MiB linux/amd64 -\n"
            for name, digest in names.items()
        )
        file.write_text("".join(lines))
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        monkeypatch.setenv("HELD", str(file))
        return file

    return hold


def test_names_in_a_registry_are_removed_from_containerd(front, published, containerd, capsys):
    node = front(node=SimulatedNode("laptop"))
    old = digest(b"of another driver")
    name = f"{REGISTRY}/ml/training"
    keeps = {
        f"{name}:v1": node.pull("v1"),
        f"{name}:v9": old,
        f"{name}@{old}": old,
        old: old,
        "other.example/ml/training:v1": old,
    }
    file = containerd({**keeps, f"{name}:v1-cpu": old})

    assert run_command(["resolver", "--sweep", "--listen", node.address, *NAMESPACE]) == 0

    assert capsys.readouterr().out == f"{name}:v1-cpu\n"
    assert [line.split()[0] for line in file.read_text().splitlines()] == list(keeps)
    assert published.digests


def test_name_that_containerd_does_not_remove_is_reported(front, published, containerd, capsys):
    node = front(classes={"stuck": SimulatedNode("laptop")})
    name = f"{REGISTRY}/ml/training:v1-class.stuck"
    containerd({name: digest(b"old")})

    assert run_command(["resolver", "--sweep", "--listen", node.address, *NAMESPACE]) == 0

    assert capsys.readouterr().err == f"{name} was not removed: ctr: it is stuck\n"
    assert published.digests


def test_missing_or_failing_containerd_client_is_reported(monkeypatch, tmp_path, capsys):
    words = ["resolver", "--sweep", *NAMESPACE]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_command(words) == 8
    assert "ctr not found" in capsys.readouterr().err
    (tmp_path / "ctr").write_text("#!/bin/sh\necho 'ctr: no such socket' >&2; exit 1\n")
    (tmp_path / "ctr").chmod(0o755)
    assert run_command(words) == 8
    assert "no such socket\n  check that containerd is running" in capsys.readouterr().err
    (tmp_path / "ctr").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    monkeypatch.setattr(sweeping, "TIMEOUT_S", 0.1)
    assert run_command(words) == 8
    assert "did not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sweep", "--namespace", "k8s.io"], "--upstream is required"),
        (["--upstream", REGISTRY, "--namespace", "k8s.io"], "--namespace is for --sweep"),
        (["--sweep", "--upstream", f"{REGISTRY}/ml", "--namespace", "k8s.io"], "is not one"),
    ],
)
def test_namespace_requires_other_options(words, message, capsys):
    assert run_command(["resolver", *words]) == 2
    assert message in capsys.readouterr().err
