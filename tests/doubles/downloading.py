"""An https server for files, with the faults of servers and connections."""

import contextlib
import datetime as dt
import hashlib
import ipaddress
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from serving import Service


@pytest.fixture(scope="session")
def tls(tmp_path_factory):
    """The files of a certificate for this machine and of its key."""
    return certify(tmp_path_factory.mktemp("tls"), "localhost")


@pytest.fixture
def downloads(tls, no_pause, monkeypatch, tmp_path):  # noqa: ARG001 - for its effect
    """A server whose certificate is trusted; what is downloaded from it goes to a new cache."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tls[0]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = Downloads(tls)
    yield server
    server.close()


def certify(folder, name, *others):
    """Write a self-signed certificate for 127.0.0.1 and for names; return the paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), *map(x509.DNSName, (name, *others))]
            ),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    chain, private = folder / "tls.crt", folder / "tls.key"
    chain.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return chain, private


class Downloads(Service):
    """The server at `address`; `files` are the contents by path, `requests` the paths and ranges asked for.

    `cut` is the number of bytes after which the next answers end, one for each; `validator` is the name of
    the header that tells contents apart, None for none; `ranges` states whether parts are sent, `sized`
    whether their length is stated; `redirect` is the address to which all requests are sent.
    """

    def __init__(self, tls):
        self.files = {}
        self.requests = []
        self.cut = []
        self.validator = "ETag"
        self.ranges = True
        self.sized = True
        self.redirect = None
        self.start(ThreadingHTTPServer(("127.0.0.1", 0), _handler(self)), tls)
        self.address = f"https://127.0.0.1:{self.port}"


def _handler(downloads):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def do_GET(self):
            content = downloads.files.get(self.path)
            wanted = self.headers.get("Range", "")
            downloads.requests.append((self.path, wanted))
            if downloads.redirect or content is None:
                self.send_response(302 if downloads.redirect else 404)
                self.send_header("Location", downloads.redirect or "")
                self.end_headers()
                return
            tag = '"' + hashlib.sha256(content).hexdigest() + '"'
            begin = 0
            if downloads.ranges and wanted and self.headers.get("If-Range") == tag:
                begin = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])
            self.send_response(206 if begin else 200)
            if downloads.sized:
                self.send_header("Content-Length", str(len(content) - begin))
            if downloads.validator:
                self.send_header(downloads.validator, tag)
            self.end_headers()
            size = downloads.cut.pop(0) if downloads.cut else len(content)
            with contextlib.suppress(OSError):  # the client has seen enough
                self.wfile.write(content[begin:][:size])

        def log_message(self, *_):
            pass

    return Handler
