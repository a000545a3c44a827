"""Admission: the function and its CEL decide alike, for listed cases and random pods."""

import json
from typing import Any

import kubernetes_validate
import pytest
import yaml
from admission_cases import (
    CLASSES,
    DECIDED,
    NAME,
    OTHER,
    POLICY,
    REFUSED,
    A,
    B,
    asking,
    images,
    one_class,
    pod,
    term,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import ApiServer, admitted, patched

from imagematrix.common import json_documents
from imagematrix.common.record import replace
from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.admission import admission as admission_module
from imagematrix.integrations.kubernetes.admission.admission import (
    UNPLACED,
    AdmissionPolicy,
    admit,
    make_policy,
)
from imagematrix.integrations.kubernetes.admission.policy import make_policy_objects
from imagematrix.integrations.kubernetes.nodes.classes import classify_nodes
from imagematrix.integrations.kubernetes.nodes.labels import CLASS
from imagematrix.integrations.kubernetes.nodes.nodes import parse_nodes
from imagematrix.integrations.kubernetes.workloads.affinity import get_required_terms

SERVER = ApiServer(list(make_policy_objects(POLICY, "t-v1")))


def decided(given_pod, before=None):
    """Return the pod after admission and the reason; the function and the API server must agree."""
    admission = admit(given_pod, POLICY, before=before)
    patch = SERVER.mutate(given_pod, before)
    assert patch == list(admission.patch)
    after = patched(given_pod, patch)
    assert SERVER.refuse(after, before) == (admission.reason if admission.refused else None)
    assert admission.refused == (admission.reason is not None)
    if not admission.refused:
        again = admit(after, POLICY, before=before)
        assert again.patch == ()
        assert SERVER.mutate(after, before) == []
    return after, admission.reason


@pytest.mark.parametrize(("spec", "image"), DECIDED)
def test_a_pod_gets_the_image_of_the_classes_that_it_may_run_on(spec, image):
    after, reason = decided(pod(NAME, OTHER, **spec))
    assert images(after) == [image or NAME, OTHER]
    assert (reason is None) == (image is not None)
    if image:
        names = {each.name for each in CLASSES if each.image == image}
        terms = [one.get("matchExpressions", []) for one in get_required_terms(after["spec"])]
        for each in CLASSES:
            # A pod with the image may not run on any other class, whatever its other labels.
            labels = {CLASS: each.name, **{key: values[0] for key, values in each.values.items()}}
            assert each.name in names or not admitted(terms, labels)
        before = get_required_terms(spec) or []
        assert [one for one in before if not one] == [
            one for one in get_required_terms(after["spec"]) if not one
        ]


@pytest.mark.parametrize(("given_pod", "reason"), REFUSED)
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
    before = pod(OTHER, nodeName="n4")
    given_pod = pod(OTHER, nodeName="n4", ephemeralContainers=[{"name": "debug", "image": NAME}])
    after, _ = decided(given_pod, before)
    assert images(after) == [OTHER, B]
    assert "affinity" not in after["spec"]


@pytest.mark.parametrize(("node", "image"), [("n1", A), ("n3", A), ("n4", B)])
def test_a_changed_image_is_that_of_the_pod_s_node(node, image):
    """Whatever its labels and selectors say: they decide nothing any more."""
    spec = {"nodeName": node, "nodeSelector": {"zone": "y"}, "labels": {CLASS: "h100"}}
    after, _ = decided(pod(NAME, OTHER, **spec), pod(A, OTHER, **spec))
    assert images(after) == [image, OTHER]
    assert "affinity" not in after["spec"]
    init = [{"name": "init", "image": NAME}]
    after, _ = decided(pod(OTHER, initContainers=init, **spec), pod(OTHER, initContainers=[], **spec))
    assert images(after) == [image, OTHER]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"nodeSelector": {"pool": "big"}}, UNPLACED),
        ({"nodeName": ""}, UNPLACED),
        ({"labels": {CLASS: "h200"}}, UNPLACED),
        ({"nodeName": "n9", "nodeSelector": {CLASS: "h200"}}, UNPLACED),
        ({"nodeName": "n5"}, "no image fits the nodes that the pod may run on: cpu"),
    ],
)
def test_a_changed_image_needs_a_node_that_is_known(spec, reason):
    """A pod without a node could still go to any: its affinity does not change any more."""
    assert decided(pod(NAME, **spec), pod(OTHER, **spec)) == (pod(NAME, **spec), f"{NAME}: {reason}")


