"""Building on engines other than the one that keeps the images, and through a proxy."""

import json
import select
import socket
import socketserver
import subprocess
import sys
import threading

import pytest
from processes import END_WITH_US

pytestmark = pytest.mark.long

MATRIX = """\
schema: imagematrix.matrix/v1
images:
  {image}: {{version: v1, template: small.j2}}
axes:
  part: [one, two, three, four]
"""
UPGRADE = b"POST /grpc HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
TEMPLATE = "FROM debian:trixie\nRUN sleep 1 && uname -a > /dev/null && echo {{ part }} > /part\n"


@pytest.fixture
def second(start_engine, engine):
    """Another engine with the same bases; the docker context "second" is for it."""
    result = start_engine()
    result.docker("rmi", "--force", "debian:trixie", "debian:bookworm")
    save = subprocess.Popen(
        ["docker", "save", "debian:trixie"], env=engine.environment, stdout=subprocess.PIPE
    )
    subprocess.run(["docker", "load"], env=result.environment, stdin=save.stdout, check=True)
    save.stdout.close()
    assert save.wait() == 0
    engine.docker("context", "create", "second", "--docker", f"host={result.host}")
    engine.docker("context", "create", "first", "--docker", f"host={engine.host}")
    yield result
    engine.docker("context", "rm", "--force", "first", "second")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    (tmp_path / "templates").mkdir()
    (tmp_path / ".dockerignore").write_text("*\n")
    (tmp_path / "templates/small.j2").write_text(TEMPLATE)
    return tmp_path


def built_by(engine):
    """Return how many steps an engine's BuildKit has run."""
    output = engine.docker("buildx", "du", "--builder", "default", "--verbose").stdout
    return output.count("sleep 1 && uname -a")


def test_other_engines_build_images_for_this_engine(engine, folder, second):
    (folder / "matrix.yaml").write_text(MATRIX.format(image="elsewhere"))
    built = engine.imagematrix("build", "--builder", "second", "--only", "part=one", cwd=folder)
    assert built.returncode == 0, built.stderr
    (reference,) = built.stdout.split()
    assert engine.docker("run", "--rm", reference, "cat", "/part").stdout == "one\n"
    assert (built_by(engine), built_by(second)) == (0, 1)
    assert not second.docker("images", "--quiet", reference).stdout

    verified = engine.imagematrix(
        "build", "--verify-reproducible", "--only", "part=one", "--json", cwd=folder
    )
    (cell,) = json.loads(verified.stdout)["cells"]
    assert (
        cell["digest"]
        == json.loads(engine.imagematrix("ls", "elsewhere:v1", "--json").stdout)["variants"][0]["digest"]
    )

    both = engine.imagematrix("build", "--builder", "first=1", "--builder", "second=2", cwd=folder)
    assert both.returncode == 0, both.stderr
    assert len(both.stdout.split()) == 3
    assert built_by(engine) >= 2
    assert built_by(second) >= 2
    for name in both.stdout.split():
        assert engine.docker("run", "--rm", name, "cat", "/part").stdout.strip() in ("two", "three", "four")


def test_an_unknown_builder_is_a_usage_error(engine, folder):
    (folder / "matrix.yaml").write_text(MATRIX.format(image="nowhere"))
    result = engine.imagematrix("build", "--builder", "nobody", cwd=folder)
    assert result.returncode == 2
    assert "builder 'nobody' not found" in result.stderr


class Wires(socketserver.ThreadingUnixStreamServer):
    """A server that forwards to an engine."""

    def __init__(self, place, engine):
        super().__init__(place, Wire)
        self.engine = engine


class Wire(socketserver.BaseRequestHandler):
    """Forwards a connection to the BuildKit inside an engine."""

    server: Wires

    def handle(self):
        with socket.socket(socket.AF_UNIX) as engine:
            engine.connect(self.server.engine.host.removeprefix("unix://"))
            engine.sendall(UPGRADE)
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += engine.recv(1)
            ends = {self.request: engine, engine: self.request}
            while True:
                for end in select.select(list(ends), [], [])[0]:
                    data = end.recv(1 << 16)
                    if not data:
                        return
                    ends[end].sendall(data)


