"""Classes: nodes that every selection treats alike, each with the answer that `select` gives its hosts."""

import json

import pytest

from imagematrix.common import json_documents
from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.nodes.classes import classify_nodes
from imagematrix.integrations.kubernetes.nodes.nodes import parse_nodes
from imagematrix.selection.selector import explain

OLD, NEW = "550.163.01", "580.65.06"


def nodes(cluster, labels, count=1):
    """Return the nodes of labels by name, `count` of each."""
    return parse_nodes(
        {
            "kind": "List",
            "items": [
                cluster.node(f"{name}-{number}", facts, arch=facts["kubernetes.io/arch"])
                for name, facts in labels.items()
                for number in range(count)
            ],
        },
        "x",
    )


def test_each_profile_is_a_class_with_the_answer_of_select(hosts, cluster, shipped_catalog):
    labels = {name: cluster.own(host) for name, host in hosts.items()}
    grouped = classify_nodes(nodes(cluster, labels, 3), shipped_catalog)
    assert len(grouped.classes) == len(hosts)
    assert sum(len(each.nodes) for each in grouped.classes) == 3 * len(hosts)
    for each in grouped.classes:
        name = each.nodes[0].name.rpartition("-")[0]
        expected = explain(hosts[name], shipped_catalog)
        assert (each.variant and each.variant.reference) == expected.selected
        assert each.kind.fits == expected.fits
        assert each.is_labelled
        assert (each.miss is None) == (each.variant is not None)


def test_labels_of_nfd_and_nvidia_give_no_image_that_does_not_fit(hosts, cluster, shipped_catalog):
    labels = {
        name: cluster.foreign(host)
        for name, host in hosts.items()
        if len({gpu.compute for gpu in host.gpus}) < 2
    }
    grouped = classify_nodes(nodes(cluster, labels), shipped_catalog, allow_cpu=True)
    chosen = {each.nodes[0].name.rpartition("-")[0]: each for each in grouped.classes if each.variant}
    assert "genoa-h200" in chosen
    for name, each in chosen.items():
        assert each.variant.reference in explain(hosts[name], shipped_catalog, allow_cpu=True).fits
        assert not each.is_labelled


def test_the_order_of_gpus_does_not_distinguish_classes(cluster, make):
    one, other = make.gpu(0, compute="8.9"), make.gpu(1, compute="8.6")
    swapped = (replace(other, index=0), replace(one, index=1))
    labels = {
        "a": cluster.own(make.host(one, other)),
        "b": cluster.own(make.host(*swapped)),
    }
    (only,) = classify_nodes(nodes(cluster, labels), make.catalog(make.variant())).classes
    assert [node.name for node in only.nodes] == ["a-0", "b-0"]


def test_a_stale_class_label_has_a_warning(cluster, make):
    labels = {"a": cluster.own(make.host(make.gpu(0))) | {"imagematrix.io/class": "old"}}
    (only,) = classify_nodes(nodes(cluster, labels), make.catalog(make.variant())).classes
    assert not only.is_labelled
    assert any("label it again" in warning for warning in only.warnings)


def test_an_upgrade(cluster, make, conforms):
    labels = {"a": cluster.own(make.host(make.gpu(0)))}
    catalog = make.catalog(make.variant("t:old"), make.variant("t:new", driver=make.umd("exact", NEW)))
    grouped = classify_nodes(nodes(cluster, labels), catalog, drivers={OLD: NEW})
    assert grouped.is_complete
    assert grouped.upgrades[0].changed[0].new == "t:new"
    conforms(grouped.to_json())
    lost = classify_nodes(nodes(cluster, labels), make.catalog(make.variant("t:old")), drivers={OLD: NEW})
    assert not lost.is_complete


def test_an_open_axis_is_an_error(cluster, make):
    catalog = make.catalog(
        make.variant("t:a", axes=(("python", "3.12"),)), make.variant("t:b", axes=(("python", "3.13"),))
    )
    labels = {"a": cluster.own(make.host(make.gpu(0)))}
    with pytest.raises(UsageError, match="python"):
        classify_nodes(nodes(cluster, labels), catalog)


def test_a_node_without_the_requested_gpus_has_a_reason(cluster, make):
    labels = {"a": cluster.own(make.host(make.gpu(0)))}
    (only,) = classify_nodes(nodes(cluster, labels), make.catalog(make.variant()), gpus="2").classes
    assert only.variant is None
    assert "1 of the host's 1 GPUs" in only.why
    assert only.to_json()["fits"] == []


@pytest.fixture
def saved(tmp_path, monkeypatch, cluster, make):
    monkeypatch.chdir(tmp_path)
    catalog = make.catalog(
        make.variant("t:v1-old"), make.variant("t:v1-new", driver=make.umd("exact", NEW)), make.cpu_variant()
    )
    (tmp_path / "t.json").write_text(json_documents.dump_json(catalog.to_json()))

    def write(**labels):
        items = [
            cluster.node(name, facts, arch=facts["kubernetes.io/arch"]) for name, facts in labels.items()
        ]
        (tmp_path / "nodes.json").write_text(json.dumps({"kind": "List", "items": items}))

    return write


def test_the_command(cli, saved, cluster, make, conforms):
    saved(
        a=cluster.own(make.host(make.gpu(0))),
        b=cluster.own(make.host(make.gpu(0))),
        c=cluster.own(make.host(make.gpu(0, compute="7.0"))),
    )
    result = cli(
        "kubernetes", "classes", "--nodes", "nodes.json", "--catalog", "t.json", "--driver", f"{OLD}={NEW}"
    )
    assert result.code == 3
    lines = result.out.splitlines()
    assert lines[2].split()[1:3] == ["2", "old"]
    assert "no device code in the image runs on GPU 0" in result.out
    assert "  new for a, b" in lines
    assert "  nothing changes for 1 node" in lines
    document = json.loads(
        cli("kubernetes", "classes", "--nodes", "nodes.json", "--catalog", "t.json", "--json").out
    )
    assert [each["nodes"] for each in conforms(document)["classes"]] == [["a", "b"], ["c"]]


def test_the_command_requires_an_image(cli, saved, cluster, make):
    saved(a=cluster.own(make.host(make.gpu(0))))
    assert "no image given" in cli("kubernetes", "classes", "--nodes", "nodes.json").err
    assert cli("kubernetes", "classes", "--nodes", "nodes.json", "--catalog", "t.json").code == 0


def test_a_lost_image_is_named(cli, saved, cluster, make):
    saved(**{f"n{number}": cluster.own(make.host(make.gpu(0))) for number in range(6)})
    words = ("--catalog", "t.json", "--where", "driver=550.163.01", "--driver", f"{OLD}={NEW}")
    result = cli("kubernetes", "classes", "--nodes", "nodes.json", *words)
    assert result.code == 3
    assert "nothing for n0, n1, n2, n3, 2 more" in result.out
