"""A registry in memory that fails on request: the distribution API on loopback."""

import contextlib
import hashlib
import json
import re
import socketserver
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from serving import Service

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
INDEX = "application/vnd.oci.image.index.v1+json"
PLATFORM = {"architecture": "amd64", "os": "linux"}
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
RESOURCE = re.compile(r"/v2/(.+)/(manifests|blobs|tags|referrers)/(.*)")


def digest(raw):
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def error(*codes):
    """Return the body of an answer that reports errors."""
    return json.dumps({"errors": [{"code": code, "message": "as it says"} for code in codes]}).encode()


class Request(NamedTuple):
    method: str
    path: str
    login: str | None


@dataclass
class Repository:
    """Blobs and manifests by digest, tags with their digests, and the tags that ever moved."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)  # media type and bytes
    tags: dict[str, str] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)

    def put(self, tag, raw, media_type):
        """Keep a manifest under a tag, or only by its digest if `tag` is None."""
        self.manifests[digest(raw)] = media_type, raw
        if tag and tag != digest(raw):
            if self.tags.get(tag, digest(raw)) != digest(raw):
                self.moved.append(tag)
            self.tags[tag] = digest(raw)
        return digest(raw)

    def naming(self, wanted):
        """Return the digests of the indexes that name a manifest."""
        return [
            one
            for one, (_, raw) in self.manifests.items()
            if any(entry["digest"] == wanted for entry in json.loads(raw).get("manifests", ()))
        ]

    def collect(self):
        """Remove blobs that no manifest has, as docker-registry's garbage collection does."""
        documents = [json.loads(raw) for _, raw in self.manifests.values()]
        used = {
            blob["digest"]
            for document in documents
            if "config" in document
            for blob in (document["config"], *document.get("layers", ()))
        }
        self.blobs = {key: value for key, value in self.blobs.items() if key in used}

    def image(
        self,
        tag,
        labels,
        *,
        layer=b"layer",
        config=None,
        kind=CONFIG,
        annotations=None,
        packed=LAYER,
        **platform,
    ):
        """Keep an image with labels, or with a `config` of other bytes; return its digest."""
        platform = platform or PLATFORM
        raw = json.dumps({**platform, "config": {"Labels": labels}}).encode() if config is None else config
        self.blobs |= {digest(raw): raw, digest(layer): layer}
        document = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": kind, "digest": digest(raw), "size": len(raw)},
            "layers": [{"mediaType": packed, "digest": digest(layer), "size": len(layer)}],
        } | ({"annotations": annotations} if annotations else {})
        return self.put(tag, json.dumps(document).encode(), MANIFEST)

    def attest(self, tag, image, *others):
        """Keep the index of an image with an attestation, as `docker buildx build --attest` makes it.

        `others` are more entries. Returns the digest of the index.
        """
        attestation = self.image(None, {}, layer=b"attestation")
        notes = {"vnd.docker.reference.type": "attestation-manifest", "vnd.docker.reference.digest": image}
        nowhere = {"os": "unknown", "architecture": "unknown"}
        entries = [
            {"mediaType": MANIFEST, "digest": image, "size": 1, "platform": PLATFORM},
            {
                "mediaType": MANIFEST,
                "digest": attestation,
                "size": 1,
                "annotations": notes,
                "platform": nowhere,
            },
            *others,
        ]
        document = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}
        return self.put(tag, json.dumps(document).encode(), INDEX)


@dataclass
class Fault:
    """A fault of the next requests of a kind: `times` of them, after `after` successful ones.

    `method` and `path` are patterns. `status` is answered instead, with `headers` and `body`; `drop` hangs up
    without an answer, or in the middle of an upload; `cut` truncates the answer; `then` is called before the
    request is served as usual.
    """

    method: str
    path: str
    times: int = 1
    after: int = 0
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b"{}"
    drop: bool = False
    cut: bool = False
    then: object = None

    def strikes(self, method, path):
        if not re.fullmatch(self.method, method) or not re.search(self.path, path) or not self.times:
            return False
        if self.after:
            self.after -= 1
            return False
        self.times -= 1
        return True


