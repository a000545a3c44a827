"""Starting and stopping the resolver, and its address."""

import asyncio
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from imagematrix.errors import UsageError
from imagematrix.integrations.http_service.http_server import Address
from imagematrix.integrations.resolver import server
from imagematrix.integrations.resolver.node import ReloadedHost
from imagematrix.integrations.resolver.server import ResolverSettings, serve

HOSTS = Path(__file__).parents[3] / "hosts"
LAPTOP = ReloadedHost.from_file(HOSTS / "laptop.json")


def settings(listen, token=None, **options):
    given = {"upstream": "registry.example:5000", "node": LAPTOP, "classes": {}, **options}
    return ResolverSettings(listen=listen, token=token, **given)


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("127.0.0.1:5050", Address("127.0.0.1", 5050)),
        ("127.1.2.3:0", Address("127.1.2.3", 0)),
        ("localhost:1", Address("127.0.0.1", 1)),
        ("[::1]:65535", Address("::1", 65535)),
    ],
)
def test_loopback_needs_no_token(listen, address):
    assert settings(listen).get_address() == address


@pytest.mark.parametrize("listen", ["0.0.0.0:5050", "[::]:5050", "10.0.0.1:1", "[::ffff:10.0.0.1]:1"])
def test_other_addresses_need_a_token(listen):
    with pytest.raises(UsageError, match="other machines can reach") as caught:
        settings(listen).get_address()
    assert "--token-file" in caught.value.remedy
    assert settings(listen, token=str(listen)).get_address().port


@pytest.mark.parametrize(
    "listen",
    [
        *("", "5050", ":5050", "127.0.0.1", "127.0.0.1:70000", "[::1", "host.example:1", "a:b", "::1:5050"),
        *("user@127.0.0.1:5098", "127.0.0.1:1#x", "127.0.0.1:1?y=1", "127.0.0.1:1/x:v1", "127.0.0.1:1/"),
        *(" 127.0.0.1:1", "127.0.0.1:1\n", "127.0.0.1:\t1", "127.0.0.1:+1", "127.0.0.1:1_0", "127.0.0.1:01"),
        *("127.1:1", "2130706433:1", "0x7f.0.0.1:1", "[::1%lo]:1", "[::1%25lo]:1", "[127.0.0.1]:1"),
        *("\\127.0.0.1:1",),
        *("localhost.:1", "127.0.0.1:\u0661", "http://127.0.0.1:1", "127.0.0.1:1,127.0.0.2:1", "*:1"),
    ],
)
def test_invalid_address_is_rejected(listen):
    with pytest.raises(UsageError, match=r"expected ADDRESS:PORT, such as 127\.0\.0\.1:5050"):
        settings(listen).get_address()


def test_class_name_must_be_valid_in_a_tag():
    with pytest.raises(UsageError, match="invalid class name: 'a-b'"):
        serve(settings("127.0.0.1:0", classes={"a-b": LAPTOP}), print)


def run(*words):
    command = [sys.executable, "-m", "imagematrix", "resolver", *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_exits_with_0(number, published, upstream):
    host = HOSTS / "laptop.json"
    words = ("--upstream", upstream.address, "--listen", "127.0.0.1:0", "--health", "127.0.0.1:0")
    with run(*words, "--host", host) as process:
        line = process.stderr.readline()
        address, health = re.fullmatch(
            rf"serving {upstream.address} on (\S+), health on (\S+)\n", line
        ).groups()
        with urllib.request.urlopen(f"http://{health}/healthz") as answer:
            assert answer.read() == b"ok\n"
        with urllib.request.urlopen(f"http://{address}/v2/ml/training/manifests/v1") as answer:
            assert answer.headers["Docker-Content-Digest"] == published.digests["cpu-v3"]
        with pytest.raises(urllib.error.HTTPError, match="404") as caught:
            urllib.request.urlopen(f"http://{address}/v2/ml/training/manifests/v9")
        caught.value.close()
        assert "ml/training:v1 is " in process.stderr.readline()
        process.send_signal(number)
        assert process.wait(30) == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--upstream", "nope"], "invalid registry 'nope'"),
        (["--upstream", "oci:/nowhere"], "is not an OCI layout"),
        (["--upstream", "r:1", "--class", "a"], "expected NAME=FILE"),
        (["--upstream", "r:1", "--class", "a=x", "--class", "a=y"], "two files for the class a"),
        *[
            (["--upstream", "r:1", task, *words], f"{words[0]} has no effect with {task.partition('=')[0]}")
            for task in ("--sweep", "--containerd=certs.d")
            for words in (
                ["--host", "node.json"],
                ["--class", "a=x"],
                ["--policy", "p.json"],
                ["--state", "s"],
                ["--changed", "c"],
                ["--health", "127.0.0.1:1"],
            )
        ],
        (["--sweep", "--containerd", "certs.d"], "--containerd has no effect with --sweep"),
        (
            ["--upstream", "r:1", "--containerd", "certs.d", "--token-file", "t"],
            "--token-file has no effect with --containerd",
        ),
        (["--upstream", "r:1", "--host", "/nowhere"], "/nowhere"),
        (
            ["--upstream", "r:1", "--token-file", "/nowhere"],
            "/nowhere cannot be read: No such file or directory\n",
        ),
        (["--upstream", "r:1", "--token-file", "."], ". cannot be read: Is a directory\n"),
        (["--upstream", "r:1", "--token-file", sys.executable], " is not text in UTF-8\n"),
        (["--upstream", "r:1", "--token-file", "/dev/null"], "is empty\n"),
        (["--sweep", "--listen", "127.0.0.1:1/x:v1"], "invalid address '127.0.0.1:1/x:v1'"),
        (
            ["--upstream", "r:1", "--containerd", "/dev/null"],
            "hosts.toml cannot be written: Not a directory\n",
        ),
        (["--upstream", "me@r:1"], "invalid"),
        (["--upstream", "r:0"], "invalid"),
        (["--upstream", "r:1/x:v1"], "invalid"),
        (["--upstream", "r:1/x@y"], "invalid"),
        (["--upstream", "0x7f.1"], "invalid"),
        (["--upstream", "r:1", "--listen", "192.0.2.1:1"], "other machines can reach"),
        (["--upstream", "r:1", "--listen", "127.0.0.1:1"], None),
    ],
)
def test_invalid_options_are_rejected_before_listening(cli, words, expected):
    with socket.socket() as other:
        if expected is None:  # a port in use
            other.bind(("127.0.0.1", 0))
            other.listen()
            words = [*words[:-1], f"127.0.0.1:{other.getsockname()[1]}"]
            expected = "cannot listen on"
        done = cli("resolver", *words)
    assert done.code == 2
    assert expected in done.err


async def test_change_of_the_node_is_noticed_while_the_upstream_hangs(tmp_path):
    hanging = threading.Event()
    changed = tmp_path / "changed"
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    reading = loop.run_in_executor(None, hanging.wait)
    watching = asyncio.create_task(server._watch_node(settings("127.0.0.1:0", changed=changed), print))
    try:
        async with asyncio.timeout(10):
            while not changed.exists():  # noqa: ASYNC110 - the watch makes it
                await asyncio.sleep(0.01)
    finally:
        hanging.set()
        watching.cancel()
        await reading
    assert changed.exists()
