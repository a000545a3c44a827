"""Manifests: valid by the published schemas, with the image of a class, and only on its nodes."""

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml
from jsonschema import Draft202012Validator, ValidationError
from scheduling import admitted

from imagematrix.cli.app import make_app
from imagematrix.common import json_documents
from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.nodes.classes import classify_nodes
from imagematrix.integrations.kubernetes.nodes.labels import CLASS
from imagematrix.integrations.kubernetes.nodes.nodes import parse_nodes
from imagematrix.integrations.kubernetes.workloads.affinity import get_required_terms, is_admitted
from imagematrix.integrations.kubernetes.workloads.compatibility import make_compatibility
from imagematrix.integrations.kubernetes.workloads.manifests import (
    WORKLOADS,
    Workload,
    make_flavors,
    make_workload_manifests,
)
from imagematrix.integrations.kubernetes.workloads.placement import (
    choose_classes,
    get_image,
    place_gang,
    place_per_class,
    require_labels,
)
from imagematrix.integrations.kubernetes.workloads.prepull import make_prepull_manifests
from imagematrix.selection.selection import NothingFits
from imagematrix.selection.selector import explain

FLAVORS = Path(__file__).parent / "kueue_flavors.json"  # with its source
RELEASES = ("1.34", "1.37")
DIGEST = f"sha256:{'1' * 64}"
BUILT_IN = ("job", "deployment", "daemonset")
NEW = "580.65.06"
NAMED = "reg.x/_t"
PROGRAM: Any = typer.main.get_command(make_app(["kubernetes", "render"]))
RENDERING = PROGRAM.commands["kubernetes"].commands["render"]


@pytest.fixture
def grouped(cluster, make):
    """Classes of L40S with two drivers and of a CPU node, and a variant for each."""
    catalog = make.catalog(
        make.variant("r/t:v1-old", digest=DIGEST),
        make.variant("r/t:v1-new", digest=DIGEST, driver=make.umd("exact", NEW)),
        make.variant("r/t:v1-any", digest=DIGEST, driver=make.umd("host")),
        make.cpu_variant("r/t:v1-cpu"),
    )
    hosts = {"old": make.host(make.gpu(0)), "new": make.host(make.gpu(0), driver=NEW), "cpu": make.host()}
    return of(cluster, {name: cluster.own(host) for name, host in hosts.items()}, catalog)


def of(cluster, labels, catalog, **options):
    items = [cluster.node(name, facts, arch=facts["kubernetes.io/arch"]) for name, facts in labels.items()]
    return classify_nodes(parse_nodes({"kind": "List", "items": items}, "x"), catalog, **options).classes


def pods(manifest):
    """Return the pod template of a manifest of any kind."""
    spec = manifest["spec"]
    if manifest["kind"] == "JobSet":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    if manifest["kind"] == "LeaderWorkerSet":
        return spec["leaderWorkerTemplate"]["workerTemplate"]
    return spec["template"]


def node(grouped, name):
    return next(one for each in grouped for one in each.nodes if one.name == name)


@pytest.mark.parametrize("kind", BUILT_IN)
@pytest.mark.parametrize("release", RELEASES)
def test_each_class_has_a_manifest_for_its_nodes(grouped, kind, release):
    workload = Workload(name="train", arguments=("--epochs", "3"), gpus=2, pods=3)
    made = make_workload_manifests(kind, workload, grouped)
    assert len(made) == 3
    assert len({one["metadata"]["name"] for one in made}) == 3
    for one in made:
        kubernetes_validate.validate(one, release, strict=True)
        template = pods(one)
        (container,) = template["spec"]["containers"]
        suffix = container["image"].partition("@")[0].rpartition("-")[2]
        admitting = {
            name
            for name in ("old", "new", "cpu")
            if admitted(terms(template["spec"]), node(grouped, name).labels)
        }
        assert admitting == {suffix}
        assert container["args"] == ["--epochs", "3"]
        assert ("resources" in container) == (suffix != "cpu")
        assert "securityContext" not in container
        assert "volumes" not in template["spec"]


