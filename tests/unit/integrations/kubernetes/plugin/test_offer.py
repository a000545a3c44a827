import gpu_node
import pytest

from imagematrix.common.record import replace
from imagematrix.errors import ProbeError
from imagematrix.integrations.kubernetes.plugin.offer import (
    GPU,
    AllocationError,
    allocate_devices,
    choose_preferred,
    list_devices,
    make_offer,
)
from imagematrix.launcher.gpu_claims.pods import VRAM


@pytest.fixture(scope="module")
def h200(hosts):
    return make_offer(hosts["genoa-h200"], by=("product", "class"), vram=True)


def _broken(host, index, state="lost"):
    gpus = tuple(replace(gpu, state=state) if gpu.index == index else gpu for gpu in host.gpus)
    return replace(host, gpus=gpus)


def test_only_the_generic_resource_is_offered_by_default(hosts):
    offered = make_offer(hosts["genoa-h200"])

    assert {name: len(devices) for name, devices in offered.resources.items()} == {GPU: 8}
    assert list(offered.resources[GPU]) == [gpu.uuid for gpu in hosts["genoa-h200"].gpus]


def test_a_gpu_is_offered_by_its_product_and_by_the_nodes_class(h200):
    generic, product, node_class, vram = h200.resources

    assert (generic, product, vram) == (GPU, "imagematrix.io/gpu-h200", VRAM)
    assert node_class.startswith("imagematrix.io/class-h200x8-550-163-01-")
    assert h200.resources[generic] == h200.resources[product] == h200.resources[node_class]


def test_gpus_of_several_models_have_a_resource_each(hosts):
    offered = make_offer(hosts["mixed"], by=["product"])

    products = {name: list(devices) for name, devices in offered.resources.items() if name != GPU}
    assert len(products) == len({gpu.name for gpu in hosts["mixed"].gpus}) > 1
    assert sorted(one for devices in products.values() for one in devices) == sorted(offered.resources[GPU])


def test_a_host_without_a_gpu_offers_nothing(hosts):
    bare = replace(hosts["genoa-h200"], gpus=())

    assert make_offer(bare, by=("product", "class"), vram=True).resources == {}


def test_mig_devices_are_offered_by_profile_and_their_gpus_are_not(hosts):
    host = hosts["mig"]
    node_offer = make_offer(host)

    expected = {
        (f"imagematrix.io/mig-{device.profile.replace('+', '-')}", device.uuid)
        for gpu in host.gpus
        for device in gpu.mig or ()
    }
    offered = {
        (name, one) for name, devices in node_offer.resources.items() if name != GPU for one in devices
    }
    assert expected
    assert offered == expected
    in_mig_mode = {gpu.uuid for gpu in host.gpus if gpu.mig is not None}
    assert in_mig_mode.isdisjoint(node_offer.resources.get(GPU, {}))


def test_a_container_gets_device_nodes_and_the_names_of_its_gpus(h200):
    first, second, *_ = h200.resources[GPU]

    grant = allocate_devices(h200, GPU, [second, first], {}, {})

    assert grant.devices[:4] == ("/dev/nvidia1", "/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")
    assert not [path for path in grant.devices if path in {f"/dev/nvidia{minor}" for minor in range(2, 8)}]
    assert grant.environment == {"IMAGEMATRIX_GPUS": f"{second},{first}"}


def test_a_mig_device_comes_with_its_capabilities(hosts):
    offered = make_offer(hosts["mig"])
    gpu = next(gpu for gpu in hosts["mig"].gpus if gpu.mig)
    device = gpu.mig[0]
    (resource,) = [name for name, ids in offered.resources.items() if device.uuid in ids]

    grant = allocate_devices(offered, resource, [device.uuid], {}, {})

    expected = [f"/dev/nvidia{gpu.minor}", *(f"/dev/nvidia-caps/nvidia-cap{n}" for n in device.capabilities)]
    assert list(grant.devices[:3]) == expected
    assert grant.environment["IMAGEMATRIX_GPUS"] == device.uuid


def test_a_unit_held_under_one_name_is_unhealthy_under_others(h200):
    first, second, *_ = h200.resources[GPU]
    holders = {first: "imagematrix.io/gpu-h200", second: VRAM}

    unhealthy = {
        resource: {
            h200.resources[resource][device]
            for device, healthy in list_devices(h200, resource, holders, {})
            if not healthy
        }
        for resource in h200.resources
    }
    _, product, node_class, _ = h200.resources
    assert unhealthy == {GPU: {first, second}, product: {second}, node_class: {first, second}, VRAM: {first}}
    with pytest.raises(AllocationError, match=r"is in use as imagematrix\.io/gpu-h200"):
        allocate_devices(h200, GPU, [first], holders, {})
    assert allocate_devices(h200, product, [first], holders, {}).devices[0] == "/dev/nvidia0"


