"""What a launch that was asked for comes to, before anything is started."""

from __future__ import annotations

import pytest

from imagematrix.catalog.catalog import Catalog, UserModeDriver, Variant
from imagematrix.errors import EngineError, ProbeError, UsageError
from imagematrix.launcher import request as module
from imagematrix.launcher.devices import Problem
from imagematrix.launcher.options import split
from imagematrix.launcher.request import elsewhere, request
from imagematrix.launcher.share import Mps
from imagematrix.record import replace
from imagematrix.selection.selection import NothingFits

BAKED = UserModeDriver(mode="exact", version="550.163.01")


def catalog(*cubins, name="training", driver=BAKED):
    variants = [
        Variant(
            reference=f"{name}:v1-sm{cubin}",
            digest=f"sha256:{'0' * 64}",
            platform="linux/amd64",
            cuda="12.4",
            cubins=(cubin,),
            driver=driver,
        )
        for cubin in cubins
    ]
    return Catalog(image=name, version="v1", variants=tuple(variants))


@pytest.fixture
def asked(make):
    """Returns what the words of a command line ask for on a node with GPUs of these kinds, not started."""

    def ask(line, *gpus, catalog=catalog("80", "90"), wanted=None):  # noqa: B008 - it is frozen
        words = split(f"--host node.json --dry-run {line} IMAGE".split())
        return request(words, make.host(*gpus), catalog, words.gpus or wanted, None)

    return ask


def devices(found):
    return [path for path in found.first()[1].devices if path[11:].isdecimal()]


def test_where_decides_among_the_images_own_axes(asked, make):
    variants = [
        Variant(
            reference=f"t:v1-{python}",
            digest=None,
            platform="linux/amd64",
            cuda="12.4",
            cubins=(cubin,),
            driver=BAKED,
            axes=(("python", python),),
        )
        for python, cubin in (("3.9", "80"), ("3.13", "90"))
    ]
    own = Catalog(image="t", version="v1", variants=tuple(variants))
    gpus = make.gpu(0), make.gpu(1, compute="9.0")
    for python, node in (("3.9", "/dev/nvidia3"), ("3.13", "/dev/nvidia4")):
        found = asked(f"--gpus 1 --where python={python}", *gpus, catalog=own)
        assert devices(found) == [node]
        assert found.first()[0].selected == f"t:v1-{python}"
    both = replace(own, variants=tuple(replace(one, cubins=("80", "90")) for one in variants))
    found = asked("--gpus 1", *gpus, catalog=both)
    with pytest.raises(UsageError, match="differ in python"):
        found.first()


def test_all_gpus_are_asked_for_where_nothing_is_said(asked, make):
    assert devices(asked("", make.gpu(0), make.gpu(1))) == ["/dev/nvidia3", "/dev/nvidia4"]


def test_of_unlike_gpus_some_that_one_image_fits(asked, make):
    gpus = (make.gpu(0), make.gpu(1, compute="9.0"), make.gpu(2), make.gpu(3, compute="9.0"))
    found = asked("--gpus 2", *gpus)
    assert devices(found) == ["/dev/nvidia3", "/dev/nvidia5"]
    assert [[gpu.index for gpu in some] for some in found.sets] == [[0, 2], [1, 3]]
    with pytest.raises(NothingFits):
        asked("--gpus 3", *gpus).first()


def test_a_share_is_of_one_gpu_unless_more_are_asked_for(asked, make):
    gpus = [make.gpu(number, memory_mib=40_000) for number in range(3)]
    assert devices(asked("--vram 4Gi", *gpus)) == ["/dev/nvidia3"]
    assert devices(asked("--vram 4Gi", *gpus, wanted="device=1,2")) == ["/dev/nvidia4"]
    assert devices(asked("--vram 4Gi --gpus 2", *gpus)) == ["/dev/nvidia3", "/dev/nvidia4"]
    with pytest.raises(UsageError, match="has 0 GPUs"):
        asked("--vram 4Gi")


def test_a_share_goes_where_there_is_room_for_it(asked, make):
    small, large = make.gpu(0, memory_mib=10_000), make.gpu(1, memory_mib=80_000)
    assert devices(asked("--vram 20Gi", small, large)) == ["/dev/nvidia4"]
    unknown = make.gpu(0)
    assert devices(asked("--vram 20Gi", unknown, large)) == ["/dev/nvidia3"]
    with pytest.raises(UsageError, match="more than a GPU has"):
        asked("--vram 200Gi", small, large).first()