def test_a_change_of_anything_else_is_not_about_the_image():
    """Otherwise a pod that had the name before could lose neither a finalizer nor a label."""
    debugged = {"ephemeralContainers": [{"name": "debug", "image": NAME}], "nodeName": "n4"}
    before = pod(NAME, OTHER, **debugged)
    after = pod(NAME, OTHER, labels={"a": "b"}, **debugged)
    assert decided(after, before) == (after, None)
    more = [*debugged["ephemeralContainers"], {"name": "again", "image": NAME}]
    after = pod(NAME, OTHER, nodeName="n4", ephemeralContainers=more)
    assert images(decided(after, before)[0]) == [NAME, OTHER, NAME, B]


def test_many_classes_are_counted_in_a_reason():
    many = tuple(one_class(f"c{number}", f"{number}", pool=("x",)) for number in range(9))
    wide = AdmissionPolicy(name=NAME, classes=many, deny=True)
    reason = admit(pod(NAME), wide).reason
    assert "9 classes" in reason
    assert ApiServer(list(make_policy_objects(wide, "x"))).refuse(pod(NAME)) == reason


@pytest.mark.parametrize("name", ["t:\U0001f600", "t:\"\\\n\u2028'", "t:$(v1) {{ x }} \x7f"])
def test_a_name_is_the_same_in_cel(name):
    made = list(make_policy_objects(AdmissionPolicy(name=name, classes=CLASSES, deny=True), "x"))
    assert "\\ud83d" not in json.dumps(made, ensure_ascii=False)
    server, given_pod = ApiServer(made), pod(name, nodeSelector={"pool": "big"})
    assert images(patched(given_pod, server.mutate(given_pod))) == [A]
    assert server.refuse(pod(name)).startswith(f"{name}: the nodes")


class Counted(str):
    """A text that counts the comparisons with it."""

    __slots__ = ()
    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Counted.comparisons += 1
        return str.__eq__(self, other)


def test_no_class_is_compared_with_all_values_of_a_requirement():
    """Otherwise a pod with many values takes minutes in a cluster with many classes."""
    many = tuple(one_class(f"c{number}", A, pool=(f"p{number}",)) for number in range(400))
    asked = term("pool", "In", *(Counted(f"p{number}") for number in range(1_000)))
    given_pod = pod(NAME, affinity=asking(asked), nodeSelector={f"k{number}": "x" for number in range(1_000)})
    assert admit(given_pod, AdmissionPolicy(name=NAME, classes=many)).patch
    assert Counted.comparisons < 10_000


def test_without_deny_the_pod_is_left_to_the_default():
    mild = AdmissionPolicy(name=NAME, classes=CLASSES)
    admission = admit(pod(NAME), mild)
    assert (admission.patch, admission.refused) == ((), False)
    assert admission.reason
    made = list(make_policy_objects(mild, "x"))
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
    st.fixed_dictionaries(
        {"name": st.sampled_from(["c", "d", "e"])}, optional={"image": st.sampled_from([NAME, OTHER, A])}
    ),
    max_size=3,
    unique_by=lambda one: one["name"],
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
@given(pods, st.none() | pods)
def test_function_and_policy_agree_about_any_pod(given_pod, before):
    after, _ = decided(given_pod, before)
    for given_image, now in zip(images(given_pod), images(after), strict=True):
        assert now == given_image or (given_image == NAME and now in {A, B})


@pytest.fixture
def small_cluster(cluster, make):
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
    return classify_nodes(parse_nodes({"kind": "List", "items": items}, "x"), catalog)


@pytest.mark.parametrize("release", ["1.36", "1.37"])
def test_the_objects_are_valid(small_cluster, release):
    made = list(make_policy_objects(make_policy(NAME, small_cluster, deny=True), "t-v1"))
    assert len(made) == 4
    for one in made:
        kubernetes_validate.validate(one, release, strict=True)


