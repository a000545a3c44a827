"""Addresses that a registry may name in its answers, and witnesses of where clients then connect.

In an address, {reg} stands for the registry's host and port, {evil} for those of another host, {other} for
another port of the registry's host.
"""

import contextlib
import json
import socket
import socketserver
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import pytest
from downloading import certify
from serving import Service

REGISTRY = "127.0.0.1"
WITNESSES = ("127.0.0.2", "127.0.0.3", "::1")
OTHER = "another port"
NAMES = {  # the hosts that this machine's DNS knows, during a test
    "reg.example": REGISTRY,
    "auth.example": REGISTRY,
    "evil.example": "127.0.0.2",
    "xn--bcher-kva.example": "127.0.0.2",
    "bücher.example": "127.0.0.2",
    "evil.example.": "127.0.0.2",
    "evil_host.example": "127.0.0.2",
    "-evil.example": "127.0.0.2",
    "localhost": REGISTRY,
    "localhost.": REGISTRY,
}

HOME = [  # the registry's own origin, however it is written
    "http://{reg}/x",
    "HTTP://{reg}/x",
    "//{reg}/x",
    "/x",
    "x",
    "?x=1",
    "/x?to=http://{evil}/",
    "/x@{evil}/",
    "/http://{evil}/",
    "/x//{evil}/x",
    "/%2e%2e/%2f%2f{evil}",
    "/x%5c@{evil}/",
    "http://{reg}?@{evil}/",
    "http://{reg}/#@{evil}/",
    "http://{reg}#@{evil}/",
    "http://{reg}/@{evil}/",
    "http://{reg}/;@{evil}/",
]
ELSEWHERE = {  # valid addresses of other origins, and the addresses to which clients connect
    "http://{evil}/x": "127.0.0.2",
    "//{evil}/x": "127.0.0.2",
    "hTTp://{evil}/x": "127.0.0.2",
    "http://evil.example:{port}/x": "127.0.0.2",
    "http://EVIL.Example:{port}/x": "127.0.0.2",
    "http://xn--bcher-kva.example:{port}/x": "127.0.0.2",
    "http://{evil}/{reg}": "127.0.0.2",
    "http://{evil}/@{reg}/": "127.0.0.2",
    "http://{evil}?@{reg}/": "127.0.0.2",
    "http://{evil}#@{reg}/": "127.0.0.2",
    "http://{evil}/%5c@{reg}/": "127.0.0.2",
    "http://127.0.0.3:{port}/x": "127.0.0.3",
    "http://[::1]:{port}/x": "::1",
    "http://[0:0:0:0:0:0:0:1]:{port}/x": "::1",
    "http://[::0001]:{port}/x": "::1",
    "https://{evil}/x": "127.0.0.2",
    "http://{other}/x": OTHER,
}
REFUSED = [
    # The host before or after a backslash, as RFC 3986 or browsers read it.
    "http://{evil}\\@{reg}/x",
    "http://{evil}\\{reg}/x",
    "http://{reg}\\@{evil}/x",
    "http:\\\\{evil}/x",
    "\\\\{evil}/x",
    "/\\{evil}/x",
    "http:/\\{evil}/x",
    "http://{evil}/\\x",
    "//{evil}\\@{reg}/x",
    # Users and passwords.
    "http://{reg}@{evil}/x",
    "http://me:secret@{reg}/x",
    "http://@{reg}/x",
    "http://me@{reg}/x",
    "http://{reg}%40{evil}/x",
    "http://{evil}:80@{reg}/x",
    "http://{reg}%2f@{evil}/x",
    "http://{reg}%5c@{evil}/x",
    "http://a@{reg}@{evil}/x",
    # Characters that parsers remove, and those that end a header or a line.
    "http://{evil} /x",
    "http://{evil}\t@{reg}/x",
    "http://{evil}/x y",
    "ht\ttp://{evil}/x",
    "http://EV\tIL/x",
    "/\t/{evil}/x",
    "http://{evil}/\x7f",
    "http://{evil}\x1b/x",
    "http://127.0.0.2%00.example:{port}/x",
    "http://{evil}%20@{reg}/x",
    # Other scripts, and characters that normalization turns into others.
    "http://bücher.example:{port}/x",
    "http://\uff11\uff12\uff17.0.0.2:{port}/x",
    "http://127。0。0。2:{port}/x",
    "http://evil.example\uff0f@{reg}/x",
    "http://ⓔvil.example:{port}/x",
    "http://b%C3%BCcher.example:{port}/x",
    # Dots and labels.
    "http://evil.example.:{port}/x",
    "http://localhost.:{port}/x",
    "http://.evil.example:{port}/x",
    "http://evil..example:{port}/x",
    "http://./x",
    "http://evil_host.example:{port}/x",
    "http://-evil.example:{port}/x",
    "http://" + "a" * 64 + ".example:{port}/x",
    "http://" + "a." * 130 + "example:{port}/x",
    "http://%65vil.example:{port}/x",
    "http://*.example:{port}/x",
    "http://127.0.0.2,127.0.0.1:{port}/x",
    # Numbers that getaddrinfo(3) takes for IPv4 addresses.
    "http://127.2:{port}/x",
    "http://127.0.2:{port}/x",
    "http://2130706434:{port}/x",
    "http://0x7f000002:{port}/x",
    "http://0x7f.0.0.2:{port}/x",
    "http://0177.0.0.2:{port}/x",
    "http://127.0.0.02:{port}/x",
    "http://127.0.0.0x2:{port}/x",
    "http://127.0.0.2.:{port}/x",
    "http://127.0.0.256:{port}/x",
    "http://1.127.0.0.2:{port}/x",
    # IPv6.
    "http://[::1%25lo]:{port}/x",
    "http://[::1%lo]:{port}/x",
    "http://[fe80::1%251]:{port}/x",
    "http://::1:{port}/x",
    "http://[::1/x",
    "http://::1]:{port}/x",
    "http://[127.0.0.2]:{port}/x",
    "http://[v1.x]:{port}/x",
    "http://[::1]evil.example:{port}/x",
    "http://[::1]@{reg}/x",
    "http://[:::1]:{port}/x",
    "http://[]:{port}/x",
    # Ports.
    "http://{evil}:{port}/x",  # two ports
    "http://127.0.0.2:/x",
    "http://127.0.0.2:0/x",
    "http://127.0.0.1:0/x",
    "http://127.0.0.2:65536/x",
    "http://127.0.0.2:99999999999/x",
    "http://127.0.0.2:-{port}/x",
    "http://127.0.0.2:+{port}/x",
    "http://127.0.0.2:0{port}/x",
    "http://127.0.0.2:{port}_0/x",
    "http://127.0.0.2:\uff18\uff10/x",
    "http://127.0.0.2:http/x",
    "http://127.0.0.2:%50/x",
    # Schemes.
    "ftp://{evil}/x",
    "file:///etc/passwd",
    "gopher://{evil}/x",
    "data:,x",
    "javascript:x",
    "unix://{evil}/x",
    "http+unix://{evil}/x",
    "httpx://{evil}/x",
    "http:///x",
    "http:x",
    "http:/x",
    "x:y",
    "http://",
    "http://?x",
    "//",
    "evil.example:{port}/x",
    "http://[",
]