@pytest.fixture
def wire(engine, folder):
    """A builder with buildx's remote driver: it reaches only BuildKit, by gRPC on a socket."""
    place = f"{folder}/buildkit.sock"
    with Wires(place, engine) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        engine.docker("buildx", "create", "--name", "wire", "--driver", "remote", f"unix://{place}")
        yield "wire"
        server.shutdown()
        thread.join()


def test_an_image_does_not_depend_on_the_builder_or_the_source_of_its_base(engine, folder, wire, registry):
    """A base keeps its layers, whether it is in the engine or only in a registry."""
    base, image = f"{registry.address}/debian:trixie", f"{registry.address}/everywhere"
    engine.docker("tag", "debian:trixie", base)
    engine.docker("push", "--quiet", base)
    (folder / "templates/small.j2").write_text(TEMPLATE.replace("debian:trixie", base))
    (folder / "matrix.yaml").write_text(MATRIX.format(image=image))
    digests, reference = set(), ""
    for options in ((), ("without",), ("--builder", wire), ("--push",)):
        if options:
            engine.docker("rmi", "--force", base, *engine.docker("images", "--quiet", image).stdout.split())
            engine.docker("buildx", "prune", "--all", "--force")
        words = [word for word in options if word != "without"]
        built = engine.imagematrix("build", "--only", "part=one", "--json", *words, cwd=folder)
        assert built.returncode == 0, built.stderr
        (cell,) = (cell for cell in json.loads(built.stdout)["cells"] if cell["status"] == "built")
        digests.add(cell["digest"])
        reference = cell["reference"]
    assert len(digests) == 1
    assert layers(engine, reference)[:-1] == layers(engine, base)


def layers(engine, reference):
    """Return the digests of the layers that an image has in its registry."""
    inspect = [*engine.inside, "docker", "buildx", "imagetools", "inspect", "--raw", reference]
    done = subprocess.run(inspect, env=engine.environment, check=True, capture_output=True)
    manifest = json.loads(done.stdout)
    if "manifests" in manifest:
        return layers(engine, f"{reference.rpartition(':')[0]}@{manifest['manifests'][0]['digest']}")
    return [layer["digest"] for layer in manifest["layers"]]


PROXY = """\
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Proxy(BaseHTTPRequestHandler):
    def do_GET(self):
        body = f"proxied {self.path}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

server = HTTPServer((sys.argv[1], 0), Proxy)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture
def proxy(engine):
    """The address of a proxy on the engine's machine, as its containers reach it."""
    gateway = engine.docker("network", "inspect", "--format", "{{(index .IPAM.Config 0).Gateway}}", "bridge")
    command = [*END_WITH_US, *engine.inside, sys.executable, "-c", PROXY, gateway.stdout.strip()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        yield f"http://{gateway.stdout.strip()}:{process.stdout.readline().strip()}"
        process.terminate()


def test_a_build_gets_proxies_only_with_proxy(engine, folder, proxy):
    (folder / "matrix.yaml").write_text(MATRIX.format(image="proxied"))
    fetch = (
        "RUN /usr/lib/apt/apt-helper -o Acquire::Retries=0 download-file http://127.0.0.1:9/{{ part }} /part"
    )
    (folder / "templates/small.j2").write_text(f"FROM debian:trixie\n{fetch}\n")
    options = {"cwd": folder, "env": engine.environment | {"http_proxy": proxy}}
    refused = engine.imagematrix("build", "--only", "part=one", **options)
    assert refused.returncode == 6, "nothing listens at that port"
    built = engine.imagematrix("build", "--only", "part=one", "--proxy", **options)
    assert built.returncode == 0, built.stderr
    (reference,) = built.stdout.split()
    assert engine.docker("run", "--rm", reference, "cat", "/part").stdout == "proxied http://127.0.0.1:9/one"
    assert proxy not in json.dumps(engine.inspect(reference)), "the image does not mention it"
    assert proxy not in engine.docker("history", "--no-trunc", reference).stdout
