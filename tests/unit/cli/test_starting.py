"""`imagematrix run` from its arguments to the start of a container, without docker's command."""

import pytest

from imagematrix.allocation.usage import Consumer
from imagematrix.catalog.catalog import Catalog, UserModeDriver, Variant
from imagematrix.cli import starting
from imagematrix.launcher.options import split
from imagematrix.node.host import Cpu, Driver, Gpu, Host
from imagematrix.record import replace

OLD, NEW = "535.261.03", "550.163.01"
HOST = Host(
    arch="x86_64",
    cpu=Cpu(vendor=None, model=None, flags=frozenset(), level=None),
    driver=Driver(version=OLD, kind=None, source="test"),
    gpus=(Gpu(index=0, minor=0, uuid="GPU-a", name="NVIDIA A100", compute="8.0", brand="nvidia"),),
)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Call it with a command line and the driver after a wait to get the image that is started."""

    def variant(version):
        driver = UserModeDriver(mode="exact", version=version)
        return Variant(
            reference=f"training:v1-{version}",
            digest=None,
            platform="linux/amd64",
            cuda="12.2",
            cubins=("80",),
            driver=driver,
        )

    def start(line, upgraded):
        hosts = iter([HOST, replace(HOST, driver=replace(HOST.driver, version=upgraded))])
        usages = iter([{"nvidia0": (Consumer(kind="process", name="train"),)}, {}])
        catalog = Catalog(image="training", version="v1", variants=(variant(OLD), variant(NEW)))
        started = []
        monkeypatch.setenv("IMAGEMATRIX_LOCKS", str(tmp_path / "locks"))
        monkeypatch.setattr("imagematrix.engine.remote", lambda: None)
        monkeypatch.setattr("imagematrix.engine.info", dict)
        monkeypatch.setattr("imagematrix.launcher.request.require", lambda _: None)
        monkeypatch.setattr("imagematrix.allocation.survey.survey", lambda *_: next(usages))
        monkeypatch.setattr("imagematrix.allocation.claim.POLL_S", 0.01)
        monkeypatch.setattr(starting, "node_of", lambda *_: (next(hosts), None))
        monkeypatch.setattr(starting, "catalog_of", lambda *_: catalog)
        monkeypatch.setattr(starting, "_run", lambda launch, *_: started.append(launch.reference) or 0)
        starting.start(split(line.split()), "training:v1")
        return started

    return start


def test_the_node_is_read_again_after_a_wait(run, capsys):
    assert run("--wait 10s training:v1", NEW) == [f"training:v1-{NEW}"]
    assert "waiting: requested 1 GPU, 0 free" in capsys.readouterr().err


def test_a_saved_host_is_not_read_again(run):
    assert run("--host node.json --wait 10s training:v1", NEW) == [f"training:v1-{OLD}"]
