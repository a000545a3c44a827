"""Certificates that rotate, and the command."""

import asyncio
import base64
import json
import re
import signal
import ssl
import subprocess
import sys
import time
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from admission_cases import OTHER, POLICY, A, pod, review
from aiohttp import ClientSession
from coroutines import running, until
from cryptography import x509
from downloading import certify

from imagematrix.common import json_documents
from imagematrix.errors import UsageError
from imagematrix.integrations.http_service.http_server import Address, serve_http
from imagematrix.integrations.http_service.workers import Workers
from imagematrix.integrations.kubernetes.webhook.certificate import Certificate
from imagematrix.integrations.kubernetes.webhook.review import PATH, answer_review
from imagematrix.integrations.kubernetes.webhook.server import LIMITS, Server
from imagematrix.integrations.kubernetes.webhook.state import ClusterState, PolicyOptions


def patch_of(response):
    return json.loads(base64.b64decode(response["patch"])) if "patch" in response else []


def common_name(port):
    """Return the name in the certificate that a server uses for a new connection."""
    certificate = x509.load_pem_x509_certificate(ssl.get_server_certificate(("127.0.0.1", port)).encode())
    return certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value


async def test_a_certificate_rotates_and_connections_stay(tmp_path, telemetry):
    chain, private = certify(tmp_path, "first")
    made = Certificate(chain, private)
    current = ClusterState([], PolicyOptions(), telemetry)
    current.policies = (POLICY,)
    workers = Workers(answer_review.__module__)
    application = Server(current, telemetry, workers).make_application()
    trusting = ssl.create_default_context(cafile=chain)
    async with (
        serve_http(application, Address("127.0.0.1", 0), tls=made.context, limits=LIMITS) as bound,
        running(made.follow(telemetry)),
        ClientSession() as session,
    ):
        port = bound.port

        async def ask():
            url = f"https://127.0.0.1:{port}{PATH}"
            async with session.post(url, json=review(pod(OTHER)), ssl=trusting) as got:
                return (await got.json())["response"]["allowed"], got.connection

        assert (await ask())[0]
        assert await asyncio.to_thread(common_name, port) == "first"
        old = chain.read_bytes(), private.read_bytes()
        certify(tmp_path, "second")
        new = chain.read_bytes()
        private.write_bytes(old[1])  # its key does not exist yet
        await until(lambda: any("KEY_VALUES_MISMATCH" in one for one in telemetry.lines))
        assert await asyncio.to_thread(common_name, port) == "first"
        certify(tmp_path, "third")
        assert chain.read_bytes() != new
        await until(lambda: "certificate reloaded" in telemetry.lines)
        assert await asyncio.to_thread(common_name, port) == "third"
        # The earlier connection still exists: a new one would not trust the certificate.
        assert (await ask())[0]
    await workers.end()


def test_a_certificate_that_cannot_be_read(tmp_path):
    chain, private = certify(tmp_path, "x")
    with pytest.raises(UsageError, match="No such file"):
        Certificate(chain, tmp_path / "none")
    private.write_text("x")
    with pytest.raises(UsageError, match="invalid certificate"):
        Certificate(chain, private)


def run_command(*words):
    command = [sys.executable, "-m", "imagematrix", "kubernetes", "webhook", *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def wait_until_ready(port):
    """Wait until a webhook has answered a review of its own."""
    for _ in range(600):
        try:
            with urlopen(f"http://127.0.0.1:{port}/readyz", timeout=30) as answer:
                assert answer.read() == b"ok\n"
                return
        except HTTPError as error:
            error.close()
        time.sleep(0.1)
    raise AssertionError("not ready within a minute")


@pytest.fixture
def files(tmp_path, catalog, nodes):
    """The options that name files."""
    chain, private = certify(tmp_path, "x")
    (tmp_path / "catalog.json").write_text(json_documents.dump_json(catalog.to_json()))
    (tmp_path / "nodes.json").write_text(json.dumps(nodes(n1=None)))
    return [
        *("--catalog", tmp_path / "catalog.json", "--nodes", tmp_path / "nodes.json"),
        *("--tls-cert", chain, "--tls-key", private),
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_answers_until_a_signal(files, tmp_path, number, catalog):
    name = f"{catalog.image}:{catalog.version}"

    async def ask(port):
        trusting = ssl.create_default_context(cafile=tmp_path / "tls.crt")
        async with ClientSession() as session:
            url = f"https://127.0.0.1:{port}{PATH}"
            async with session.post(url, json=review(pod(name)), ssl=trusting) as got:
                return (await got.json())["response"]

    with run_command(*files, "--listen", "127.0.0.1:0", "--health", "127.0.0.1:0") as process:
        address = r"127\.0\.0\.1:(\d+)"
        told = re.fullmatch(
            rf"answering reviews on {address}, health on {address}\n", process.stderr.readline()
        )
        port, health = map(int, told.groups())
        assert process.stderr.readline() == "policies made for 2 nodes\n"
        wait_until_ready(health)
        response = asyncio.run(ask(port))
        assert patch_of(response)[0]["value"] == A
        process.send_signal(number)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--listen", "8443"], "invalid address '8443'"),
        (["--listen", "192.0.2.1:1"], "cannot listen on 192.0.2.1:1"),
        (["--on-unknown", "x"], "invalid --on-unknown"),
        (["--nodes", "cluster"], "not running in a pod"),
        (["--tls-key", "/nowhere"], "No such file"),
        (["--events", "x"], "--events is for --nodes cluster"),
        (["--exclude", "x"], "--exclude is for --events"),
        (["--nodes", "cluster", "--events", "a/../b"], "invalid --events: 'a/../b'"),
    ],
)
def test_invalid_options_are_rejected(cli, files, words, expected, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    cli("kubernetes", "webhook", *files, *words).refuses(2, expected)


def test_events_need_the_namespace_of_a_pod(cli, files, monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "192.0.2.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    cli("kubernetes", "webhook", *files, "--nodes", "cluster", "--events", "l").refuses(
        2, "serviceaccount/namespace cannot be read"
    )
