"""Requested launches, before anything is started."""

from __future__ import annotations

import os

import pytest

from imagematrix.common.record import replace
from imagematrix.errors import EngineError, ProbeError, UsageError
from imagematrix.images.catalog.catalog import Catalog, UserModeDriver, Variant
from imagematrix.launcher.docker import request as module
from imagematrix.launcher.docker.devices import DeviceProblem
from imagematrix.launcher.docker.options import parse_run_args
from imagematrix.launcher.docker.request import find_remote_machine, make_request
from imagematrix.launcher.docker.share import Mps
from imagematrix.launcher.gpu_claims import pods
from imagematrix.launcher.gpu_claims.usage import Consumer
from imagematrix.selection.selection import NothingFits

DIGEST = f"sha256:{'0' * 64}"
BAKED = UserModeDriver(mode="exact", version="550.163.01")


def catalog(*cubins, name="training", driver=BAKED):
    variants = [
        Variant(
            reference=f"{name}:v1-sm{cubin}",
            digest=DIGEST,
            platform="linux/amd64",
            cuda="12.4",
            cubins=(cubin,),
            driver=driver,
        )
        for cubin in cubins
    ]
    return Catalog(image=name, version="v1", variants=tuple(variants))


@pytest.fixture
def request_for(make):
    """Returns the request of a command line on a node with GPUs of these kinds."""

    def ask(line, *gpus, catalog=catalog("80", "90"), wanted=None, remote=None):  # noqa: B008 - it is frozen
        words = parse_run_args(f"--host node.json --dry-run {line} IMAGE".split())
        return make_request(words, make.host(*gpus), catalog, words.gpus or wanted, remote)

    return ask


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("", "reg:5000/t:v1-sm80"),
        ("--pull missing", "reg:5000/t:v1-sm80"),
        ("--pull never", "reg:5000/t:v1-sm80"),
        ("--pull always", f"reg:5000/t:v1-sm80@{DIGEST}"),  # the tag may be another image's now
    ],
)
def test_what_is_pulled_anew_is_the_image_that_was_chosen(request_for, make, line, name):
    chosen = request_for(line, make.gpu(0), catalog=catalog("80", name="reg:5000/t"))
    present = {"RepoDigests": [f"reg:5000/t@{DIGEST}"]}
    engine = replace(make.engine()(), inspect_image=lambda _: present)
    assert replace(chosen, engine=engine).plan_on_any()[1].reference == name


def devices(request):
    return [path for path in request.plan_on_any()[1].devices if path[11:].isdecimal()]


def test_conditions_select_among_the_image_s_own_axes(request_for, make):
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
        result = request_for(f"--gpus 1 --where python={python}", *gpus, catalog=own)
        assert devices(result) == [node]
        assert result.plan_on_any()[0].selected == f"t:v1-{python}"
    both = replace(own, variants=tuple(replace(one, cubins=("80", "90")) for one in variants))
    result = request_for("--gpus 1", *gpus, catalog=both)
    with pytest.raises(UsageError, match="differ in python"):
        result.plan_on_any()


def test_all_gpus_are_the_default(request_for, make):
    assert devices(request_for("", make.gpu(0), make.gpu(1))) == ["/dev/nvidia3", "/dev/nvidia4"]


def test_an_image_gets_those_gpus_that_it_fits(request_for, make):
    gpus = (make.gpu(0), make.gpu(1, compute="9.0"), make.gpu(2), make.gpu(3, compute="9.0"))
    result = request_for("--gpus 2", *gpus)
    assert devices(result) == ["/dev/nvidia3", "/dev/nvidia5"]
    assert [[gpu.index for gpu in choice.gpus] for choice in result.choices] == [[0, 2], [1, 3]]
    with pytest.raises(NothingFits):
        request_for("--gpus 3", *gpus).plan_on_any()


def test_a_share_is_of_one_gpu_by_default(request_for, make):
    gpus = [make.gpu(number, memory_mib=40_000) for number in range(3)]
    assert devices(request_for("--vram 4Gi", *gpus)) == ["/dev/nvidia3"]
    assert devices(request_for("--vram 4Gi", *gpus, wanted="device=1,2")) == ["/dev/nvidia4"]
    assert devices(request_for("--vram 4Gi --gpus 2", *gpus)) == ["/dev/nvidia3", "/dev/nvidia4"]
    with pytest.raises(UsageError, match="of the host's 0 GPUs"):
        request_for("--vram 4Gi")