def terms(spec):
    return [term["matchExpressions"] for term in get_required_terms(spec)]


@pytest.mark.parametrize("kind", ["jobset", "leaderworkerset"])
def test_a_gang_has_one_image_for_all_ranks(grouped, kind):
    gpu_classes = [one for one in grouped if one.nodes[0].name != "cpu"]
    (made,) = make_workload_manifests(kind, Workload(name="train", gpus=1, pods=4), gpu_classes)
    spec = pods(made)["spec"]
    assert spec["containers"][0]["image"] == f"r/t:v1-any@{DIGEST}"
    assert all(admitted(terms(spec), node(grouped, name).labels) for name in ("old", "new"))
    assert not admitted(terms(spec), node(grouped, "cpu").labels)
    with pytest.raises(NothingFits, match="no variant fits all of the classes"):
        make_workload_manifests(kind, Workload(name="train"), grouped)


def test_a_jobset_is_as_its_api_has_it(grouped):
    # Loads hundreds of models, in every process that collects tests.
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet as JobSet

    gpu_classes = [one for one in grouped if one.nodes[0].name != "cpu"]
    workload = Workload(name="train", arguments=("--epochs", "3"), gpus=1, pods=4, pull_secret="logins")  # noqa: S106
    (made,) = make_workload_manifests("jobset", workload, gpu_classes)
    assert JobSet.from_dict(made).to_dict() == made, "unknown fields are lost, wrong types are errors"


@pytest.mark.parametrize("kind", WORKLOADS)
def test_the_secret_for_pulling_is_in_every_pod(grouped, kind):
    name = "logins"
    gpu_classes = [one for one in grouped if one.nodes[0].name != "cpu"]
    for made in make_workload_manifests(kind, Workload(name="train", pull_secret=name), gpu_classes):
        assert pods(made)["spec"]["imagePullSecrets"] == [{"name": name}]
    without = make_workload_manifests(kind, Workload(name="train"), gpu_classes)[0]
    assert "imagePullSecrets" not in pods(without)["spec"]


def test_a_gang_gets_the_variant_that_is_best_for_all_classes(hosts, cluster, shipped_catalog):
    some = [hosts["genoa-h200"], hosts["sapphirerapids-h100"]]
    labels = {str(number): cluster.own(host) for number, host in enumerate(some)}
    fitting = [explain(host, shipped_catalog).fits for host in some]
    try:
        placed = place_gang(of(cluster, labels, shipped_catalog))
    except NothingFits:
        assert not fitting[0] & fitting[1]
    else:
        assert placed.variant.reference in fitting[0] & fitting[1]


def test_one_class_alone_keeps_the_name(grouped):
    (made,) = make_workload_manifests("job", Workload(name="train"), [grouped[0]])
    assert made["metadata"]["name"] == "train"
    assert "completions" not in made["spec"]


@pytest.mark.parametrize(("length", "pods", "longest"), [(50, 1, 63), (55, 1, 63), (63, 1, 63), (63, 12, 60)])
def test_a_long_name_keeps_the_hash_of_the_class(grouped, length, pods, longest):
    """A second object with the same name would replace the first; pods have the job's name and an index."""
    names = [
        made["metadata"]["name"]
        for made in make_workload_manifests("job", Workload(name="a" * length, pods=pods), grouped)
    ]
    assert len(set(names)) == 3
    assert max(map(len, names)) <= longest


@pytest.mark.parametrize(
    ("kind", "count", "longest"),
    [
        ("job", 1, 63),
        ("job", 101, 59),
        ("deployment", 101, 63),
        ("jobset", 1, 53),
        ("jobset", 12, 52),
        ("leaderworkerset", 8, 50),
    ],
)
def test_a_name_leaves_room_for_the_names_of_its_pods(grouped, kind, count, longest):
    def made(length):
        return make_workload_manifests(kind, Workload(name="a" * length, pods=count), grouped[:1])

    assert made(longest)[0]["metadata"]["name"] == "a" * longest
    if longest < 63:
        with pytest.raises(UsageError) as refused:
            made(longest + 1)
        assert refused.value.remedy == f"use at most {longest} characters, such as --name train"


