"""What a warm image is for: the facts of its node on which the caches in it depend."""

import pytest

from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.hardware.host.host import Cpu, Driver, Gpu, Host, MigDevice
from imagematrix.hardware.vendors.marches import IGNORED, list_code_flags
from imagematrix.images.catalog.catalog import UserModeDriver, Variant
from imagematrix.images.catalog.warm_up import WarmUp
from imagematrix.images.warm.tools import find_tools
from imagematrix.launcher.warm_up.node_match import (
    derive_match,
    make_whole_match,
    require_equal_gpus,
    require_known_gpus,
)
from imagematrix.launcher.warm_up.warm_up_error import WarmUpError

CPU = Cpu(
    vendor="AuthenticAMD", model="EPYC", flags=frozenset(["avx2", "sse2", "rtm"]), level="x86-64-v3", usable=2
)
GPUS = tuple(Gpu(index=index, name="NVIDIA L40S", compute="8.9", memory_mib=46068) for index in range(2))
HOST = Host(
    arch="x86_64",
    cpu=CPU,
    driver=Driver(version="550.163.01", kind="open", source="", user_mode="550.163.01"),
    gpus=GPUS,
)
WARM_UP = WarmUp(command=("train",))
OWN_DRIVER = Variant(
    reference="t:v1",
    digest=None,
    platform="linux/amd64",
    driver=UserModeDriver(mode="exact", version="550.163.01"),
    cubins=("89",),
)
NODE_DRIVER = Variant(reference="t:v1", digest=None, platform="linux/amd64", cubins=("89",), cuda="12.4")
ALL_GPU_FACTS = {"count": 2, "compute": "8.9", "name": "NVIDIA L40S", "memory_mib": 46068, "mig": ""}


def match(*names, host=HOST, gpus=GPUS, variant=OWN_DRIVER, warm_up=WARM_UP, has_host_code=False):
    whole = make_whole_match(host, gpus, variant, warm_up)
    return derive_match(whole, find_tools(names), warm_up, has_host_code=has_host_code).to_json()


def test_all_facts_of_the_gpus_are_stated():
    assert match("cupy") == {"gpus": ALL_GPU_FACTS}


def test_without_gpus_nothing_of_them_is_stated():
    assert match("cupy", gpus=()) == {}


def test_a_mig_device_is_one_of_its_profile():
    slices = tuple(
        MigDevice(uuid=None, profile="1g.10gb", gpu_instance=n, compute_instance=0, memory_mib=9856)
        for n in (1, 2)
    )
    gpus = (replace(GPUS[0], mig=slices),)
    require_equal_gpus(gpus)
    facts = match("cupy", gpus=gpus)["gpus"]
    assert facts == ALL_GPU_FACTS | {"memory_mib": 9856, "mig": "1g.10gb"}


@pytest.mark.parametrize("other", [{"name": "NVIDIA A100"}, {"memory_mib": 1}, {"compute": "9.0"}])
def test_gpus_that_differ_are_refused(other):
    require_equal_gpus(GPUS)
    with pytest.raises(UsageError, match=r"differ: GPU 0 .* and GPU 1") as raised:
        require_equal_gpus((GPUS[0], replace(GPUS[1], **other)))
    assert "CUDA_VISIBLE_DEVICES" in raised.value.remedy


def test_host_code_states_the_cpu_and_every_flag_on_which_code_depends():
    cpu = match("cupy", has_host_code=True)["cpu"]
    assert cpu["vendor"] == "AuthenticAMD"
    assert cpu["flags"] == ["avx2", "sse2"]
    assert not {"avx2", "sse2", *IGNORED["x86_64"]} & {*cpu["without"]}
    assert {*cpu["flags"], *cpu["without"]} == list_code_flags("x86_64")
    assert "avx512f" in cpu["without"]
    assert "name" not in cpu
    assert match("triton")["cpu"] == cpu  # whose row says that it has some


def test_name_and_number_of_cpus_are_stated_where_a_row_says_so():
    assert match("numba")["cpu"]["name"] == "EPYC"
    assert "cpus" not in match("numba")
    assert match("inductor")["cpus"] == 2


def test_the_driver_of_the_node_is_stated_where_a_tool_depends_on_it_and_the_image_has_none():
    assert "user_mode" not in match("cuda")
    assert "user_mode" not in match("cupy", variant=NODE_DRIVER)
    assert match("cuda", variant=NODE_DRIVER)["user_mode"] == "550.163.01"


BLIND = replace(
    HOST, driver=None, cpu=Cpu(vendor=None, model=None, flags=frozenset(), level=None, usable=None)
)


def test_an_unknown_fact_is_null():
    whole = make_whole_match(BLIND, (Gpu(index=0),), NODE_DRIVER, WARM_UP)
    assert whole.to_json() == {
        "gpus": {"count": 1, "compute": None, "name": None, "memory_mib": None, "mig": ""},
        "user_mode": None,
        "cpu": {"vendor": None, "flags": None, "without": None, "name": None},
        "cpus": None,
    }
    with pytest.raises(UsageError, match=r"no node would match: gpus\.compute, gpus\.memory_mib, gpus\.name"):
        require_known_gpus(whole)
    require_known_gpus(make_whole_match(BLIND, GPUS, NODE_DRIVER, WARM_UP))
    any_product = replace(WARM_UP, match="compute")
    require_known_gpus(make_whole_match(BLIND, (Gpu(index=0, compute="8.9"),), NODE_DRIVER, any_product))


@pytest.mark.parametrize(
    ("tool", "facts"),
    [("cuda", "user_mode"), ("numba", r"cpu\.flags, cpu\.name, cpu\.vendor, cpu\.without"), ("jax", "cpus")],
)
def test_caches_that_depend_on_an_unknown_fact_are_for_no_node(tool, facts):
    with pytest.raises(WarmUpError, match=f"depend on .*{facts}, unknown on this node") as raised:
        match(tool, host=BLIND, variant=NODE_DRIVER)
    assert raised.value.remedy
    assert match("cupy", host=BLIND) == {"gpus": ALL_GPU_FACTS}


def test_flags_are_unknown_if_one_on_which_code_depends_is():
    assert {"avx_ifma", "sha512"} <= list_code_flags("x86_64")
    unread = replace(HOST, cpu=replace(CPU, unknown_flags=frozenset(["avx_ifma", "sha512"])))
    whole = make_whole_match(unread, GPUS, NODE_DRIVER, WARM_UP).to_json()["cpu"]
    assert whole == {"name": "EPYC", "vendor": "AuthenticAMD", "flags": None, "without": None}


def test_caches_for_a_capability_are_only_of_tools_that_are_keyed_by_it():
    any_product = replace(WARM_UP, match="compute")
    assert match("cupy", "triton", warm_up=any_product)["gpus"] == {"count": 2, "compute": "8.9"}
    with pytest.raises(WarmUpError, match="inductor, vllm needs the same product"):
        match("cupy", "vllm", "inductor", warm_up=any_product)


def test_the_whole_match_has_every_fact_that_any_match_states():
    whole = dict(make_whole_match(HOST, GPUS, NODE_DRIVER, WARM_UP).facts)
    every = [tool.name for tool in find_tools(["cuda", "numba", "inductor", "vllm", "triton"])]
    derived = derive_match(
        make_whole_match(HOST, GPUS, NODE_DRIVER, WARM_UP), find_tools(every), WARM_UP, has_host_code=True
    )
    assert dict(derived.facts) == whole
