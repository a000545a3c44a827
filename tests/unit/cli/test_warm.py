"""warm: what it refuses before anything is pulled; tests/engine/test_warm.py runs it."""

from types import SimpleNamespace

import pytest
from choosing import Make

from imagematrix.cli.shared import warm_up_starter
from imagematrix.errors import UsageError
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.images.catalog.warm_image import WarmLabel
from imagematrix.images.catalog.warm_up import WarmUp
from imagematrix.images.oci.compression import DEFAULT
from imagematrix.images.oci.manifest import compute_digest
from imagematrix.images.warm.layer import WarmLayer
from imagematrix.launcher.daemonless import start
from imagematrix.launcher.docker import request
from imagematrix.launcher.docker.options import RunArgs
from imagematrix.launcher.warm_up import plan_warm_up, warm_up_session
from imagematrix.launcher.warm_up.warm_up_session import LAYER

VARIANT = Make.variant("r.example/training:v1-gpu", digest=f"sha256:{'0' * 64}", cubins=("80",))
GPUS = [Make.gpu(number, uuid=f"GPU-{number}", name="A100", memory_mib=81920) for number in range(2)]


class Starter:
    """Selects one variant, whose warm-up takes `gpus`; it starts nothing, and keeps the plan in `started`."""

    def __init__(self, gpus="all", inputs=()):
        self.warm_up = WarmUp(command=("train",), gpus=gpus, inputs=inputs)
        self.started = []

    def open_catalog(self):
        return Catalog(image="r.example/training", version="v1", variants=(VARIANT,))

    def make_request(self, host, gpus, catalog):
        def make_engine():
            return request.Engine(get_info=dict, inspect_image=lambda _: None, survey=None)

        args = RunArgs(options=(), image="t", command=())
        return request.make_request(args, host, catalog, gpus, None, make_engine)

    def fetch_base(self, *_):
        return self.warm_up, ""

    def make_engine(self, plan, start):
        self.started.append((plan, start))
        return self

    def list_base_caches(self):
        raise UsageError("this starts nothing")


@pytest.fixture
def warm_on(cli, monkeypatch):
    """Call it with a starter and GPUs of the node to warm up there; returns the result."""

    def call(starter, *gpus, options=()):
        host = Make.host(*gpus)
        monkeypatch.setattr("imagematrix.hardware.host.probe.probe_hardware", lambda *_, **__: host)
        monkeypatch.setattr(request, "require_device_nodes", lambda _: None)
        monkeypatch.setattr(plan_warm_up, "choose_compression", lambda _: DEFAULT)
        monkeypatch.setattr(warm_up_starter, "open_starter", lambda *_: starter)
        return cli("warm", "r.example/training:v1", *options)

    return call


@pytest.fixture
def proved(monkeypatch):
    """What is proved of a warm-up, which does what its `on_run` does."""
    warm_up = SimpleNamespace(on_run=lambda: None)

    def make_warm_layer(_, plan, folder, __):
        warm_up.on_run()
        (folder / LAYER).write_bytes(b"a layer")
        digest = compute_digest(b"a layer")
        layer = WarmLayer(digest=digest, size=7, diff_id=digest, unpacked=7, paths=(), tools=())
        label = WarmLabel(
            base=plan.base,
            key=plan.key,
            match=plan.match,
            command=("train",),
            inputs=plan.inputs,
            date="2026-11-29T12:00:00Z",
            seconds=(("cold", 2.0), ("warm", 1.0)),
            tools=(("numba", None),),
            proofs=(("root", "proved"),),
            why_not_reproducible="times",
        )
        return layer, label

    monkeypatch.setattr(warm_up_session, "make_warm_layer", make_warm_layer)
    return warm_up


