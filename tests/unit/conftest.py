"""Fixtures of the unit tests: a small matrix to modify, the shipped matrix, a simulated Docker engine."""

import base64
import contextlib
import fnmatch
import json
import os
import shutil
import signal
import socketserver
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import jsonschema
import pytest
from distribution import Server
from rendering import Starter

from imagematrix.build.matrix import promised_variants
from imagematrix.build.matrix.load import load_matrix
from imagematrix.build.plan.plan import PlanContext, PlanStatus
from imagematrix.build.plan.planner import plan
from imagematrix.build.stores.names import NEW, REPOSITORY
from imagematrix.cli import main
from imagematrix.common import json_documents, programs
from imagematrix.common.record import replace
from imagematrix.hardware.host import probe
from imagematrix.hardware.host.host import Host
from imagematrix.hardware.vendors import marches
from imagematrix.images.catalog import labels as names
from imagematrix.images.catalog.catalog import Catalog

# After a test with gRPC, a fork in the same process, as `run` does, may hang in gRPC's handlers.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

ROOT = Path(__file__).parents[2]
# Folders with tests that start processes for code that runs in no other.
TRACED = (
    "build/trim",
    "hardware/gpu_request",
    "hardware/host",
    "integrations/kubernetes",
    "integrations/resolver",
    "integrations/swarm",
    "launcher/daemonless",
    "launcher/docker",
    "launcher/doctor",
    "selection",
)
GOOD = """\
schema: imagematrix.matrix/v1
images:
  training:
    version: v1
    template: training.j2
    context: .
axes:
  cuda: [none, "11.8", "12.4"]
  compute: ["7.0", "8.9"]
  driver: [535.261.03, 550.163.01]
  march: [x86-64-v3, znver4]
properties:
  cuda:
    none: {base: "debian:trixie", compiler: gcc-14}
    "11.8": {base: "debian:bookworm", compiler: gcc-12}
    "12.4": {base: "debian:trixie", compiler: gcc-14}
exclude:
  - {cuda: "11.8", driver: 550.163.01, why: they have the newer toolkit}
"""
TEMPLATE = """\
FROM {{ base }} AS compiler
RUN apt-get install g++
FROM compiler AS program
RUN cc {{ march_option }} main.c{% if cuda %} -DSM={{ sm }}{% endif %}

FROM {{ base }}
COPY --from=program /a.out /
"""


def pytest_ignore_collect(collection_path):
    """Collect folders called build too, which pytest ignores by default."""
    return False if collection_path == Path(__file__).parent / "build" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Run tests with very many inputs without coverage.

    With it they take two to ten times as long, and they cover no additional lines.
    """
    tracer = sys.gettrace()
    many = any(item.get_closest_marker(name) for name in ("hypothesis", "fuzz", "many"))
    if many:
        sys.settrace(None)
    try:
        return (yield)
    finally:
        if many:
            sys.settrace(tracer)


def pytest_sessionfinish():
    """Save the coverage: xdist kills a worker that does not end within 10 s, as on a busy machine."""
    if "coverage" in sys.modules and (tracing := sys.modules["coverage"].Coverage.current()):
        tracing.stop()
        tracing.save()


@pytest.fixture(autouse=True)
def _programs_of_path(monkeypatch):
    """Let programs be found in PATH by root, too, so that tests can put their own there."""
    monkeypatch.setattr(programs, "_get_path", lambda: os.environ["PATH"])


@pytest.fixture(autouse=True)
def _few_children_are_traced(request, monkeypatch):
    """Start coverage only in processes whose code no test runs in its own process.

    To start it takes ten times as long as to start Python.
    """
    if not any(request.path.is_relative_to(Path(__file__).parent / folder) for folder in TRACED):
        monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)


@pytest.fixture(autouse=True)
def _no_other_containers(monkeypatch):
    """Let no container that runs on this machine use a GPU of a test."""
    monkeypatch.setattr(
        "imagematrix.launcher.gpu_claims.other_engines.find_other_containers", lambda *_, **__: []
    )


@pytest.fixture(autouse=True)
def _no_policy(monkeypatch, tmp_path):
    """Let no policy of this machine apply to a test."""
    monkeypatch.setattr("imagematrix.images.trust.files.SITE", str(tmp_path / "etc" / "policy.json"))
    monkeypatch.delenv("IMAGEMATRIX_POLICY", raising=False)


@pytest.fixture(autouse=True)
def _no_site(monkeypatch, tmp_path):
    """Let no settings of this machine apply to a test."""
    monkeypatch.setattr("imagematrix.common.settings.FILE", str(tmp_path / "etc" / "site.toml"))
    for name in ("SITE", "ENGINE", "RUNTIME", "STORE"):
        monkeypatch.delenv(f"IMAGEMATRIX_{name}", raising=False)


@pytest.fixture
def write_site(tmp_path):
    """Call it with the text of the site's settings; it returns their file."""

    def write(text):
        path = tmp_path / "etc" / "site.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


