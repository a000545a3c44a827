"""Requests to the Docker engine, over a socket or with docker-py."""

import hashlib
import json
import os
import socket
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from imagematrix import endpoint, unix_http
from imagematrix import engine as module
from imagematrix.errors import EngineError
from imagematrix.kubernetes import authority

LABEL = "io.imagematrix.image"


pytestmark = pytest.mark.usefixtures("docker_host")


def test_images_take_one_request_without_a_library(engine):
    engine.add_image({LABEL: "training"})
    engine.add_image({"other": "label"})
    engine.add_image(None)
    assert module.images(LABEL) == engine.images[:1]
    assert module.images(f"{LABEL}=training") == engine.images[:1]
    assert module.images(f"{LABEL}=é &#") == []
    assert len(engine.requests) == 3


def test_images_of_a_remote_engine_are_listed(remote_engine):
    remote_engine.add_image({LABEL: "training"})
    assert module.images(LABEL) == remote_engine.images
    assert remote_engine.requests[0] == "/version"


@pytest.mark.parametrize("kind", ["engine", "remote_engine"])
def test_podman_is_distinguished_from_docker(request, kind):
    answering = request.getfixturevalue(kind)
    assert (module.is_podman(), module.reports_system()) == (False, True)
    answering.version = {"ApiVersion": "1.41", "Version": "4.3.1", "Components": [{"Name": "Podman Engine"}]}
    answering.headers = {"Libpod-Api-Version": "4.3.1"}
    assert (module.is_podman(), module.reports_system()) == (True, False)
    answering.version = {"ApiVersion": "1.24", "Version": "17.05.0"}
    assert module.is_podman() is False


@pytest.mark.parametrize("kind", ["engine", "remote_engine"])
def test_docker_py_client_is_connected(request, kind):
    answering = request.getfixturevalue(kind)
    answering.add_image({LABEL: "training"})
    client = module.client()
    assert client.api.images(filters={"label": LABEL}) == answering.images
    client.close()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "not a Docker engine at unix://.*"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not a Docker engine at"),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>", "not a Docker engine at"),
        (b"HTTP/1.0 200 OK\r\n\r\n[\xff]", "not a Docker engine at"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 100_000, "not a Docker engine at"),
        (b"HTTP/1.0 200 OK\r\n\r\n[{}", "not a Docker engine at"),
        (b"HTTP/1.0 200 OK\r\n\r\n{}", "refused: {}"),
        (b'HTTP/1.0 403 Forbidden\r\n\r\n{"message": "no"}', "refused: no"),
        (b"HTTP/1.0 500 Oops\r\n\r\n[]", r"refused: \[\]"),
        (b"HTTP/1.0 " + b"9" * 5000 + b"\r\n\r\n[]", r"refused: \[\]"),
        (b"\r\n\r\n[]", r"refused: \[\]"),
    ],
)
def test_invalid_response_is_an_engine_error(engine, raw, expected):
    engine.raw = raw
    with pytest.raises(EngineError, match=expected):
        module.images(LABEL)


def test_response_size_is_limited(engine, monkeypatch):
    monkeypatch.setattr(unix_http, "RESPONSE_LIMIT", 1 << 20)
    engine.raw = b"HTTP/1.0 200 OK\r\n\r\n[" + b" " * (2 << 20)
    with pytest.raises(EngineError, match="response of the engine exceeds 1 MiB"):
        module.images(LABEL)


def test_error_of_a_remote_engine_is_reported(remote_engine, monkeypatch):
    monkeypatch.setattr(
        remote_engine, "answer", lambda _, real=remote_engine.answer: _then_refuse(remote_engine, real, _)
    )
    with pytest.raises(
        EngineError, match=r"the Docker engine at tcp://127.* refused: something about the daemon"
    ):
        module.images(LABEL)