ANSWER = (
    b'HTTP/1.1 401 U\r\nWWW-Authenticate: Basic realm="x"\r\n'
    b"Set-Cookie: a=b\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"
)


class Witness(Service):
    """A server at a `host` that answers every request with a demand for a login.

    `received` are the heads of all requests together.
    """

    def __init__(self, host, port):
        self.received = b""
        witness = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                head = b""
                with contextlib.suppress(OSError):
                    while b"\r\n\r\n" not in head and not head.startswith(b"\x16"):  # of a TLS handshake
                        head += self.request.recv(1 << 16) or b"\x16"
                    witness.received += head
                    self.request.sendall(ANSWER)

        class Listener(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            allow_reuse_address = daemon_threads = True

        self.start(Listener((host, port), Handler))


class Seen(NamedTuple):
    """To which hosts clients connected besides the registry, what they sent there, and requests to it."""

    elsewhere: set[str]
    said: bytes
    asked: list[tuple[str, str | None]]


class Network:
    """What this process asked of the network: the `connected` addresses, each a host and a port."""

    def __init__(self):
        self.connected = []

    def observing(self, connect):
        """Return a method of sockets that does what `connect` does, and is seen."""

        def observed(client, address):
            if isinstance(address, tuple):
                self.connected.append(tuple(address[:2]))
            return connect(client, address)

        return observed


@contextlib.contextmanager
def observed():
    """Yield a Network that sees every connection that this process opens, whatever opens it.

    No audit hook sees them, because none can be removed, and while one runs no other thread can be traced
    for its coverage.
    """
    network = Network()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, network.observing(getattr(socket.socket, name)))
        yield network


def lookup(real):
    """Return a getaddrinfo that knows NAMES, and numbers as the `real` one does."""

    def getaddrinfo(host, port, family=0, type=0, proto=0, flags=0):  # noqa: A002 - as in `socket`
        name = host.decode() if isinstance(host, bytes) else host
        number = NAMES.get(name.lower(), name)
        return real(number, port, family, type, proto, flags | socket.AI_NUMERICHOST)

    return getaddrinfo


def written(address, port, other=5001):
    """Return an address of the table for a registry at a port, and another service at another one."""
    hosts = {"reg": f"{REGISTRY}:{port}", "evil": f"127.0.0.2:{port}", "other": f"{REGISTRY}:{other}"}
    return address.format(port=port, other_port=other, **hosts)


