"""A package index on loopback."""

import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from serving import Service


class Index(Service):
    """A package index: the files by project, or bytes or a status that it answers instead.

    `logins` are the `Authorization` headers of its requests.
    """

    def __init__(self):
        self.projects: dict[str, Any] = {}
        self.logins: list[str | None] = []
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                index.logins.append(self.headers["Authorization"])
                name = self.path.strip("/").rpartition("/")[2]
                assert self.headers["Accept"].startswith("application/vnd.pypi.simple.v1+json")
                known = index.projects.get(name)
                status, body = (
                    200,
                    known if isinstance(known, bytes) else json.dumps({"files": known}).encode(),
                )
                if known is None or isinstance(known, int):
                    status, body = known or 404, b""
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.start(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.address}/simple"

    def add(self, name, *filenames, **more):
        """Add files to a project; the SHA-256 of each is made from its name."""
        files = [{"filename": one, "hashes": {"sha256": sha256(one)}, **more} for one in filenames]
        self.projects.setdefault(name, []).extend(files)


def sha256(filename):
    """Return the SHA-256 that the index states for a file."""
    return hashlib.sha256(filename.encode()).hexdigest()