class Dripping(Service):
    """A registry that responds to every request with `begin`, and then sends `piece` without end.

    `most` is the greatest number of connections that were open at a time.
    """

    def __init__(self, begin, piece=b"x"):
        self.connections = self.most = 0
        now_open = set()
        dripping = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                dripping.connections += 1
                now_open.add(self)
                dripping.most = max(dripping.most, len(now_open))
                self.request.recv(65536)
                with contextlib.suppress(OSError):
                    self.request.sendall(begin)
                    while not dripping.closed.wait(0.01):
                        self.request.sendall(piece)
                now_open.remove(self)

        self.closed = threading.Event()
        self.start(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler))
        self.address = f"127.0.0.1:{self.port}"

    def close(self):
        self.closed.set()
        super().close()


class Server(Service):
    """The registry at `address`.

    `requests` are those received, `forms` the bodies of those for tokens. If `basic` is set, that
    Authorization is required; if `uses` is set, tokens of its own are required, each valid for so many
    requests. `page` is the number of tags per page, `pages` the address of the others, `silent` omits
    Docker-Content-Digest, `elsewhere` is the address for uploads. Without `deletes` nothing can be deleted,
    and without `ranges` blobs are sent whole. It answers `refusal` to a manifest with a layer in zstd.

    With `busy`, every second request is answered with 429. With `strict`, it deletes neither a manifest that
    an index names nor one that has a tag, but single tags. With `tells`, it tells which manifests have a
    subject.
    """

    def __init__(self):
        self.repositories = {}
        self.faults = []
        self.requests = []
        self.forms = []
        self.basic = None
        self.uses = None
        self.page = 1000
        self.pages = "http://another.example/v2/{name}/tags/list"
        self.silent = False
        self.deletes = True
        self.busy = False
        self.strict = False
        self.tells = False
        self.ranges = True
        self.refusal = None
        self.elsewhere = ""
        self._tokens = []  # remaining uses of each
        self._lock = threading.Lock()
        self.start(ThreadingHTTPServer(("127.0.0.1", 0), _handler(self)))
        self.address = f"127.0.0.1:{self.port}"

    def repository(self, name):
        return self.repositories.setdefault(name, Repository())

    def fails(self, method, path, **how):
        """Make requests fail; see Fault."""
        self.faults.append(Fault(method, path, **how))

    def count(self, method, path=""):
        """Return the number of requests of a kind."""
        return sum(one.method == method and re.search(path, one.path) is not None for one in self.requests)

    def challenge(self, login):
        """Return the headers of the 401 for a request; None if its login is accepted."""
        if self.uses is not None:
            with self._lock:
                number = (login or "").removeprefix("Bearer t")
                if number.isdigit() and self._tokens[int(number)]:
                    self._tokens[int(number)] -= 1
                    return None
            return {"WWW-Authenticate": f'Bearer realm="http://{self.address}/token",service="s"'}
        if self.basic and login != self.basic:
            return {"WWW-Authenticate": 'Basic realm="here"'}
        return None

    def token(self):
        with self._lock:
            self._tokens.append(self.uses)
            return json.dumps({"token": f"t{len(self._tokens) - 1}"}).encode()


