"""Clusters of simulated machines for the tests (tests/doubles/cluster.py), and an engine that builds."""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from cluster import Cluster
from engines import ROOT, Engine, Registry, require
from processes import new_folder, remove_folder, remove_leftovers

BASE = "127.0.0.1:5000/debian:trixie"


@pytest.fixture(scope="session", autouse=True)
def _needed():
    require("tini", "ip")
    remove_leftovers()
    subprocess.run([ROOT / "ci/bases", "archives"], check=True)


@pytest.fixture(scope="session")
def data():
    """The folder of the registry that builder and nodes share."""
    folder = new_folder()
    yield folder
    remove_folder(folder)


@pytest.fixture(scope="session")
def builder(data):
    """An engine with a network that builds images and pushes them to the registry on 127.0.0.1:5000."""
    engine = Engine("containerd")
    engine.start()
    registry = Registry(engine, 5000, data=data)
    engine.seed()
    yield engine
    registry.remove()
    engine.remove()


@pytest.fixture(scope="session")
def base(builder):
    """The name of an image with a plain Debian, in the registry."""
    builder.docker("tag", "debian:trixie", BASE)
    builder.docker("push", BASE)
    return BASE


@pytest.fixture(scope="module")
def start_cluster(data):
    """Return a function that starts a Cluster without nodes, which ends with the test file."""
    started = []

    def start():
        started.append(Cluster(data))
        return started[-1]

    yield start
    with ThreadPoolExecutor() as pool:
        list(pool.map(Cluster.remove, started))
