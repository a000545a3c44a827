"""The oldest and the newest Docker of Debian list, choose, pull and run images that another one built."""

import json
import subprocess
from pathlib import Path

import pytest
from cdi import LIST, etc_with
from drivers import library
from engines import OLDEST, Engine, Registry
from processes import END_WITH_US

ROOT = Path(__file__).parents[2]
CONTROL = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
HOST = ("--host", ROOT / "tests/hosts/genoa-h200.json")
DRIVER = "550.163.01"  # of that host
PORT = 5031
BASE = f"127.0.0.1:{PORT}/debian:trixie"  # imported images differ from engine to engine
FACTS = {"march": {"old": {"flags": ["sse4_2"]}, "new": {"flags": ["sse4_2", "avx2"]}}}
MATRIX = {
    "schema": "imagematrix.matrix/v1",
    "axes": {"cuda": ["none", "12.4"], "driver": [DRIVER], "compute": ["9.0"], "march": [*FACTS["march"]]},
    "properties": {"march": {march: {"base": BASE} for march in FACTS["march"]}},
    "facts": FACTS,
}
TEMPLATE = """\
FROM {{ base }}
RUN echo {{ "sm_" ~ sm if cuda else "cpu" }} {{ march }} > /variant
CMD ["cat", "/variant"]
{% if cuda %}
COPY libcuda.so.{{ driver }} /usr/lib/
{% endif %}
"""
ENGINES = (
    (OLDEST, "classic"),
    ("docker-forky", "containerd"),
    pytest.param(("docker-forky", "classic"), marks=pytest.mark.long),
)


def name(compression):
    return f"127.0.0.1:{PORT}/ml/{compression}:v1"


def project(folder, compression):
    """Write the matrix with this compression of layers, and return its folder."""
    (folder / "templates").mkdir()
    (folder / "templates" / "image.j2").write_text(TEMPLATE)
    library(folder / "context", "libcuda", DRIVER)
    image = {"version": "v1", "template": "image.j2", "context": "context", "device_code": "claim"}
    images = {name(compression).removesuffix(":v1"): image}
    document = {**MATRIX, "compression": compression, "images": images}
    (folder / "matrix.yaml").write_text(json.dumps(document))  # JSON is YAML
    return folder


@pytest.fixture(scope="module")
def published(engine, tmp_path_factory):
    """A registry's folder with a version for each compression, and the digests of their variants."""
    data = tmp_path_factory.mktemp("registry")
    registry = Registry(engine, PORT, data=data)
    engine.docker("tag", "debian:trixie", BASE)
    engine.docker("push", BASE)
    digests = {}
    for compression in ("gzip", "zstd"):
        folder = project(tmp_path_factory.mktemp("project"), compression)
        for words in (("build", "--push"), ("publish", name(compression))):
            done = engine.imagematrix(*words, cwd=folder)
            assert done.returncode == 0, done.stderr
        listed = json.loads(engine.imagematrix("ls", name(compression), "--json").stdout)["variants"]
        digests[compression] = {one["reference"]: one["digest"] for one in listed}
    registry.remove()
    return data, digests


@pytest.fixture(scope="module", params=ENGINES, ids="-".join)
def other(request, published, engines):
    """An engine of another release, with a registry that has the published versions."""
    release, store = request.param
    subprocess.run([ROOT / "ci/engines", release], check=True)
    started = Engine(store, release=release)
    engines.append(started)
    started.start()
    registry = Registry(started, PORT, data=published[0])
    yield started
    registry.remove()


def is_old(engine):
    return engine.programs.parent.name == OLDEST


def test_a_version_is_listed_chosen_and_pulled(other, published):
    listed = json.loads(other.imagematrix("ls", name("gzip"), "--json").stdout)["variants"]
    assert {one["reference"]: one["digest"] for one in listed} == published[1]["gzip"]
    reference = other.imagematrix("select", name("gzip"), *HOST).stdout.strip()
    assert "-sm90-new-" in reference
    pulled = other.imagematrix("pull", name("gzip"), *HOST)
    assert pulled.stdout == f"{reference}@{published[1]['gzip'][reference]}\n", pulled.stderr
    assert reference in other.inspect(reference)["RepoTags"]


@pytest.mark.usefixtures("nodes")
def test_a_container_has_the_device_nodes_of_its_gpus(other):
    words = ("--rm", "--gpus", "device=3", *HOST, name("gzip"), "sh", "-c")
    ran = other.imagematrix("run", *words, "cat /variant; ls /dev | grep nvidia; exit 7")
    assert ran.returncode == 7, ran.stderr
    assert ran.stdout.split("\n", 1)[0] == "sm_90 new"
    assert {word for word in ran.stdout.split() if word[-1].isdigit() and "nvidia" in word} == {"nvidia3"}
    assert "nvidiactl" in ran.stdout


def test_a_container_without_gpus_has_no_device_node(other):
    ran = other.imagematrix("run", "--rm", "--gpus", "none", *HOST, name("gzip"), "sh", "-c", "ls /dev")
    assert ran.returncode == 0, ran.stderr
    assert "null" in ran.stdout.split()
    assert "nvidia" not in ran.stdout