@pytest.mark.parametrize("gpus", ["all", "1"])
def test_gpus_are_those_that_the_environment_names(warm_on, monkeypatch, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    starter = Starter(gpus)
    assert "this starts nothing" in warm_on(starter, *GPUS).err
    ((_, started),) = starter.started
    (choice,) = started.request.choices
    assert [gpu.index for gpu in choice.gpus] == [1]


def test_more_gpus_than_the_environment_names_are_refused(warm_on, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    result = warm_on(Starter("2"), *GPUS)
    assert result.code == 2
    assert "restricted by CUDA_VISIBLE_DEVICES=1" in result.err


def test_where_some_gpus_fit_the_remedy_is_one_of_this_command(warm_on, monkeypatch):
    node = (GPUS[0], Make.gpu(1, uuid="GPU-1", compute="9.0"))
    refused = warm_on(Starter("1"), *node)
    assert refused.code == 3
    assert "export CUDA_VISIBLE_DEVICES=GPU-0\n" in refused.err
    assert "--gpus" not in refused.err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0")
    assert "this starts nothing" in warm_on(Starter("1"), *node).err


def test_the_repository_of_the_image_is_none_for_staging(warm_on, server):
    starter = Starter()
    refused = warm_on(starter, *GPUS, options=("--staging", "r.example/training"))
    assert refused.code == 2
    assert "--staging r.example/training is the repository of the image itself" in refused.err
    assert "--staging r.example/training-staging" in refused.err
    assert starter.started == []
    other = warm_on(starter, *GPUS, options=("--staging", f"{server.address}/training"))
    assert "this starts nothing" in other.err


@pytest.mark.parametrize("may_push", [True, False])
def test_a_missing_right_to_stage_is_found_before_anything_starts(warm_on, server, may_push):
    if not may_push:
        server.fails("POST", "/blobs/uploads/", times=9, status=403)
    result = warm_on(Starter(), *GPUS, options=("--staging", f"{server.address}/ml/staging"))
    assert ("this starts nothing" in result.err) == may_push
    assert result.code == (2 if may_push else 8)


def test_without_a_place_to_keep_it_that_is_told_before_anything_starts(warm_on, tmp_path):
    assert "nothing will be kept: add --to DIR or --staging REPO" in warm_on(Starter(), *GPUS).err
    to = ("--to", str(tmp_path / "out"))
    assert "nothing will be kept" not in warm_on(Starter(), *GPUS, options=to).err


def test_what_is_proved_and_cannot_be_pushed_is_left_in_a_folder(
    warm_on, proved, server, tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    proved.on_run = lambda: server.fails("POST", "/blobs/uploads/", times=99, status=403)
    result = warm_on(Starter(), *GPUS, options=("--staging", f"{server.address}/ml/staging"))
    assert result.code == 8
    (left,) = tmp_path.iterdir()
    assert f"what was proved is left in {left}" in result.err
    assert f"`imagematrix publish --warm oci:{left} r.example/training:v1`" in result.err
    assert (left / "oci-layout").exists()


@pytest.mark.parametrize("is_changed", [False, True])
def test_of_an_input_that_changes_meanwhile_nothing_is_kept(warm_on, proved, tmp_path, is_changed):
    (tmp_path / "model").mkdir()
    if is_changed:
        proved.on_run = (tmp_path / "model/more").touch
    starter = Starter(inputs=(("model", "/model"),))
    options = (f"--input=model={tmp_path}/model", "--to", str(tmp_path / "out"))
    result = warm_on(starter, *GPUS, options=options)
    assert (result.code, (tmp_path / "out").exists()) == ((1, False) if is_changed else (0, True)), result.err
    assert ("input model was changed meanwhile" in result.err) == is_changed


def test_gpus_of_which_a_fact_is_unknown_warm_up_nothing(warm_on):
    starter = Starter()
    result = warm_on(starter, Make.gpu(name=None))
    assert result.code == 2
    assert "no node would match: gpus.memory_mib, gpus.name could not be read on this one" in result.err
    assert starter.started == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "new", "--staging", "r.example/staging"), "--to and --staging are mutually exclusive"),
        (("--to", "."), "exists, and is no empty folder"),
        (("--to", "file/new"), "cannot be written: Not a directory"),
        (("--wait", "soon"), "invalid --wait soon"),
    ],
)
def test_options_that_cannot_be_are_refused(cli, tmp_path, monkeypatch, options, message):
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    result = cli("warm", "r.example/training:v1", *options)
    assert result.code == 2
    assert message in result.err


def test_it_needs_an_engine(cli):
    result = cli("warm", "r.example/training:v1")
    assert result.code == 8
    assert "Docker engine" in result.err


def test_an_engine_on_another_machine_has_neither_gpus_nor_inputs(cli, monkeypatch):
    monkeypatch.setattr("imagematrix.images.engine.system.get_remote_name", lambda: "elsewhere")
    result = cli("warm", "r.example/training:v1")
    assert result.code == 2
    assert "the engine runs on elsewhere" in result.err


def test_a_runtime_whose_process_is_not_root_is_refused(cli, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(start, "find_program", lambda *names: f"/bin/{names[0]}")
    monkeypatch.setenv("IMAGEMATRIX_RUNTIME", "bwrap")
    result = cli("warm", "r.example/training:v1", "--engine", "oci")
    assert result.code == 8
    assert "whose process is root in the container: bwrap" in result.err
    assert "leave IMAGEMATRIX_RUNTIME unset" in result.err
