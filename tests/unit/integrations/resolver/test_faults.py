"""Failures in the middle of a layer or of a rollout."""

import concurrent.futures
import contextlib
import http.client
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import requests
from distribution import Dripping, digest
from resolving import variant

from imagematrix.images.oci.retry import BUSY_TRIES, TRIES
from imagematrix.integrations.http_service import connections
from imagematrix.integrations.http_service.connections import Limits
from imagematrix.integrations.resolver import tag_cache
from imagematrix.integrations.resolver.upstream import KEPT, RegistryUpstream

HOST = Path(__file__).parents[3] / "hosts" / "laptop.json"
LAYER = b"cpu-v3" * 1000
BLOB = f"/v2/ml/training/blobs/{digest(LAYER)}"


@pytest.fixture
def process():
    """Call it with an upstream to get a resolver in a process of its own, and its address."""
    started = []

    def start(upstream, *words):
        command = [sys.executable, "-m", "imagematrix", "resolver", "--upstream", upstream, "--host", HOST]
        command += ["--listen", "127.0.0.1:0", *words]
        one = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
        started.append(one)
        return one, re.search(r" on (\S+)\n", one.stderr.readline())[1]

    yield start
    for one in started:
        one.kill()
        one.wait()
        one.stderr.close()


def test_a_busy_upstream_is_not_asked_for_long(node, upstream, published):
    """The threads that ask would all wait, and their clients with them."""
    upstream.fails("HEAD", "/manifests/v1", status=429, times=BUSY_TRIES)
    upstream.fails("GET", "/manifests/v1", status=429, times=BUSY_TRIES)
    assert node.get("/v2/ml/training/manifests/v1").status_code >= 400
    asked = [one for one in upstream.requests if one.path.endswith("/manifests/v1")]
    assert len(asked) == TRIES
    assert published.digests


def test_layer_truncated_by_the_upstream_ends_early(node, upstream, published):
    upstream.fails("GET", "/blobs/", cut=True)
    with pytest.raises(requests.exceptions.ChunkedEncodingError, match="IncompleteRead"):
        node.get(BLOB)
    assert node.get(BLOB).content == LAYER
    assert any(f"{BLOB}: aborted: " in note for note in node.notes)
    assert published.digests


def test_client_disconnect_logs_one_line(front, upstream, published):
    del upstream, published
    with Dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n") as slow:
        node = front(name=slow.address)
        with requests.get(f"http://{node.address}{BLOB}", stream=True, timeout=10) as answer:
            assert answer.raw.read(10) == b"x" * 10
        for _ in range(200):  # it shows with the next write
            if node.notes:
                break
            time.sleep(0.05)
        assert node.notes[0].startswith(f"{BLOB}: aborted: ")


def test_clients_that_do_not_read_hinder_no_others_and_are_dropped(front, monkeypatch):
    """What the resolver keeps for each is bounded, and so is for how long."""
    monkeypatch.setattr(connections, "LOOK_S", 0.05)
    endless = Dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n", bytes(1 << 20))
    with endless as upstream, contextlib.ExitStack() as stack:
        node = front(name=upstream.address, limits=Limits(answers=100 * KEPT, slow_s=1.0))
        host, _, port = node.address.rpartition(":")
        for _ in range(100):
            stalled = stack.enter_context(socket.create_connection((host, int(port))))
            stalled.sendall(f"GET {BLOB} HTTP/1.1\r\nHost: x\r\n\r\n".encode())

        def dropped():
            return len([note for note in node.notes if note.startswith(f"{BLOB}: aborted: ")])

        for _ in range(400):
            if dropped() == 100:
                break
            time.sleep(0.05)
        with requests.get(f"http://{node.address}{BLOB}", stream=True, timeout=60) as reading:
            assert len(reading.raw.read(8 << 20)) == 8 << 20
        assert dropped() >= 100


def test_pull_resumes_after_a_killed_resolver_restarts(process, upstream, published, tmp_path):
    state = ("--state", tmp_path / "state")
    first, address = process(upstream.address, *state)
    manifest = requests.get(f"http://{address}/v2/ml/training/manifests/v1", timeout=10)
    assert manifest.headers["Docker-Content-Digest"] == published.digests["cpu-v3"]
    first.kill()
    with Dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n") as slow:
        second, address = process(slow.address)
        connection = http.client.HTTPConnection(address, timeout=10)
        connection.request("GET", BLOB)
        answer = connection.getresponse()
        assert answer.read(10) == b"x" * 10
        second.kill()
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()
        connection.close()
    # An engine goes on with the digest that it was answered before.
    upstream.fails("GET", "/manifests/", times=1000, status=503)
    _, address = process(upstream.address, *state)
    url = f"http://{address}/v2/ml/training"
    again = requests.get(f"{url}/manifests/{published.digests['cpu-v3']}", timeout=10)
    assert again.content == manifest.content
    assert requests.get(f"http://{address}{BLOB}", timeout=10).content == LAYER


def test_hanging_upstream_does_not_delay_known_answers(front, published, monkeypatch, tmp_path):
    first = front(state=tmp_path / "state")
    assert first.pull("v1") == published.digests["cpu-v3"]
    first.close()
    monkeypatch.setattr(tag_cache, "PATIENCE_S", 0.1)
    answers = threading.Event()
    with monkeypatch.context() as hanging, concurrent.futures.ThreadPoolExecutor(1) as pool:
        hanging.setattr(RegistryUpstream, "find_manifest", lambda *_: answers.wait(20) and None)
        node = front(state=tmp_path / "state", threads=1)
        waiting = pool.submit(requests.get, f"http://{node.address}/v2/ml/other/manifests/v1", timeout=30)
        assert node.pull("v1") == published.digests["cpu-v3"]
        node.answer_own()
        assert not waiting.done()
        answers.set()


def test_pulls_during_a_rollout_never_return_to_the_old_variant(front, published, monkeypatch):
    """A better variant is added to the version while many clients pull it."""
    monkeypatch.setattr(tag_cache, "FRESH_S", 0)
    node = front()
    old = node.pull("v1")

    def pulls(_):
        seen = []
        for _ in range(10):
            digest_now = node.get("/v2/ml/training/manifests/v1", method="HEAD").headers[
                "Docker-Content-Digest"
            ]
            assert node.pull(digest_now) == digest_now, "the answered digest stays available"
            seen.append(digest_now)
        return seen

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [pool.submit(pulls, number) for number in range(8)]
        published.publish({"cpu-v2": variant(), "adl": variant("alderlake", ["sse4_2", "avx2", "fma"])})
        new = published.digests["adl"]
        for one in running:
            seen = one.result()
            assert seen == sorted(seen, key=[old, new].index)
    assert node.pull("v1") == new