def test_mps_of_another_node_is_taken_as_usual(asked, make):
    assert asked("--mps-threads 25", make.gpu()).share.mps == Mps(threads=25)
    assert asked("", make.gpu()).share.mps is None


def test_mps_of_this_node_has_to_be_there(make, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    words = split(["--mps", "--host", "node.json", "IMAGE"])
    with pytest.raises(ProbeError, match="no MPS daemon"):
        request(words, make.host(make.gpu()), catalog("80"), None, None)


@pytest.mark.usefixtures("no_engine")
def test_the_driver_s_capabilities_are_for_images_that_leave_it_to_the_node(asked, make):
    bare = catalog("80", driver=UserModeDriver(mode="host"))
    line = "--gpus all,capabilities=utility"
    launch = asked(line, make.gpu(), catalog=bare).first()[1]
    assert launch.environment == {"NVIDIA_DRIVER_CAPABILITIES": "utility"}
    assert "NVIDIA_DRIVER_CAPABILITIES" not in asked(line, make.gpu()).first()[1].environment


@pytest.mark.usefixtures("no_engine")
def test_a_launch_is_shown_also_without_an_engine(asked, make):
    there = catalog("80", name="registry.example.com/training")
    assert asked("", make.gpu(), catalog=there).first()[1].reference.endswith(f"-sm80@sha256:{'0' * 64}")
    words = split(["--print", "json", "IMAGE"])
    bare = catalog("80", driver=UserModeDriver(mode="host"))
    launch = request(words, make.host(make.gpu()), bare, None, None).first()[1]
    assert (launch.injected, launch.cdi) == (("GPU-0",), False)
    assert elsewhere(words) is None
    words = split(["--host", "node.json", "IMAGE"])
    with pytest.raises(EngineError):
        elsewhere(words)
    with pytest.raises(EngineError):
        request(words, make.host(make.gpu()), there, None, None).first()


def test_what_may_go_wrong_is_told(make, monkeypatch):
    def doubts(line, mps=None):
        monkeypatch.setattr(module, "_mps", lambda _: mps)
        monkeypatch.setattr(module.engine, "info", lambda: {"DefaultRuntime": "nvidia"})
        words = split(f"--host node.json --dry-run {line} IMAGE".split())
        found = request(words, make.host(make.gpu()), catalog("80"), None, None)
        monkeypatch.setattr(module, "check", lambda _: ())
        return [doubt for doubt, _ in found.doubts(*found.first())]

    assert doubts("-e NVIDIA_VISIBLE_DEVICES=none") == []
    assert "brings the node's into it, too" in doubts("-e NVIDIA_VISIBLE_DEVICES=all")[0]
    assert doubts("--mps", Mps(user=0)) == []
    assert doubts("--mps --user 1000", Mps(user=1000)) == []
    assert doubts("--mps", Mps(user=1000)) == ["the MPS daemon serves its own user only"]


def test_a_node_that_this_user_may_not_open_is_told(make, monkeypatch):
    words = split(["--host", "node.json", "--dry-run", "IMAGE"])
    found = request(words, make.host(make.gpu()), catalog("80"), None, None)
    kept = Problem(path="/dev/nvidia3", what="may not be opened by this user", remedy="do", doubt=True)
    monkeypatch.setattr(module, "check", lambda _: (kept,))
    for user, expected in (
        (0, []),
        (1000, ["/dev/nvidia3 may not be opened by this user; the engine may open it"]),
    ):
        monkeypatch.setattr(module.os, "geteuid", lambda user=user: user)
        assert [doubt for doubt, _ in found.doubts(*found.first())] == expected


@pytest.mark.parametrize(
    ("line", "machine", "is_remote"),
    [
        ("IMAGE", None, None),
        ("--host node.json IMAGE", "node7", "node7"),
        ("--host node.json --dry-run IMAGE", "node7", None),
    ],
)
def test_where_the_engine_is(monkeypatch, line, machine, is_remote):
    monkeypatch.setattr(module.engine, "remote", lambda: machine)
    assert elsewhere(split(line.split())) == is_remote


def test_nobody_guesses_what_another_machine_has(monkeypatch):
    monkeypatch.setattr(module.engine, "remote", lambda: "node7")
    for line in ("IMAGE", "--dry-run IMAGE"):
        with pytest.raises(UsageError, match="the engine runs on node7") as caught:
            elsewhere(split(line.split()))
        assert "on node7, then --host node.json here" in caught.value.remedy
