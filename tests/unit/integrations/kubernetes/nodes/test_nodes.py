"""Node objects become Hosts: exactly with our labels, with nulls and warnings with other labels."""

import io
import json
from pathlib import Path

import pytest

from imagematrix.common import json_documents
from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.nodes import cpuid
from imagematrix.integrations.kubernetes.nodes.classes import classify_nodes
from imagematrix.integrations.kubernetes.nodes.nodes import load_nodes, parse_nodes

GFD = {
    "nvidia.com/cuda.driver-version.full": "580.65.06",
    "nvidia.com/cuda.driver-version.major": "580",
    "nvidia.com/cuda.driver-version.minor": "65",
    "nvidia.com/cuda.driver-version.revision": "06",
    "nvidia.com/gpu.compute.major": "9",
    "nvidia.com/gpu.compute.minor": "0",
    "nvidia.com/gpu.count": "8",
    "nvidia.com/gpu.memory": "143771",
    "nvidia.com/gpu.product": "NVIDIA-H200",
    "nvidia.com/mig.strategy": "none",
}
OLD = {
    "nvidia.com/cuda.driver.major": "535",
    "nvidia.com/cuda.driver.minor": "54",
    "nvidia.com/cuda.driver.rev": "03",
}


def make_host(node):
    """Return the Host that the labels of a Node object describe."""
    return parse_nodes(node, "node")[0].host


def without(labels, *starts):
    return {key: value for key, value in labels.items() if not key.startswith(starts)}


def test_a_node_with_our_labels_is_the_host(hosts, cluster):
    for described in hosts.values():
        node = cluster.node("a", cluster.own(described), arch=cluster.arch(described))
        assert make_host(node).arch == described.arch
        assert parse_nodes(node, "x")[0].has_our_labels


def test_gpu_feature_discovery(cluster):
    described = make_host(cluster.node("a", GFD, nvidia_com_gpu=8))
    assert described.driver.version == "580.65.06"
    assert described.driver.kind is None
    assert len(described.gpus) == 8
    gpu = described.gpus[0]
    assert (gpu.name, gpu.compute, gpu.memory_mib, gpu.brand) == ("NVIDIA H200", "9.0", 143771, "nvidia")
    assert (gpu.state, gpu.uuid, gpu.pci_device_id, gpu.mig) == ("ok", None, None, None)
    assert described.cpu.flags == frozenset()
    assert any("CPU flags unknown" in warning for warning in described.warnings)


def test_a_driver_is_read_from_its_parts():
    labels = without(GFD, "nvidia.com/cuda.driver-version.full")
    assert (
        make_host({"kind": "Node", "metadata": {"name": "a", "labels": labels}}).driver.version == "580.65.06"
    )
    labels = without(GFD, "nvidia.com/cuda.") | OLD
    assert (
        make_host({"kind": "Node", "metadata": {"name": "a", "labels": labels}}).driver.version == "535.54.03"
    )
    described = make_host(
        {"kind": "Node", "metadata": {"name": "a", "labels": without(GFD, "nvidia.com/cuda.")}}
    )
    assert described.driver is None
    assert any("driver version unknown" in warning for warning in described.warnings)
    assert "CPU architecture unknown" in described.warnings


@pytest.mark.parametrize(
    ("change", "count", "mig", "state", "warning"),
    [
        ({"nvidia.com/gpu.product": "NVIDIA-H200-SHARED", "nvidia.com/gpu.replicas": "4"}, 8, None, "ok", ""),
        (
            {"nvidia.com/gpu.product": "NVIDIA-H200-MIG-1g.18gb", "nvidia.com/gpu.count": "56"},
            1,
            (),
            "ok",
            "count MIG devices",
        ),
        ({"nvidia.com/gpu.product": "NVIDIA-H200-MIG-INVALID"}, 1, (), "ok", "count MIG devices"),
        ({"nvidia.com/gpu.product": "NVIDIA-A40-8Q"}, 8, None, "vgpu", ""),
        ({"nvidia.com/vgpu.present": "true"}, 8, None, "vgpu", ""),
        ({"nvidia.com/gpu.count": "-1"}, 1, None, "unconfirmed", "the number of GPUs is unknown"),
        ({"nvidia.com/gpu.count": "0"}, 1, None, "unconfirmed", "the number of GPUs is unknown"),
        ({"nvidia.com/gpu.compute.major": "x"}, 8, None, "ok", "compute capability unknown"),
        ({"nvidia.com/mig.strategy": "mixed"}, 8, None, "ok", "which GPUs are in MIG mode"),
    ],
)
def test_odd_labels(cluster, change, count, mig, state, warning):
    described = make_host(cluster.node("a", GFD | change))
    assert len(described.gpus) == count
    assert all((gpu.mig, gpu.state) == (mig, state) for gpu in described.gpus)
    assert warning in "\n".join(described.warnings)
    assert all("MIG" not in (gpu.name or "") and "SHARED" not in (gpu.name or "") for gpu in described.gpus)


def test_gpus_of_models_without_labels_count_as_unknown(cluster):
    node = cluster.node("a", GFD | {"nvidia.com/gpu.replicas": "2"})
    node["status"]["capacity"]["nvidia.com/gpu"] = "20"
    described = make_host(node)
    assert [gpu.state for gpu in described.gpus] == ["ok"] * 8 + ["unconfirmed"] * 2
    assert "2 GPUs are of models that no label describes" in described.warnings


def test_a_sign_of_an_accelerator_is_kept(cluster):
    node = cluster.node("a", {"feature.node.kubernetes.io/pci-0302_10de.present": "true"})
    node["status"]["capacity"] |= {"amd.com/gpu": "2", "cpu": "4", "nvidia.com/gpu": "0"}
    assert [one.where for one in make_host(node).accelerators] == [
        "feature.node.kubernetes.io/pci-0302_10de.present",
        "amd.com/gpu",
    ]
    assert make_host(cluster.node("a", {})).accelerators == ()