def test_a_gpu_that_does_not_work_is_unhealthy_and_not_allocated(hosts):
    offered = make_offer(_broken(hosts["genoa-h200"], 2), vram=True)
    name = hosts["genoa-h200"].gpus[2].uuid

    assert [device for device, healthy in list_devices(offered, GPU, {}, {}) if not healthy] == [name]
    assert {
        offered.resources[VRAM][device]
        for device, healthy in list_devices(offered, VRAM, {}, {})
        if not healthy
    } == {name}
    with pytest.raises(AllocationError, match=f"{name} cannot be used: lost"):
        allocate_devices(offered, GPU, [name], {}, {})


def test_a_missing_device_is_not_allocated(h200):
    with pytest.raises(AllocationError, match=r"imagematrix\.io/gpu: device 'GPU-gone' not found"):
        allocate_devices(h200, GPU, ["GPU-gone"], {}, {})
    assert list_devices(h200, "imagematrix.io/gpu-gone", {}, {}) == ()


def test_a_share_of_memory_does_not_span_gpus(h200, hosts):
    gpu = hosts["genoa-h200"].gpus[0]
    shares = list(h200.resources[VRAM])
    assert len(shares) == sum(gpu.memory_mib // 1024 for gpu in hosts["genoa-h200"].gpus)
    assert max(map(len, shares)) <= 63

    grant = allocate_devices(h200, VRAM, shares[:4], {}, {})

    assert grant.environment["IMAGEMATRIX_VRAM_MIB"] == "4096"
    assert grant.environment["IMAGEMATRIX_GPUS"] == gpu.uuid
    assert "/dev/nvidia1" not in grant.devices
    with pytest.raises(AllocationError, match="2 GiB would span 2 GPUs"):
        allocate_devices(h200, VRAM, [shares[0], shares[-1]], {}, {})


def test_shares_come_from_the_fullest_gpu_with_enough_left(h200):
    one, two, three, *_ = h200.units
    available = [f"{one}::{n}" for n in range(5)] + [f"{two}::{n}" for n in range(3)] + [f"{three}::7"]

    assert choose_preferred(h200, VRAM, available, [], 3) == tuple(f"{two}::{n}" for n in range(3))
    assert choose_preferred(h200, VRAM, available, [f"{one}::4"], 2) == (f"{one}::4", f"{one}::0")
    assert choose_preferred(h200, VRAM, available, [], 6) == ()
    assert choose_preferred(h200, VRAM, available, [f"{one}::0", f"{two}::0"], 2) == ()
    assert choose_preferred(h200, VRAM, ["GPU-gone::0"], [], 1) == ()


def test_memory_of_unknown_size_is_not_offered(host):
    unknown = replace(host, gpus=tuple(replace(gpu, memory_mib=None) for gpu in host.gpus))

    assert VRAM not in make_offer(unknown, vram=True).resources


def test_a_gpu_whose_uuid_is_unknown_is_not_offered(host):
    """Its name would be its index, so it would be allocated again once the UUID is known."""
    first, *others = host.gpus
    nameless = replace(host, gpus=(replace(first, uuid=None), *others))

    assert list(make_offer(nameless).resources[GPU]) == [gpu.uuid for gpu in others]


def test_mig_devices_that_only_the_kernel_shows_are_not_offered(hosts):
    host = hosts["mig"]
    gpus = tuple(
        replace(gpu, mig=gpu.mig and tuple(replace(device, uuid=None) for device in gpu.mig))
        for gpu in host.gpus
    )

    assert not [name for name in make_offer(replace(host, gpus=gpus)).resources if "/mig-" in name]


def test_units_whose_device_nodes_are_unknown_are_unhealthy(hosts):
    """No container could get them."""
    host = hosts["mig"]
    gpus = tuple(
        replace(gpu, minor=None)
        if gpu.mig is None
        else replace(gpu, mig=tuple(replace(device, capabilities=None) for device in gpu.mig))
        for gpu in host.gpus
    )
    offered = make_offer(replace(host, gpus=gpus), vram=True)

    assert len(offered.resources) > 2
    for resource in offered.resources:
        devices = list_devices(offered, resource, {}, {})
        assert not any(healthy for _, healthy in devices)
        with pytest.raises(ProbeError):
            allocate_devices(offered, resource, [devices[0][0]], {}, {})


def test_a_product_without_a_letter_has_the_name_of_an_unknown_one(host):
    gpus = tuple(replace(gpu, name="NVIDIA ???") for gpu in host.gpus)

    assert list(make_offer(replace(host, gpus=gpus), by=["product"]).resources) == [GPU, f"{GPU}-unknown"]


def test_the_command_shows_what_it_would_offer(cli, profiles):
    words = ["kubernetes", "device-plugin", "--host", profiles["genoa-h200"], "--dry-run"]

    assert cli(*words, "--by", "product") == (0, f"{GPU} 8\n{GPU}-h200 8\n", "")
    cli(*words, "--by", "colour").refuses(2, "invalid --by: 'colour'")


def test_in_a_container_the_node_is_read_from_mounted_folders(cli, tmp_path):
    """Without NVML the memory is unknown, so no shares are offered."""
    gpu_node.profiles().capture(tmp_path, "genoa-h200")
    words = ["kubernetes", "device-plugin", "--root", tmp_path, "--by", "product", "--vram", "--dry-run"]

    assert cli(*words).out == f"{GPU} 8\n{GPU}-h200 8\n"
