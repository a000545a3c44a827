"""Zun's driver for Docker pulls through the resolver, and gets the variant that fits its node.

`make test-zun` installs Zun. Only its driver runs, as a library: no service of OpenStack.
"""

import json
import subprocess

import pytest
from engines import ROOT, Engine, Registry, require
from processes import END_WITH_US, remove_leftovers

PYTHON = ROOT / ".cache/zun/bin/python"
HOSTS = ROOT / "tests/hosts"
NAME = "ml/training"
MATRIX = {
    "schema": "imagematrix.matrix/v1",
    "axes": {"march": ["old", "new"]},
    "facts": {"march": {"old": {"flags": ["sse4_2"]}, "new": {"flags": ["sse4_2", "avx2"]}}},
}
# What zun-compute does with the name that a user wrote, with the default policy of pulls.
PULL = """
import sys
import zun.conf
from zun.common import utils
from zun.image.docker.driver import DockerDriver

_, docker, registry, name = sys.argv
zun.conf.CONF([], project="zun", default_config_files=[])
for option, value in {"api_url": docker, "api_insecure": True, "default_registry": registry}.items():
    zun.conf.CONF.set_override(option, value or None, "docker")
repository, tag = utils.parse_image_name(name)
policy = utils.get_image_pull_policy(None, tag)
image, _ = DockerDriver().pull_image(None, repository, tag, policy, None)
print(image["image"] + ":" + tag)
"""


@pytest.fixture(scope="module", params=["containerd", "classic"])
def engine(request):
    require()
    if not PYTHON.exists():
        pytest.skip("Zun is not installed: run `make test-zun`")
    remove_leftovers()
    started = Engine(request.param)
    started.start()
    yield started
    started.remove()


@pytest.fixture(scope="module")
def registry(engine):
    started = Registry(engine, 5000)
    yield started
    started.remove()


@pytest.fixture(scope="module")
def published(engine, registry, tmp_path_factory):
    """The digests of a published version's variants."""
    folder = tmp_path_factory.mktemp("project")
    image = f"{registry.address}/{NAME}"
    for name in ("templates", "context"):
        (folder / name).mkdir()
    (folder / "context/variant").write_text("")
    (folder / "templates/image.j2").write_text(
        'FROM scratch\nCOPY variant /{{ march }}\nCMD ["/{{ march }}"]\n'
    )
    described = {image: {"version": "v1", "template": "image.j2", "context": "context"}}
    (folder / "matrix.yaml").write_text(json.dumps({**MATRIX, "images": described}))
    built = engine.imagematrix("build", "--push", "--json", cwd=folder)
    assert built.returncode == 0, built.stderr
    done = engine.imagematrix("publish", f"{image}:v1", "--json")
    assert done.returncode == 0, done.stderr
    listed = json.loads(engine.imagematrix("ls", f"{image}:v1", "--json").stdout)["variants"]
    return {one["march"]: one["digest"] for one in listed}


@pytest.fixture
def resolver(engine, registry, published, tmp_path):  # noqa: ARG001 - builds
    """Call it with a host to get the address of a resolver on such a node."""
    started = []

    def start(host):
        file = tmp_path / "host.json"
        file.write_text(json.dumps(host))
        options = ("--upstream", registry.address, "--listen", "127.0.0.1:0", "--host", file)
        command = [*END_WITH_US, *engine.inside, ROOT / ".venv/bin/imagematrix", "resolver", *options]
        process = subprocess.Popen(
            list(map(str, command)), stderr=subprocess.PIPE, text=True, env=engine.environment
        )
        started.append(process)
        return process.stderr.readline().split()[-1]

    yield start
    for process in started:
        process.terminate()
        assert process.wait(60) == 0
        process.stderr.close()


def _host(*without):
    laptop = json.loads((HOSTS / "laptop.json").read_text())
    laptop["cpu"]["flags"] = [flag for flag in laptop["cpu"]["flags"] if flag not in without]
    return laptop


def _pull(engine, name, default_registry=""):
    command = [PYTHON, "-W", "ignore", "-c", PULL, engine.host, default_registry, name]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=engine.environment)


def test_one_name_gives_each_node_its_own_image(engine, published, resolver):
    address = resolver(_host())
    pulled = _pull(engine, f"{address}/{NAME}:v1")
    assert pulled.returncode == 0, pulled.stderr
    assert published["new"] in engine.inspect(pulled.stdout.strip())["RepoDigests"][0]

    address = resolver(_host("avx2"))
    pulled = _pull(engine, f"{NAME}:v1", default_registry=address)
    assert pulled.returncode == 0, pulled.stderr
    assert pulled.stdout.strip() == f"{address}/{NAME}:v1"
    assert published["old"] in engine.inspect(pulled.stdout.strip())["RepoDigests"][0]


def test_a_node_that_nothing_fits_gets_no_image(engine, resolver):
    name = f"{resolver(_host('avx2', 'sse4_2'))}/{NAME}:v1"
    refused = _pull(engine, name)
    assert refused.returncode != 0
    assert "zun.common.exception.ZunException" in refused.stderr
    assert engine.docker("inspect", name, check=False).returncode != 0
