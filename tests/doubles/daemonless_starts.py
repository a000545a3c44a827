"""Starts of containers without a daemon, from a store with images of no content, up to the runtime."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from imagematrix.cli import dispatch
from imagematrix.cli.shared import daemonless
from imagematrix.common import settings
from imagematrix.common.record import replace
from imagematrix.hardware.host.host import Cpu, Driver, Gpu, Host
from imagematrix.images.catalog.catalog import Catalog, UserModeDriver, Variant
from imagematrix.images.local_store.folder import ImageStore
from imagematrix.launcher.daemonless import start

DIGESTS = {name: f"sha256:{number * 64}" for name, number in (("gpu", "1"), ("cpu", "2"), ("host", "3"))}
GPUS = tuple(
    Gpu(index=index, minor=index, uuid=f"GPU-{index}", name="NVIDIA A100", compute="8.0", brand="nvidia")
    for index in range(2)
)
HOST = Host(
    arch="x86_64",
    cpu=Cpu(vendor=None, model=None, flags=frozenset(), level=None),
    driver=Driver(version="550.163.01", kind=None, source="test"),
    gpus=GPUS,
)
CONFIG = {"config": {"Cmd": ["train"], "Env": ["PATH=/bin"], "User": "app"}}


def variant(name):
    bare = Variant(reference=f"reg:5000/training:v1-{name}", digest=DIGESTS[name], platform="linux/amd64")
    if name == "cpu":
        return bare
    mode = "exact" if name == "gpu" else "host"
    driver = UserModeDriver(mode=mode, version="550.163.01" if name == "gpu" else None)
    return replace(bare, cuda="12.2", cubins=("80",), driver=driver)


@pytest.fixture
def filled_store(tmp_path, monkeypatch):
    """A store with all variants of the catalog."""
    made = ImageStore(tmp_path / "store")
    monkeypatch.setenv("IMAGEMATRIX_STORE", made.path)
    for name in DIGESTS:
        put(made, name)
    return made


def put(store, name, config=CONFIG):
    folder = Path(store.get_folder(DIGESTS[name]))
    (folder / "root").mkdir(parents=True)
    document = {
        "schema": "imagematrix.stored-image/v1",
        "digest": DIGESTS[name],
        "kind": "folder",
        "size": 0,
        "checksum": None,
        "references": [variant(name).reference],
        "image": "reg:5000/training",
        "version": "v1",
        "variant": variant(name).to_json(),
        "terms": {},
        "config": config,
    }
    (folder / "image.json").write_text(json.dumps(document))


@pytest.fixture
def started(monkeypatch, tmp_path, filled_store):
    """Call it with words of the command line; it returns the exit code and the calls of the runtime."""
    Path(filled_store.path, "catalogs").mkdir()

    def catalog(*names):
        document = Catalog(
            image="reg:5000/training", version="v1", variants=tuple(map(variant, names))
        ).to_json()
        filled_store.put_catalog(document)

    catalog("gpu", "cpu")
    calls = []
    monkeypatch.setattr(settings, "FILE", str(tmp_path / "site.toml"))
    monkeypatch.setenv("IMAGEMATRIX_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setattr("imagematrix.cli.shared.inputs.load_node", lambda *words: (HOST, words[-1]))
    monkeypatch.setattr(daemonless, "check_device_nodes", lambda _: ())
    monkeypatch.setattr("imagematrix.launcher.docker.request.require_device_nodes", lambda _: None)
    monkeypatch.setattr("imagematrix.launcher.gpu_claims.survey.survey_without_daemon", lambda *_: {})

    def runtime_of(engine, wanted, *, of_user=False):
        name = wanted or ("bwrap" if of_user else engine)
        return SimpleNamespace(
            name=name,
            as_root=name == "runc",
            require_possible=lambda _: None,
            format_command=lambda container: [name, *container.args],
        )

    def begin(container, image, runtime, store, claim, _):
        calls.append((container, image, runtime.name, store, claim.descriptors if claim else ()))
        return 7

    monkeypatch.setattr(start, "choose_runtime", runtime_of)
    monkeypatch.setattr(start, "run_container", begin)

    def call(*words, variants=None):
        if variants:
            catalog(*variants)
        calls.clear()
        return dispatch.run_command([*words]), list(calls)

    return call


@pytest.fixture
def starts_nothing(capfd):
    """Call it with what a start gave, to require that nothing was started, with this exit code and text."""

    def require(result, code, text):
        assert result == (code, [])
        assert text in capfd.readouterr().err

    return require