@pytest.fixture(scope="session")
def _starter():
    with Starter() as starter:
        yield starter


@pytest.fixture(autouse=True)
def _fast_renderers(monkeypatch, _starter):
    """Fork the processes that render: to load Jinja takes longer than most tests."""
    monkeypatch.setattr("imagematrix.build.dockerfile.render.subprocess", _starter)


@pytest.fixture
def project(tmp_path):
    """A folder with a valid matrix and its template; call it with (old, new) pairs to modify it."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "training.j2").write_text(TEMPLATE)
    path = tmp_path / "matrix.yaml"
    path.write_text(GOOD)

    def write(*changes, text=None, template=None):
        content = GOOD if text is None else textwrap.dedent(text)
        for old, new in changes:
            assert old in content
            content = content.replace(old, new)
        path.write_text(content)
        if template is not None:
            (tmp_path / "templates" / "training.j2").write_text(textwrap.dedent(template))
        return path

    return write


@pytest.fixture(scope="session")
def shipped():
    """The path of the shipped matrix."""
    return ROOT / "matrix.yaml"


@pytest.fixture(scope="session")
def starters(tmp_path_factory):
    """The paths of the matrices that `init` writes, by template name."""
    folder = tmp_path_factory.mktemp("starters")
    shutil.copytree(ROOT / "templates", folder / "templates")
    written = sorted((ROOT / "imagematrix" / "starter").glob("*.yaml"))
    return {path.stem: Path(shutil.copy(path, folder)) for path in written}


@pytest.fixture(scope="session")
def shipped_catalog(shipped):
    """The catalog of all images of the shipped matrix."""
    variants = []
    for item in plan(load_matrix(shipped), PlanContext()).with_status(PlanStatus.BUILD):
        flags = marches.get_required_flags(item.cell.axes["march"], item.cell.properties["compiler"])
        variant = promised_variants.make_variant(item.cell, flags, f"training:v1-{item.cell.id}-0123456789ab")
        facts = (("cubins", "bytes"), ("driver", "bytes"))
        variants.append(replace(variant, facts=facts, libraries=()))
    return Catalog(image="training", version="v1", variants=tuple(variants))


@pytest.fixture(scope="session")
def catalog_file(shipped_catalog, tmp_path_factory):
    """The file of `shipped_catalog`."""
    path = tmp_path_factory.mktemp("catalog") / "training.json"
    path.write_text(json_documents.dump_json(shipped_catalog.to_json()))
    return path


@pytest.fixture(scope="session")
def profiles():
    """The files of the saved hosts, by name."""
    return {path.stem: path for path in (ROOT / "tests" / "hosts").glob("*.json")}


@pytest.fixture(scope="session")
def conforms():
    """Call it with a document to validate it against the JSON Schema named in it; it is returned."""

    def check(document):
        kind = document["schema"].removeprefix("imagematrix.").removesuffix("/v1")
        schema = json.loads((ROOT / "imagematrix" / "schemas" / f"{kind}.json").read_text())
        jsonschema.Draft202012Validator(schema).validate(document)
        return document

    return check


class FakeEngine:
    """A server of /images/json and a few other resources of the Docker API.

    It lists `images`, or sends `raw` bytes if they are set. `containers` are running, as `inspect` shows
    them; the list has one more, which has ended by the time it is inspected. `created` are the entries of
    created containers, and `starting` is their state as `inspect` shows it. A `status` other than 200 is sent
    with an error message. `requests` are the requested resources, `bodies` the bodies of the requests.

    It creates, shows and removes `volumes`, and an image that was loaded under a temporary name has the
    digest in that name.

    `responses` override the answers, by method and the end of the path: a status with bytes, or None to hang
    up. `before_response` has functions that are called before such an answer.
    """

    def __init__(self):
        self.images = []
        self.containers = []
        self.created = []
        self.starting = []
        self.info = {"ServerVersion": "26.1.5", "Name": os.uname().nodename}
        self.version = {"ApiVersion": "1.43", "Version": "26.1.5", "Components": [{"Name": "Engine"}]}
        self.headers = {"Ostype": "linux"}
        self.status = 200
        self.raw = None
        self.requests = []
        self.responses = {}
        self.before_response = {}
        self.bodies = []
        self.volumes = {}

    def add_catalog(self, catalog):
        """Add the variants of a catalog, whose references end in the first digits of an input digest."""
        for variant in catalog.variants:
            cell, _, short = variant.reference.removeprefix(f"{catalog.image}:{catalog.version}-").rpartition(
                "-"
            )
            own = {
                names.IMAGE: catalog.image,
                names.VERSION: catalog.version,
                names.CELL: cell,
                names.INPUT: f"sha256:{short:0<64}",
                names.VARIANT: names.write_variant(variant),
            }
            self.add_image(own, RepoTags=[variant.reference])

    def add_image(self, own, **facts):
        """Add an image with the labels `own`, or without labels if they are None."""
        number = f"sha256:{len(self.images):064x}"
        entry = {"Id": number, "RepoTags": [], "RepoDigests": [], "Labels": own, "Size": 81_000_000}
        self.images.append(entry | facts)

    def _containers(self, path, query):
        if path.endswith("/containers/json") and "created" in query:
            return [*self.created, {"Id": "gone", "Created": time.time()}]
        if path.endswith("/containers/json"):
            return [*({"Id": one["Id"]} for one in self.containers), {"Id": "gone"}]
        there = (*self.containers, *self.starting)
        return next((one for one in there if one["Id"] == path.split("/")[-2]), None)

    def answer(self, resource):
        """Return the JSON that answers a GET."""
        self.requests.append(resource)
        parts = urlsplit(resource)
        if self.status != 200:
            return {"message": "something about the daemon"}
        simple = {
            "version": self.version,
            "info": self.info,
            "_ping": "OK",
        }
        if parts.path.rpartition("/")[2] in simple:
            return simple[parts.path.rpartition("/")[2]]
        if "/containers/" in parts.path:
            return self._containers(parts.path, parts.query)
        if parts.path.endswith("/json") and not parts.query:
            name = unquote(parts.path.split("/images/")[1].removesuffix("/json"))
            if name.startswith(f"{REPOSITORY}:{NEW}"):
                return {"Id": f"sha256:{name.removeprefix(f'{REPOSITORY}:{NEW}')[:64]}"}
            image = next((one for one in self.images if one["Id"] == name), None)
            return image and {"Id": name, "Config": {"Labels": image["Labels"], "Env": image.get("Env")}}
        (filters,) = parse_qs(parts.query)["filters"]
        wanted = json.loads(filters)
        labelled = [label.partition("=") for label in wanted.get("label", ())]
        return [
            entry
            for entry in self.images
            if not isinstance(entry, dict)
            or (
                all(
                    key in (entry["Labels"] or {}) and (not given or entry["Labels"][key] == value)
                    for key, given, value in labelled
                )
                and all(fnmatch.filter(entry["RepoTags"] or (), name) for name in wanted.get("reference", ()))
            )
        ]

    def usual(self, method, resource, body):
        """Return the status and the body of the answer to a request without another response."""
        path = unquote(urlsplit(resource).path)
        if "/volumes/" in path:
            status, result = self.volume(method, path.rpartition("/")[2], body)
            return status, b"" if result is None else json.dumps(result).encode()
        if method != "GET" and "/images/" in path:  # a tag is set, or removed
            self.requests.append(resource)
            return 200, b"[]"
        result = self.answer(resource)
        missing = {"message": "no such thing"}
        return 404 if result is None else self.status, json.dumps(
            missing if result is None else result
        ).encode()

    def volume(self, method, name, body):
        """Return the status and the answer of a request for a volume."""
        if method == "POST":
            created = json.loads(body)
            return 201, self.volumes.setdefault(created["Name"], created)
        if name not in self.volumes:
            return 404, {"message": "no such volume"}
        return (204, None) if method == "DELETE" and self.volumes.pop(name) else (200, self.volumes[name])


def _body(request):
    if request.headers.get("Transfer-Encoding") != "chunked":
        return request.rfile.read(int(request.headers.get("Content-Length", 0)))
    pieces = []
    while size := int(request.rfile.readline(), 16):
        pieces.append(request.rfile.read(size))
        request.rfile.readline()
    request.rfile.readline()
    return b"".join(pieces)


def _handler(engine):
    class Handler(BaseHTTPRequestHandler):
        def handle(self):
            with contextlib.suppress(ConnectionError):  # clients under test hang up
                if engine.raw is None:
                    super().handle()
                else:
                    self.request.recv(1 << 16)
                    self.request.sendall(engine.raw)

        def do_GET(self):
            path = unquote(urlsplit(self.path).path)
            ends = (given for given in engine.responses if path.endswith(given[1]))
            given = next((given for given in ends if given[0] == self.command), None)
            if given is None:
                self.send(*engine.usual(self.command, self.path, _body(self)))
            else:
                engine.requests.append(self.path)
                engine.bodies.append(_body(self))
                engine.before_response.get(given, lambda: None)()
                if engine.responses[given] is not None:
                    self.send(*engine.responses[given])

        do_POST = do_DELETE = do_GET  # noqa: N815 - names of the standard library

        def send(self, status, body):
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            for name, value in engine.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    return Handler


@contextlib.contextmanager
def _serving(server):
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield
        server.shutdown()
        thread.join()


@pytest.fixture
def docker_host(monkeypatch, tmp_path):
    """Clear the variables that point to a Docker engine; call it with an address to set DOCKER_HOST."""
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.delenv("DOCKER_CONTEXT", raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker-config"))
    return lambda address: monkeypatch.setenv("DOCKER_HOST", address)


@pytest.fixture(autouse=True)
def no_engine(docker_host):
    """Point DOCKER_HOST to a socket that does not exist: no unit test may need this machine's engine."""
    docker_host("unix:///nowhere/docker.sock")


