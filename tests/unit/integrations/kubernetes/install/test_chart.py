"""The Helm chart renders the manifests of every installation. `tests/chart` asks Helm."""

import dataclasses
import itertools
import json
from importlib.metadata import version
from typing import Any

import jsonschema
import pytest
import yaml
from charting import CHART, installation_of, render_chart, values_of

from imagematrix.integrations.kubernetes.install.certificates import VALID, Tls
from imagematrix.integrations.kubernetes.install.install import (
    Installation,
    make_manifests,
    make_service_names,
)
from imagematrix.integrations.kubernetes.install.upgrade import LEFT

TLS = Tls(chain=b"chain", key=b"key", authorities=b"authorities")
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
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


@pytest.mark.parametrize("more", [*SETS, *MORE], ids=json.dumps)
def test_the_chart_renders_what_an_installation_with_the_same_options_is(more):
    tls = {"cert": TLS.chain.decode(), "key": TLS.key.decode(), "ca": TLS.authorities.decode()}
    values = values_of(**more, tls=tls)
    jsonschema.validate(values, SCHEMA)
    expected = [
        each for each in make_manifests(installation_of(values, "space"), TLS) if each["kind"] != "Namespace"
    ]
    by_name = lambda one: (one["kind"], one["metadata"]["name"])  # noqa: E731
    assert sorted(render_chart(values, "space"), key=by_name) == sorted(expected, key=by_name)


def values_in(schema, path=()):
    """Yield the path of each value, and its schema."""
    for key, value in schema["properties"].items():
        if "properties" in value:
            yield from values_in(value, (*path, key))
        elif key != "global":  # Helm's own
            yield (*path, key), value


def test_the_values_have_the_defaults_and_comments_of_their_schema():
    lines = []
    for path, value in values_in(SCHEMA):
        *outer, key = path
        if f"{''.join(outer)}:" not in lines and outer:
            lines.append(f"{outer[0]}:")
        pad = "  " * len(outer)
        lines += [f"{pad}# {value['description']}", f"{pad}{key}: {json.dumps(value['default'])}"]
    assert (CHART / "values.yaml").read_text().splitlines() == lines


def test_every_option_of_an_installation_has_a_value():
    """An option that does not change what is written would be lost."""
    names = {field.name for field in dataclasses.fields(Installation)} - {"namespace"}
    usual = installation_of(values_of(), "x")
    changes = [installation_of(values_of(**other(*value)), "x") for value in values_in(SCHEMA)]
    changed = {name for name in names for each in changes if getattr(each, name) != getattr(usual, name)}
    assert changed == names


def other(path, schema):
    """Return a change of one value."""
    texts = {"program": "reg/p:2", "onUnknown": "deny", "kubelet": "/data", "pullSecret": "x"}
    lists = {"images": ["r/x:1"], "excludeNamespaces": ["x"], "where": ["a=b"], "by": ["class"]}
    *outer, key = path
    new: Any = texts.get(key) or lists.get(key)
    if new is None:
        new = not schema["default"] if isinstance(schema["default"], bool) else 7
    if key in {"cert", "key", "ca"}:
        new = "x"
    change = {key: new, "enabled": True} if key == "by" else {key: new}
    return {outer[0]: change} if outer else change


def test_a_certificate_that_helm_makes_is_like_ours():
    """It is for the same names, is valid as long, and is renewed as early."""
    text = (CHART / "templates/certificate.yaml").read_text()
    names = " ".join(f'(printf "{name}" $.Release.Namespace)' for name in make_service_names("%s"))
    assert f"nil (list {names}) {VALID.days} $authority" in text
    assert f'genCA "imagematrix webhook authority" {VALID.days} }}}}' in text
    assert f"add (now | unixEpoch | int64) {(VALID - LEFT).days * 24 * 3600} | toString" in text


def test_the_chart_is_of_this_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["apiVersion"], chart["name"]) == ("v2", "imagematrix")
    assert chart["version"] == chart["appVersion"] == version("imagematrix")
    jsonschema.Draft7Validator.check_schema(SCHEMA)


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
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values_of(**wrong), SCHEMA)


def test_the_command_writes_to_an_empty_folder_only(cli, tmp_path):
    result = cli("kubernetes", "render", "chart", "-o", tmp_path / "chart")
    assert (result.code, result.out) == (0, "")
    assert contents(tmp_path / "chart") == contents(CHART)
    cli("kubernetes", "render", "chart", "-o", tmp_path / "chart").fails(2, "is not an empty folder")
    (tmp_path / "file").write_text("")
    assert "is not an empty folder" in cli("kubernetes", "render", "chart", "-o", tmp_path / "file").err
    cli("kubernetes", "render", "chart", "-o", tmp_path / "file" / "x").fails(2, "Not a directory")
    assert "Missing option '--output'" in cli("kubernetes", "render", "chart").err


def contents(folder):
    """Return the content of each file in a folder."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