def test_a_share_needs_a_large_enough_gpu(request_for, make):
    small, large = make.gpu(0, memory_mib=10_000), make.gpu(1, memory_mib=80_000)
    assert devices(request_for("--vram 20Gi", small, large)) == ["/dev/nvidia4"]
    unknown = make.gpu(0)
    assert devices(request_for("--vram 20Gi", unknown, large)) == ["/dev/nvidia3"]
    with pytest.raises(UsageError, match="exceeds the memory of a GPU"):
        request_for("--vram 200Gi", small, large).plan_on_any()


def test_an_image_has_to_fit_the_share(request_for, make):
    own = catalog("80")
    small, large = (
        replace(own.variants[0], reference=f"t:v1-{name}", gpu_memory_mib=mib, axes=(("precision", name),))
        for name, mib in (("int8", 8000), ("fp16", 20000))
    )
    own = replace(
        own,
        variants=(small, large),
        defaults=(("precision", "fp16"),),
        default_order=(("precision", ("fp16", "int8")),),
    )
    gpus = make.gpu(0, memory_mib=40_000), make.gpu(1, memory_mib=40_000)
    for line, selected in (("", "fp16"), ("--vram 24Gi", "fp16"), ("--vram 8Gi", "int8")):
        selection, _ = request_for(line, *gpus, catalog=own).plan_on_any()
        assert selection.selected == f"t:v1-{selected}"
        assert [one.kind for one in selection.warnings] == (["default"] if selected == "int8" else [])
    request = request_for("--vram 8Gi", *gpus, catalog=own)
    doubts = [text for text, _ in request.find_doubts(*request.plan_on_any())]
    assert doubts[0] == (
        "precision int8: fp16 does not fit: it needs 20000 MiB of GPU memory, and the share has 8192 MiB"
    )
    with pytest.raises(NothingFits, match="the share has 4096 MiB") as caught:
        request_for("--vram 4Gi", *gpus, catalog=own).plan_on_any()
    assert caught.value.remedy == "pass --vram 8000Mi or more"


def test_mps_of_another_node_uses_the_defaults(request_for, make):
    assert request_for("--mps-threads 25", make.gpu()).share.mps == Mps(threads=25)
    assert request_for("", make.gpu()).share.mps is None