@pytest.fixture
def engine(docker_host):
    """A FakeEngine on a Unix socket, set as DOCKER_HOST."""
    made = FakeEngine()
    with tempfile.TemporaryDirectory(prefix="imx-") as folder:
        address = f"{folder}/docker.sock"
        docker_host(f"unix://{address}")
        with _serving(socketserver.ThreadingUnixStreamServer(address, _handler(made))):
            yield made


@pytest.fixture
def remote_engine(docker_host):
    """A FakeEngine on a TCP port of the loopback, set as DOCKER_HOST."""
    made = FakeEngine()
    server = HTTPServer(("127.0.0.1", 0), _handler(made))
    docker_host(f"tcp://127.0.0.1:{server.server_port}")
    with _serving(server):
        yield made


@pytest.fixture
def no_pause(monkeypatch):
    """Retry transient errors without a pause."""
    monkeypatch.setattr("imagematrix.images.oci.retry.PAUSE", 0)


@pytest.fixture
def start_server(docker_host, no_pause):  # noqa: ARG001 - for their effects
    """Call it to start a registry in memory, for which docker has no login yet."""
    servers = []

    def start():
        servers.append(Server())
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def server(start_server):
    """A registry in memory."""
    return start_server()


@pytest.fixture
def log_in(tmp_path):
    """Call it with a registry's address to log in; it returns the value of the Authorization header."""

    def call(address):
        secret = base64.b64encode(b"me:secret").decode()
        (tmp_path / "docker-config").mkdir(exist_ok=True)
        config = {"auths": {address: {"auth": secret}}}
        (tmp_path / "docker-config" / "config.json").write_text(json.dumps(config))
        return f"Basic {secret}"

    return call


