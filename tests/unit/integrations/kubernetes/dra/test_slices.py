"""The GPUs of a node as devices, and the requests that publish them."""

import re
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.common.json_documents import Fields
from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.hardware.host.host import Driver
from imagematrix.integrations.kubernetes.dra import slices
from imagematrix.integrations.kubernetes.dra.slices import (
    StoredSlice,
    make_devices,
    make_slice,
    name_devices,
    plan_requests,
    split_devices,
)

NODE = "n1"
DEVICE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
ATTRIBUTE = re.compile(r"(resource\.kubernetes\.io/)?[A-Za-z_][A-Za-z0-9_]{0,31}")


def value(device, name):
    """Return the value of an attribute."""
    ((_, found),) = device["attributes"][name].items()
    return found


@pytest.mark.parametrize("name", ["genoa-h200", "mig", "mixed", "laptop", "masked", "skylake-v100"])
def test_slices_are_what_the_api_accepts(hosts, name):
    groups = split_devices(make_devices(hosts[name], {}))
    for index, group in enumerate(groups):
        made = make_slice(NODE, "u", index, count=len(groups), generation=3, devices=group)
        for release in ("1.34", "1.37"):
            kubernetes_validate.validate(made, release, strict=True)
        for device in group:
            assert DEVICE.fullmatch(device["name"])
            assert len(device["attributes"]) <= 31
            for key, typed in device["attributes"].items():
                ((kind, found),) = typed.items()
                assert ATTRIBUTE.fullmatch(key)
                assert len(str(found)) <= 64
                assert kind != "version" or re.fullmatch(r"\d+\.\d+\.\d+", found)


def test_a_device_has_the_facts_of_its_gpu(host):
    gpu = host.gpus[3]
    device = make_devices(host, {})[3]
    assert device["name"] == gpu.uuid.lower()
    assert device["capacity"] == {"memory": {"value": f"{gpu.memory_mib}Mi"}}
    facts = {key: value(device, key) for key in device["attributes"]}
    assert facts.pop("class").startswith("h200x8-")
    assert facts == {
        "type": "gpu",
        "uuid": gpu.uuid,
        "productName": "NVIDIA H200",
        "brand": "nvidia",
        "state": "ok",
        "driver": host.driver.version,
        "kernelModules": host.driver.kind,
        "userModeDriver": host.driver.user_mode,
        "resource.kubernetes.io/pciBusID": gpu.pci_bus_id,
        "index": 3,
        "minor": 3,
        "memoryMib": 143771,
        "dataCentre": True,
        "cudaComputeCapability": "9.0.0",
        "driverVersion": "550.163.1",
    }


def test_of_a_gpu_in_mig_mode_its_devices_are_published(hosts):
    host = hosts["mig"]
    whole, *migs = make_devices(host, {})
    assert value(whole, "type") == "gpu"
    (parent,) = [gpu for gpu in host.gpus if gpu.mig]
    assert [value(one, "uuid") for one in migs] == [device.uuid for device in parent.mig]
    for one, device in zip(migs, parent.mig, strict=True):
        facts = [value(one, key) for key in ("type", "parentUUID", "profile", "minor")]
        assert facts == ["mig", parent.uuid, device.profile, parent.minor]
        assert one["capacity"] == {"memory": {"value": f"{device.memory_mib}Mi"}}


@pytest.mark.parametrize(
    ("version", "semantic"),
    [("580.65.06", "580.65.6"), ("575.57", "575.57.0"), ("1.2.3.4", None), ("540.4.0", None)],
)
def test_a_driver_is_published_as_it_is_and_if_it_has_an_order_by_that(hosts, version, semantic):
    host = replace(hosts["genoa-h200"], driver=Driver(version=version, kind=None, source=""))
    device = make_devices(host, {})[0]
    assert value(device, "driver") == version
    assert device["attributes"].get("driverVersion") == (semantic and {"version": semantic})


def test_a_gpu_that_fails_or_is_used_or_has_no_uuid_is_left_out(host):
    broken: dict[int, dict[str, Any]] = {1: {"state": "lost"}, 2: {"uuid": None}, 3: {"minor": None}}
    host = replace(host, gpus=tuple(replace(gpu, **broken.get(gpu.index, {})) for gpu in host.gpus))
    listed = make_devices(host, {host.gpus[4].uuid.lower(): "container x"})
    assert [value(one, "index") for one in listed] == [0, 5, 6, 7]
    assert host.gpus[1].uuid.lower() in name_devices(host)


def test_a_mig_device_whose_device_nodes_are_unknown_is_left_out(hosts):
    host = hosts["mig"]
    known = {value(one, "uuid") for one in make_devices(host, {})}
    (parent,) = [gpu for gpu in host.gpus if gpu.mig]
    first, *others = parent.mig
    gpu = replace(parent, mig=(replace(first, capabilities=None), *others))
    host = replace(host, gpus=tuple(gpu if one is parent else one for one in host.gpus))
    assert {value(one, "uuid") for one in make_devices(host, {})} == known - {first.uuid}


