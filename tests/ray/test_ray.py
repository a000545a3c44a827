"""Ray's nodes have our labels, and a task chooses the image for the node and the GPUs that it was given.

`make test-ray` installs Ray. The script is that of the page, with a saved host in place of the probe's.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pages
import pytest

from imagematrix.common import json_documents
from imagematrix.images.catalog.catalog import Catalog, UserModeDriver, Variant

pytest.importorskip("ray")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "batch-systems.md"
RAY = Path(sys.executable).with_name("ray")
SECONDS = 120
HEAD = "127.0.0.1:6379"
HOSTS = {"genoa-h200": "sse4a", "sapphirerapids-h100": "amx_tile"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a catalog, with one variant for the CPU of each host, and with the hosts' labels."""
    own = tmp_path_factory.mktemp("ray")
    variants = tuple(
        Variant(
            reference=f"training:v1-{name}",
            digest=None,
            platform="linux/amd64",
            cuda="12.4",
            cubins=("90",),
            driver=UserModeDriver(mode="exact", version="550.163.01"),
            cpu_flags=frozenset({flag}),
        )
        for name, flag in HOSTS.items()
    )
    catalog = Catalog(image="training", version="v1", variants=variants)
    (own / "training.json").write_text(json_documents.dump_json(catalog.to_json()))
    for name in HOSTS:
        command = [sys.executable, "-m", "imagematrix", "kubernetes", "labels", "--json", "--host"]
        told = subprocess.run([*command, _saved(name)], check=True, capture_output=True, text=True).stdout
        (own / f"{name}.json").write_text(json.dumps(json.loads(told)["labels"]))
    return own


def _saved(name):
    return ROOT / "tests" / "hosts" / f"{name}.json"


@pytest.fixture(scope="module")
def cluster(folder):
    """A head without GPUs, and two nodes."""
    short = Path("/tmp/imagematrix-ray")  # the path of a socket has 107 bytes at most
    try:
        _ray("start", "--head", "--num-cpus=0", "--num-gpus=0", f"--temp-dir={short}")
        for name in HOSTS:
            own = {"NODE": str(_saved(name))}
            labels = f"--labels-file={folder / f'{name}.json'}"
            _ray("start", f"--address={HEAD}", "--num-cpus=2", "--num-gpus=8", labels, **own)
        yield HEAD
    finally:
        _ray("stop", "--force")
        shutil.rmtree(short, ignore_errors=True)


def _ray(*words, **variables):
    options = () if words[0] == "stop" else ("--disable-usage-stats", "--object-store-memory=100000000")
    subprocess.run(
        [RAY, *words, *options],
        check=True,
        env=os.environ | variables,
        timeout=SECONDS,
        stdout=subprocess.DEVNULL,
    )


@pytest.mark.parametrize(
    ("selector", "chosen"),
    [
        (
            '"imagematrix.io/gpu.compute-min": "90"',
            {"training:v1-genoa-h200", "training:v1-sapphirerapids-h100"},
        ),
        ('"imagematrix.io/cpu-flag.amx_tile": "true"', {"training:v1-sapphirerapids-h100"}),
        ('"imagematrix.io/cpu-flag.sse4a": "true"', {"training:v1-genoa-h200"}),
    ],
)
def test_a_task_gets_the_image_for_its_node_and_its_gpu(cluster, folder, selector, chosen):
    (block,) = [one for one in pages.blocks(PAGE.read_text()) if one.mark == ("file", "ray_job.py")]
    text = block.text
    for old, new in (
        ("im.probe()", 'im.Host.load(__import__("os").environ["NODE"])'),
        ("registry:5000/ml/training:v1", str(folder / "training.json")),
        ('"imagematrix.io/gpu.compute-min": "90"', selector),
        ('address="auto"', f'address="{cluster}"'),
    ):
        assert old in text
        text = text.replace(old, new)
    (folder / "job.py").write_text(text)
    told = subprocess.run(
        [sys.executable, folder / "job.py"], check=True, capture_output=True, text=True, timeout=SECONDS
    ).stdout
    reference, gpu = told.splitlines()[-1].split()
    assert reference in chosen
    name = reference.removeprefix("training:v1-")
    assert gpu in {one["uuid"] for one in json.loads(_saved(name).read_text())["gpus"]}