@pytest.mark.parametrize(
    "resource", ["imagematrix.io/gpu-h200", "imagematrix.io/mig-1g.10gb", "nvidia.com/mig-1g.10gb"]
)
def test_a_node_that_offers_gpus_is_not_a_cpu_node(cluster, resource):
    """Otherwise it would get the image for CPUs."""
    node = cluster.node("a", {})
    node["status"]["capacity"][resource] = "2"
    assert [one.where for one in make_host(node).accelerators] == [resource]


COUNT = "imagematrix.io/gpu.count"
ACCELERATORS = "imagematrix.io/accelerators"


@pytest.mark.parametrize("value", [None, "8x", "", "-1", "eight"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_number_of_gpus_that_cannot_be_read_is_not_none(hosts, cluster, make, value, kept):
    """Otherwise the node would get the image for CPUs, or one that only some of its GPUs can use."""
    labels = without(
        cluster.own(hosts["genoa-h200"]), COUNT, *(() if kept else ("imagematrix.io/gpu-kind.",))
    )
    node = cluster.node("a", labels | ({COUNT: value} if value is not None else {}))
    described = make_host(node)
    assert [gpu.state for gpu in described.gpus] == ["ok"] * 8 * kept + ["unconfirmed"]
    assert f"label {COUNT} missing or invalid: the number of GPUs is unknown" in described.warnings
    cpu = make.variant("t:v1-cpu", cubins=frozenset(), cuda=None, driver=None)
    (only,) = classify_nodes(parse_nodes(node, "x"), make.catalog(cpu, make.variant("t:v1-gpu"))).classes
    assert only.variant is None


@pytest.mark.parametrize("value", [None, "x"])
def test_signs_of_accelerators_that_cannot_be_read_are_a_sign(cluster, make, value):
    labels = without(cluster.own(make.host()), ACCELERATORS)
    node = cluster.node("a", labels | ({ACCELERATORS: value} if value else {}))
    assert [(one.where, one.why) for one in make_host(node).accelerators] == [
        (ACCELERATORS, "missing or invalid")
    ]


def test_a_node_labelled_without_gpus_that_offers_some_is_not_a_cpu_node(cluster, make):
    node = cluster.node("a", cluster.own(make.host()), nvidia_com_gpu=8)
    node["status"]["capacity"] = {"nvidia.com/gpu": "8"}
    assert [one.where for one in make_host(node).accelerators] == ["nvidia.com/gpu"]


def test_flags_of_node_feature_discovery(hosts, cluster):
    for described in hosts.values():
        node = cluster.node("a", cluster.foreign(described), arch=cluster.arch(described))
        read_back = make_host(node)
        assert read_back.cpu.flags <= described.cpu.flags
        assert read_back.cpu.level == described.cpu.level
        assert read_back.cpu.vendor in {None, described.cpu.vendor}


def test_a_level_is_inferred_only_from_all_of_its_shown_flags():
    shown = [cpuid.get_nfd_names("x86_64")[flag] for flag in cpuid.get_proving_flags("x86-64-v3")]
    assert {"bmi2", "sse4_2", "avx2"} <= cpuid.expand_flags(shown, "x86_64")
    assert "bmi2" not in cpuid.expand_flags([name for name in shown if name != "MOVBE"], "x86_64")
    assert "sse4_2" not in cpuid.expand_flags(["LAHF"], "x86_64")
    assert "sse2" in cpuid.expand_flags(["FXSR"], "x86_64")
    assert "bmi2" in cpuid.expand_flags(["BMI2"], "x86_64")
    assert cpuid.expand_flags(["ASIMDHP", "NEW"], "aarch64") == {"asimdhp"}
    assert cpuid.expand_flags([], "x86_64") == cpuid.expand_flags(["AVX2"], "ppc64le") - {"avx2"}


def test_lists_are_sorted_and_complete(cluster, tmp_path):
    listed = {"kind": "List", "items": [cluster.node("b", {}), cluster.node("a", {})]}
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps(listed))
    assert [node.name for node in load_nodes(path, io.BytesIO())] == ["a", "b"]
    assert [node.name for node in load_nodes(Path("-"), io.BytesIO(json.dumps(listed).encode()))] == [
        "a",
        "b",
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "List", "items": []}, "no nodes found"),
        ({"kind": "List", "items": [{"kind": "Pod"}]}, "expected Node, found 'Pod'"),
        ({"kind": "Node"}, "metadata: is missing"),
        ({"kind": "Node", "metadata": {}}, "name is missing"),
        ([], "expected an object"),
    ],
)
def test_other_documents_than_lists_of_nodes_are_refused(data, message):
    with pytest.raises(UsageError, match=message):
        parse_nodes(data, "x")


def test_a_duplicate_node_is_refused(cluster):
    with pytest.raises(UsageError, match="duplicate node 'a'"):
        parse_nodes({"kind": "List", "items": [cluster.node("a", {})] * 2}, "x")


def test_a_list_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(json_documents, "LIMIT", 10)
    with pytest.raises(UsageError, match="too large"):
        load_nodes(Path("-"), io.BytesIO(b" " * 11))


def test_invalid_labels_are_ignored_and_counted(cluster):
    labels = {"a/b/c": "x", "ok": "y", "/": "", "x": "*", "a" * 64: "", f"{'a' * 254}/b": "", "-": ""}
    (node,) = parse_nodes(cluster.node("a", labels), "x")
    assert set(node.labels) == {"kubernetes.io/arch", "ok"}
    assert "6 invalid labels were ignored" in node.host.warnings
