"""Our own labels: valid in Kubernetes for every host, and the same facts when read back."""

import json
import re

import pytest
import strategies
from choosing import Make
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.common.record import replace
from imagematrix.hardware.host.host import Accelerator, Cpu, Driver, Gpu, Host
from imagematrix.hardware.vendors import marches
from imagematrix.integrations.kubernetes.nodes import labels
from imagematrix.integrations.kubernetes.nodes.host_from_our_labels import read_our_labels
from imagematrix.integrations.kubernetes.nodes.labels import (
    is_valid_value,
    make_class_name,
    make_label_value,
    make_labels,
    rank_version,
)

KEY = re.compile(r"imagematrix\.io/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)
words = st.text(max_size=80)
hostile = st.builds(
    Host,
    arch=words,
    cpu=st.builds(Cpu, vendor=words, model=words, flags=st.frozensets(words, max_size=4), level=words),
    driver=st.builds(
        Driver, version=st.sampled_from(["1.2", "9999.9999.9999.9999"]), kind=words, source=words
    ),
    gpus=st.lists(
        st.builds(
            Gpu,
            index=st.integers(0, 9),
            name=words,
            pci_device_id=words,
            compute=st.sampled_from(["99.9", "0.0", None]),
            brand=words,
            memory_mib=st.integers(0, 10**9),
            state=words,
        ),
        max_size=labels.KINDS,
    ).map(tuple),
    accelerators=st.just((Accelerator(kind="pci", where="x"),)),
)


@given(st.one_of(strategies.hosts, hostile))
def test_labels_are_valid_and_read_back_the_same(host):
    described = make_labels(host)
    assert all(KEY.fullmatch(key) and is_valid_value(value) and value for key, value in described.items())
    assert list(described) == sorted(described)
    again = make_labels(read_our_labels(described))
    ignored = {labels.MODEL}
    assert {key: again.get(key) for key in described.keys() - ignored} == {
        key: described[key] for key in described.keys() - ignored
    }


def test_labels_of_a_profile_contain_every_fact_that_rules_read(hosts):
    for host in hosts.values():
        again = read_our_labels(make_labels(host))
        assert again.arch == host.arch
        assert again.cpu.flags == host.cpu.flags & labels.get_flag_vocabulary(host.arch)
        assert (again.driver and again.driver.version) == (host.driver and host.driver.version)
        seen, right = (
            sorted((gpu.compute or "", gpu.state, gpu.least_memory_mib or 0) for gpu in one.gpus)
            for one in (again, host)
        )
        assert seen == right
        assert len(again.accelerators) == len(host.accelerators)


def test_every_flag_that_an_image_can_need_has_a_label():
    for arch in ("x86_64", "aarch64"):
        needed: set[str] = set()
        for march in marches.list_names():
            if marches.get_arch(march) == arch:
                for compiler in marches.list_compilers():
                    needed |= marches.get_required_flags(march, compiler) or set()
        assert needed <= labels.get_flag_vocabulary(arch)


def test_a_fact_that_no_rule_reads_does_not_change_the_class(make):
    host = make.host(make.gpu(0))
    other = replace(
        host,
        cpu=replace(host.cpu, model="X", flags=host.cpu.flags | {"ida"}),
        gpus=(replace(host.gpus[0], uuid="GPU-x", minor=7),),
    )
    assert make_labels(host)[labels.CLASS] == make_labels(other)[labels.CLASS]


@pytest.mark.parametrize(
    "change",
    [
        {"driver": Driver(version="550.163.02", kind=None, source="")},
        {"driver": Driver(version="550.163.01", kind="open", source="")},
        {"gpus": ()},
        {"gpus": (Make.gpu(0, memory_mib=15360),)},
        {"cpu": Cpu(vendor="GenuineIntel", model=None, flags=frozenset(["avx"]), level=None)},
        {"accelerators": (Accelerator(kind="pci", where="x"),)},
    ],
)
def test_a_fact_that_a_rule_reads_changes_the_class(make, change):
    host = make.host(make.gpu(0))
    assert make_labels(host)[labels.CLASS] != make_labels(replace(host, **change))[labels.CLASS]


def test_a_class_is_named_by_its_facts(hosts):
    assert make_labels(hosts["genoa-h200"])[labels.CLASS].startswith("h200x8-550-163-01-v4-")
    assert make_labels(hosts["laptop"])[labels.CLASS].startswith("cpu-v3-")
    assert make_labels(hosts["mixed"])[labels.CLASS].startswith("mixedx2-535-261-03-v3-")
    assert make_class_name({}).startswith("cpu-unknown-")


def test_ranks_are_in_the_order_of_versions():
    versions = [
        *("390.46", "535.54", "535.54.0", "535.54.0.0", "535.54.03", "535.261.03", "550.54.14"),
        *("9999.0",),
    ]
    assert sorted(versions, key=rank_version) == versions
    assert len({rank_version(version) for version in versions}) == len(versions)
    assert rank_version("9999.9999.9999.9999") < 2**63


@given(words)
def test_any_text_becomes_a_value(text):
    assert is_valid_value(make_label_value(text))


def test_gpus_that_no_label_describes_are_unknown(make):
    kinds = tuple(make.gpu(index, compute=f"{index}.0") for index in range(20))
    again = read_our_labels(make_labels(make.host(*kinds)))
    assert len(again.gpus) == 20
    assert [gpu.state for gpu in again.gpus].count("unconfirmed") == 4
    assert again.warnings == ("labels describe 16 of 20 GPUs",)


def test_hostile_labels_are_bounded():
    described = {
        labels.ARCH: "amd64",
        labels.COUNT: "999999999",
        f"{labels.KIND}0": "99999_9.0_nvidia_2335_ok_1",
    }
    again = read_our_labels(described)
    assert len(again.gpus) == 1024
    given = {
        labels.ARCH: "amd64",
        labels.COUNT: "1",
        f"{labels.KIND}0": "1_x_y_z_ok_w",
        labels.DRIVER: "new",
    }
    again = read_our_labels(given)
    assert again.driver is None
    assert again.gpus[0].compute is None
    assert "no labels for CPU flags found" in again.warnings


def test_the_command(cli, profiles, conforms):
    host = str(profiles["genoa-h200"])
    nfd = cli("kubernetes", "labels", "--host", host)
    assert nfd.out.splitlines()[0].startswith("#")
    assert "imagematrix.io/driver=550.163.01" in nfd.out.splitlines()
    kubectl = cli("kubernetes", "labels", "--host", host, "--format", "kubectl", "--node", "a b")
    assert kubectl.out.startswith("kubectl label --overwrite node 'a b' imagematrix.io/")
    assert 'node "$NODE" ' in cli("kubernetes", "labels", "--host", host, "--format", "kubectl").out
    document = json.loads(cli("kubernetes", "labels", "--host", host, "--json").out)
    assert conforms(document)["labels"]["imagematrix.io/class"] == document["class"]
    assert cli("kubernetes", "labels", "--format", "yaml").code == 2


def test_the_command_warns_of_unreadable_facts(cli, profiles):
    assert "warning: " in cli("kubernetes", "labels", "--host", str(profiles["driver-mismatch"])).err
