"""The Helm chart renders the manifests of every installation. `tests/chart` asks Helm."""

import base64
import dataclasses
import itertools
import json
from importlib.metadata import version
from typing import Any

import jsonschema
import pytest
import yaml
from charting import CHART, installation_of, render_chart, values_of

from imagematrix.common.image_reference import REPOSITORY, TAG
from imagematrix.errors import UsageError
from imagematrix.integrations.kubernetes.install import certificates
from imagematrix.integrations.kubernetes.install.certificates import VALID, Tls
from imagematrix.integrations.kubernetes.install.install import (
    Installation,
    make_manifests,
    make_service_names,
)
from imagematrix.integrations.kubernetes.install.upgrade import LEFT
from imagematrix.selection.query import parse_where

TLS = Tls(chain=b"chain", key=b"key", authorities=b"authorities")
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
SETS = [
    dict(zip(("onUnknown", "pullSecret", "events", "allowCpu", "matchConditions"), chosen, strict=True))
    for chosen in itertools.product(("default", "deny"), ("", "logins"), *[(True, False)] * 3)
]
MORE = [
    {
        "images": ["reg.x/a:1", "reg:5000/b:2", "localhost/c:3"],
        "where": ["python=3.13", "cuda=12.*"],
        "timeoutSeconds": 30,
    },
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
    lists = {"images": ["r.x/x:1"], "excludeNamespaces": ["x"], "where": ["a=b"], "by": ["class"]}
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
        {"images": ["r.x/t:v1@sha256:1"]},
        {"images": ['r.x/t"x:v1']},
        {"images": ["r.x/t:v1", "r.x/t:v1"]},
        {"excludeNamespaces": ["A"]},
        {"kubelet": "data"},
        {"kubelet": "/data/"},
        {"onUnknown": "no"},
        {"timeoutSeconds": 31},
        {"devicePlugin": {"by": ["x"]}},
        {"devicePlugin": {"enabled": True}, "draDriver": {"enabled": True}},
        {"unknown": 1},
        {"tls": {"cert": "chain"}},
        {"tls": {"key": "key", "ca": "authorities"}},
    ],
)
def test_values_that_no_option_would_accept_are_refused(wrong):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values_of(**wrong), SCHEMA)


IMAGES = (
    *("r.x/t:v1", "reg:5000/ml/t:v1", "localhost/t:v1", "localhost:5000/t:V.1", "10.0.0.1/a__b/c-d.e:_1"),
    *("[::1]:5000/t:v1", "docker.io/library/t:v1", "REG.x/t:v1", f"r.x/t:{'v' * 128}"),
    *("ml/training:v1", "r.x/ML/t:v1", "r.x/t:-v", "r.x/t:v1\x01", "-x/y:z", "-r.x/y:z", "r.x/a\x0bb:v1"),
    *("$(HOSTNAME)/a:b", "r.x//t:v1", "r.x/t:", "127.1/t:v1", "r.x:0/t:v1", f"r.x/t:{'v' * 129}"),
)
CONDITIONS = (
    *("python=3.13", "cuda=12.*,march=<x&y>", "a>=1", "a == b", " a=b , c!=d", "my_axis=b c", "a=="),
    *("python", "=", "python=", "-h", "a b", "", "a=b,", ",a=b", "1=b", "a=b,c", "a=b\nc"),
)


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_that_the_command_refuses_is_refused(cli, image):
    words = ("kubernetes", "render", "install", "--program", "r.x/p:1", "--", image)
    assert is_valid(values_of(images=[image])) == (cli(*words).code == 0)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_that_the_command_refuses_is_refused(condition):
    try:
        parse_where([condition])
    except UsageError:
        assert not is_valid(values_of(where=[condition]))
    else:
        assert is_valid(values_of(where=[condition]))


def test_names_of_images_have_the_repositories_and_tags_of_references():
    pattern = SCHEMA["properties"]["images"]["items"]["pattern"]
    assert pattern.endswith(f"/{REPOSITORY}:{TAG.removeprefix('(?a)')}$")


def is_valid(values):
    return jsonschema.Draft7Validator(SCHEMA).is_valid(values)


def test_an_upgrade_keeps_the_certificate():
    secret, bundle = upgrade(None)
    assert (secret["data"]["ca.crt"], "previous-ca.crt" in secret["data"]) == (encoded(bundle), False)
    assert upgrade(secret) == (secret, bundle)
    renewed = upgrade(due(secret))
    assert upgrade(renewed[0]) == renewed


def test_the_authority_before_is_trusted_and_earlier_ones_are_not():
    secret, bundle = upgrade(None)
    for _ in range(3):
        alone, before = secret["data"]["ca.crt"], bundle
        secret, bundle = upgrade(due(secret))
        assert secret["data"]["previous-ca.crt"] == alone
        assert bundle.count(b"BEGIN CERTIFICATE") == 2
        assert base64.b64decode(alone) in bundle
        assert bundle != before


@pytest.mark.parametrize("before", ["given", "made"])
def test_another_given_certificate_leaves_the_authority_before_trusted(before):
    old, new = (certificates.make_certificate(make_service_names("space")) for _ in range(2))
    secret, bundle = upgrade(None, old if before == "given" else None)
    replaced, both = upgrade(secret, new)
    assert replaced["data"]["tls.crt"] == encoded(new.chain)
    assert both == new.authorities + b"\n" + bundle
    assert upgrade(replaced, new) == (replaced, both)
    made, trusted = upgrade(replaced)
    assert made["data"]["previous-ca.crt"] == encoded(new.authorities)
    assert new.authorities in trusted
    assert bundle not in trusted


def upgrade(secret, tls=None):
    """Return the Secret and the authorities of a release where the cluster has a Secret, or none."""
    parts = (tls.chain, tls.key, tls.authorities) if tls else (b"", b"", b"")
    given = dict(zip(("cert", "key", "ca"), map(bytes.decode, parts), strict=True))
    found = {one["kind"]: one for one in render_chart(values_of(tls=given), "space", secret)}
    (hook,) = found["MutatingWebhookConfiguration"]["webhooks"]
    return found["Secret"], base64.b64decode(hook["clientConfig"]["caBundle"])


def due(secret):
    """Return a Secret whose certificate is to be renewed."""
    metadata = secret["metadata"] | {"annotations": {"imagematrix.io/renew-after": "1"}}
    return secret | {"metadata": metadata}


def encoded(text):
    return base64.b64encode(text).decode()


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