def test_nodes_without_our_labels_are_selected_by_other_labels_if_safe(cluster, make):
    catalog = make.catalog(make.variant("r/t:v1-old", digest=DIGEST))
    host = make.host(make.gpu(0))
    (made,) = make_workload_manifests(
        "job", Workload(name="t"), of(cluster, {"a": cluster.foreign(host)}, catalog)
    )
    spec = pods(made)["spec"]
    assert admitted(terms(spec), cluster.foreign(host))
    assert not admitted(terms(spec), cluster.foreign(make.host(make.gpu(0), driver=NEW)))
    mixed = {"a": cluster.foreign(host), "b": cluster.own(host)}
    placed = place_gang(of(cluster, mixed, catalog))
    assert all(admitted(placed.terms, labels) for labels in mixed.values())


def test_nodes_that_no_label_distinguishes_are_an_error(cluster, make):
    compat = make.variant("r/t:v1", driver=make.umd("compat", "560.35.05"))
    labels = {"a": cluster.foreign(make.host(make.gpu(0)))}
    with pytest.raises(UsageError, match="labels do not distinguish nodes of the class"):
        make_workload_manifests("job", Workload(name="t"), of(cluster, labels, make.catalog(compat)))


@pytest.mark.parametrize("variants", [("host",), ("exact", "host")])
def test_several_daemonsets_for_a_node_without_our_labels_are_an_error(cluster, make, variants):
    """A Job may run on nodes of another class that its image fits."""
    drivers = {"exact": make.umd("exact", NEW), "host": make.umd("host")}
    catalog = make.catalog(*(make.variant(f"r/t:v1-{mode}", driver=drivers[mode]) for mode in variants))
    hosts = {"old": make.host(make.gpu(0)), "new": make.host(make.gpu(0), driver=NEW)}
    classes = of(cluster, {name: cluster.foreign(host) for name, host in hosts.items()}, catalog)
    assert len(make_workload_manifests("job", Workload(name="t"), classes)) == 2
    with pytest.raises(UsageError, match="labels do not distinguish nodes of the class") as refused:
        make_workload_manifests("daemonset", Workload(name="t"), classes)
    assert refused.value.remedy.startswith("label them with `imagematrix kubernetes labels`, such as ")
    with pytest.raises(UsageError, match="labels do not distinguish nodes of the class"):
        make_prepull_manifests("t", classes, pause="reg/pause:1")
    (alone,) = make_workload_manifests("daemonset", Workload(name="t"), classes[:1])
    assert alone["metadata"]["name"] == "t"


def test_daemonsets_for_different_nodes_without_our_labels_are_written(cluster, make):
    catalog = make.catalog(
        make.variant("r/t:v1-old"), make.variant("r/t:v1-new", driver=make.umd("exact", NEW))
    )
    hosts = {"old": make.host(make.gpu(0)), "new": make.host(make.gpu(0), driver=NEW)}
    classes = of(cluster, {name: cluster.foreign(host) for name, host in hosts.items()}, catalog)
    made = make_workload_manifests("daemonset", Workload(name="t"), classes)
    for one in made:
        spec = pods(one)["spec"]
        suffix = spec["containers"][0]["image"].rpartition("-")[2]
        assert [n for n, host in hosts.items() if admitted(terms(spec), cluster.foreign(host))] == [suffix]
    assert len(made) == 2


def test_an_error_has_the_reason_if_no_class_gets_an_image(cluster, make):
    labels = {"a": cluster.own(make.host(make.gpu(0, compute="7.0")))}
    with pytest.raises(NothingFits, match="no device code"):
        make_workload_manifests("job", Workload(name="t"), of(cluster, labels, make.catalog(make.variant())))
    with pytest.raises(UsageError, match="1 of the host's 1"):
        make_workload_manifests(
            "job", Workload(name="t"), of(cluster, labels, make.catalog(make.variant()), gpus="3")
        )
    with pytest.raises(UsageError, match="1 of the host's 1"):
        place_gang(of(cluster, labels, make.catalog(make.variant()), gpus="3"))