@pytest.fixture
def in_context(monkeypatch, tmp_path):
    """Call it with an address to use a docker context that has it, with files for TLS by name."""

    def use(address, **files):
        number = hashlib.sha256(b"far").hexdigest()
        folder = tmp_path / "docker-config" / "contexts"
        meta, tls = folder / "meta" / number, folder / "tls" / number / "docker"
        meta.mkdir(parents=True)
        engine = {"Host": address, "SkipTLSVerify": False}
        (meta / "meta.json").write_text(json.dumps({"Name": "far", "Endpoints": {"docker": engine}}))
        for name, content in files.items():
            tls.mkdir(parents=True, exist_ok=True)
            (tls / f"{name}.pem").write_bytes(content)
        monkeypatch.delenv("DOCKER_HOST", raising=False)
        monkeypatch.setenv("DOCKER_CONTEXT", "far")

    return use


def test_images_are_those_of_the_engine_in_the_context(remote_engine, in_context):
    remote_engine.add_image({LABEL: "training"})
    in_context(os.environ["DOCKER_HOST"])
    assert module.images(LABEL) == remote_engine.images


@pytest.fixture
def tls_engine(monkeypatch, tmp_path):
    """The address of an engine, and the certificates of it and of clients; registries have another CA."""
    (tmp_path / "registries.pem").write_bytes(authority.make(["registry.example"]).authorities)
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.setenv(name, str(tmp_path / "registries.pem"))

    class Engine(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(
                b'{"ApiVersion": "1.43"}' if self.path.endswith("/version") else b'[{"Id": "x"}]'
            )

        def log_message(self, *_):
            pass

    tls = authority.make(["localhost"])
    (tmp_path / "server.pem").write_bytes(tls.key + tls.chain)
    settings = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    settings.load_cert_chain(tmp_path / "server.pem")
    with HTTPServer(("127.0.0.1", 0), Engine) as server:
        server.socket = settings.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield f"tcp://localhost:{server.server_port}", tls
        server.shutdown()


@pytest.mark.parametrize("own", [True, False])
def test_context_has_its_own_certificates(tls_engine, in_context, tmp_path, own):
    address, tls = tls_engine
    files = {"cert": tls.chain, "key": tls.key} if own else {}
    in_context(address, ca=tls.authorities, **files)
    assert module.images(LABEL) == [{"Id": "x"}]
    (tmp_path / "docker-config" / "contexts" / "tls").rename(tmp_path / "gone")
    with pytest.raises(EngineError, match="cannot reach the Docker engine"):
        module.images(LABEL)


@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")  # as DOCKER_TLS says
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("folder", ["certificates", "docker-config"])
def test_environment_has_its_own_certificates(tls_engine, docker_host, monkeypatch, tmp_path, own, folder):
    address, tls = tls_engine
    docker_host(address)
    (tmp_path / folder).mkdir()
    files = {"ca": tls.authorities, "cert": tls.chain, "key": tls.key}
    for name in files if own else ["ca"]:
        (tmp_path / folder / f"{name}.pem").write_bytes(files[name])
    if folder == "certificates":
        monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path / folder))
    for name in ("DOCKER_TLS_VERIFY", "DOCKER_TLS"):
        monkeypatch.setenv(name, "1")
        assert module.images(LABEL) == [{"Id": "x"}]
        monkeypatch.delenv(name)
    with pytest.raises(EngineError, match="cannot reach the Docker engine"):  # without TLS
        module.images(LABEL)


def _then_refuse(engine, real, resource):
    engine.status = 200 if resource.endswith("/version") else 500
    return real(resource)


def test_damaged_configuration_of_docker_is_reported(remote_engine, tmp_path):
    (tmp_path / "docker-config").mkdir()
    (tmp_path / "docker-config" / "config.json").write_text('{"auths": {"reg.example": {"auth": "!!!"}}}')
    with pytest.raises(EngineError, match=r"docker's configuration cannot be read"):
        module.images(LABEL)
    assert not remote_engine.images


def test_remote_that_is_not_an_engine_is_reported(remote_engine):
    remote_engine.status = 500
    with pytest.raises(EngineError, match=r"cannot reach the Docker engine at tcp://127"):
        module.client()


