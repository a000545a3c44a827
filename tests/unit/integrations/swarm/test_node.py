"""Offered GPUs are matched again with what the kernel shows."""

import pytest

from imagematrix.common.record import replace
from imagematrix.errors import ProbeError
from imagematrix.hardware.host.tree import Tree
from imagematrix.integrations.swarm import node

INFORMATION = "Model: NVIDIA L40S\nGPU UUID: {}\nBus Location: {}\nDevice Minor: {}\nGPU Excluded: {}\n"
GPU_A, GPU_B = ("0000:01:00.0", "GPU-a", 0), ("0000:02:00.0", "GPU-b", 1)


@pytest.fixture
def tree(tmp_path):
    """Make a tree with a driver that shows these GPUs: bus id, UUID, minor, and whether it is excluded."""

    def make(*gpus):
        for bus_id, uuid, minor, *excluded in gpus:
            folder = tmp_path / "proc/driver/nvidia/gpus" / bus_id
            folder.mkdir(parents=True)
            text = INFORMATION.format(uuid, bus_id, minor, "Yes" if excluded else "No")
            (folder / "information").write_text(text)
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: Kernel Module  550.163.01  x\n")
        return Tree(str(tmp_path))

    return make


def test_numbers_are_current(host, tree):
    now = node.keep_present_gpus(
        host(1, 1), tree(("0000:01:00.0", "GPU-a", 1), ("0000:02:00.0", "GPU-????????", 0))
    )
    assert [(gpu.uuid, gpu.minor) for gpu in now.gpus] == [("GPU-a", 1), ("GPU-b", 0)]


@pytest.mark.parametrize("other", [(), (("0000:02:00.0", "GPU-new", 1),), ((*GPU_B, "excluded"),)])
def test_a_gpu_that_was_removed_or_replaced(host, tree, other):
    now = node.keep_present_gpus(host(1, 1), tree(GPU_A, *other))
    assert [gpu.uuid for gpu in now.gpus] == ["GPU-a"]


def test_all_gpus_are_gone(host, tree):
    assert node.keep_present_gpus(host(1, 1), tree()).gpus == ()


def test_a_kernel_that_shows_no_driver(host, tmp_path):
    configured = host(1, 1, devices=("/dev/nvidia0",))
    assert node.keep_present_gpus(configured, Tree(str(tmp_path))) == configured


def test_a_gpu_that_was_divided_by_mig(host, tree, tmp_path):
    present_tree = tree(GPU_A, GPU_B)
    folder = tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig/gi7/ci0"
    folder.mkdir(parents=True)
    for number, path in ((37, folder.parent), (38, folder)):
        (path / "access").write_text(f"DeviceFileMinor: {number}\n")
    assert [gpu.uuid for gpu in node.keep_present_gpus(host(1, 1), present_tree).gpus] == ["GPU-b"]


def test_mig_devices_have_their_current_nodes(host, mig, tree, tmp_path):
    present_tree = tree(GPU_A)
    folder = tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig/gi7/ci0"
    folder.mkdir(parents=True)
    for number, path in ((107, folder.parent), (108, folder)):
        (path / "access").write_text(f"DeviceFileMinor: {number}\n")
    divided = replace(host(), gpus=(replace(mig, pci_bus_id="0000:01:00.0", uuid="GPU-a"),))
    (gpu,) = node.keep_present_gpus(divided, present_tree).gpus
    assert [device.capabilities for device in gpu.mig] == [(107, 108), None]


def test_gpus_by_uuid(host, mig):
    offered = node.list_offered_gpus(replace(host(1, 1), gpus=(*host(1, 1).gpus, replace(mig, index=2))))
    assert [gpu.index for gpu in node.find_gpus(offered, ["MIG-b", "GPU-a"])] == [2, 0]
    with pytest.raises(ProbeError, match=r"^Swarm assigned GPU-m, GPU-x, which this node does not have"):
        node.find_gpus(offered, ["GPU-a", "GPU-m", "GPU-x"])