def test_classes_are_chosen_by_name(grouped):
    assert choose_classes(grouped, [grouped[1].name]) == (grouped[1],)
    assert choose_classes(grouped, [grouped[1].name] * 2) == (grouped[1],)
    with pytest.raises(UsageError, match="class 'x' not found"):
        choose_classes(grouped, ["x"])


@pytest.fixture
def stale(cluster, make):
    """Return the classes and labels of a cluster after a driver upgrade: three nodes have older labels.

    Two of them have the label of a class that still has a node, one that of a class that has none.
    """
    upgraded = make.host(make.gpu(0), driver=NEW)
    hosts = {"old": make.host(make.gpu(0)), "cpu": make.host()}
    hosts |= dict.fromkeys(("new", "stale1", "stale2", "stale3"), upgraded)
    labels = {name: cluster.own(host) | {"kubernetes.io/hostname": name} for name, host in hosts.items()}
    labels["stale1"][CLASS] = labels["stale2"][CLASS] = labels["old"][CLASS]
    labels["stale3"][CLASS] = "gone"
    old, new = make.variant("training:v1-a"), make.variant("training:v1-b", driver=make.umd("exact", NEW))
    return of(cluster, labels, make.catalog(old, new)), labels


def test_pods_stay_off_nodes_with_the_label_of_another_class(stale):
    """The image of that class does not fit them; the other nodes get their pods."""
    grouped, labels = stale
    placements = {one.variant.reference: one.terms for one in place_per_class(grouped)}
    assert set(placements) == {"training:v1-a", "training:v1-b"}
    for reference, node in (("training:v1-a", "old"), ("training:v1-b", "new")):
        assert [name for name in labels if is_admitted(placements[reference], labels[name])] == [node]


def test_a_class_whose_nodes_all_have_other_labels_is_left_out(stale, cluster, make):
    _, labels = stale
    only = {name: labels[name] for name in ("old", "stale1")}
    catalog = make.catalog(
        make.variant("training:v1-a"), make.variant("training:v1-b", driver=make.umd("exact", NEW))
    )
    assert [one.variant.reference for one in place_per_class(of(cluster, only, catalog))] == ["training:v1-a"]
    with pytest.raises(UsageError, match="all nodes have the labels of other classes"):
        place_per_class(of(cluster, {"stale3": labels["stale3"]}, catalog))
    del only["stale1"]["kubernetes.io/hostname"]
    with pytest.raises(UsageError, match="node stale1 has the label of a class, but other facts"):
        place_per_class(of(cluster, only, catalog))


def test_objects_that_select_by_the_label_alone_need_it_to_be_right(stale):
    grouped, labels = stale
    with pytest.raises(UsageError, match=r"2 nodes have .* other facts: stale1 \(.*\), stale2 \("):
        list(make_flavors(grouped))
    require_labels(choose_classes(grouped, [labels["cpu"][CLASS]]))


def test_a_reference_has_its_digest(make):
    assert get_image(make.variant("r/t:v1-a", digest=DIGEST)) == f"r/t:v1-a@{DIGEST}"
    assert get_image(make.variant("r/t:v1-a")) == "r/t:v1-a"
    assert get_image(make.variant(f"r/t@{DIGEST}", digest=DIGEST)) == f"r/t@{DIGEST}"


@pytest.mark.parametrize("name", ["", "A", "a.b", "-a", "a" * 64])
def test_an_invalid_name_is_refused(name):
    with pytest.raises(UsageError, match="invalid name"):
        Workload(name=name)


def test_a_flavor_selects_the_nodes_of_its_class(grouped, cluster, make):
    made = list(make_flavors(grouped))
    assert [one["metadata"]["name"] for one in made] == [group.name for group in grouped]
    for one, group in zip(made, grouped, strict=True):
        assert one["spec"]["nodeLabels"].items() <= group.nodes[0].labels.items()
    unlabelled = of(cluster, {"a": cluster.foreign(make.host(make.gpu(0)))}, make.catalog(make.variant()))
    with pytest.raises(UsageError, match=r"lack the label imagematrix\.io/class"):
        list(make_flavors(unlabelled))