def test_a_cluster_s_labels_narrow_a_pod_to_its_image(small_cluster):
    made = make_policy(NAME, small_cluster)
    after = patched(
        pod(NAME, nodeSelector={"pool": "p-n2"}), admit(pod(NAME, nodeSelector={"pool": "p-n2"}), made).patch
    )
    assert images(after) == [B]
    assert all(not key.startswith(("feature.", "imagematrix.io/cpu-flag.")) for key in made.classes[0].values)
    daemon = pod(NAME, affinity=asking(term("metadata.name", "In", "n1", kind="matchFields")))
    assert admit(daemon, made).patch[0]["value"] == A


def by_both(given_pod, policy):
    """Return the image that a pod gets by the function, and by its CEL."""
    server = ApiServer(list(make_policy_objects(policy, "x")))
    patches = (admit(given_pod, policy).patch, server.mutate(given_pod))
    return [images(patched(given_pod, patch))[0] for patch in patches]


def on_node(name):
    """Return the pod that a DaemonSet makes for a node."""
    return pod(NAME, affinity=asking(term("metadata.name", "In", name, kind="matchFields")))


def test_architectures_get_their_own_images(cluster, make):
    catalog = make.catalog(
        make.cpu_variant("reg/t:v1-a", digest=f"sha256:{'a' * 64}"),
        make.cpu_variant("reg/t:v1-b", digest=f"sha256:{'b' * 64}", platform="linux/arm64"),
    )
    hosts = {"n1": make.host(), "n2": make.host(arch="aarch64")}
    items = [cluster.node(name, cluster.own(host), arch=cluster.arch(host)) for name, host in hosts.items()]
    made = make_policy(NAME, classify_nodes(parse_nodes({"kind": "List", "items": items}, "x"), catalog))
    for arch, node, image in (("amd64", "n1", A), ("arm64", "n2", B)):
        for given_pod in (pod(NAME, nodeSelector={"kubernetes.io/arch": arch}), on_node(node)):
            assert by_both(given_pod, made) == [image, image]


def test_a_label_with_too_many_values_narrows_nothing(small_cluster, monkeypatch):
    monkeypatch.setattr(admission_module, "VALUES", 2)
    made = make_policy(NAME, small_cluster)
    assert "pool" not in made.classes[0].values
    assert {"pool", "kubernetes.io/hostname"} <= {*made.omitted_labels}


def test_a_node_and_a_class_decide_in_any_cluster(small_cluster, monkeypatch):
    monkeypatch.setattr(admission_module, "VALUES", 2)
    made = make_policy(NAME, small_cluster)
    n2 = next(each for each in made.classes if each.nodes == ("n2",))
    asked = [on_node("n2"), pod(NAME, nodeName="n2"), pod(NAME, nodeSelector={CLASS: n2.name})]
    assert [by_both(given_pod, made) for given_pod in asked] == [[B, B]] * 3


def test_without_room_for_names_in_cel_a_class_still_decides(small_cluster, monkeypatch):
    monkeypatch.setattr(admission_module, "ROOM", 1)
    made = make_policy(NAME, small_cluster)
    assert {"metadata.name", "pool"} <= {*made.omitted_labels}
    n2 = next(each for each in made.classes if each.nodes == ("n2",))
    assert by_both(pod(NAME, nodeSelector={CLASS: n2.name}), made) == [B, B]
    assert by_both(on_node("n2"), made) == [B, NAME]


def test_names_and_images_of_classes_take_room(small_cluster, monkeypatch):
    written = make_policy(NAME, small_cluster).classes
    used = sum(admission_module.FRAME + len(each.name) + len(each.image) for each in written)
    monkeypatch.setattr(admission_module, "ROOM", used + 30)
    made = make_policy(NAME, small_cluster)
    assert made.omitted_labels
    assert "metadata.name" not in made.omitted_labels
    assert not any(each.values for each in made.classes)


