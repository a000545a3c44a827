"""The Helm chart: its templates stand for the manifests of every installation. `tests/chart` asks Helm."""

import base64
import dataclasses
import itertools
import json
from typing import Any

import jsonschema
import pytest
import yaml
from charting import installation_of

from imagematrix.integrations.kubernetes.install.certificates import Tls
from imagematrix.integrations.kubernetes.install.chart import templates
from imagematrix.integrations.kubernetes.install.chart.files import make_chart_files
from imagematrix.integrations.kubernetes.install.chart.nodes import (
    ABSENT,
    SKIPPED,
    Each,
    Joined,
    When,
    make_conditional,
    make_repeated,
)
from imagematrix.integrations.kubernetes.install.chart.templates import (
    DRA,
    EXPRESSIONS,
    PLUGIN,
    make_conditional_objects,
)
from imagematrix.integrations.kubernetes.install.chart.text import EACH, Number, Writer
from imagematrix.integrations.kubernetes.install.chart.values import VALUES, make_schema, render_defaults
from imagematrix.integrations.kubernetes.install.install import Installation, make_manifests

TLS = Tls(chain=b"chain", key=b"key", authorities=b"authorities")
CONDITIONS = {
    'eq $.Values.onUnknown "deny"': lambda values: values["onUnknown"] == "deny",
    "$.Values.pullSecret": lambda values: bool(values["pullSecret"]),
    "$.Values.matchConditions": lambda values: values["matchConditions"],
    "$.Values.events": lambda values: values["events"],
    "$.Values.allowCpu": lambda values: values["allowCpu"],
    PLUGIN: lambda values: values["devicePlugin"]["enabled"],
    DRA: lambda values: values["draDriver"]["enabled"],
    "$tls.renew": lambda _: False,
}
SETS = [
    dict(zip(("onUnknown", "pullSecret", "events", "allowCpu", "matchConditions"), chosen, strict=True))
    for chosen in itertools.product(("default", "deny"), ("", "logins"), *[(True, False)] * 3)
]
MORE = [
    {"images": ["r/a:1", "r/b:2", "r/c:3"], "where": ["python=3.13", "cuda=12.*"], "timeoutSeconds": 30},
    {"excludeNamespaces": ["a", "b"], "devicePlugin": {"enabled": True, "by": []}},
    {"devicePlugin": {"enabled": True, "by": ["product", "class"]}, "kubelet": "/data/kubelet"},
    {"draDriver": {"enabled": True}, "pullSecret": "logins", "kubelet": "/data/kubelet"},
    {"devicePlugin": {"enabled": False, "by": ["product"]}},
]


def given(**more):
    """Return the values of the chart with some changed."""
    values = yaml.safe_load(render_defaults()) | {"images": ["reg.example.com/ml/t:v1"], "program": "reg/p:1"}
    for key, value in more.items():
        values[key] = values[key] | value if isinstance(value, dict) else value
    jsonschema.validate(values, make_schema())
    return values


def evaluated(node, values, each=None):
    """Return a part as Helm would make it of these values."""
    if isinstance(node, When):
        return evaluated(node.then if CONDITIONS[node.condition](values) else node.other, values, each)
    if isinstance(node, dict):
        parts = {key: evaluated(part, values, each) for key, part in node.items()}
        return {key: part for key, part in parts.items() if part is not ABSENT}
    if isinstance(node, list):
        items = [one for item in node for one in repeated(item, values, each)]
        return [item for item in items if item is not ABSENT]
    if isinstance(node, Joined):
        elements = value_at(values, node.value)
        return node.separator.join(replaced(node.text, values, element) for element in elements)
    if isinstance(node, Number):
        return values["timeoutSeconds"]
    return replaced(node, values, each) if isinstance(node, str) else node


def repeated(item, values, each):
    """Yield the items that an item of a list stands for."""
    if isinstance(item, Each):
        for element in value_at(values, item.value):
            yield from (evaluated(one, values, element) for one in item.items)
    elif item is not SKIPPED:
        yield evaluated(item, values, each)


