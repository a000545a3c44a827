"""Finding the Docker engine, and who may use it."""

import hashlib
import json
import os
import socket
import sys
import types
from pathlib import Path

import pytest

from imagematrix.errors import EngineError
from imagematrix.images.engine import endpoint


@pytest.fixture(autouse=True)
def _no_variable(no_engine, monkeypatch):  # noqa: ARG001 - which sets it
    monkeypatch.delenv("DOCKER_HOST")


@pytest.fixture
def config(tmp_path):
    """Call it with contexts by name to write Docker's configuration with its `current` context."""
    folder = tmp_path / "docker-config"
    folder.mkdir()

    def write(current=None, **contexts):
        if current is not None:
            (folder / "config.json").write_text(json.dumps({"currentContext": current}))
        for name, content in contexts.items():
            meta = folder / "contexts" / "meta" / hashlib.sha256(name.encode()).hexdigest()
            meta.mkdir(parents=True)
            (meta / "meta.json").write_text(content if isinstance(content, str) else json.dumps(content))
        return folder

    return write


def at(host):
    return {"Name": "x", "Endpoints": {"docker": {"Host": host}}}


@pytest.mark.parametrize("configured", [None, "", "default"])
def test_default_address_is_the_local_socket(config, configured):
    config(configured)
    assert endpoint.find_address() == "unix:///var/run/docker.sock"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"other": 1}', '{"currentContext": null}', "\xff"])
def test_malformed_configuration_is_ignored(config, text):
    (config() / "config.json").write_text(text, encoding="latin-1")
    assert endpoint.find_address() == "unix:///var/run/docker.sock"


def test_docker_host_outranks_the_context(config, docker_host, monkeypatch):
    config("far", far=at("tcp://far:2376"), near=at("unix:///run/near.sock"))
    assert endpoint.find_address() == "tcp://far:2376"
    monkeypatch.setenv("DOCKER_CONTEXT", "near")
    assert endpoint.find_address() == "unix:///run/near.sock"
    docker_host("unix:///run/here.sock")
    assert endpoint.find_address() == "unix:///run/here.sock"


def test_context_needs_no_configuration_file(config, monkeypatch):
    config(far=at("tcp://far:2376"))
    monkeypatch.setenv("DOCKER_CONTEXT", "far")
    assert endpoint.find_address() == "tcp://far:2376"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"Endpoints": {}}', '{"Endpoints": {"docker": []}}']
)
def test_invalid_context_is_reported(config, content):
    config("far", far=content)
    with pytest.raises(EngineError, match="docker context not found: 'far'") as caught:
        endpoint.find_address()
    assert caught.value.remedy == "run `docker context ls`"


def test_missing_context_is_reported(config):
    config("far")
    with pytest.raises(EngineError, match="docker context not found: 'far'"):
        endpoint.find_address()


@pytest.mark.usefixtures("engine")
def test_listener_in_another_pid_namespace_is_unknown(monkeypatch):
    assert endpoint.get_listener_name(endpoint.find_address()) == Path("/proc/self/comm").read_text().strip()
    monkeypatch.setattr(sys, "byteorder", "little")
    unknown = types.SimpleNamespace(connect=lambda _: None, getsockopt=lambda *_: bytes(4), close=list)
    sockets = types.SimpleNamespace(**vars(socket) | {"socket": lambda *_: unknown})
    monkeypatch.setattr("imagematrix.images.engine.endpoint._socket", sockets)
    assert endpoint.get_listener_name(endpoint.find_address()) is None


def test_group_of_the_engine_s_socket(docker_host, tmp_path, monkeypatch):
    path = tmp_path / "docker.sock"
    docker_host(f"unix://{path}")
    assert endpoint.get_socket_group() is None
    assert not endpoint.runs_as_root()
    path.touch(mode=0o660)
    root, mine = (
        os.stat_result([0o660, 0, 0, 0, 0, 42, *[0] * 4]),
        os.stat_result([0o660, *[0] * 3, 7, 42, *[0] * 4]),
    )
    for status, expected in ((root, 42), (mine, None), (os.stat_result([0o666, *[0] * 9]), None)):
        monkeypatch.setattr(os, "stat", lambda _, status=status: status)
        assert endpoint.get_socket_group() == expected
        assert endpoint.runs_as_root() == (status is not mine)
    docker_host("tcp://far:2376")
    assert endpoint.get_socket_group() is None