def test_a_new_node_of_a_known_class_gets_its_image(small_cluster):
    """A policy is written before the node is there, and its DaemonSets' pods need no other policy."""
    made = make_policy(NAME, small_cluster)
    n2 = next(each for each in made.classes if each.nodes == ("n2",))
    given_pod = on_node("n7")
    given_pod["spec"]["nodeSelector"] = {CLASS: n2.name}
    assert by_both(given_pod, made) == [B, B]
    assert by_both(on_node("n7"), made) == [NAME, NAME]
    assert "need different images" in admit(on_node("n7"), made).reason


def test_classes_must_be_labelled(cluster, make):
    items = [cluster.node("a", cluster.foreign(make.host(make.gpu(0))))]
    small_cluster = classify_nodes(
        parse_nodes({"kind": "List", "items": items}, "x"), make.catalog(make.variant())
    )
    with pytest.raises(UsageError, match=r"lack the label imagematrix\.io/class"):
        make_policy(NAME, small_cluster)


@pytest.mark.parametrize("name", ["Reg.example.com/t:v1", "reg.example.com:443/t:v1"])
def test_another_spelling_of_a_registry_is_another_name(name):
    """SECURITY.md says so: names are matched whole."""
    policy = AdmissionPolicy(name="reg.example.com/t:v1", classes=CLASSES, deny=True)
    server = ApiServer(list(make_policy_objects(policy, "x")))
    assert admit(pod(policy.name), policy).refused
    assert server.refuse(pod(policy.name))
    assert not admit(pod(name), policy).refused
    assert server.refuse(pod(name)) is None


def test_a_changed_pod_is_known_by_its_node_in_any_cluster(small_cluster, monkeypatch):
    monkeypatch.setattr(admission_module, "VALUES", 2)
    made, placed = make_policy(NAME, small_cluster, deny=True), {"nodeName": "n2"}
    changed = pod(NAME, **placed), pod(OTHER, **placed)
    assert admit(changed[0], made, before=changed[1]).patch[0]["value"] == B
    monkeypatch.setattr(admission_module, "ROOM", 20)
    without_names = make_policy(NAME, small_cluster, deny=True)
    assert admit(changed[0], without_names, before=changed[1]).patch[0]["value"] == B
    assert UNPLACED in ApiServer(list(make_policy_objects(without_names, "x"))).refuse(*changed)


@pytest.fixture
def widely_labelled(cluster, make):
    """Two classes in pools, of which one has a node with 1,500 labels of its own."""
    catalog = make.catalog(
        make.variant("reg/t:v1-a", digest=f"sha256:{'a' * 64}"),
        make.variant("reg/t:v1-b", digest=f"sha256:{'b' * 64}", driver=make.umd("exact", "580.65.06")),
    )
    drivers = {"n1": "550.163.01", "n2": "580.65.06", "n3": "580.65.06"}
    own = {f"a.example.com/a-label-of-my-own-{number:04}": "x" * 63 for number in range(1500)}
    items = [
        cluster.node(name, {"pool": driver, **cluster.own(make.host(make.gpu(0), driver=driver))})
        for name, driver in drivers.items()
    ]
    items[2]["metadata"]["labels"].update(own)
    return items, catalog, own


def test_a_node_with_labels_of_its_own_ends_no_policy(widely_labelled):
    items, catalog, own = widely_labelled
    made = make_policy(
        NAME, classify_nodes(parse_nodes({"kind": "List", "items": items}, "x"), catalog), deny=True
    )
    written = list(make_policy_objects(made, "t"))
    assert len(made.omitted_labels) > 300
    assert set(made.omitted_labels) < own.keys()
    assert "pool" in made.classes[0].values
    assert max(len(json.dumps(one)) for one in written) < 262_144, "kubectl apply keeps it in an annotation"
    given_pod = pod(NAME, nodeSelector={"pool": "580.65.06"})
    assert ApiServer(written).mutate(given_pod) == list(admit(given_pod, made).patch)
    assert admit(given_pod, made).patch[0]["value"] == B


