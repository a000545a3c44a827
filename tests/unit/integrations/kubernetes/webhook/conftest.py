"""A small cluster, and a webhook with short intervals."""

import gc
from types import SimpleNamespace

import pytest

from imagematrix.integrations.http_service import garbage
from imagematrix.integrations.kubernetes.client import api
from imagematrix.integrations.kubernetes.webhook import certificate, server, sources, state
from imagematrix.integrations.kubernetes.webhook.telemetry import Telemetry


class Kept(Telemetry):
    """A telemetry that keeps its lines."""

    def __init__(self):
        self.lines: list[str] = []
        super().__init__(self.lines.append)


@pytest.fixture
def telemetry():
    return Kept()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Shorten all intervals."""
    monkeypatch.setattr(state, "SETTLE_S", 0.01)
    monkeypatch.setattr(certificate, "WATCH_S", 0.02)
    monkeypatch.setattr(sources, "FILE_S", 0.02)
    monkeypatch.setattr(sources, "CATALOG_S", 0.02)
    monkeypatch.setattr(api, "PAUSE_S", 0.02)
    monkeypatch.setattr(server, "DRAIN_S", 0.1)
    # To collect the garbage of a whole run of tests takes seconds.
    monkeypatch.setattr(garbage, "gc", SimpleNamespace(**vars(gc) | {"collect": lambda: 0}))
    yield
    gc.unfreeze()


@pytest.fixture
def catalog(make):
    return make.catalog(
        make.variant("reg/t:v1-a", digest=f"sha256:{'a' * 64}"),
        make.variant("reg/t:v1-b", digest=f"sha256:{'b' * 64}", driver=make.umd("exact", "580.65.06")),
    )


@pytest.fixture
def nodes(make, cluster):
    """Return a function from names and drivers to a list of Node objects; the first, n0, has no GPU."""

    def listed(**drivers):
        items = [cluster.node("n0", cluster.own(make.host()))]
        for name, driver in drivers.items():
            labels = cluster.own(make.host(make.gpu(0), **({"driver": driver} if driver else {})))
            items.append(cluster.node(name, labels))
        return {"kind": "List", "items": items}

    return listed