def test_a_flavor_is_valid_by_the_schemas_of_kueue(grouped):
    """Those of every version that it serves; Kueue says that v1beta1 is deprecated."""
    served = json.loads(FLAVORS.read_text())["versions"]
    for one in make_flavors(grouped):
        assert one["apiVersion"].removeprefix("kueue.x-k8s.io/") in served
        for schema in served.values():
            Draft202012Validator(schema).validate(one)
    with pytest.raises(ValidationError):
        Draft202012Validator(served["v1beta2"]).validate({"spec": {"nodeLabels": ["a"]}})


def test_an_artifact_matches_the_nodes_that_the_variant_fits(hosts, cluster, shipped_catalog):
    for variant in shipped_catalog.variants[::5]:
        artifact = make_compatibility(variant)
        assert artifact["version"] == "v1alpha1"
        for host in hosts.values():
            fits = variant.reference in explain(host, shipped_catalog).fits
            assert is_compatible(artifact, cluster.own(host)) == fits


@pytest.mark.parametrize("fact", ["user_mode", "kind"])
@pytest.mark.parametrize("umd", [("host", None), ("exact", "550.163.01"), ("compat", "560.35.05")])
def test_an_artifact_matches_nodes_without_a_label_as_select_does(hosts, cluster, make, fact, umd):
    requires = ("driver!=535.161.08",)
    variant = make.variant(driver=make.umd(*umd), cubins=("80", "89", "90"), requires=requires)
    artifact, fitting = make_compatibility(variant), 0
    for host in hosts.values():
        unknown = replace(host, driver=host.driver and replace(host.driver, **{fact: None}))
        fits = bool(explain(unknown, make.catalog(variant)).fits)
        assert is_compatible(artifact, cluster.own(unknown)) == fits
        fitting += fits
    assert fitting


def test_an_artifact_of_a_variant_that_no_node_fits_matches_none(hosts, cluster, make):
    artifact = make_compatibility(make.variant(driver=make.umd("host"), requires=("driver<400",)))
    assert artifact["compatibilities"][0]["description"] == "no node fits t:gpu"
    for labels in ({}, *map(cluster.own, hosts.values())):
        assert not is_compatible(artifact, labels)


def is_compatible(artifact, labels):
    """Whether NFD calls a node compatible, as in rule.go of NFD, if its features are `labels`."""
    (compatibility,) = artifact["compatibilities"]
    (rule,) = compatibility["rules"]
    return not rule["matchAny"] or any(matched(one["matchFeatures"], labels) for one in rule["matchAny"])


def matched(features, labels):
    """Whether NFD matches all features. What is absent meets no operator but DoesNotExist."""
    return all(
        (key in labels or one["op"] == "DoesNotExist")
        and admitted([[{"key": key, "operator": one["op"], "values": one.get("value", [])}]], labels)
        for feature in features
        for key, one in feature["matchExpressions"].items()
    )


@pytest.fixture
def saved(tmp_path, monkeypatch, cluster, make):
    monkeypatch.chdir(tmp_path)
    catalog = make.catalog(make.variant("t:v1-old", digest=DIGEST), make.cpu_variant("t:v1-cpu"))
    (tmp_path / "t.json").write_text(json_documents.dump_json(replace(catalog, image=NAMED).to_json()))
    items = [
        cluster.node("a", cluster.own(make.host(make.gpu(0)))),
        cluster.node("b", cluster.own(make.host())),
        cluster.node("c", cluster.own(make.host(make.gpu(0, compute="7.0")))),
    ]
    (tmp_path / "nodes.json").write_text(json.dumps({"kind": "List", "items": items}))


