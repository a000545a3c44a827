"""Warm images: documents and labels round-trip, damage is named, and a match keeps what it cannot read."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.common.json_documents import Fields
from imagematrix.errors import UsageError
from imagematrix.images.catalog.catalog import Catalog
from imagematrix.images.catalog.warm_image import (
    FACTS,
    MOST_FLAGS,
    MOST_WORDS,
    WarmImage,
    WarmInput,
    WarmLabel,
    WarmMatch,
    compute_key,
    make_warm_tag,
)

BASE, OTHER, KEY = (f"sha256:{digit * 64}" for digit in "abc")
MATCH = {
    "cpu": {"flags": ["avx2", "fma"], "name": "EPYC", "vendor": "AuthenticAMD", "without": ["avx512f"]},
    "cpus": 2,
    "gpus": {"compute": "9.0", "count": 1, "memory_mib": 81559, "mig": "", "name": "NVIDIA H100"},
    "user_mode": "580.65.06",
}
WARM = {
    "base": BASE,
    "reference": "training:v1-warm-aaaaaaaaaaaa-cccccccccccc",
    "digest": OTHER,
    "size": 12345,
    "match": MATCH,
    "inputs": {"model": "/models/m"},
    "schema": 1,
}
LABEL = {
    "schema": 1,
    "base": BASE,
    "key": KEY,
    "match": MATCH,
    "command": ["python", "-m", "warm"],
    "inputs": {"model": {"path": "/models/m", "digest": OTHER}},
    "date": "2026-11-29T12:00:00Z",
    "seconds": {"cold": 48.2, "warm": 11.0},
    "tools": {"inductor": "2.8.0", "triton": None},
    "content": "opaque",
    "proofs": {"image-user": "proved", "root": "missed"},
    "reproducible": False,
    "why_not_reproducible": "compilers write what they measured",
}
VARIANT = {
    "reference": "training:v1-x",
    "digest": BASE,
    "platform": "linux/amd64",
    "cuda": None,
    "cubins": [],
    "ptx": [],
    "compressed_fatbin": False,
    "driver": None,
    "march": None,
    "cpu_flags": [],
    "vendor": None,
    "size": 1,
}
DOCUMENT = {"schema": "imagematrix.catalog/v1", "image": "training", "version": "v1", "variants": [VARIANT]}


def test_a_catalog_keeps_its_warm_images(conforms):
    catalog = Catalog.from_json(DOCUMENT | {"warm": [WARM]})
    assert catalog.to_json() == DOCUMENT | {"prefer": [], "warm": [WARM]}
    conforms(catalog.to_json())
    assert catalog.warm[0].match == WarmMatch.from_json(MATCH)
    assert catalog.named(f"training@{BASE}").warm == catalog.warm
    assert catalog.without_warm().to_json() == catalog.to_json(), "it is what a store keeps"
    assert not catalog.without_warm().named(f"training@{BASE}").starts_warm


def test_a_catalog_without_warm_images_is_as_before():
    catalog = Catalog.from_json(DOCUMENT)
    assert catalog.to_json() == DOCUMENT | {"prefer": []}
    assert catalog.without_warm() is catalog


def test_a_warm_image_of_no_variant_is_left_out():
    second = VARIANT | {"reference": "training:v1-y", "digest": OTHER}
    data = DOCUMENT | {
        "variants": [VARIANT, second],
        "warm": [WARM, WARM | {"base": OTHER}, WARM | {"base": KEY}],
    }
    catalog = Catalog.from_json(data)
    assert [warm.base for warm in catalog.warm] == [BASE, OTHER]
    assert [warm.base for warm in catalog.named("training:v1-y").warm] == [OTHER]
    assert [warm.base for warm in catalog.known_as("training:v1-x").warm] == [BASE]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base": "sha256:1"}, "warm[0]: base: 'sha256:1' is not a sha256 digest"),
        ({"digest": None}, "warm[0]: digest: expected a string, found null"),
        ({"reference": "-x"}, "warm[0]: reference: '-x' is not an image reference"),
        ({"match": None}, "warm[0]: match: is missing (expected an object)"),
        ({"match": []}, "warm[0]: match: expected an object, found a list"),
        ({"schema": 0}, "warm[0]: schema: 0 is no version of a label"),
        ({"inputs": {"model": "m"}}, "warm[0]: inputs: model: 'm' is not an absolute path"),
        ({"inputs": {"a b": "/m"}}, "warm[0]: inputs: has more than 100 names, or one of another form"),
        ({"inputs": {"model": "/m\n"}}, "warm[0]: inputs: model: is longer than 4096 letters"),
    ],
)
def test_a_damaged_warm_image_is_named(change, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        Catalog.from_json(DOCUMENT | {"warm": [WARM | change]})


def test_a_label_round_trips():
    label = WarmLabel.from_json(json.loads(json.dumps(LABEL)))
    assert label.to_json() == LABEL
    assert label.inputs == (WarmInput(name="model", path="/models/m", digest=OTHER),)
    image = label.make_image("training:v1-warm-aaaaaaaaaaaa-cccccccccccc", OTHER, 12345)
    assert image == WarmImage.from_json(Fields(WARM, "warm"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema: 2 is newer than this release, which reads 1"),
        ({"key": "x"}, "key: 'x' is not a sha256 digest"),
        ({"command": []}, "command: is empty"),
        ({"command": ["a"] * (MOST_WORDS + 1)}, "command: is empty, or has more than 1000 words"),
        ({"command": ["a" * 70_000]}, "command: is empty, or has more than 1000 words or 65536 letters"),
        ({"command": ["a\0"]}, "command: has a null character"),
        ({"inputs": {"m": None}}, "inputs: m: expected an object"),
        ({"inputs": {"m": {"path": "/m", "digest": "1"}}}, "inputs: m: digest: '1' is not a sha256 digest"),
        ({"date": "today"}, "date: 'today' is not a time"),
        ({"seconds": {"cold": -1}}, "seconds: cold: expected a finite, non-negative number"),
        ({"seconds": {"cold": float("nan")}}, "seconds: cold: expected a finite, non-negative number"),
        ({"tools": {"numba": "\x1b[1m"}}, "tools: numba: is longer than 4096 letters, or has control"),
        ({"proofs": {"root": "perhaps"}}, "proofs: root: 'perhaps' is not one of proved, missed"),
        ({"proofs": {f"p{i}": "proved" for i in range(101)}}, "proofs: has more than 100 names"),
        ({"reproducible": True}, "reproducible: is true"),
        ({"content": 1}, "content: expected a string"),
    ],
)
def test_a_damaged_label_is_named(change, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        WarmLabel.from_json(LABEL | change)


@pytest.mark.parametrize(
    "stated",
    [
        {"gpus": None},
        {"gpus": {}},
        {"gpus": {"count": True}},
        {"gpus": {"count": 1.0}},
        {"gpus": {"count": -1}},
        {"gpus": {"nvlink": 4}},
        {"gpus.count": 1},
        {"cpu": {"flags": "avx2"}},
        {"cpu": {"flags": ["AVX 2"]}},
        {"cpu": {"flags": ["a"] * (MOST_FLAGS + 1)}},
        {"cpu": {"name": "a\nb"}},
        {"kernel": "6.1"},
        {"cpus": None},
    ],
)
def test_what_cannot_be_read_is_a_fact_that_no_host_has(stated):
    match = WarmMatch.from_json(stated)
    assert [value for _, value in match.facts] == [None]
    assert WarmMatch.from_json(match.to_json()).facts == match.facts


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.sampled_from(["avx2", "fma", "x", ""]), max_size=3),
    st.dictionaries(st.text(max_size=3), st.none(), max_size=2),
)
KEYS = st.sampled_from([*FACTS, "gpus", "cpu", "other", "cpu.other"])


@given(st.dictionaries(KEYS, VALUES))
def test_any_object_is_a_match_that_round_trips(stated):
    data: dict[str, object] = {}
    for key, value in stated.items():
        member, _, name = key.rpartition(".")
        inner = data.setdefault(member, {}) if member else data
        if isinstance(inner, dict):
            inner[name] = value
    match = WarmMatch.from_json(data)
    assert len(match.facts) >= len(data)  # nothing that is stated gets lost
    assert WarmMatch.from_json(json.loads(json.dumps(match.to_json()))) == match
    hash(match)


def test_the_key_has_everything_that_decides():
    match, warm_up = WarmMatch.from_json(MATCH), {"command": ["a"], "inputs": {"model": "/m"}}
    keys = {
        compute_key(BASE, warm_up, {"model": KEY}, match),
        compute_key(OTHER, warm_up, {"model": KEY}, match),
        compute_key(BASE, warm_up | {"command": ["b"]}, {"model": KEY}, match),
        compute_key(BASE, warm_up, {"model": OTHER}, match),
        compute_key(BASE, warm_up, {"other": KEY}, match),
        compute_key(BASE, warm_up, {"model": KEY}, WarmMatch.from_json(MATCH | {"cpus": 3})),
    }
    assert len(keys) == 6
    assert compute_key(BASE, dict(reversed(warm_up.items())), {"model": KEY}, match) in keys


def test_the_tag_is_that_of_no_variant():
    assert make_warm_tag("v1", BASE, KEY) == "v1-warm-aaaaaaaaaaaa-cccccccccccc"