def test_the_command_says_which_labels_do_not_count(cli, tmp_path, widely_labelled):
    items, catalog, own = widely_labelled
    (tmp_path / "t.json").write_text(json_documents.dump_json(catalog.to_json()))
    (tmp_path / "nodes.json").write_text(json.dumps({"kind": "List", "items": items}))
    words = ("kubernetes", "render", "policy", "t:v1", "--nodes", tmp_path / "nodes.json")
    result = cli(*words, "--catalog", tmp_path / "t.json")
    assert result.code == 0
    assert f"labels: {min(own)[:20]}" in result.err
    assert "let pods that select nodes by them also select imagematrix.io/class" in result.err


def test_more_classes_than_fit_into_an_expression_are_an_error():
    many = tuple(one_class(f"c{number}", A, pool=("x",)) for number in range(5000))
    with pytest.raises(UsageError, match="too many classes for a policy: 5000") as refused:
        list(make_policy_objects(AdmissionPolicy(name=NAME, classes=many), "x"))
    assert "render install --help" in refused.value.remedy
    wide = tuple(one_class(f"h100x8-{'x' * 50}-{number}", A, pool=("x",)) for number in range(1000))
    with pytest.raises(UsageError, match="too many classes for a policy: 1000"):
        list(make_policy_objects(AdmissionPolicy(name=NAME, classes=wide), "x"))


def test_the_command(cli, tmp_path, monkeypatch, cluster, make):
    monkeypatch.chdir(tmp_path)
    catalog = make.catalog(make.variant("t:v1-a", digest=f"sha256:{'a' * 64}"))
    (tmp_path / "t.json").write_text(json_documents.dump_json(catalog.to_json()))
    node = cluster.node("a", cluster.own(make.host(make.gpu(0))))
    (tmp_path / "nodes.json").write_text(json.dumps(node))
    words = ("kubernetes", "render", "policy", "t:v1", "--nodes", "nodes.json", "--catalog", "t.json")
    result = cli(*words, "--on-unknown", "deny")
    made = list(yaml.safe_load_all(result.out))
    assert [one["metadata"]["name"] for one in made] == ["t-v1"] * 4
    server = ApiServer(made)
    assert server.mutate(pod("t:v1"))[0]["value"] == f"t:v1-a@sha256:{'a' * 64}"
    assert len(list(yaml.safe_load_all(cli(*words).out))) == 2
    named = list(yaml.safe_load_all(cli(*words, "--as", "mirror.example/t:v1", "--name", "x").out))
    assert ApiServer(named).mutate(pod("mirror.example/t:v1"))
    assert "invalid" in cli(*words, "--on-unknown", "guess").err
    cli(*words, "--name", "Foo Bar/..").refuses(2, "invalid --name: 'Foo Bar/..'")
    cli(*words, "--as", "").refuses(2, "--as is empty")


def test_the_command_s_names_and_classes(cli, tmp_path, monkeypatch, cluster, make):
    """An API server takes the name, and a node without labels, which gets no image, is in no class."""
    monkeypatch.chdir(tmp_path)
    catalog = replace(make.catalog(make.variant("t:V1_-a", digest=f"sha256:{'a' * 64}")), version="V1_")
    (tmp_path / "t.json").write_text(json_documents.dump_json(catalog.to_json()))
    gpu, plain = make.host(make.gpu(0)), make.host()
    items = [
        cluster.node("a", cluster.own(gpu)),
        cluster.node("b", cluster.own(plain)),
        cluster.node("c", {}),
    ]
    (tmp_path / "nodes.json").write_text(json.dumps({"kind": "List", "items": items}))
    words = ("kubernetes", "render", "policy", "t:V1_", "--nodes", "nodes.json", "--catalog", "t.json")
    made = list(yaml.safe_load_all(cli(*words, "--on-unknown", "deny").out))
    assert {one["metadata"]["name"] for one in made} == {"t-v1"}
    server = ApiServer(made)
    assert server.mutate(pod("t:V1_", nodeSelector={CLASS: cluster.own(gpu)[CLASS]}))
    assert "no class of nodes matches" in server.refuse(pod("t:V1_", nodeSelector={CLASS: "!"}))
    variables = {one["name"] for one in made[0]["spec"]["variables"]}
    assert "class1" in variables
    assert "class2" not in variables