class NamingRegistry(Service):
    """A registry that names `address` in its answers, at `place`; every request needs the login ann:secret.

    The places: "redirect", of each request for the repository; "blob", the redirect of a GET of a blob;
    "upload", the Location of an upload; "realm" of a challenge; "token", where the token service redirects;
    "next", the next page of tags. With the files of a certificate in `tls` it is an https server.
    `requests` are the paths and Authorizations of all requests, `cookies` those of its own that came back.
    """

    LOGIN = "Basic YW5uOnNlY3JldA=="

    def __init__(self, tls=None):
        self.place = self.address = None
        self.requests = []
        self.cookies: list[str] = []
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle(self):
                with contextlib.suppress(ConnectionError):  # clients hang up
                    super().handle()

            def serve(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                registry.cookies += self.headers.get_all("Cookie", ())
                status, headers = registry.answer(self.command, self.path, self.headers.get("Authorization"))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value.encode().decode("latin-1"))
                self.send_header("Set-Cookie", "session=secret; Path=/")
                self.send_header("Content-Length", "2")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(b"{}")

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve  # noqa: N815 - names of the library

            def log_message(self, *_):
                pass

        self.start(ThreadingHTTPServer((REGISTRY, 0), Handler), tls)
        self.name = f"{REGISTRY}:{self.port}"

    def answer(self, method, path, login):
        """Return the status and the headers of an answer."""
        self.requests.append((path, login))
        if path.startswith("/token") and self.place == "token":
            return 307, {"Location": self.address}
        if not path.startswith("/v2/ml/training/") or "to=" in path:
            return 404, {}
        if login != self.LOGIN:
            realm = {"realm": self.address, "token": "/token"}.get(self.place)
            quoted = (realm or "").replace("\\", "\\\\")
            return 401, {
                "WWW-Authenticate": f'Bearer realm="{quoted}",service="s"' if realm else 'Basic realm="r"'
            }
        if self.place == "redirect" or (
            self.place == "blob" and (method, "/blobs/" in path) == ("GET", True)
        ):
            return 307, {"Location": self.address}
        if self.place == "upload" and method == "POST":
            return 202, {"Location": self.address}
        return 200, {"Link": f'<{self.address}>; rel="next"'} if self.place == "next" else {}


@pytest.fixture(scope="module")
def machines():
    """A NamingRegistry, and witnesses by host at the same port; none at ::1 on a machine without IPv6."""
    hosts = [host for host in WITNESSES if ":" not in host or has_ipv6()]
    with contextlib.ExitStack() as stack:
        for _ in range(20):  # another program may have the registry's port at a witness's address
            with contextlib.ExitStack() as starting, contextlib.suppress(OSError):
                registry = starting.enter_context(contextlib.closing(NamingRegistry()))
                witnesses = {
                    host: starting.enter_context(contextlib.closing(Witness(host, registry.port)))
                    for host in hosts
                }
                witnesses[OTHER] = starting.enter_context(contextlib.closing(Witness(REGISTRY, 0)))
                stack.push(starting.pop_all())
                break
        else:
            pytest.fail("no port is free at all of the witnesses' addresses")
        yield registry, witnesses


def has_ipv6():
    """Whether this machine has the address ::1."""
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.fixture
def logged_in(docker_host, tmp_path, monkeypatch, no_pause):  # noqa: ARG001 - for their effects
    """Call it with registries for which docker then has a login; the names of the table are in DNS."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", lookup(socket.getaddrinfo))

    def log_in(*names, login=None):
        folder = tmp_path / "docker-config"
        folder.mkdir(exist_ok=True)
        given = login or {"auth": NamingRegistry.LOGIN.removeprefix("Basic ")}
        (folder / "config.json").write_text(json.dumps({"auths": dict.fromkeys(names, given)}))

    return log_in


@pytest.fixture
def hostile(machines, logged_in):
    """Call it with a place, an address of the table, and what a client does; see `Seen`."""
    registry, witnesses = machines
    other = witnesses[OTHER].port

    def call(place, address, act, *, login=None):
        logged_in(registry.name, f"localhost:{registry.port}", login=login)
        registry.place, registry.address = place, written(address, registry.port, other)
        registry.requests.clear()
        for witness in witnesses.values():
            witness.received = b""
        with observed() as network:
            act(registry.name)
        assert not registry.cookies
        said = b"".join(witness.received for witness in witnesses.values()).lower()
        there = {*network.connected} - {(REGISTRY, registry.port)}
        own = {(REGISTRY, other): OTHER, **{(host, registry.port): host for host in WITNESSES}}
        hosts = {own.get((host, port), f"{host} port {port}") for host, port in there}
        return Seen(hosts, said, list(registry.requests))

    return call


@pytest.fixture
def over_tls(logged_in, tmp_path, monkeypatch):
    """A NamingRegistry as https://reg.example, and one at auth.example; docker is logged in at the first."""
    files = certify(tmp_path, "reg.example", "auth.example")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(files[0]))
    registry, other = NamingRegistry(files), NamingRegistry(files)
    registry.name, other.name = f"reg.example:{registry.port}", f"auth.example:{other.port}"
    logged_in(registry.name)
    yield registry, other
    registry.close()
    other.close()