def test_an_unknown_fact_has_no_attribute(make):
    host = make.host(make.gpu(0, compute=None, brand=None, memory_mib=None, name="x" * 65), driver=None)
    (device,) = make_devices(host, {})
    absent = {"cudaComputeCapability", "brand", "productName", "driver", "driverVersion"}
    assert not absent & device["attributes"].keys()
    assert "capacity" not in device


class Server:
    """The slices of a node as an API server keeps them."""

    def __init__(self):
        self.kept = {}
        self.requests = 0
        self.version = 0

    def observed(self):
        return {name: StoredSlice.parse(Fields(one, name)) for name, one in self.kept.items()}

    def publish(self, wanted):
        """Carry out a plan."""
        planned = plan_requests(wanted, self.observed(), NODE)
        for name in planned.remove:
            del self.kept[name]
        for index in (*planned.update, *planned.create):
            self.version += 1
            made = make_slice(
                NODE, "u", index, count=len(wanted), generation=planned.generation, devices=wanted[index]
            )
            assert (made["metadata"]["name"] in self.kept) == (index in planned.update)
            made["metadata"]["resourceVersion"] = str(self.version)
            self.kept[made["metadata"]["name"]] = made
        return planned


groups = st.lists(st.lists(st.integers(0, 3), max_size=2).map(tuple), min_size=1, max_size=3)


@given(st.lists(groups, max_size=4))
def test_every_plan_leads_to_what_is_wanted_and_then_to_nothing(steps):
    server, generation = Server(), 0
    for step in steps:
        wanted = [tuple({"name": f"d{number}"} for number in one) for one in step]
        planned = server.publish(wanted)
        assert [one["spec"]["devices"] for _, one in sorted(server.kept.items())] == [
            list(one) for one in wanted
        ]
        pools = {repr(one["spec"]["pool"]) for one in server.kept.values()}
        assert len(pools) == 1
        assert server.publish(wanted).is_empty
        # The scheduler takes slices of one generation: it never sees a part of a change as a whole pool.
        assert planned.generation >= generation
        assert planned.generation > generation or len(planned.update) + len(planned.create) <= 1
        generation = planned.generation


def test_slices_of_others_with_our_driver_and_node_are_removed():
    server = Server()
    server.publish([({"name": "a"},)])
    server.kept["old"] = {
        "metadata": {"name": "old", "resourceVersion": "1"},
        "spec": {"pool": {"name": "other", "generation": 7}, "devices": [{"name": "a"}]},
    }
    planned = server.publish([({"name": "a"},)])
    assert planned.remove == ("old",)
    assert list(server.kept) == ["00-gpu.imagematrix.io-n1"]
    assert server.publish([({"name": "a"},)]).is_empty


@pytest.mark.parametrize(
    "item",
    [
        {},
        {"metadata": {"name": "x", "resourceVersion": "1"}},
        {"metadata": {"name": "x"}, "spec": {}},
        {"metadata": {"name": "x", "resourceVersion": "1"}, "spec": {"devices": [1]}},
    ],
)
def test_an_invalid_slice_is_an_error(item):
    with pytest.raises(UsageError):
        StoredSlice.parse(Fields(item, "slices"))


def test_an_invalid_generation_counts_as_none():
    read = StoredSlice.parse(
        Fields({"metadata": {"name": "x", "resourceVersion": "1"}, "spec": {"pool": {"generation": "9"}}}, "")
    )
    assert read.generation == 0


def test_many_devices_are_in_several_slices():
    listed = [{"name": f"d{number}"} for number in range(300)]
    assert [len(group) for group in split_devices(listed)] == [128, 128, 44]
    assert split_devices([]) == ((),)


def test_the_name_of_a_slice_has_at_most_253_characters():
    assert slices.make_slice_name("n1", 17) == "11-gpu.imagematrix.io-n1"
    long, other = slices.make_slice_name("n" * 253, 0), slices.make_slice_name("n" * 252, 0)
    assert max(len(long), len(other)) <= 253
    assert long != other


def test_the_command_shows_what_it_would_publish(cli, profiles, monkeypatch):
    words = ["kubernetes", "dra-driver", "--dry-run", "--host", profiles["mig"]]
    done = cli(*words, "--node-name", "n1")
    assert (done.code, done.err) == (0, "")
    (made,) = yaml.safe_load_all(done.out)
    kubernetes_validate.validate(made, "1.37", strict=True)
    assert len(made["spec"]["devices"]) == 4
    monkeypatch.delenv("NODE_NAME", raising=False)
    for name in ((), ("--node-name", "../x")):
        cli(*words, *name).refuses(2, "no valid name of this node")
