"""Admission: the function and its CEL decide alike, for written cases and for random pods."""

import json
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import ApiServer, admitted, patched

from imagematrix import documents
from imagematrix.errors import UsageError
from imagematrix.kubernetes.admission import EPHEMERAL, PodClass, Policy, admit, policy
from imagematrix.kubernetes.affinity import required
from imagematrix.kubernetes.classes import classes
from imagematrix.kubernetes.labels import CLASS
from imagematrix.kubernetes.nodes import parse
from imagematrix.kubernetes.policy import objects

NAME, OTHER = "reg/t:v1", "debian:trixie"
A, B = f"reg/t:v1-a@sha256:{'a' * 64}", f"reg/t:v1-b@sha256:{'b' * 64}"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def one_class(name, image, *, pool, zone=("x",), memory=("40",), **values):
    told = {CLASS: (name,), "pool": pool, "zone": zone, "memory": memory}
    return PodClass(name=name, image=image, values=told | values)


CLASSES = (
    one_class("h200", A, pool=("big",), memory=("141", "!"), **{"metadata.name": ("n1", "n2")}),
    one_class("h100", A, pool=("big", "old"), zone=("x", "y"), **{"metadata.name": ("n3",)}),
    one_class("l40s", B, pool=("small", "!"), zone=("y",), **{"metadata.name": ("n4",)}),
    one_class("cpu", "", pool=("!",), zone=("z",), memory=("!",), **{"metadata.name": ("n5",)}),
)
POLICY = Policy(name=NAME, classes=CLASSES, deny=True)
SERVER = ApiServer(list(objects(POLICY, "t-v1")))


def pod(*images, labels=None, **spec):
    """Return a pod with a container for each image."""
    containers = [{"name": f"c{number}", "image": image} for number, image in enumerate(images)]
    metadata = {"name": "p"} | ({"labels": labels} if labels is not None else {})
    return {"kind": "Pod", "metadata": metadata, "spec": {"containers": containers, **spec}}


