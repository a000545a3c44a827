"""The container to start, and the exact command that starts it."""

from __future__ import annotations

import pytest

from imagematrix.errors import ProbeError, UsageError
from imagematrix.launcher.docker.plan import format_docker_run, plan_launch
from imagematrix.launcher.docker.share import Mps, Share

PRESENT = ("/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
NODES = ("/dev/nvidia3", "/dev/nvidia4", "/dev/nvidiactl", "/dev/nvidia-uvm")


@pytest.mark.parametrize("mode", ["exact", "compat"])
def test_an_image_with_a_driver_gets_device_nodes_only(make, mode):
    launch = plan_launch(make.selection(make.gpu(0), make.gpu(1), mode=mode), ["train", "--lr", "1"])
    assert format_docker_run(launch, ["--rm", "-v", "/data:/data"]) == [
        "docker", "run",
        "--device", "/dev/nvidia3", "--device", "/dev/nvidia4",
        "--device", "/dev/nvidiactl", "--device", "/dev/nvidia-uvm",
        "--env", "NVIDIA_VISIBLE_DEVICES=void",
        "--rm", "-v", "/data:/data",
        "--label", "io.imagematrix.selected=training:v1-x",
        "--label", "io.imagematrix.vram=whole",
        "--label", "io.imagematrix.gpus=GPU-0,GPU-1",
        "training:v1-x", "train", "--lr", "1",
    ]  # fmt: skip


def test_labels_of_the_launch_come_last(make):
    """So neither labels of the image nor of the user's own options replace them."""
    words = format_docker_run(plan_launch(make.selection(make.gpu(0))), ["--label", "io.imagematrix.vram=1"])
    given = [word for word in words if word.startswith("io.imagematrix.vram=")]
    assert given == ["io.imagematrix.vram=1", "io.imagematrix.vram=whole"]


def test_a_cpu_only_image_gets_no_device(make):
    launch = plan_launch(make.selection(mode=None))
    assert format_docker_run(launch) == [
        "docker", "run", "--env", "NVIDIA_VISIBLE_DEVICES=void",
        "--label", "io.imagematrix.selected=training:v1-x", "--label", "io.imagematrix.vram=whole",
        "training:v1-x",
    ]  # fmt: skip
    node = make.selection(make.gpu(), mode=None, wanted="none")
    assert plan_launch(node) == launch


@pytest.mark.parametrize(
    ("first", "second", "injected"),
    [
        ({"uuid": None}, {"uuid": None}, ("0", "1")),
        ({"mig": ["MIG-a"], "uuid": None}, {}, ("MIG-a", "GPU-1")),
        # NVIDIA's runtime would count MIG devices, and not GPUs without the module.
        ({"mig": [None]}, {}, None),
        ({"mig": ["MIG-a", None]}, {}, None),
        ({"state": "no-module"}, {"uuid": None}, None),
    ],
)
def test_only_names_with_the_same_meaning_for_the_runtime_are_injected(make, first, second, injected):
    def gpu(index, mig=(), **facts):
        parts = tuple(make.mig(number, uuid=uuid) for number, uuid in enumerate(mig, 1))
        return make.gpu(index, mig=parts or None, **facts)

    wanted = "device=1" if first.get("state") else "all"
    selection = make.selection(gpu(0, **first), gpu(1, **second), mode="host", wanted=wanted)
    if injected is None:
        with pytest.raises(ProbeError, match="unknown: NVIDIA's runtime could take another device"):
            plan_launch(selection)
    else:
        assert plan_launch(selection).injected == injected


def test_the_host_s_driver_is_injected_by_the_runtime(make):
    launch = plan_launch(make.selection(make.gpu(0), make.gpu(1), mode="host"))
    assert (launch.devices, launch.injected) == ((), ("GPU-0", "GPU-1"))
    assert launch.environment == {"NVIDIA_DISABLE_REQUIRE": "true"}
    words = format_docker_run(launch)
    assert words[2:4] == ["--gpus", '"device=GPU-0,GPU-1"']  # docker parses it as CSV
    assert "--device" not in words
    assert format_docker_run(plan_launch(make.selection(make.gpu(0), mode="host")))[2:4] == [
        "--gpus",
        "device=GPU-0",
    ]


@pytest.mark.parametrize(
    ("platform", "words"),
    [("linux/amd64", []), ("linux/amd64/v3", ["--platform", "linux/amd64/v3"])],
)
def test_the_platform_of_a_cpu_variant_is_passed(make, platform, words):
    launch = plan_launch(make.selection(mode=None, platform=platform))
    assert launch.platform == platform
    assert format_docker_run(launch)[2:-7] == words


def test_only_the_chosen_gpus_are_passed(make):
    gpus = make.gpu(0), make.gpu(1)
    assert plan_launch(make.selection(*gpus)).devices == NODES
    assert plan_launch(make.selection(*gpus, wanted="1")).devices == (NODES[0], *NODES[2:])
    second = plan_launch(make.selection(*gpus, wanted="device=1"))
    assert second.devices == NODES[1:]
    assert second.labels["io.imagematrix.gpus"] == "GPU-1"


def test_mig_devices_are_passed_with_their_capabilities(make):
    gpu = make.gpu(0, mig=(make.mig(1, uuid="MIG-1"), make.mig(2, uuid="MIG-2", capabilities=(426, 427))))
    launch = plan_launch(make.selection(gpu, wanted="MIG-2"))
    assert launch.devices == (
        "/dev/nvidia3",
        "/dev/nvidia-caps/nvidia-cap426",
        "/dev/nvidia-caps/nvidia-cap427",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
    )
    assert launch.labels["io.imagematrix.gpus"] == "MIG-2"
    with pytest.raises(ProbeError, match=r"gpu3/mig/gi1$"):
        plan_launch(make.selection(gpu, wanted="MIG-1"))


def test_an_empty_selection_is_refused(make):
    with pytest.raises(UsageError, match="nothing was selected"):
        plan_launch(make.selection(make.gpu(compute="7.0")))


def test_the_launch_as_data(make, conforms):
    selection = make.selection(make.gpu(), make.gpu(1), devices=PRESENT, wanted=1)
    document = conforms(plan_launch(selection, ["train", "--steps", "5"]).to_json(["--rm"]))
    assert document["devices"] == ["/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm", *PRESENT]
    assert document["gpus"] == ["GPU-0"]
    assert document["docker"][:2] == ["docker", "run"]
    assert document["docker"][-4:] == ["training:v1-x", "train", "--steps", "5"]
    assert "--rm" in document["docker"]
    conforms(plan_launch(make.selection(mode=None)).to_json())
    injected = plan_launch(make.selection(make.gpu(), mode="host")).to_json()
    conforms(injected)
    assert (injected["gpus"], injected["injected"], injected["devices"]) == (["GPU-0"], ["GPU-0"], [])


def test_a_share_is_in_environment_and_labels(make):
    share = Share(vram_mib=10_800)
    planned = plan_launch(make.selection(make.gpu(memory_mib=20_000)), share=share)
    assert planned.labels["io.imagematrix.vram"] == "10800"
    assert planned.environment["IMAGEMATRIX_VRAM_FRACTION"] == "0.5000"
    assert (planned.mounts, planned.ipc) == ((), None)
    alone = plan_launch(make.selection(mode=None), share=share)
    assert (alone.labels, alone.environment) == (
        {"io.imagematrix.selected": "training:v1-x", "io.imagematrix.vram": "10800"},
        {"NVIDIA_VISIBLE_DEVICES": "void"},
    )


def test_only_mps_adds_mounts(make, conforms):
    share = Share(mps=Mps(pipes="/run/mps"))
    planned = plan_launch(make.selection(make.gpu()), share=share)
    conforms(planned.to_json())
    words = format_docker_run(planned, ["--ipc", "private"])
    assert words[words.index("--volume") + 1] == "/run/mps:/run/mps"
    assert [words[at + 1] for at, word in enumerate(words) if word == "--ipc"] == ["host", "private"]
    assert "CUDA_MPS_PIPE_DIRECTORY=/run/mps" in words
    alone = plan_launch(make.selection(mode=None), share=share)
    assert (alone.mounts, alone.ipc) == ((), None)