def replaced(text, values, each):
    """Return a text with the values that parts of it stand for."""
    for part, expression in sorted(EXPRESSIONS.items(), key=lambda pair: -len(pair[0])):
        if part in text:
            text = text.replace(part, text_of(expression, values, each))
    return text


def value_at(values, path):
    for key in path.split("."):
        values = values[key]
    return values


def text_of(expression, values, each):
    if expression == EACH:
        return each
    return {
        "$.Release.Namespace": "space",
        "$.Values.pullSecret": values["pullSecret"],
        "$.Values.kubelet": values["kubelet"],
        "($tls.cert | b64enc)": base64.b64encode(TLS.chain).decode(),
        "($tls.key | b64enc)": base64.b64encode(TLS.key).decode(),
        "($tls.ca | b64enc)": base64.b64encode(TLS.authorities).decode(),
    }.get(expression, values["program"])


@pytest.fixture(scope="module")
def made():
    return make_conditional_objects()


@pytest.mark.parametrize("more", [*SETS, *MORE], ids=json.dumps)
def test_the_objects_are_those_of_an_installation_with_the_same_options(made, more):
    values = given(**more)
    expected = [
        each for each in make_manifests(installation_of(values, "space"), TLS) if each["kind"] != "Namespace"
    ]
    found = [one for each in made.values() if (one := evaluated(each, values)) is not ABSENT]
    by_name = lambda one: (one["kind"], one["metadata"]["name"])  # noqa: E731
    assert sorted(found, key=by_name) == sorted(expected, key=by_name)


def test_every_option_of_an_installation_has_a_value():
    """An option that does not change what is written would be lost."""
    names = {field.name for field in dataclasses.fields(Installation)} - {"namespace"}
    usual = installation_of(given(), "x")
    changes = [installation_of(given(**other(value)), "x") for value in VALUES]
    changed = {name for name in names for each in changes if getattr(each, name) != getattr(usual, name)}
    assert changed == names


def other(value):
    """Return a change of one value."""
    texts = {"program": "reg/p:2", "onUnknown": "deny", "kubelet": "/data", "pullSecret": "x"}
    lists = {"images": ["r/x:1"], "excludeNamespaces": ["x"], "where": ["a=b"], "by": ["class"]}
    *outer, key = value.path
    new: Any = texts.get(key) or lists.get(key)
    if new is None:
        new = not value.default if isinstance(value.default, bool) else 7
    if key in {"cert", "key", "ca"}:
        new = "x"
    change = {key: new, "enabled": True} if key == "by" else {key: new}
    return {outer[0]: change} if outer else change


def test_the_files_are_a_chart():
    written = make_chart_files()
    chart = yaml.safe_load(written["Chart.yaml"])
    assert (chart["apiVersion"], chart["name"], chart["version"]) == ("v2", "imagematrix", "0.1.0")
    assert yaml.safe_load(written["values.yaml"])["images"] == []
    jsonschema.Draft7Validator.check_schema(json.loads(written["values.schema.json"]))
    assert {"templates/certificate.yaml", "templates/webhook-deployment.yaml"} < written.keys()
    joined = "".join(text for name, text in written.items() if name.startswith("templates"))
    assert "zz-" not in joined
    assert joined.count("{{- if") + joined.count("{{- range") + joined.count("{{- define") <= joined.count(
        "end "
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"images": ["t"]},
        {"images": ["t:v1"]},
        {"images": ["r/t:v1@sha256:1"]},
        {"images": ['r/t"x:v1']},
        {"images": ["r/t:v1", "r/t:v1"]},
        {"excludeNamespaces": ["A"]},
        {"kubelet": "data"},
        {"kubelet": "/data/"},
        {"onUnknown": "no"},
        {"timeoutSeconds": 31},
        {"devicePlugin": {"by": ["x"]}},
        {"devicePlugin": {"enabled": True}, "draDriver": {"enabled": True}},
        {"unknown": 1},
    ],
)
def test_values_that_no_option_would_accept_are_refused(wrong):
    values = yaml.safe_load(render_defaults())
    for key, value in wrong.items():
        values[key] = values[key] | value if isinstance(value, dict) else value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, make_schema())


