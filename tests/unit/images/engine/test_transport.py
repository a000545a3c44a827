"""Both ways to the engine: a socket, and docker-py with TLS and contexts."""

import hashlib
import json
import os
import socket
import ssl
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from imagematrix.errors import EngineError
from imagematrix.images.engine import containers, endpoint, images, transport
from imagematrix.integrations.kubernetes.install import certificates

LABEL = "io.imagematrix.image"

pytestmark = pytest.mark.usefixtures("docker_host")


def test_docker_py_client_is_connected(any_engine):
    any_engine.add_image({LABEL: "training"})
    client = transport.open_client()
    assert client.api.images(filters={"label": LABEL}) == any_engine.images
    client.close()


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "not a Docker engine at unix://.*"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not a Docker engine at"),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>", "not a Docker engine at"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + b"[" * 100_000, "not a Docker engine at"),
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
        images.list_labelled(LABEL)


def test_response_size_is_limited(any_engine, monkeypatch):
    monkeypatch.setattr(transport, "RESPONSE_LIMIT", 1 << 20)
    any_engine.responses["GET", "/images/json"] = 200, b"[%s]" % (b" " * (2 << 20))
    with pytest.raises(EngineError, match="response of the engine exceeds 1 MiB"):
        images.list_labelled(LABEL)


def test_error_of_a_remote_engine_is_reported(remote_engine, monkeypatch):
    monkeypatch.setattr(
        remote_engine, "answer", lambda _, real=remote_engine.answer: _then_refuse(remote_engine, real, _)
    )
    with pytest.raises(
        EngineError, match=r"the Docker engine at tcp://127.* refused: something about the daemon"
    ):
        images.list_labelled(LABEL)


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
    assert images.list_labelled(LABEL) == remote_engine.images


@pytest.fixture
def tls_engine(monkeypatch, tmp_path):
    """The address of an engine, and the certificates of it and of clients; registries have another CA."""
    (tmp_path / "registries.pem").write_bytes(certificates.make_certificate(["registry.example"]).authorities)
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

    tls = certificates.make_certificate(["localhost"])
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
    assert images.list_labelled(LABEL) == [{"Id": "x"}]
    (tmp_path / "docker-config" / "contexts" / "tls").rename(tmp_path / "gone")
    with pytest.raises(EngineError, match="cannot reach the Docker engine"):
        images.list_labelled(LABEL)


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
        assert images.list_labelled(LABEL) == [{"Id": "x"}]
        monkeypatch.delenv(name)
    with pytest.raises(EngineError, match="cannot reach the Docker engine"):  # without TLS
        images.list_labelled(LABEL)


def _then_refuse(engine, real, resource):
    engine.status = 200 if resource.endswith("/version") else 500
    return real(resource)


def test_damaged_configuration_of_docker_is_reported(remote_engine, tmp_path):
    (tmp_path / "docker-config").mkdir()
    (tmp_path / "docker-config" / "config.json").write_text('{"auths": {"reg.example": {"auth": "!!!"}}}')
    with pytest.raises(EngineError, match=r"docker's configuration for tcp:\S+ cannot be read"):
        images.list_labelled(LABEL)
    assert not remote_engine.images


def test_impossible_port_in_the_address_of_the_engine_is_named(monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:99999")
    with pytest.raises(EngineError, match=r"for tcp://127.0.0.1:99999 cannot be read: Port out of range"):
        images.list_labelled(LABEL)


def test_remote_that_is_not_an_engine_is_reported(remote_engine):
    remote_engine.status = 500
    with pytest.raises(EngineError, match=r"cannot reach the Docker engine at tcp://127"):
        transport.open_client()


@pytest.mark.parametrize(
    "address", ["unix:///nowhere/docker.sock", "unix://" + "/x" * 100, "tcp://127.0.0.1:1", "no://x"]
)
def test_error_for_a_missing_engine_has_a_remedy(docker_host, address):
    docker_host(address)
    with pytest.raises(EngineError, match="cannot reach the Docker engine at") as caught:
        images.list_labelled(LABEL)
    assert address in str(caught.value)
    assert "systemctl start docker" in caught.value.remedy
    assert caught.value.exit_code == 8


def test_remedy_for_a_remote_engine_refers_to_its_machine(docker_host):
    docker_host("ssh://me@nowhere.invalid")
    error = transport.make_unreachable_error(
        endpoint.find_address(), OSError("Permission denied (publickey)")
    )
    assert error.remedy.startswith("run `ssh ssh://me@nowhere.invalid docker version` to check")
    assert "on that machine" in transport.make_unreachable_error("tcp://far:2375", OSError("no route")).remedy


def test_permission_error_names_the_group(docker_host, monkeypatch):
    docker_host("unix:///run/docker.sock")

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(transport, "_socket", SimpleNamespace(AF_UNIX=1, SOCK_STREAM=1, socket=refuse))
    with pytest.raises(
        EngineError, match=r"cannot reach the Docker engine at unix://.*: permission denied"
    ) as caught:
        transport.open_client()
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
        images.list_labelled(LABEL)


def test_hanging_engine_times_out(docker_host, monkeypatch, tmp_path):
    monkeypatch.setattr(transport, "ANSWER_S", 0.01)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{tmp_path}/docker.sock")
        listening.listen()
        docker_host(f"unix://{tmp_path}/docker.sock")
        for ask in (containers.list_running, transport.is_responding):
            with pytest.raises(EngineError, match=r"did not respond within 0\.01 seconds") as caught:
                ask()
            assert "systemctl status docker" in caught.value.remedy
