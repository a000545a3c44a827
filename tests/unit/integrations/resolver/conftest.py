"""A registry in memory with a version of several variants, and resolvers in front of it."""

import base64
import contextlib
import json

import pytest
from distribution import Server
from hostile_addresses import hostile, logged_in, machines, over_tls  # noqa: F401
from resolving import HOPPER, Front, Published, SimulatedNode, variant


@pytest.fixture
def upstream(monkeypatch):
    monkeypatch.setattr("imagematrix.images.oci.retry.PAUSE", 0)
    server = Server()
    yield server
    server.close()


@pytest.fixture
def published(upstream):
    """The version v1 for two CPU levels and for one GPU."""
    result = Published(upstream)
    result.publish(
        {
            "cpu-v2": variant(),
            "cpu-v3": variant("x86-64-v3", ["sse4_2", "avx2"]),
            "sm90": variant("x86-64-v3", ["avx2"], **HOPPER),
        }
    )
    return result


@pytest.fixture
def front(upstream):
    """Call it with the name of a host and options to get a resolver on such a node."""
    with contextlib.ExitStack() as stack:

        def start(host="laptop", name=None, node=None, **options):
            started = Front(name or upstream.address, node or SimulatedNode(host), **options)
            stack.callback(started.close)
            return started

        yield start


@pytest.fixture
def node(front):
    """A resolver on a node without a GPU."""
    return front()


@pytest.fixture
def docker_login(tmp_path, monkeypatch):
    """Call it with a registry, a user and a password to log docker in."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))

    def login(registry, user, password):
        secret = base64.b64encode(f"{user}:{password}".encode()).decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {registry: {"auth": secret}}}))

    return login
