"""GPUs that the environment names without --gpus, and restrictions of --gpus by the environment."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.hardware.gpu_request.spec import select_gpus
from imagematrix.hardware.gpu_request.visible import (
    CONDOR,
    CUDA,
    JOB,
    MOUNTED,
    NO_GPU,
    list_gpu_variables,
    parse_visible,
    select_within_environment,
    within,
)
from imagematrix.hardware.host import device
from imagematrix.hardware.host.host import MigDevice
from imagematrix.hardware.vendors.runtime import VISIBLE as RUNTIME


@pytest.fixture
def node(make):
    """Return a host with five GPUs: 1 is lost, 4 is in MIG mode."""
    parts = tuple(
        MigDevice(uuid=f"MIG-{instance}", profile=None, gpu_instance=instance, compute_instance=0)
        for instance in (1, 2)
    )
    return make.host(
        make.gpu(0), make.gpu(1, state="lost"), make.gpu(2), make.gpu(3, uuid=None), make.gpu(4, mig=parts)
    )


@pytest.mark.parametrize(
    ("runtime", "cuda", "indices"),
    [
        ("all", None, [0, 2, 3, 4]),
        ("none", None, []),
        ("void", None, [0, 1, 2, 3, 4]),  # another mechanism injects them
        ("void", "1", [2]),
        ("0", None, [0]),
        ("1", None, [2]),  # the second usable one
        ("2", None, [3]),  # its UUID is unknown
        ("0, 3", None, [0, 4]),
        ("GPU-2", None, [2]),
        ("", "0,1", [0, 2]),
        (None, "1,0", [0, 2]),
        (None, "", []),
        (None, "-1", []),
        (None, "NoDevFiles", []),
        (None, "1,-1,0", [2]),
        (None, "GPU-0", [0]),
        ("0,1", "1", [2]),
        ("all", "2", [3]),
        ("none", "", []),
    ],
)
def test_the_environment_restricts_visible_gpus(node, runtime, cuda, indices):
    environment = {name: value for name, value in ((RUNTIME, runtime), (CUDA, cuda)) if value is not None}
    assert [gpu.index for gpu in select_gpus(node.gpus, parse_visible(node.gpus, environment))] == indices


def test_mig_devices(node):
    (gpu,) = select_gpus(node.gpus, parse_visible(node.gpus, {CUDA: "MIG-2"}))
    assert [device.uuid for device in gpu.mig] == ["MIG-2"]


@pytest.fixture
def parted(make):
    """Return a host with two GPUs in MIG mode, of which NVML reports only the first, and a third GPU."""

    def parts(*uuids):
        return tuple(
            MigDevice(uuid=uuid, profile=None, gpu_instance=7 - number, compute_instance=0)
            for number, uuid in enumerate(uuids)
        )

    return make.host(
        make.gpu(0, state="lost"),
        make.gpu(1, mig=parts("MIG-a", "MIG-b")),
        make.gpu(2, mig=parts(None, None)),
        make.gpu(3, mig=parts(None)),
        make.gpu(4),
    )


@pytest.mark.parametrize("variable", [RUNTIME, CUDA])
@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("0:0", {1: [7]}),  # the first usable GPU and its first MIG device
        ("0:1", {1: [6]}),
        ("0:1,3", {1: [6], 4: None}),
        ("mig0:1", {1: [6]}),
        ("2:0", {3: [7]}),  # the order of a single device is known
        ("MIG-GPU-1/6/0", {1: [6]}),
        ("MIG-b", {1: [6]}),
        ("gpu3", {4: None}),
    ],
)
def test_names_of_mig_devices(parted, variable, value, devices):
    assert instances(parted, {variable: value}) == devices


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("nvidia.com/gpu=0:0", {1: [7]}),
        ("nvidia.com/gpu=MIG-a, nvidia.com/gpu=gpu3", {1: [7], 4: None}),
        ("k8s.device-plugin.nvidia.com/gpu=GPU-4", {4: None}),
    ],
)
def test_names_of_cdi(parted, value, devices):
    assert instances(parted, {RUNTIME: value}) == devices


def instances(node, environment):
    chosen = select_gpus(node.gpus, parse_visible(node.gpus, environment))
    return {gpu.index: gpu.mig and [device.gpu_instance for device in gpu.mig] for gpu in chosen}


@pytest.mark.parametrize(
    "value",
    ["0:2", "1:0", "3:0", "9:0", "MIG-GPU-0/1/0", "MIG-GPU-1/1/0", "gpu9", "4", "99999", "0:0:0:0", "é"],
)
def test_missing_mig_devices_are_rejected(parted, value):
    with pytest.raises(UsageError, match=f"^{CUDA}={value}: .* not found on this host"):
        parse_visible(parted.gpus, {CUDA: value})


def test_devices_are_named_by_mounted_files(parted, tmp_path):
    environment = {RUNTIME: MOUNTED}
    with pytest.raises(UsageError, match="No such file or directory") as caught:
        parse_visible(parted.gpus, environment, str(tmp_path / "none"))
    assert "unset" in caught.value.remedy
    assert parse_visible(parted.gpus, environment, str(tmp_path)) is None
    (tmp_path / "GPU-4").touch()
    (tmp_path / "cdi/nvidia.com/gpu").mkdir(parents=True)
    (tmp_path / "cdi/nvidia.com/gpu/1:0").touch()
    (tmp_path / "cdi/nvidia.com/gpu/0:0").touch()
    with pytest.raises(UsageError, match="'1:0' not found"):
        parse_visible(parted.gpus, environment, str(tmp_path))
    (tmp_path / "cdi/nvidia.com/gpu/1:0").unlink()
    assert parse_visible(parted.gpus, environment, str(tmp_path)) == "device=MIG-a,GPU-4"
    assert [sign.where for sign in list_gpu_variables(environment, str(tmp_path))] == [f"{RUNTIME}={MOUNTED}"]


def test_variables_that_name_gpus_indicate_accelerators():
    environment = {RUNTIME: "GPU-1", CUDA: "0,1", "SLURM_JOB_GPUS": "0", CONDOR: "CUDA0"}
    signs = list_gpu_variables(environment)
    assert [sign.where for sign in signs] == [
        f"{name}={environment[name]}" for name in (RUNTIME, "SLURM_JOB_GPUS", CONDOR, CUDA)
    ]
    assert {sign.kind for sign in signs} == {"environment"}
    for none in ({}, {RUNTIME: "void"}, {RUNTIME: "none"}, {RUNTIME: "all"}, {CUDA: ""}, {CUDA: "-1"}):
        assert list_gpu_variables(none) == ()


def test_the_host_as_a_process_sees_it(make, node):
    bare = make.host()
    assert within(bare, None, {}) == (bare, None)
    seen, wanted = within(bare, None, {CUDA: "0"})
    assert ([sign.where for sign in seen.accelerators], wanted) == ([f"{CUDA}=0"], None)
    seen, wanted = within(bare, "none", {CUDA: "0"})
    assert (len(seen.accelerators), wanted) == (1, "none")
    assert within(node, None, {CUDA: "0"}) == (node, "device=GPU-0")
    seen, wanted = within(node, "1", {CUDA: "1"})
    assert ([gpu.index for gpu in seen.gpus], wanted) == ([2], "1")


def test_variables_on_a_host_without_gpus():
    assert parse_visible((), {CUDA: "0"}) is None
    assert parse_visible((), {RUNTIME: "all"}) is None
    assert parse_visible((), {RUNTIME: "none"}) == "none"
    assert parse_visible((), {CUDA: "-1"}) == "none"


def test_all_gpus_broken_is_not_none(make):
    assert parse_visible(make.host(make.gpu(state="lost")).gpus, {RUNTIME: "all"}) is None


def test_unset_variables_restrict_nothing(node):
    assert parse_visible(node.gpus, {}) is None
    assert parse_visible(node.gpus, {RUNTIME: "", "OTHER": "1"}) is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({RUNTIME: "9"}, "NVIDIA_VISIBLE_DEVICES=9: '9' not found on this host"),
        ({CUDA: "0,x"}, "CUDA_VISIBLE_DEVICES=0,x: GPU 'x' not found on this host"),
        ({"SLURM_JOB_GPUS": "1,9"}, "SLURM_JOB_GPUS=1,9: '/dev/nvidia1' not found on this host"),
        ({RUNTIME: "0", CUDA: "1"}, "CUDA_VISIBLE_DEVICES=1: GPU '2' not found on this host"),
    ],
)
def test_missing_gpus_are_rejected(node, environment, words):
    with pytest.raises(UsageError) as caught:
        parse_visible(node.gpus, environment)
    assert str(caught.value) == words
    assert "unset" in caught.value.remedy


@pytest.mark.parametrize(
    ("environment", "indices"),
    [
        ({RUNTIME: "3,5"}, [0, 1]),
        ({RUNTIME: "1,2"}, [0, 1]),
        ({RUNTIME: "nvidia.com/gpu=6, nvidia.com/gpu=7"}, [0, 1]),
        ({RUNTIME: "3,5", CUDA: "1"}, [1]),
        ({RUNTIME: "1,0", CUDA: "0"}, [0]),
        ({RUNTIME: "5"}, None),
        ({RUNTIME: "5,5"}, None),
        ({RUNTIME: "5,GPU-7"}, None),
        ({CUDA: "3,5"}, None),
    ],
)
def test_numbers_of_the_machine_in_a_container_with_some_of_its_gpus(make, environment, indices):
    node = make.host(make.gpu(0), make.gpu(1))
    if indices is None:
        with pytest.raises(UsageError, match="not found on this host"):
            parse_visible(node.gpus, environment)
    else:
        assert [gpu.index for gpu in select_gpus(node.gpus, parse_visible(node.gpus, environment))] == indices


def test_the_number_of_a_mig_device_in_its_container(make):
    part = MigDevice(uuid="MIG-a", profile=None, gpu_instance=7, compute_instance=0)
    node = make.host(make.gpu(0, mig=(part,)))
    assert parse_visible(node.gpus, {RUNTIME: "3:1"}) == "device=MIG-a"


@pytest.mark.parametrize(
    ("environment", "indices"),
    [
        ({"SLURM_JOB_GPUS": "7"}, [2]),  # by the device file's number
        ({"SLURM_JOB_GPUS": "9,7"}, [0, 2]),
        ({"SLURM_JOB_GPUS": "9,7", "SLURM_STEP_GPUS": "7"}, [2]),
        ({"SLURM_JOB_GPUS": "", "SLURM_STEP_GPUS": ""}, None),
        ({"SLURM_JOB_GPUS": "3"}, [3]),  # its device file is unknown
        ({"SLURM_JOB_GPUS": "7", CUDA: "1"}, [2]),  # the second of the node
        ({"SLURM_JOB_GPUS": "7", CUDA: "0"}, [2]),  # the first of the job
        ({"SLURM_JOB_GPUS": "9,7", CUDA: "0,1"}, [0, 2]),
        ({"SLURM_JOB_GPUS": "7,3", CUDA: "0,1"}, [2, 3]),
        ({"SLURM_JOB_GPUS": "7,3", CUDA: "GPU-2"}, [2]),
        ({"SLURM_JOB_GPUS": "7", CUDA: ""}, []),
        ({CONDOR: "GPU-2"}, [2]),
        ({CONDOR: "CUDA1,CUDA0"}, [0, 2]),
        ({CONDOR: "GPU-2", CUDA: "GPU-2"}, [2]),
        ({RUNTIME: "all", CONDOR: "GPU-2"}, [2]),
        ({CONDOR: ""}, None),
    ],
)
def test_the_gpus_of_a_job(make, environment, indices):
    facts: list[dict[str, Any]] = [{"minor": 9}, {"minor": 8, "state": "lost"}, {"minor": 7}, {"minor": None}]
    node = make.host(*(replace(make.gpu(index), **some) for index, some in enumerate(facts)))
    named = parse_visible(node.gpus, environment)
    assert indices == (None if named is None else [gpu.index for gpu in select_gpus(node.gpus, named)])


TASK = """\
import json, sys
from imagematrix.errors import UsageError
from imagematrix.hardware.gpu_request.visible import parse_visible
from imagematrix.hardware.host.host import Gpu
states, environment, nodes = json.loads(sys.argv[1])
gpus = [Gpu(index=n, minor=n, uuid=f"GPU-{n}", state=state) for n, state in enumerate(states)]
try:
    print(parse_visible(tuple(gpus), environment, nodes=nodes))