class TestComparingManifests:
    """Dependencies that cannot be expressed are errors, never ignored."""

    def test_parts_are_left_out_or_replaced(self):
        base, off = {"a": 1, "b": [1, 2, 3], "c": "x"}, {"b": [1, 3], "c": "y"}
        made = make_conditional(base, base, off, "k")
        assert made == {
            "a": When(condition="k", then=1),
            "b": [1, When(condition="k", then=2), 3],
            "c": When(condition="k", then="x", other="y"),
        }
        twice = make_conditional(made, base, {"a": 1, "b": [1, 2, 3], "c": "z"}, "l")
        inner = When(condition="l", then="x", other="z")
        assert twice["c"] == When(condition="k", then=inner, other="y")

    @pytest.mark.parametrize("off", [{"a": [1], "b": 2}, {"a": [1, 2, 3]}, {"a": [3]}])
    def test_parts_that_only_others_have_are_an_error(self, off):
        base = {"a": [1, 2]}
        with pytest.raises(ValueError, match=r"only without|other items"):
            make_conditional(base, base, off, "k")

    def test_items_and_texts_are_repeated(self):
        one, two = ["x", "--n", "a", "y"], ["x", "--n", "a", "--n", "b", "y"]
        assert make_repeated(one, one, two, "v", ("a", "b")) == [
            "x",
            Each(value="v", items=("--n", "a")),
            SKIPPED,
            "y",
        ]
        joined = make_repeated("is a", "is a", "is a or is b", "v", ("a", "b"))
        assert joined == Joined(value="v", text="is a", separator=" or ")

    @pytest.mark.parametrize(
        ("one", "two"),
        [(["a"], ["a", "c"]), (["a", "b"], ["a"]), ("is a", "is b"), ({"x": "a"}, {"y": "a"}), (["a"], [])],
    )
    def test_what_is_no_repetition_is_an_error(self, one, two):
        with pytest.raises(ValueError, match="by repetition"):
            make_repeated(one, one, two, "v", ("a", "b"))

    def test_text_that_looks_like_a_template_is_an_error(self):
        with pytest.raises(ValueError, match="takes for a template"):
            list(Writer(expressions=EXPRESSIONS).write_lines({"a": "{{ x }}"}))

    def test_an_object_that_depends_on_both_drivers_is_an_error(self, monkeypatch):
        monkeypatch.setattr(templates, "CHANGES", {})
        real = templates._make_manifests

        def differing(installation):
            found = real(installation)
            found["Service", "imagematrix-webhook"]["spec"]["x"] = str(installation.dra)
            return found

        monkeypatch.setattr(templates, "_make_manifests", differing)
        with pytest.raises(ValueError, match="depends on"):
            make_conditional_objects()


def test_the_command_writes_to_an_empty_folder_only(cli, tmp_path):
    result = cli("kubernetes", "render", "chart", "-o", tmp_path / "chart")
    assert (result.code, result.out) == (0, "")
    written = make_chart_files()
    assert {name: (tmp_path / "chart" / name).read_text() for name in written} == written
    cli("kubernetes", "render", "chart", "-o", tmp_path / "chart").fails(2, "is not an empty folder")
    (tmp_path / "file").write_text("")
    assert "is not an empty folder" in cli("kubernetes", "render", "chart", "-o", tmp_path / "file").err
    cli("kubernetes", "render", "chart", "-o", tmp_path / "file" / "x").fails(2, "Not a directory")
    assert "Missing option '--output'" in cli("kubernetes", "render", "chart").err