@pytest.mark.parametrize(
    "address", ["unix:///nowhere/docker.sock", "unix://" + "/x" * 100, "tcp://127.0.0.1:1", "no://x"]
)
def test_error_for_a_missing_engine_has_a_remedy(docker_host, address):
    docker_host(address)
    with pytest.raises(EngineError, match="cannot reach the Docker engine at") as caught:
        module.images(LABEL)
    assert address in str(caught.value)
    assert "systemctl start docker" in caught.value.remedy
    assert caught.value.exit_code == 8


def test_remedy_for_a_remote_engine_refers_to_its_machine(docker_host):
    docker_host("ssh://me@nowhere.invalid")
    error = module.unreachable(endpoint.address(), OSError("Permission denied (publickey)"))
    assert error.remedy.startswith("run `ssh ssh://me@nowhere.invalid docker version` to check")
    assert "on that machine" in module.unreachable("tcp://far:2375", OSError("no route")).remedy


def test_permission_error_names_the_group(docker_host, monkeypatch):
    docker_host("unix:///run/docker.sock")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(unix_http, "request", refuse)
    with pytest.raises(
        EngineError, match=r"cannot reach the Docker engine at unix://.*: permission denied"
    ) as caught:
        module.client()
    assert "group docker" in caught.value.remedy


def test_engine_lost_during_a_response_is_reported(remote_engine, monkeypatch):
    def die(resource):
        if not resource.endswith("/version"):
            remote_engine.raw = b""
            raise ConnectionError
        return {"ApiVersion": "1.43"}

    monkeypatch.setattr(remote_engine, "answer", die)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with pytest.raises(EngineError, match="cannot reach the Docker engine"):
        module.images(LABEL)


@pytest.mark.parametrize("where", ["engine", "remote_engine"])
def test_running_containers_are_inspected_and_ended_ones_skipped(request, where):
    engine = request.getfixturevalue(where)
    engine.containers = [{"Id": "a1", "Name": "/web"}, {"Id": "b2", "Name": "/job"}]
    assert module.running() == engine.containers
    engine.containers = []
    assert module.running() == []


@pytest.mark.parametrize("where", ["engine", "remote_engine"])
def test_containers_that_are_just_starting_count_unless_they_are_accounted_for(request, where):
    engine = request.getfixturevalue(where)
    now = time.time()
    states = {
        "new": {"Status": "created", "Error": ""},
        "up": {"Status": "running", "Running": True},
        "failed": {"Status": "created", "Error": "no such file"},
        "ended": {"Status": "exited", "Running": False},
    }
    engine.containers = [{"Id": "a1"}]
    engine.starting = [{"Id": name, "State": state} for name, state in states.items()]
    engine.starting[0]["Config"] = {"Image": "x", "Labels": {"io.imagematrix.vram": "1"}}
    engine.created = [
        *({"Id": name, "Created": now} for name in states),
        {"Id": "a1", "Created": now},  # it runs by now
        {"Id": "old", "Created": now - 100},
        {"Id": "launch", "Created": now, "Labels": {"io.imagematrix.selected": "training:v1-x"}},
        {"Id": "task", "Created": now, "Labels": {"com.docker.swarm.task.id": "t"}},
    ]
    found = module.running_or_starting()
    assert [one["Id"] for one in found] == ["a1", "new", "up"]
    assert found[1]["Config"] == {"Image": "x", "Labels": {}}
    assert not any(name in request for request in engine.requests for name in ("/old/", "/launch/", "/task/"))
    assert [one["Id"] for one in module.running()] == ["a1"]


@pytest.mark.parametrize("where", ["engine", "remote_engine"])
def test_a_starting_launch_counts_if_nobody_attends_to_it(request, where):
    engine = request.getfixturevalue(where)
    selected = "io.imagematrix.selected"
    engine.starting = [{"Id": name, "State": {"Status": "created"}} for name in ("one", "two", "task")]
    engine.created = [
        {"Id": "one", "Created": time.time(), "Labels": {selected: "x:1", "number": "1"}},
        {"Id": "two", "Created": time.time(), "Labels": {selected: "x:1", "number": "2"}},
        {"Id": "task", "Created": time.time(), "Labels": {"com.docker.swarm.task.id": "t"}},
    ]
    found = module.running_or_starting(lambda labels: labels["number"] == "1")
    assert [one["Id"] for one in found] == ["two"]