except UsageError as error:
    print(error)
"""


@pytest.fixture
def task(tmp_path):
    """Return a function that gives the GPUs of a task that may open only some device files of the node."""
    rules = Path("/sys/fs/cgroup/devices/devices.deny")
    if os.geteuid() != 0 or not rules.exists():
        pytest.skip("needs root and the devices controller of cgroup v1")
    group = rules.parent / f"imagematrix-test-{os.getpid()}"
    group.mkdir()

    def visible_to_task(states, environment, denied):
        for minor in range(len(states)):
            os.mknod(tmp_path / f"nvidia{minor}", stat.S_IFCHR | 0o666, os.makedev(195, minor))
        for minor in denied:
            (group / "devices.deny").write_text(f"c 195:{minor} rwm")
        question = json.dumps([states, environment, str(tmp_path)])
        entering = ["sh", "-c", 'echo $$ > "$1"; shift; exec "$@"', "sh", str(group / "cgroup.procs")]
        done = subprocess.run(
            [*entering, sys.executable, "-c", TASK, question], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    yield visible_to_task
    group.rmdir()


BOUND = {"SLURM_JOB_GPUS": "0,1", "SLURM_STEP_GPUS": "0", CUDA: "0"}  # of each task with --gpus-per-task=1


@pytest.mark.parametrize(
    ("environment", "denied", "expected"),
    [
        (BOUND, [1, 2], "device=GPU-0"),
        (BOUND, [0, 2], "device=GPU-1"),
        (BOUND | {CUDA: "1,0"}, [1], "device=GPU-0,GPU-2"),
        (BOUND | {CUDA: "1"}, [0], "device=GPU-2"),  # CUDA counts what the task may open
        (BOUND, [], "device=GPU-0"),
        (BOUND, [0, 1, 2], "device=GPU-0"),  # the engine may open what this user may not
        ({"SLURM_JOB_GPUS": "2"}, [], "device=GPU-2"),
        ({CUDA: "0"}, [0], "device=GPU-0"),  # not a job of Slurm
        ({JOB: "7"}, [], "None"),
        ({JOB: "7"}, [0, 2], "device=GPU-1"),
        ({JOB: "7", CUDA: "0"}, [0, 2], "device=GPU-1"),  # of a job with shards
        ({JOB: "7"}, [0, 1, 2], "none"),
        (BOUND | {JOB: "7"}, [0, 2], "device=GPU-1"),
        (BOUND | {JOB: "7"}, [0, 1, 2], "none"),  # a step without GPUs, of a job with some
    ],
)
def test_a_task_has_the_gpus_that_its_cgroup_permits(task, environment, denied, expected):
    assert task(["ok"] * 3, environment, denied) == expected


def test_a_task_whose_only_gpu_is_lost_has_none(task):
    assert "'/dev/nvidia1' not found on this host" in task(["ok", "lost"], BOUND, [0])


def test_the_gpus_of_a_task_by_the_modes_of_files(make, tmp_path, monkeypatch):
    gpus = tuple(replace(make.gpu(index), minor=index) for index in range(2))
    for minor, mode in enumerate((0o600, 0o666)):
        (tmp_path / f"nvidia{minor}").touch()
        (tmp_path / f"nvidia{minor}").chmod(mode if os.geteuid() == 0 else mode & 0o066)
    monkeypatch.chdir(tmp_path)  # the folders above are for their owner only
    tmp_path.chmod(0o755)
    user = os.geteuid()
    os.seteuid(65534 if user == 0 else user)
    try:
        assert parse_visible(gpus, BOUND, nodes=".") == "device=GPU-1"
        assert parse_visible(gpus, BOUND, nodes="./none") == "device=GPU-0"
    finally:
        os.seteuid(user)


def test_a_job_without_gpus_has_none_and_says_why(node, monkeypatch):
    monkeypatch.setattr(device, "list_permitted_minors", lambda _: ())
    monkeypatch.setattr(device, "is_withheld", lambda _: True)
    assert parse_visible(node.gpus, {JOB: "7"}) == "none"
    host, wanted = within(node, None, {JOB: "7"})
    assert (host.gpus, wanted, [one.why for one in host.accelerators]) == ((), None, [NO_GPU])
    with pytest.raises(UsageError, match="0 GPUs are usable, restricted by SLURM_JOB_ID=7"):
        within(node, "1", {JOB: "7"})
    assert within(node, "none", {JOB: "7"}) == (node, "none")


def test_a_job_that_may_open_all_gpus_has_all(node, monkeypatch):
    monkeypatch.setattr(device, "list_permitted_minors", lambda _: ())
    monkeypatch.setattr(device, "is_withheld", lambda _: False)
    assert within(node, None, {JOB: "7"}) == (node, None)


@pytest.mark.parametrize(
    ("environment", "wanted", "indices"),
    [
        ({}, "1", [0, 1, 2, 3, 4]),
        ({CUDA: "2"}, "1", [3]),
        ({CUDA: "1,2"}, "1", [2, 3]),
        ({CUDA: "1,2"}, "all", [2, 3]),
        ({CUDA: "1,2"}, "device=2", [2, 3]),
        ({CUDA: "1,2"}, "compute>=8.0", [2, 3]),
        ({CUDA: ""}, "none", [0, 1, 2, 3, 4]),
    ],
)
def test_a_job_chooses_among_its_own_gpus(node, environment, wanted, indices):
    assert [gpu.index for gpu in select_within_environment(node.gpus, wanted, environment)] == indices


@pytest.mark.parametrize(
    ("environment", "wanted", "words"),
    [
        ({CUDA: "2"}, "device=0", "'0' not found on this host, restricted by CUDA_VISIBLE_DEVICES=2"),
        ({CUDA: "2"}, "2", "1 of the host's 1 GPUs are usable, restricted by CUDA_VISIBLE_DEVICES=2"),
        (
            {RUNTIME: "all", CUDA: ""},
            "1",
            "restricted by NVIDIA_VISIBLE_DEVICES=all and CUDA_VISIBLE_DEVICES=",
        ),
        ({CUDA: "-1"}, "all", "GPUs all: no GPU is available, restricted by CUDA_VISIBLE_DEVICES=-1"),
        ({"SLURM_JOB_GPUS": "0"}, "device=3", "restricted by SLURM_JOB_GPUS=0"),
    ],
)
def test_gpus_outside_the_job_are_rejected(node, environment, wanted, words):
    with pytest.raises(UsageError) as caught:
        select_within_environment(node.gpus, wanted, environment)
    assert words in str(caught.value)
    assert "of this job" in caught.value.remedy


def test_a_request_for_no_gpu_needs_no_valid_variable(node):
    assert select_within_environment(node.gpus, "none", {CUDA: "x"}) == node.gpus