def asking(*terms):
    """Return an affinity that requires one of some terms."""
    return {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": list(terms)}}}


def term(key, operator, *values, kind="matchExpressions"):
    return {kind: [{"key": key, "operator": operator} | ({"values": list(values)} if values else {})]}


def images(given_pod):
    spec = given_pod["spec"]
    lists = ("initContainers", "containers", "ephemeralContainers")
    return [container.get("image") for name in lists for container in spec.get(name) or ()]


def decided(given_pod, subresource=""):
    """Return what becomes of a pod, which the function and the API server agree about."""
    admission = admit(given_pod, POLICY, subresource=subresource)
    patch = SERVER.mutate(given_pod, subresource)
    assert patch == list(admission.patch)
    after = patched(given_pod, patch)
    assert SERVER.refuse(after, subresource) == (admission.reason if admission.refused else None)
    assert admission.refused == (admission.reason is not None)
    if not admission.refused:
        again = admit(after, POLICY, subresource=subresource)
        assert again.patch == ()
        assert SERVER.mutate(after, subresource) == []
    return after, admission.reason


@pytest.mark.parametrize(
    ("spec", "image"),
    [
        ({"nodeSelector": {CLASS: "h200"}}, A),
        ({"nodeSelector": {"pool": "big"}}, A),
        ({"nodeSelector": {"pool": "small"}}, B),
        ({"nodeSelector": {"pool": "big", "unknown": "x"}}, A),
        ({"nodeSelector": {"zone": "y"}}, None),
        ({"nodeSelector": {"zone": "z"}}, None),
        ({"nodeSelector": {"pool": "none"}}, None),
        ({}, None),
        ({"nodeName": "n4"}, B),
        ({"nodeName": ""}, None),
        ({"nodeName": "n9"}, None),
        ({"labels": {CLASS: "l40s"}}, B),
        ({"labels": {CLASS: "l40s"}, "nodeSelector": {"pool": "big"}}, None),
        ({"labels": {"app": "x"}, "nodeSelector": {"pool": "big"}}, A),
        ({"affinity": {}, "nodeSelector": {"pool": "big"}}, A),
        ({"affinity": {"podAffinity": {}}, "nodeSelector": {"pool": "big"}}, A),
        ({"affinity": {"nodeAffinity": {}}, "nodeSelector": {"pool": "big"}}, A),
        ({"affinity": asking(term("pool", "In", "big", "old"))}, A),
        ({"affinity": asking(term("pool", "In", "big"), term("pool", "In", "old"))}, A),
        ({"affinity": asking(term("pool", "In", "big"), term("pool", "In", "small"))}, None),
        ({"affinity": asking(term("pool", "NotIn", "big", "old"))}, B),
        ({"affinity": asking(term("pool", "DoesNotExist"))}, B),
        ({"affinity": asking(term("pool", "Exists"))}, None),
        ({"affinity": asking(term("memory", "Gt", "100"))}, A),
        ({"affinity": asking(term("memory", "Lt", "100"))}, None),
        ({"affinity": asking(term("memory", "Gt", "x"))}, None),
        ({"affinity": asking(term("metadata.name", "In", "n4", kind="matchFields"))}, B),
        ({"affinity": asking(term("metadata.name", "In", "n2", kind="matchFields"))}, A),
        ({"affinity": asking({}, term("pool", "In", "big"))}, A),
        ({"affinity": asking({})}, None),
        ({"affinity": asking()}, None),
        ({"affinity": asking(term("unknown", "In", "x")), "nodeSelector": {"pool": "big"}}, A),
        ({"affinity": asking(term("pool", "Later", "x")), "nodeSelector": {"pool": "big"}}, A),
    ],
)
def test_a_pod_gets_the_image_of_the_classes_that_it_may_run_on(spec, image):
    after, reason = decided(pod(NAME, OTHER, **spec))
    assert images(after) == [image or NAME, OTHER]
    assert (reason is None) == (image is not None)
    if image:
        names = {each.name for each in CLASSES if each.image == image}
        terms = [one.get("matchExpressions", []) for one in required(after["spec"])]
        for each in CLASSES:
            # A pod with the image is kept from every other class, whatever else is known of it.
            labels = {CLASS: each.name, **{key: values[0] for key, values in each.values.items()}}
            assert each.name in names or not admitted(terms, labels)
        before = required(spec) or []
        assert [one for one in before if not one] == [one for one in required(after["spec"]) if not one]


@pytest.mark.parametrize(
    ("given_pod", "reason"),
    [
        (
            pod(NAME),
            f"{NAME}: nodes that the pod may get need different images: h200, h100, l40s, cpu; select",
        ),
        (pod(NAME, nodeSelector={"zone": "z"}), f"{NAME}: nothing fits the nodes that the pod may get: cpu"),
        (pod(NAME, nodeSelector={"pool": "x"}), f"{NAME}: no class of nodes matches the pod's node selector"),
        (pod(*[NAME] * 41, nodeSelector={"pool": "big"}), f"{NAME}: the pod has more than 40 containers"),
    ],
)
def test_a_refusal_has_a_reason(given_pod, reason):
    assert decided(given_pod)[1].startswith(reason)


def test_all_kinds_of_containers_and_no_other_image():
    given_pod = pod(NAME, OTHER, nodeSelector={"pool": "big"})
    given_pod["spec"]["initContainers"] = [{"name": "i", "image": OTHER}, {"name": "j", "image": NAME}]
    given_pod["spec"]["containers"].append({"name": "k"})
    after, _ = decided(given_pod)
    assert images(after) == [OTHER, A, A, OTHER, None]
    other = pod(OTHER, f"{NAME}-a", "t:v1")
    assert decided(other) == (other, None)


def test_an_ephemeral_container_gets_the_image_and_no_affinity():
    given_pod = pod(OTHER, nodeName="n4")
    given_pod["spec"]["ephemeralContainers"] = [{"name": "debug", "image": NAME}]
    after, _ = decided(given_pod, EPHEMERAL)
    assert images(after) == [OTHER, B]
    assert "affinity" not in after["spec"]


def test_many_classes_are_counted_in_a_reason():
    many = tuple(one_class(f"c{number}", f"{number}", pool=("x",)) for number in range(9))
    wide = Policy(name=NAME, classes=many, deny=True)
    reason = admit(pod(NAME), wide).reason
    assert "9 classes" in reason
    assert ApiServer(list(objects(wide, "x"))).refuse(pod(NAME)) == reason


def test_without_deny_the_pod_is_left_to_the_default():
    mild = Policy(name=NAME, classes=CLASSES)
    admission = admit(pod(NAME), mild)
    assert (admission.patch, admission.refused) == ((), False)
    assert admission.reason
    made = list(objects(mild, "x"))
    assert [one["kind"] for one in made] == ["MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding"]
    assert made[0]["spec"]["failurePolicy"] == "Ignore"


words = {
    "pool": st.sampled_from(["big", "old", "small", "none"]),
    "zone": st.sampled_from(["x", "y", "z"]),
    "memory": st.sampled_from(["40", "141", "100", "x", "-1"]),
    "metadata.name": st.sampled_from(["n1", "n3", "n4", "n5", "n9"]),
    CLASS: st.sampled_from([each.name for each in CLASSES]),
    "unknown": st.just("x"),
}


@st.composite
def requirements(draw):
    key = draw(st.sampled_from(list(words)))
    operator = draw(st.sampled_from(["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]))
    values = draw(st.lists(words[key], max_size=2))
    return {"key": key, "operator": operator} | ({"values": values} if values else {})


def some_of(strategies):
    """Return dictionaries with some of the keys."""
    return st.fixed_dictionaries({}, optional=strategies)


terms = some_of(
    {
        "matchExpressions": st.lists(requirements(), max_size=2),
        "matchFields": st.lists(requirements(), max_size=1),
    }
)
affinities: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.just({"nodeAffinity": {}}),
    st.lists(terms, max_size=3).map(lambda some: asking(*some)),
)
containers = st.lists(
    st.fixed_dictionaries({"name": st.just("c")}, optional={"image": st.sampled_from([NAME, OTHER, A])}),
    max_size=3,
)
pods = st.fixed_dictionaries(
    {
        "metadata": some_of({"labels": st.dictionaries(st.just(CLASS), words[CLASS])}),
        "spec": st.fixed_dictionaries(
            {"containers": containers},
            optional={
                "initContainers": containers,
                "ephemeralContainers": containers,
                "affinity": affinities,
                "nodeName": st.sampled_from(["", "n1", "n4", "n9"]),
                "nodeSelector": some_of(words),
            },
        ),
    }
)


@settings(max_examples=40, deadline=None)
@given(pods, st.sampled_from(["", EPHEMERAL]))
def test_function_and_policy_agree_about_any_pod(given_pod, subresource):
    after, _ = decided(given_pod, subresource)
    for before, now in zip(images(given_pod), images(after), strict=True):
        assert now == before or (before == NAME and now in {A, B})


@pytest.fixture
def found(cluster, make):
    """The classes of a small cluster, with pools."""
    catalog = make.catalog(
        make.variant("reg/t:v1-a", digest=f"sha256:{'a' * 64}"),
        make.variant("reg/t:v1-b", digest=f"sha256:{'b' * 64}", driver=make.umd("exact", "580.65.06")),
    )
    hosts = {
        "n1": make.host(make.gpu(0)),
        "n2": make.host(make.gpu(0), driver="580.65.06"),
        "n3": make.host(),
    }
    items = [
        cluster.node(name, {"pool": f"p-{name}", "kubernetes.io/hostname": name, **cluster.own(host)})
        for name, host in hosts.items()
    ]
    return classes(parse({"kind": "List", "items": items}, "x"), catalog)


@pytest.mark.parametrize("release", ["1.36", "1.37"])
def test_the_objects_are_valid(found, release):
    made = list(objects(policy(NAME, found, deny=True), "t-v1"))
    assert len(made) == 4
    for one in made:
        kubernetes_validate.validate(one, release, strict=True)


def test_a_cluster_s_labels_narrow_a_pod_to_its_image(found):
    made = policy(NAME, found)
    after = patched(
        pod(NAME, nodeSelector={"pool": "p-n2"}), admit(pod(NAME, nodeSelector={"pool": "p-n2"}), made).patch
    )
    assert images(after) == [B]
    assert all(not key.startswith(("feature.", "imagematrix.io/cpu-flag.")) for key in made.classes[0].values)
    daemon = pod(NAME, affinity=asking(term("metadata.name", "In", "n1", kind="matchFields")))
    assert admit(daemon, made).patch[0]["value"] == A


def test_a_label_with_too_many_values_narrows_nothing(found, monkeypatch):
    monkeypatch.setattr("imagematrix.kubernetes.admission.VALUES", 2)
    made = policy(NAME, found)
    assert "pool" not in made.classes[0].values


def test_classes_must_be_labelled(cluster, make):
    items = [cluster.node("a", cluster.foreign(make.host(make.gpu(0))))]
    found = classes(parse({"kind": "List", "items": items}, "x"), make.catalog(make.variant()))
    with pytest.raises(UsageError, match=r"lack the label imagematrix\.io/class"):
        policy(NAME, found)


def test_what_is_too_long_for_an_expression_is_an_error():
    names = tuple(f"node-{number}" for number in range(20_000))
    long = one_class("x", A, pool=names)
    with pytest.raises(UsageError, match="too many nodes and labels"):
        list(objects(Policy(name=NAME, classes=(long,)), "x"))


def test_the_command(cli, tmp_path, monkeypatch, cluster, make):
    monkeypatch.chdir(tmp_path)
    catalog = make.catalog(make.variant("t:v1-a", digest=f"sha256:{'a' * 64}"))
    (tmp_path / "t.json").write_text(documents.dump(catalog.to_json()))
    node = cluster.node("a", cluster.own(make.host(make.gpu(0))))
    (tmp_path / "nodes.json").write_text(json.dumps(node))
    words = ("kubernetes", "render", "policy", "t:v1", "--nodes", "nodes.json", "--catalog", "t.json")
    said = cli(*words, "--on-unknown", "deny")
    made = list(yaml.safe_load_all(said.out))
    assert [one["metadata"]["name"] for one in made] == ["t-v1"] * 4
    server = ApiServer(made)
    assert server.mutate(pod("t:v1"))[0]["value"] == f"t:v1-a@sha256:{'a' * 64}"
    assert len(list(yaml.safe_load_all(cli(*words).out))) == 2
    named = list(yaml.safe_load_all(cli(*words, "--as", "mirror.example/t:v1", "--name", "x").out))
    assert ApiServer(named).mutate(pod("mirror.example/t:v1"))
    assert "invalid" in cli(*words, "--on-unknown", "guess").err