@pytest.mark.parametrize("where", ["engine", "remote_engine"])
def test_a_container_that_takes_long_to_start_is_not_waited_for(request, where, monkeypatch):
    engine = request.getfixturevalue(where)
    monkeypatch.setattr(module, "START_S", 0.1)
    engine.created = [{"Id": "slow", "Created": time.time()}, {"Id": "new", "Created": time.time()}]
    engine.starting = [{"Id": "new", "State": {"Status": "created"}}]
    engine.before_response["GET", "/containers/slow/json"] = lambda: time.sleep(0.5)
    engine.responses["GET", "/containers/slow/json"] = (200, b"{}")
    assert [one["Id"] for one in module.running_or_starting()] == ["new"]


@pytest.mark.parametrize("where", ["engine", "remote_engine"])
def test_labels_inherited_from_the_image_are_excluded(request, where):
    engine = request.getfixturevalue(where)
    engine.add_image({"from": "image", "both": "image"})
    engine.add_image(None)
    labelled, bare = (image["Id"] for image in engine.images)
    cases = [
        (labelled, {"from": "image", "both": "launch", "own": "launch"}, {"both": "launch", "own": "launch"}),
        (bare, {"own": "launch"}, {"own": "launch"}),
        (labelled, {}, {}),
        ("sha256:gone", {"own": "launch"}, {}),
        (None, {"own": "launch"}, {}),
    ]
    engine.containers = [
        {"Id": f"c{number}", "Image": image, "Config": {"Labels": labels}}
        for number, (image, labels, _) in enumerate(cases)
    ]
    assert [one["Config"]["Labels"] for one in module.running()] == [own for _, _, own in cases]


@pytest.mark.parametrize("where", ["engine", "remote_engine"])
def test_error_while_listing_containers_is_reported(request, where):
    request.getfixturevalue(where).status = 500
    with pytest.raises(EngineError):
        module.running()


def test_local_dockerd_is_on_this_machine(engine, monkeypatch):
    engine.info["Name"] = "elsewhere"
    monkeypatch.setattr(module, "listener", lambda _: "dockerd")
    assert module.remote() is None
    assert engine.requests == []


@pytest.mark.parametrize("kind", ["engine", "remote_engine"])
def test_remote_engine_is_detected_by_its_host_name(request, kind):
    """A socket forwarded by ssh has ssh as its listener; here it is this process."""
    answering = request.getfixturevalue(kind)
    assert module.remote() is None
    answering.info["Name"] = "node7"
    assert module.remote() == "node7"
    answering.info["Name"] = ""
    assert module.remote() == endpoint.address()


def test_engine_of_this_container_is_on_this_machine(engine, monkeypatch, tmp_path):
    engine.info["Name"] = "node7"
    engine.containers = [{"Id": "ab" * 32}]
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"600 590 8:1 /var/lib/docker/containers/{'ab' * 32}/hostname /etc/hostname rw\n")
    monkeypatch.setattr(
        module, "open", lambda path, **_: mounts.open() if "mount" in path else 1, raising=False
    )
    monkeypatch.setattr(module, "listener", lambda _: None)
    assert module.remote() is None
    engine.containers = []
    assert module.remote() == "node7"
    mounts.unlink()
    assert module.remote() == "node7"


def test_hanging_engine_times_out(docker_host, monkeypatch, tmp_path):
    monkeypatch.setattr(unix_http, "ANSWER_S", 0.01)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{tmp_path}/docker.sock")
        listening.listen()
        docker_host(f"unix://{tmp_path}/docker.sock")
        for ask in (module.running, module.responds):
            with pytest.raises(EngineError, match=r"did not respond within 0\.01 seconds") as caught:
                ask()
            assert "systemctl status docker" in caught.value.remedy