@pytest.mark.usefixtures("saved")
def test_the_command(cli):
    words = (f"{NAMED}:v1", "--nodes", "nodes.json", "--catalog", "t.json")
    result = cli("kubernetes", "render", "job", *words, "--name", "train", "--gpus", "2", "--", "-v", "x")
    assert result.code == 0
    made = list(yaml.safe_load_all(result.out))
    assert [one["kind"] for one in made] == ["Job", "Job"]
    assert made[0]["spec"]["template"]["spec"]["containers"][0]["args"] == ["-v", "x"]
    assert "nothing fits the class" in result.err
    assert "the catalog has no digest" in result.err
    flavored = cli("kubernetes", "render", "flavors", *words)
    assert len(list(yaml.safe_load_all(flavored.out))) == 3
    artifacts = cli("kubernetes", "render", "compatibility", f"{NAMED}:v1", "--catalog", "t.json")
    assert len(list(yaml.safe_load_all(artifacts.out))) == 2
    name = made[0]["metadata"]["name"].removeprefix("train-")
    one = cli("kubernetes", "render", "deployment", *words, "--class", name, "--name", "train")
    assert yaml.safe_load(one.out)["metadata"]["name"] == "train"


@pytest.mark.usefixtures("saved")
def test_the_command_names_what_is_missing(cli):
    assert "Did you mean 'job'?" in cli("kubernetes", "render", "jbo", "t:v1").err
    assert "Missing option '--nodes'" in cli("kubernetes", "render", "job", "t:v1").err
    words = ("kubernetes", "render", "job", f"{NAMED}:v1", "--nodes", "nodes.json", "--catalog", "t.json")
    assert cli(*words).out.startswith("apiVersion: batch/v1\nkind: Job\nmetadata:\n  name: t-")
    assert "invalid name 'Train'" in cli(*words, "--name", "Train").err


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("kind", ["job", "jobset", "prepull"])
def test_an_image_that_no_node_can_pull_is_refused(cli, kind):
    document = json.loads(Path("t.json").read_text())
    Path("t.json").write_text(json.dumps({**document, "image": "t"}))
    cli("kubernetes", "render", kind, "t:v1", "--nodes", "nodes.json", "--catalog", "t.json").refuses(
        2, "t:v1 is not in a registry, from which nodes could pull it"
    )


@pytest.mark.usefixtures("saved")
def test_classes_without_an_image_are_one_warning(cli, cluster, make):
    document = json.loads(Path("nodes.json").read_text())
    more = [
        cluster.node(f"n{compute}", cluster.own(make.host(make.gpu(0, compute=compute))))
        for compute in ("5.0", "6.0", "6.1", "7.2", "7.5")
    ]
    Path("nodes.json").write_text(json.dumps({"kind": "List", "items": document["items"] + more}))
    words = (f"{NAMED}:v1", "--nodes", "nodes.json", "--catalog", "t.json")
    result = cli("kubernetes", "render", "job", *words)
    assert result.err.count("nothing fits") == 1
    assert "nothing fits 6 of 8 classes: " in result.err
    assert f"  `imagematrix kubernetes classes --image {NAMED}:v1 --nodes FILE` says why\n" in result.err


def test_every_kind_of_workload_is_on_the_command_line():
    assert WORKLOADS.keys() < RENDERING.commands.keys()


@pytest.mark.parametrize("kind", RENDERING.commands)
def test_an_option_of_another_kind_is_refused(cli, kind):
    """What would be ignored is an error."""
    own, *others = (
        {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
        for command in (RENDERING.commands[kind], *RENDERING.commands.values())
    )
    foreign = sorted(set().union(*others) - own)
    assert foreign
    for option in foreign:
        cli("kubernetes", "render", kind, "t:v1", option, "1").refuses(2, f"No such option: {option}")


def test_a_gang_on_a_node_whose_labels_tell_only_that_its_drivers_differ(cluster, hosts, make):
    labels = {"n": cluster.own(hosts["driver-mismatch"])}
    catalog = make.catalog(make.variant(driver=make.umd("host")))
    with pytest.raises(NothingFits) as caught:
        place_gang(of(cluster, labels, catalog))
    assert "the host's user-mode driver is another version" in str(caught.value.selection.to_json())