@pytest.fixture(scope="session")
def nvml_stub(tmp_path_factory):
    """A folder with a stub of NVML for driver 550.144.03, which reads STUB_* from the environment."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to build the NVML stub with")
    folder = tmp_path_factory.mktemp("nvml")
    library = folder / "libnvidia-ml.so.550.144.03"
    subprocess.run(
        [
            compiler,
            "-shared",
            "-fPIC",
            "-Wl,-soname,libnvidia-ml.so.1",
            "-o",
            library,
            ROOT / "tests/doubles/nvml_stub.c",
        ],
        check=True,
    )
    (folder / "libnvidia-ml.so.1").symlink_to(library.name)
    return folder


@pytest.fixture
def configure_nvml(nvml_stub, monkeypatch):
    """Call it to set what the stub of NVML reports to child processes, such as `init=18` or `gpus="..."`."""

    def configure(**settings):
        monkeypatch.setenv("LD_LIBRARY_PATH", str(nvml_stub))
        for name, value in settings.items():
            monkeypatch.setenv(f"STUB_{name.upper()}", str(value))

    return configure


class CommandResult(NamedTuple):
    """Exit code, stdout and stderr of a command."""

    code: int
    out: str
    err: str

    def fails(self, code, *texts):
        """Require that the command ended with this code and these texts on stderr."""
        assert self.code == code, self
        for text in texts:
            assert text in self.err

    def refuses(self, code, *texts):
        """Require that it fails so, and has answered nothing."""
        self.fails(code, *texts)
        assert self.out == ""


@pytest.fixture
def cli(monkeypatch, capsys):
    """Call it with the arguments of a command to run it in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for name in ("COLORTERM", "FORCE_COLOR", "GITHUB_ACTIONS", "GITLAB_CI", "NO_COLOR", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)

    monkeypatch.setattr("imagematrix.cli._exit_at_once", sys.exit)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["imagematrix", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return CommandResult(int(ended.value.code or 0), *capsys.readouterr())

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def show_gpus(cli, monkeypatch):
    """Call it with a saved host and options to run `gpus` on a node with this hardware."""

    def run(path, *options):
        monkeypatch.setattr(probe, "assemble_host", lambda *_, **__: Host.load(path))
        return cli("gpus", *options)

    return run
