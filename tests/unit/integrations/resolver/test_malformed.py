"""A thousand malformed requests: each is refused, and none leaves a connection or memory behind."""

import contextlib
import random
import re
import socket
import time
from pathlib import Path

import pytest
from distribution import digest

# Every 15 s, aiohttp closes connections that nobody has used for 15 s.
KEPT_ALIVE_S = 40
KEPT = 16  # both ends of connections that are kept for the next request
LAYER = digest(b"cpu-v3" * 1000)
TOKENS = [
    *("bytes=", "-", ",", "0", "5", "99999999999999999999", "x", " ", "=", "items=", "\x7f", "é", "--", "1-0")
]
SEGMENTS = [
    *("v2", "..", ".", "", "%2e%2e", "%00", "%", "%zz", "ml", "training", "manifests", "blobs"),
    *("tags", "list"),
    *("sha256:" + "0" * 64, "sha256:x", LAYER, "v1", "V1 ", "\\", "é", "a" * 300, "~", "?ns=x", "#"),
    *(";", "@"),
]
HEADERS = [
    *("Accept", "Range", "If-Range", "Authorization", "Host", "Content-Length", "Transfer-Encoding"),
    *("Expect",),
    *("Connection", "Upgrade", "", " ", "X\x00", "X" * 300, "Cookie", ":"),
]
METHODS = ["GET", "HEAD", "PUT", "get", "G\x00T", "CONNECT", "PRI", "", "X" * 200, "OPTIONS"]


def path(pick):
    return "/" + "/".join(pick.choices(SEGMENTS, k=pick.randint(1, 9)))


def of_a_path(pick):
    return f"GET {path(pick)} HTTP/1.1\r\nHost: a\r\n\r\n".encode("utf-8", "surrogateescape")


def of_a_range(pick):
    value = "".join(pick.choices(TOKENS, k=pick.randint(1, 6)))
    return f"GET /v2/ml/training/blobs/{LAYER} HTTP/1.1\r\nHost: a\r\nRange: {value}\r\n\r\n".encode()


def of_a_header(pick):
    first = "GET /v2/ml/training/manifests/v1 HTTP/1.1"
    count = pick.randint(1, 5)
    lines = [f"{pick.choice(HEADERS)}: {''.join(pick.choices(TOKENS, k=3))}" for _ in range(count)]
    return "\r\n".join([first, *lines, "", ""]).encode()


def of_a_first_line(pick):
    version = pick.choice(["HTTP/1.1", "HTTP/9.9", "HTTP/2.0", "", "FTP/1.0", "HTTP/1.1" * 50])
    return f"{pick.choice(METHODS)} {path(pick)} {version}\r\n\r\n".encode()


def of_tls(pick):
    record = bytes([22, 3, pick.randint(0, 4)]) + pick.randbytes(2)
    return record + b"\x01" + pick.randbytes(pick.randint(0, 600)) + pick.choice([b"", b"\r\n\r\n"])


def sockets(*addresses):
    """Return how many open sockets are an end of a connection with one of these; see proc_net_tcp(5)."""
    ports = {f"{int(address.rpartition(':')[2]):04X}" for address in addresses}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(
        inode != "0" and bool(ports & {local.rpartition(":")[2], remote.rpartition(":")[2]})
        for _, local, remote, _, _, _, _, _, _, inode, *_ in rows
    )


def answered(address, raw, *, end):
    """Send the bytes, optionally close the sending side, and return the whole answer."""
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        pieces = []
        with contextlib.suppress(
            ConnectionError
        ):  # it may close the connection before it has read everything
            connection.sendall(raw)
            if end:
                connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(1 << 16):
                pieces.append(piece)
        return b"".join(pieces)


@pytest.mark.parametrize("upstream_is_down", [False, True])
def test_malformed_requests_are_survived(node, upstream, published, upstream_is_down):
    assert node.pull("v1") == published.digests["cpu-v3"]
    if upstream_is_down:
        upstream.fails("GET", "/v2/", times=10_000, status=503)
    pick = random.Random(20261122)  # noqa: S311 - the same each time
    before = sockets(node.address, upstream.address)
    statuses = set()
    for kind in (of_a_path, of_a_range, of_a_header, of_a_first_line, of_tls):
        for _ in range(200):
            raw = kind(pick)
            # A TLS client waits for an answer before it closes the connection.
            answer = answered(node.address, raw, end=kind is not of_tls)
            if answer:
                status = re.match(rb"HTTP/\d\.\d (\d{3}) ", answer)  # the HTTP version of the request
                assert status, (raw, answer[:200])
                statuses.add(int(status[1]))
            assert kind is not of_tls or answer[8:].startswith(b" 400 "), raw
    of_the_upstream = {503} if upstream_is_down else set()  # the status is passed through for a blob
    assert statuses <= {200, 206, 301, 400, 403, 404, 405, 416, 417, 502} | of_the_upstream
    assert node.pull("v1") == published.digests["cpu-v3"]
    deadline = time.monotonic() + KEPT_ALIVE_S
    while (after := sockets(node.address, upstream.address)) > before + KEPT and time.monotonic() < deadline:
        time.sleep(0.1)
    assert after <= before + KEPT