def _handler(server):  # noqa: C901 - one method for each of HTTP's
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # otherwise each answer takes 40 ms
        cut = False

        def handle_one_request(self):
            self.body = None
            try:
                super().handle_one_request()
            except ConnectionError:  # the client hung up, as many tests want it
                self.close_connection = True

        def serve(self):
            self.cut = False
            login = self.headers.get("Authorization")
            server.requests.append(Request(self.command, self.path, login))
            fault = next((one for one in server.faults if one.strikes(self.command, self.path)), None)
            if fault and fault.drop:
                self.rfile.read(min(10, int(self.headers.get("Content-Length", 0))))
                self.close_connection = True
                return
            self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if server.busy and len(server.requests) % 2 == 0:
                self.answer(429)
                return
            if fault and fault.then:
                fault.then()
            if fault and fault.status:
                self.answer(fault.status, fault.body, fault.headers)
                return
            self.cut = bool(fault and fault.cut)
            challenge = server.challenge(login) if self.path.startswith("/v2/") else None
            if challenge:
                self.answer(401, b"{}", challenge)
            elif self.path.startswith("/token"):
                server.forms.append(self.body.decode())
                self.answer(200, server.token())
            elif self.path == "/v2/":
                self.answer(200)
            else:
                name, kind, what = RESOURCE.fullmatch(urlsplit(self.path).path).groups()
                getattr(self, f"{self.command.lower()}_{kind}")(server.repository(name), name, what)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = serve  # noqa: N815 - names of the standard library

        def get_manifests(self, repository, _, tag):
            result = repository.manifests.get(repository.tags.get(tag, tag))
            if result is None:
                # docker-registry treats any blob as a manifest, and fails to parse it.
                self.answer(500 if tag in repository.blobs else 404)
                return
            headers = {} if server.silent else {"Docker-Content-Digest": digest(result[1])}
            self.answer(200, result[1], {"Content-Type": result[0], **headers})

        head_manifests = get_manifests

        def put_manifests(self, repository, _, tag):
            document = json.loads(self.body)
            if server.refusal and any(
                one["mediaType"].endswith("zstd") for one in document.get("layers", ())
            ):
                self.answer(*server.refusal)
                return
            wanted = [document["config"], *document["layers"]] if "config" in document else []
            lacks = [one for one in wanted if one["digest"] not in repository.blobs]
            lacks += [
                one for one in document.get("manifests", ()) if one["digest"] not in repository.manifests
            ]
            if lacks:
                self.answer(400, error("MANIFEST_BLOB_UNKNOWN"))
                return
            repository.put(tag, self.body, self.headers["Content-Type"])
            self.answer(201)

        def delete_manifests(self, repository, _, tag):
            """Delete as docker-registry does: only by digest, with all its tags; or not at all."""
            if server.strict and tag in repository.tags:
                del repository.tags[tag]
                self.answer(202)
                return
            if not server.deletes or tag not in repository.manifests:
                self.answer(404 if DIGEST.fullmatch(tag) and server.deletes else 400)
                return
            if server.strict and (tag in repository.tags.values() or repository.naming(tag)):
                self.answer(412, error("DENIED"))
                return
            del repository.manifests[tag]
            repository.tags = {name: value for name, value in repository.tags.items() if value != tag}
            self.answer(202)

        def get_referrers(self, repository, _, subject):
            if not server.tells:
                self.answer(404)
                return
            found = [
                {"mediaType": kind, "digest": one, "size": len(raw)}
                for one, (kind, raw) in repository.manifests.items()
                if json.loads(raw).get("subject", {}).get("digest") == subject
            ]
            self.answer(200, json.dumps({"schemaVersion": 2, "manifests": found}).encode())

        def get_blobs(self, repository, _, wanted):
            result = repository.blobs.get(wanted)
            start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")) if server.ranges else None
            if result is not None and start:
                self.answer(206, result[int(start[1]) :])
                return
            self.answer(404 if result is None else 200, result or b"")

        head_blobs = get_blobs

        def post_blobs(self, _, name, __):
            self.answer(202, headers={"Location": f"{server.elsewhere}/v2/{name}/blobs/uploads/1?_state=x"})

        def put_blobs(self, repository, _, __):
            (promised,) = parse_qs(urlsplit(self.path).query)["digest"]
            if promised != digest(self.body):
                self.answer(400, error("DIGEST_INVALID"))
                return
            repository.blobs[promised] = self.body
            self.answer(201)

        def get_tags(self, repository, name, _):
            if not repository.tags:
                self.answer(404)
                return
            last = parse_qs(urlsplit(self.path).query).get("last", [""])[0]
            rest = sorted(tag for tag in repository.tags if tag > last)
            page = rest[: server.page]
            link = f'<{server.pages.format(name=name)}?last={page[-1]}>; rel="next"' if page else ""
            more = {"Link": link} if len(rest) > len(page) else {}
            self.answer(200, json.dumps({"name": name, "tags": page}).encode(), more)

        def answer(self, status, body=b"", headers=None):
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.cut:
                body, self.close_connection = body[: len(body) // 2], True
            if self.command != "HEAD":
                with contextlib.suppress(ConnectionError):  # clients hang up when they have read enough
                    self.wfile.write(body)

        def log_message(self, *_):
            pass

    return Handler
