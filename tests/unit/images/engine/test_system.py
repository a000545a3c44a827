"""What the engine is, and on which machine."""

import pytest

from imagematrix.images.engine import endpoint, system

pytestmark = pytest.mark.usefixtures("docker_host")


def test_podman_is_distinguished_from_docker(any_engine):
    assert (system.is_podman(), system.reports_system()) == (False, True)
    any_engine.version = {"ApiVersion": "1.41", "Version": "4.3.1", "Components": [{"Name": "Podman Engine"}]}
    any_engine.headers = {"Libpod-Api-Version": "4.3.1"}
    assert (system.is_podman(), system.reports_system()) == (True, False)
    any_engine.version = {"ApiVersion": "1.24", "Version": "17.05.0"}
    assert system.is_podman() is False


def test_architecture_is_in_the_version(any_engine):
    for version, expected in (({"Arch": "arm64"}, "arm64"), ({}, ""), ({"Arch": None}, "")):
        any_engine.version = {"ApiVersion": "1.41", **version}
        assert system.get_architecture() == expected


def test_local_dockerd_is_on_this_machine(engine, monkeypatch):
    engine.info["Name"] = "elsewhere"
    monkeypatch.setattr(system, "get_listener_name", lambda _: "dockerd")
    assert system.get_remote_name() is None
    assert engine.requests == []


def test_remote_engine_is_detected_by_its_host_name(any_engine):
    """A socket forwarded by ssh has ssh as its listener; here it is this process."""
    assert system.get_remote_name() is None
    any_engine.info["Name"] = "node7"
    assert system.get_remote_name() == "node7"
    any_engine.info["Name"] = ""
    assert system.get_remote_name() == endpoint.find_address()


def test_engine_of_this_container_is_on_this_machine(engine, monkeypatch, tmp_path):
    engine.info["Name"] = "node7"
    engine.containers = [{"Id": "ab" * 32}]
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"600 590 8:1 /var/lib/docker/containers/{'ab' * 32}/hostname /etc/hostname rw\n")
    monkeypatch.setattr(
        system, "open", lambda path, **_: mounts.open() if "mount" in path else 1, raising=False
    )
    monkeypatch.setattr(system, "get_listener_name", lambda _: None)
    assert system.get_remote_name() is None
    engine.containers = []
    assert system.get_remote_name() == "node7"
    mounts.unlink()
    assert system.get_remote_name() == "node7"
