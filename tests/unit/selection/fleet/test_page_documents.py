"""The documents that the page of a fleet is completed with: hostile, damaged, or of another image."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.errors import UsageError
from imagematrix.selection.fleet.staleness import load_findings
from imagematrix.selection.fleet.storage import load_storage

SIZES: dict[str, Any] = {
    "schema": "imagematrix.sizes/v1",
    "image": "t",
    "version": "v1",
    "total": 111,
    "variants": [
        {"reference": "t:v1-a", "compressed": True, "size": 11, "layers": ["base", "a", "base"]},
        {"reference": "t:v1-b", "compressed": True, "size": 101, "layers": ["base", "b"]},
        {"reference": "t:v1-c", "compressed": True, "size": None, "layers": []},
        {"reference": "t:v1-other", "compressed": False, "size": 5, "layers": ["lost"]},
    ],
    "layers": {"base": {"size": 1}, "a": {"size": 10}, "b": {"size": 100}},
}
OUTDATED: dict[str, Any] = {
    "schema": "imagematrix.outdated/v1",
    "findings": [
        {
            "kind": "wheel",
            "name": "torch",
            "status": "outdated",
            "used": "2.8.0",
            "now": "2.9.0",
            "why": "the index has a newer release",
            "source": "https://pypi.org/simple",
            "date": None,
            "cells": [{"image": "t", "version": "v1", "cell": name, "reference": None} for name in "ab"],
            "hosts": ["one"],
        }
    ],
}
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3))
values = st.recursive(
    scalars,
    lambda some: st.lists(some, max_size=2) | st.dictionaries(st.text(max_size=3), some, max_size=2),
    max_leaves=4,
)


@pytest.fixture
def saved(tmp_path):
    """Call it with a document to get its file."""

    def write(document):
        path = tmp_path / "document.json"
        path.write_text(json.dumps(document))
        return path

    return write


@pytest.fixture
def three(make):
    return make.catalog(*(make.variant(f"t:v1-{name}") for name in "abc"))


def test_layers_that_variants_share_are_counted_once(saved, three):
    storage = load_storage(saved(SIZES), three)
    assert (storage.total, storage.unshared, storage.largest, storage.compressed) == (111, 112, 101, True)
    assert [storage.get_pull_size(f"t:v1-{name}") for name in "abc"] == [11, 101, None]
    assert [storage.get_unshared_size(f"t:v1-{name}") for name in "abc"] == [10, 100, None]
    assert storage.sum_sizes(["t:v1-a", "t:v1-c"]) == 11


def test_sizes_of_another_image_are_refused(saved, make):
    with pytest.raises(UsageError, match="has no variant of t:v1") as refused:
        load_storage(saved(SIZES), make.catalog(make.variant("t:v2-a")))
    assert refused.value.remedy == "write it with `imagematrix ls t:v1 --size --json`"


@pytest.mark.parametrize("layers", [{}, {"base": {"size": -1}}, {"base": 3}])
def test_sizes_without_their_layers_are_refused(saved, three, layers):
    with pytest.raises(UsageError, match=r"size is missing|not a number of bytes|expected an object"):
        load_storage(saved({**SIZES, "layers": layers}), three)


def test_sizes_may_all_be_unknown(saved, three):
    storage = load_storage(saved({**SIZES, "variants": SIZES["variants"][2:]}), three)
    assert (storage.total, storage.largest) == (0, 0)


def test_findings_count_their_cells(saved, conforms):
    (found,) = load_findings(saved(conforms(OUTDATED)))
    assert (found.kind, found.name, found.cells, found.images) == ("wheel", "torch", 2, ("t:v1",))
    assert found.hosts == ("one",)


@pytest.mark.parametrize("document", [[], {}, {"schema": "imagematrix.host/v1"}, SIZES])
def test_another_document_is_refused(saved, document):
    with pytest.raises(UsageError):
        load_findings(saved(document))


def places(value, path=()):
    """Yield the path of every value in a document."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))
        else:
            yield *path, key


@given(st.data())
def test_damaged_documents_are_read_or_refused(tmp_path_factory, make, data):
    path = tmp_path_factory.mktemp("page") / "damaged.json"
    catalog = make.catalog(make.variant("t:v1-a"))
    readers = (SIZES, lambda: load_storage(path, catalog).total), (OUTDATED, lambda: load_findings(path))
    for document, load in readers:
        where = data.draw(st.sampled_from([one for one in places(document) if one]))
        damaged = copy.deepcopy(document)
        parent = damaged
        for key in where[:-1]:
            parent = parent[key]
        parent[where[-1]] = data.draw(values)
        path.write_text(json.dumps(damaged))
        try:
            read: object = load()
        except UsageError as error:
            read = error
        assert "damaged.json" in str(read) if isinstance(read, UsageError) else read is not None