@pytest.mark.usefixtures("nodes")
def test_cdi_devices_are_exactly_the_nodes_of_a_launch(other):
    written = other.imagematrix("export", "cdi", *HOST, "-o", other.folder / "cdi")
    assert written.returncode == 0, written.stderr
    other.docker("pull", BASE)
    words = ("--rm", "--device", "imagematrix.io/gpu=3")
    ran = other.docker("run", *words, BASE, *LIST, check=False)
    if is_old(other):
        assert ran.returncode != 0, "Docker 20.10 has no CDI"
        return
    assert set(ran.stdout.split()) == {"/dev/nvidia3", *CONTROL}, ran.stderr
    assert other.docker("run", "--rm", BASE, *LIST).stdout == ""
    if other.store == "containerd":
        socket = other.folder / "run/containerd/containerd.sock"
        ctr = [*other.inside, *etc_with(other.folder), "ctr", "--address", socket, "--namespace", "moby"]
        for devices, nodes in ((words, {"/dev/nvidia3", *CONTROL}), (("--rm",), set())):
            command = [*map(str, (*ctr, "run", *devices, BASE, "listed", *LIST))]
            given = {"capture_output": True, "text": True, "env": other.environment}
            ran = subprocess.run(command, check=True, **given)
            assert set(ran.stdout.split()) == nodes


def test_layers_in_zstd_start_or_are_refused_before_the_pull(other):
    ran = other.imagematrix("run", "--rm", "--gpus", "none", *HOST, name("zstd"))
    if not is_old(other):
        assert (ran.returncode, ran.stdout) == (0, "cpu new\n"), ran.stderr
        return
    assert ran.returncode == 8
    assert "has layers compressed with zstd, which Docker 20.10.24+dfsg1 cannot unpack" in ran.stderr
    assert not other.docker("images", "--quiet", name("zstd").removesuffix(":v1")).stdout


def test_a_build_has_the_same_digests_or_says_why_it_cannot(other, published, tmp_path):
    pulled = other.docker("images", "--quiet", name("zstd").removesuffix(":v1")).stdout.split()
    if pulled:
        other.docker("rmi", "--force", *dict.fromkeys(pulled))
    done = other.imagematrix("build", "--json", cwd=project(tmp_path, "zstd"))
    if is_old(other):
        assert done.returncode == 8
        assert "Docker 20.10.24+dfsg1 is too old for builds" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    cells = [cell for cell in json.loads(done.stdout)["cells"] if cell["reference"]]
    contained = other.store == "containerd"
    assert {cell["reproducible"] for cell in cells} == {contained}
    if contained:
        assert {cell["reference"]: cell["digest"] for cell in cells} == published[1]["zstd"]
    else:
        assert {cell["reference"] for cell in cells} == set(published[1]["zstd"])


def pulls_through_the_resolver(started, digests, folder):
    """Pull with the `hosts.toml` that the resolver writes, by the containerd of an engine."""
    words = [*started.inside, ROOT / ".venv/bin/imagematrix", "resolver", "--upstream", f"127.0.0.1:{PORT}"]
    resolver = subprocess.Popen(
        [*END_WITH_US, *map(str, (*words, "--listen", "127.0.0.1:0", *HOST))],
        stderr=subprocess.PIPE, text=True, env=started.environment,
    )  # fmt: skip
    address = resolver.stderr.readline().split()[-1]
    written = ("--upstream", f"127.0.0.1:{PORT}", "--listen", address, "--containerd", folder)
    assert started.imagematrix("resolver", *written).returncode == 0
    socket = started.folder / "run/containerd/containerd.sock"
    ctr = [*started.inside, "ctr", "--address", socket, "--namespace", "test", "images"]
    pull = [*map(str, (*ctr, "pull", "--hosts-dir", folder, name("gzip")))]
    given = {"capture_output": True, "text": True, "env": started.environment}
    pulled = subprocess.run(pull, check=False, **given)
    assert pulled.returncode == 0, pulled.stderr
    listed = subprocess.run([*map(str, ctr), "ls"], check=True, **given)
    (digest,) = (one for reference, one in digests["gzip"].items() if "-sm90-new-" in reference)
    assert digest in listed.stdout
    resolver.terminate()
    assert resolver.wait(60) == 0
    resolver.stderr.close()


def test_containerd_pulls_through_the_resolver(other, published, tmp_path):
    pulls_through_the_resolver(other, published[1], tmp_path)


def test_the_containerd_of_the_publisher_pulls_through_the_resolver(engine, published, tmp_path):
    registry = Registry(engine, PORT, data=published[0])
    pulls_through_the_resolver(engine, published[1], tmp_path)
    registry.remove()


def test_doctor_knows_the_engine(other):
    findings = json.loads(other.imagematrix("doctor", "--json").stdout)["findings"]
    severity = {one["check"]: one["severity"] for one in findings}["engine"]
    assert severity == ("warning" if is_old(other) else "ok"), findings
