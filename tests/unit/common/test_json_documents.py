"""Untrusted documents raise one clear error, whatever they contain."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from imagematrix.common import json_documents
from imagematrix.errors import UsageError
from imagematrix.hardware.host.host import Host
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.selection.selector import explain


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "x:1:1: not JSON: Expecting value"),
        (b'{\n  "a": }', "x:2:8: not JSON: Expecting value"),
        (b"\xff", "x: not UTF-8 text"),
        (b'"\xff"', "x: not UTF-8 text"),
        (b"[" * 200_000, "x: nested too deeply"),
        (b'{"a":' * 200_000, "x: nested too deeply"),
        (b"1" * 5000, "x: Exceeds the limit"),
    ],
)
def test_invalid_json_is_rejected(raw, expected):
    with pytest.raises(UsageError) as caught:
        json_documents.parse_json(raw, "x")
    assert str(caught.value).startswith(expected)


def test_file_size_is_limited(tmp_path):
    path = tmp_path / "host.json"
    path.write_text("[1, 2]")
    assert json_documents.read_json(path, limit=6) == [1, 2]
    with pytest.raises(UsageError, match=rf"{path}: exceeds 0 MiB"):
        json_documents.read_json(path, limit=5)
    with pytest.raises(UsageError, match="missing: No such file or directory"):
        json_documents.read_json(tmp_path / "missing")
    with pytest.raises(UsageError, match="Is a directory"):
        json_documents.read_json(tmp_path)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("007", 7),
        ("9" * 9, 10**9 - 1),
        ("9" * 10, None),
        ("", None),
        ("-1", None),
        ("\u0663", None),
    ],
)
def test_natural_numbers_are_parsed(text, number):
    assert json_documents.parse_natural(text) == number


def test_documents_are_dumped_readably():
    assert json_documents.dump_json({"b": "é", "a": []}) == '{\n  "b": "é",\n  "a": []\n}\n'


@pytest.mark.parametrize("data", [{}, {"spec": None}, {"spec": {}}])
def test_an_absent_object_is_read_as_an_empty_one(data):
    fields = json_documents.Fields(data, "x")
    assert (fields.get_object_or_none("spec") is None) == (data != {"spec": {}})
    spec = fields.get_object_or_empty("spec")
    assert spec.data == {}
    with pytest.raises(UsageError, match=r"^x: spec: name is missing"):
        spec.get_text("name")
    with pytest.raises(UsageError, match="spec: expected an object, found a list"):
        json_documents.Fields({"spec": []}, "x").get_object_or_empty("spec")


@pytest.mark.parametrize(
    ("read", "value", "expected"),
    [
        ("get_text_or_none", 9.0, "x: key: expected a string, found a number"),
        ("get_integer", True, "x: key: expected an integer, found true or false"),
        ("get_integers", [1, "2"], "x: key[1]: expected an integer, found a string"),
        ("get_texts", "none", "x: key: expected a list, found a string"),
        ("get_texts", ["a", None], "x: key[1]: expected a string, found null"),
        ("list_objects", [{}, []], "x: key[1]: expected an object, found a list"),
    ],
)
def test_a_value_of_another_kind_is_refused(read, value, expected):
    with pytest.raises(UsageError) as caught:
        tuple(getattr(json_documents.Fields({"key": value}, "x"), read)("key"))
    assert str(caught.value) == expected


def test_objects_of_a_list_know_their_place():
    (inner,) = json_documents.Fields({"key": [{"a": None}]}, "x").list_objects("key")
    assert inner.get_text_or_none("a") is None
    with pytest.raises(UsageError, match=r"^x: key\[0\]: b is missing"):
        inner.get_text("b")


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ("imagematrix.host/v2", "x: unsupported schema 'imagematrix.host/v2'"),
        ("imagematrix.catalog/v1", "x: schema is 'imagematrix.catalog/v1', expected 'imagematrix.host/v1'"),
    ],
)
def test_another_schema_is_refused(schema, expected):
    with pytest.raises(UsageError) as caught:
        json_documents.Fields({"schema": schema}, "x").require_schema("imagematrix.host/v1")
    assert str(caught.value).startswith(expected)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["8.9", "550.163.01", "12.4", "89", "exact", "host", "10" * 300, "linux/amd64"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
PATHS = st.lists(st.integers(0, 11), min_size=1, max_size=4)


def spoil(value, path, junk):
    """Return `value` with `junk` at `path`."""
    if isinstance(value, dict) and value and path:
        key = sorted(value)[path[0] % len(value)]
        return value | {key: spoil(value[key], path[1:], junk)}
    if isinstance(value, list) and value and path:
        place = path[0] % len(value)
        return [*value[:place], spoil(value[place], path[1:], junk), *value[place + 1 :]]
    return junk


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_arbitrary_host_raises_only_usage_errors(data, profiles, shipped_catalog):
    good = json.loads(profiles[data.draw(st.sampled_from(["mig", "mixed", "laptop"]))].read_text())
    spoilt = spoil(good, data.draw(PATHS), data.draw(JSON))
    try:
        result: Any = explain(Host.from_json(spoilt), shipped_catalog).to_json()
    except UsageError as error:
        assert str(error).startswith("host")  # noqa: PT017 - some junk is valid
        return
    assert len(result["candidates"]) == len(shipped_catalog.variants)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_arbitrary_catalog_raises_only_usage_errors(data, profiles, shipped_catalog):
    few = shipped_catalog.variants[-2:]
    good = Catalog(image="training", version="v1", variants=few).to_json()
    spoilt = spoil(good, data.draw(PATHS), data.draw(JSON))
    try:
        result = Catalog.from_json(spoilt)
    except UsageError as error:
        assert str(error).startswith("catalog")  # noqa: PT017 - some junk is valid
        return
    assert explain(Host.load(profiles["mig"]), result).to_json()["image"] == result.image


@given(st.text(max_size=20) | JSON.map(json.dumps))
def test_arbitrary_label_raises_only_usage_errors(text):
    with pytest.raises(UsageError, match=r"^t:x: "):
        labels.read_variant({labels.VARIANT: text}, reference="t:x", digest=None, size=None)


@given(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_arbitrary_bytes_raise_only_usage_errors(raw):
    try:
        json_documents.parse_json(raw, "x")
    except UsageError as error:
        assert str(error).startswith("x:")  # noqa: PT017 - some bytes are JSON