def test_mps_needs_a_running_daemon(make, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    words = parse_run_args(["--mps", "--host", "node.json", "IMAGE"])
    with pytest.raises(ProbeError, match="MPS daemon not found"):
        make_request(words, make.host(make.gpu()), catalog("80"), None, None)


def test_driver_capabilities_are_for_images_without_a_driver(request_for, make):
    bare = catalog("80", driver=UserModeDriver(mode="host"))
    line = "--gpus all,capabilities=utility"
    launch = request_for(line, make.gpu(), catalog=bare).plan_on_any()[1]
    assert launch.environment["NVIDIA_DRIVER_CAPABILITIES"] == "utility"
    assert "NVIDIA_DRIVER_CAPABILITIES" not in request_for(line, make.gpu()).plan_on_any()[1].environment


def test_printing_a_launch_needs_no_engine(request_for, make):
    remote = catalog("80", name="registry.example.com/training")
    assert (
        request_for("", make.gpu(), catalog=remote)
        .plan_on_any()[1]
        .reference.endswith(f"-sm80@sha256:{'0' * 64}")
    )
    words = parse_run_args(["--print", "json", "IMAGE"])
    bare = catalog("80", driver=UserModeDriver(mode="host"))
    launch = make_request(words, make.host(make.gpu()), bare, None, None).plan_on_any()[1]
    assert (launch.injected, launch.cdi) == (("GPU-0",), False)
    assert find_remote_machine(words) is None
    words = parse_run_args(["--host", "node.json", "IMAGE"])
    with pytest.raises(EngineError):
        find_remote_machine(words)
    with pytest.raises(EngineError):
        make_request(words, make.host(make.gpu()), remote, None, None).plan_on_any()


def test_doubts_about_a_launch(request_for, make, monkeypatch):
    def doubts(line, mps=None):
        monkeypatch.setattr(module, "_find_mps", lambda _: mps)
        monkeypatch.setattr("imagematrix.images.engine.system.get_info", lambda: {"DefaultRuntime": "nvidia"})
        result = request_for(line, make.gpu())
        monkeypatch.setattr(module, "check_device_nodes", lambda _: ())
        return [doubt for doubt, _ in result.find_doubts(*result.plan_on_any())]

    assert doubts("-e NVIDIA_VISIBLE_DEVICES=none") == []
    assert "injects the node's as well" in doubts("-e NVIDIA_VISIBLE_DEVICES=all")[0]
    assert doubts("--mps", Mps(user=0)) == []
    assert doubts("--mps --user 1000", Mps(user=1000)) == []
    assert doubts("--mps", Mps(user=1000)) == ["the MPS daemon serves only its own user"]


def test_a_node_without_permission_is_a_doubt(request_for, make, monkeypatch):
    result = request_for("", make.gpu())
    kept = [
        DeviceProblem(path=path, what="permission denied", remedy="do", doubt=True)
        for path in ("/dev/nvidia3", "/dev/nvidiactl")
    ]
    monkeypatch.setattr(module, "check_device_nodes", lambda _: kept)
    doubt = "/dev/nvidia3, /dev/nvidiactl: permission denied; the engine may still have access"
    for user, as_root, expected in ((0, False, []), (1000, True, []), (1000, False, [doubt])):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        monkeypatch.setattr(
            "imagematrix.images.engine.endpoint.runs_as_root", lambda as_root=as_root: as_root
        )
        assert [doubt for doubt, _ in result.find_doubts(*result.plan_on_any())] == expected


@pytest.mark.parametrize(
    ("access", "remote", "doubts"),
    [
        (True, None, []),
        (None, None, []),
        (False, None, ["/k/pod-resources/kubelet.sock: permission denied: GPU usage by pods unknown"]),
        (False, "node7", []),
    ],
)
def test_a_kubelet_that_this_user_may_not_ask_is_a_doubt(
    request_for, make, monkeypatch, access, remote, doubts
):
    result = request_for("", make.gpu(), remote=remote)
    monkeypatch.setattr(module, "check_device_nodes", lambda _: ())
    monkeypatch.setattr(pods, "check_access", lambda: access)
    monkeypatch.setattr("imagematrix.launcher.kubelet.sockets.find_root_dir", lambda: "/k")
    assert [doubt for doubt, _ in result.find_doubts(*result.plan_on_any())] == doubts


@pytest.mark.parametrize(("remote", "expected"), [(None, 4), ("node7", 3)])
def test_a_gpu_that_a_pod_has_is_not_claimed(request_for, make, monkeypatch, remote, expected):
    pod = Consumer(kind="container", name="team/web-1 (main)")
    monkeypatch.setattr(pods, "compute_pod_usage", lambda _: {"nvidia3": (pod,)})
    monkeypatch.setattr("imagematrix.images.engine.containers.list_running_or_starting", lambda *_: [])
    result = request_for("--gpus 1", make.gpu(0), make.gpu(1), remote=remote)
    with result.claim_gpus(result.plan_on_any()[1], lambda _: None) as claimed:
        assert [gpu.minor for gpu in claimed.gpus] == [expected]


@pytest.mark.parametrize(
    ("line", "machine", "is_remote"),
    [
        ("IMAGE", None, None),
        ("--host node.json IMAGE", "node7", "node7"),
        ("--host node.json --dry-run IMAGE", "node7", None),
    ],
)
def test_the_machine_of_the_engine(monkeypatch, line, machine, is_remote):
    monkeypatch.setattr("imagematrix.images.engine.system.get_remote_name", lambda: machine)
    assert find_remote_machine(parse_run_args(line.split())) == is_remote


def test_a_remote_engine_needs_a_saved_host(monkeypatch):
    monkeypatch.setattr("imagematrix.images.engine.system.get_remote_name", lambda: "node7")
    for line in ("IMAGE", "--dry-run IMAGE"):
        with pytest.raises(UsageError, match="the engine runs on node7") as caught:
            find_remote_machine(parse_run_args(line.split()))
        assert "on node7, then pass --host node.json" in caught.value.remedy


@pytest.mark.parametrize(
    ("line", "architecture", "message"),
    [
        ("IMAGE", "amd64", None),
        ("IMAGE", "", None),
        ("IMAGE", "arm64", "training:v1-sm80 is for linux/amd64, and its engine runs on linux/arm64"),
        ("--host node.json IMAGE", "arm64", "its engine runs on linux/arm64"),
        ("--host node.json --dry-run IMAGE", "arm64", None),
    ],
)
def test_nothing_of_another_architecture_is_started(make, monkeypatch, line, architecture, message):
    """Even where its engine has an emulator."""
    monkeypatch.setattr(module, "require_device_nodes", lambda _: None)
    engine = replace(make.engine()(), get_architecture=lambda: architecture)
    args = parse_run_args(line.split())
    request = make_request(args, make.host(make.gpu(0)), catalog("80"), None, None, lambda: engine)
    if message is None:
        assert request.plan_on_any()[1].platform == "linux/amd64"
        return
    with pytest.raises(UsageError, match=message) as caught:
        request.plan_on_any()
    assert caught.value.remedy == "start it on a machine with linux/amd64"


@pytest.fixture
def claimed(make, monkeypatch):
    """Returns what is started on GPUs of the host `after`, claimed when it was the host `before`."""
    older = UserModeDriver(mode="exact", version="535.261.03")
    original = catalog("80")
    (newer,) = original.variants
    other = replace(newer, reference="training:v1-older", driver=older)
    monkeypatch.setattr(module, "require_device_nodes", lambda _: None)

    def start(before, after, version="550.163.01"):
        both = replace(original, variants=(newer, other))
        asked = make_request(parse_run_args(["IMAGE"]), make.host(*before), both, None, None, make.engine())
        now = make.host(*after)
        now = replace(now, driver=replace(now.driver, version=version))
        chosen, launch = asked.plan_on_any()
        with asked.claim_gpus(launch, lambda _: None) as taken:
            return asked.plan_on_claimed(taken, chosen, launch, now)[1]

    return start


@pytest.mark.parametrize(
    ("taken", "version", "expected"),
    [
        (None, "550.163.01", ["image", "info"]),  # the first plan holds
        (3, "550.163.01", ["image", "info"]),  # another GPU
        (None, "580.65.06", ["image", "info", "image", "info"]),  # the host changed during a wait
    ],
)
def test_the_engine_is_asked_again_only_after_a_wait(make, monkeypatch, taken, version, expected):
    asked = []
    monkeypatch.setattr("imagematrix.images.engine.system.get_info", lambda: asked.append("info") or {})
    monkeypatch.setattr("imagematrix.images.engine.system.get_architecture", lambda: "amd64")
    monkeypatch.setattr("imagematrix.images.engine.images.inspect_image", lambda _: asked.append("image"))
    used = {} if taken is None else {f"nvidia{taken}": (Consumer(kind="container", name="web"),)}
    monkeypatch.setattr("imagematrix.launcher.gpu_claims.survey.survey_usage", lambda *_: used)
    host = make.host(make.gpu(0), make.gpu(1))
    now = replace(host, driver=replace(host.driver, version=version))
    bare = catalog("80", driver=UserModeDriver(mode="host"))
    result = make_request(parse_run_args(["--gpus", "1", "IMAGE"]), host, bare, "1", None)
    chosen, launch = result.plan_on_any()
    with result.claim_gpus(launch, lambda _: None) as claimed:
        chosen, launch = result.plan_on_claimed(claimed, chosen, launch, now)
    assert asked == expected
    assert launch.injected == (("GPU-0",) if taken is None else ("GPU-1",))
    assert list(chosen.chosen_gpus) == list(claimed.gpus)


def test_an_image_is_chosen_for_the_driver_after_the_wait(claimed, make):
    gpu = make.gpu(0)
    assert claimed([gpu], [gpu]).reference == "training:v1-sm80"
    assert claimed([gpu], [gpu], version="535.261.03").reference == "training:v1-older"
    with pytest.raises(NothingFits):
        claimed([gpu], [gpu], version="580.65.06")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"minor": 7}, "devices of GPU 0 .* changed during the wait"),
        ({}, {"uuid": "GPU-9"}, "'GPU-0' not found"),
        ({}, {"mig": ["MIG-1"]}, "changed during the wait"),
        ({"mig": ["MIG-1"]}, {"mig": ["MIG-2"]}, "'MIG-1' not found"),
        ({"mig": ["MIG-1"]}, {}, "'MIG-1' not found"),
    ],
)
def test_a_gpu_that_changed_during_the_wait_is_not_used(claimed, make, before, after, message):
    def gpu(mig=(), **facts):
        return make.gpu(
            0, mig=tuple(make.mig(uuid=name, capabilities=(1, 2)) for name in mig) or None, **facts
        )

    with pytest.raises((ProbeError, UsageError), match=message):
        claimed([gpu(**before)], [gpu(**after)])
