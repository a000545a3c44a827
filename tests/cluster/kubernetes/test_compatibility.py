"""The client of Node Feature Discovery 0.17.3 judges images by their artifacts; it needs no cluster."""

import json
import subprocess
import sys
from itertools import product

import pytest
import yaml
from choosing import Make
from machines import ROOT
from modules import built

from imagematrix.common import json_documents
from imagematrix.common.record import replace
from imagematrix.hardware.host.host import Host

pytestmark = pytest.mark.since("1.36")

HOSTS = sorted((ROOT / "tests/hosts").glob("*.json"))
IMAGE = "127.0.0.1:5000/debian:trixie"  # any
UMDS = (
    Make.umd("exact", "535.261.03"),
    Make.umd("exact", "550.163.01"),
    Make.umd("compat", "560.28.03"),
    Make.umd("host"),
)
CODES = (("52",), ("75",), ("80",), ("86",), ("90",), ("90a",))
MARCHES = ("x86-64-v2", "x86-64-v3", "x86-64-v4")
# Gives the client a feature file of its own, in a mount namespace.
ALONE = """\
set -eu
mount -t tmpfs own "$1"
mkdir "$1/upper" "$1/work"
mount -t overlay -o "lowerdir=/etc,upperdir=$1/upper,workdir=$1/work" own /etc
folder=/etc/kubernetes/node-feature-discovery/features.d
mkdir -p "$folder"
cat > "$folder/imagematrix"
shift
exec "$@"
"""


def variants():
    """Yield variants for GPUs, with PTX besides their cubins or without, and for CPUs."""
    for number, (umd, cubins, march) in enumerate(product(UMDS, CODES, MARCHES)):
        ptx = [("80", "7.8")] if number % 3 == 0 else []
        needed = {"march": march, "cpu_flags": frozenset(Make.flags(march))}
        yield Make.variant(f"t:gpu-{number}", ptx=ptx, driver=umd, cubins=cubins, **needed)
    for march in MARCHES:
        yield Make.cpu_variant(f"t:cpu-{march}", march=march, cpu_flags=frozenset(Make.flags(march)))
    yield Make.variant("t:none", driver=Make.umd("host"), requires=("driver<400",))


@pytest.fixture(scope="module")
def catalog(tmp_path_factory):
    """The file of a catalog."""
    path = tmp_path_factory.mktemp("compatibility") / "catalog.json"
    path.write_text(json_documents.dump_json(Make.catalog(*variants()).to_json()))
    return path


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """The files of the saved hosts, and of one for each fact of a driver that may have no label."""
    known = Host.load(ROOT / "tests/hosts/genoa-h200.json")
    folder = tmp_path_factory.mktemp("hosts")
    files = [folder / f"{fact}.json" for fact in ("kind", "user_mode")]
    for file in files:
        host = replace(known, driver=replace(known.driver, **{file.stem: None}))
        file.write_text(json_documents.dump_json(host.to_json()))
    return [*HOSTS, *files]


@pytest.fixture(scope="module")
def attached(builder, base, catalog):
    """The registry's image has an artifact with the needs of all variants."""
    words = ("kubernetes", "render", "compatibility", "t:v1", "--catalog", catalog)
    specs = list(yaml.safe_load_all(builder.imagematrix(*words).stdout))
    together = [one for spec in specs for one in spec["compatibilities"]]
    assert len(together) == len(list(variants()))
    script = [*builder.inside, sys.executable, ROOT / "tests/doubles/attach.py", *base.rsplit(":", 1)]
    given = yaml.safe_dump({"version": "v1alpha1", "compatibilities": together})
    subprocess.run(script, input=given, text=True, check=True)


@pytest.fixture
def compatible(builder, tmp_path):
    """Return a function that returns the variants that a client calls compatible with a host."""

    def call(program, host):
        labels = builder.imagematrix("kubernetes", "labels", "--host", host).stdout
        own = tmp_path / host.stem
        own.mkdir()
        alone = [*builder.inside, "unshare", "--mount", "sh", "-c", ALONE, "alone", own]
        words = (program, "compat", "validate-node", "--plain-http", "--output-json", "--image", IMAGE)
        done = subprocess.run([*alone, *words], input=labels, capture_output=True, text=True, check=True)
        told = json.loads(done.stdout)
        fitting = [one for one in told if all(rule["isMatch"] for rule in one["rules"])]
        return {one["description"].removeprefix("needs of ") for one in fitting}

    return call


@pytest.mark.usefixtures("attached")
def test_with_feature_files_it_agrees_with_select(builder, catalog, hosts, compatible):
    found = {}
    for host in hosts:
        words = ("explain", "t:v1", "--catalog", catalog, "--host", host, "--json")
        candidates = json.loads(builder.imagematrix(*words).stdout)["candidates"]
        found[host.stem] = {one["reference"] for one in candidates if one["fits"]}
        assert compatible(built("nfd") / "nfd-local", host) == found[host.stem], host.stem
    assert sum(map(bool, found.values())) >= 8, found


@pytest.mark.usefixtures("attached")
def test_the_published_client_reads_no_feature_files(compatible):
    """It has no source `local`, so nothing is compatible. If this fails, tell so in the page."""
    host = ROOT / "tests/hosts/genoa-h200.json"
    assert compatible(built("nfd") / "nfd", host) == set()
