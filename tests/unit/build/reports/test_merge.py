"""Reading and merging Build documents: missing cells and contradictions are reported."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.build.executor.result import make_build_document
from imagematrix.build.plan.shard import Shard, select_shard
from imagematrix.build.reports.merge import merge_reports
from imagematrix.build.reports.outcome import load_report, parse_report
from imagematrix.errors import BuildError, UsageError

A, B = (f"sha256:{digit * 64}" for digit in "ab")


def cell(name, status, **more):
    result = {"image": "training", "version": "v1", "cell": name, "axes": {}, "status": status}
    result |= {"rule": None, "why": None, "reference": None, "input": None, "changed": []}
    if status in ("built", "failed", "stopped"):
        result |= {"seconds": 1.0, "digest": None, "reproducible": True, "log": None, "error": None}
    return result | more


def document(*cells, shard=None, where="x.json", kind="build", error=None):
    data = {"schema": f"imagematrix.{kind}/v1", "shard": shard, "error": error, "cells": list(cells)}
    return parse_report(data, where)


def statuses(merged):
    return {outcome.cell: outcome.status for outcome in merged.outcomes}


@pytest.fixture
def sharded(planned, carry_out):
    """Call it with numbers of shards of 3 to get their reports."""

    def call(*numbers):
        for number in numbers:
            plan = select_shard(planned(), Shard(number=number, count=3), {})
            yield make_build_document(plan, carry_out(plan))

    return call


def test_reports_of_all_shards_merge_into_a_whole(sharded, planned, conforms):
    documents = list(sharded(3, 1, 2))
    for one in documents:
        conforms(one)
    merged = merge_reports(parse_report(one, "x") for one in documents)
    assert merged.find_failure() is None
    whole = conforms(merged.to_json())
    assert whole["shard"] is None
    became = [(one["cell"], one["status"]) for one in whole["cells"]]
    assert [name for name, _ in became] == [item.cell.id for item in planned().items]
    assert Counter(status for _, status in became) == {"built": 12, "excluded": 4, "infeasible": 2}
    assert merge_reports([parse_report(whole, "x")]).to_json() == whole


def test_missing_shard_is_reported_with_its_cells(sharded, conforms):
    merged = merge_reports(parse_report(one, "x") for one in sharded(1, 3))
    error = merged.find_failure()
    assert (type(error), error.exit_code) == (BuildError, 6)
    lines = str(error).splitlines()
    assert lines[0] == "4 of 12 images were not built"
    assert lines[1].startswith("  no document has the outcome of: training:v1 cpu-")
    assert lines[1].count("training:v1 ") == 4
    assert lines[2] == "  no document for the shards: 2/3"
    document = conforms(merged.to_json())
    assert [one["status"] for one in document["cells"]].count("missing") == 4


def test_plan_document_reveals_missing_cells():
    planned = document(cell("a", "build"), cell("b", "build"), cell("c", "up-to-date"), kind="plan")
    merged = merge_reports([planned, document(cell("a", "built"))])
    assert statuses(merged) == {"a": "built", "b": "build", "c": "build"}
    assert "2 of 3 images were not built" in str(merged.find_failure())
    assert "outcome of: training:v1 b, training:v1 c" in str(merged.find_failure())
    rest = document(cell("b", "built"), cell("c", "failed"))
    assert statuses(merge_reports([planned, document(cell("a", "built")), rest]))["c"] == "failed"


def test_failed_cells_are_named():
    merged = merge_reports([document(cell("a", "built"), cell("b", "failed"), cell("c", "stopped"))])
    assert "2 of 3 images were not built\n  failed or stopped: training:v1 b, training:v1 c" in str(
        merged.find_failure()
    )


def test_retry_replaces_a_failure():
    tries = [
        document(cell("a", "failed", error="no"), cell("b", "other-shard"), shard="1/2"),
        document(cell("a", "other-shard"), cell("b", "built", digest=A), shard="2/2"),
        document(cell("a", "built", digest=B), cell("b", "other-shard"), shard="1/2"),
    ]
    merged = merge_reports(tries)
    assert statuses(merged) == {"a": "built", "b": "built"}
    assert merged.find_failure() is None


def test_long_list_of_failures_is_shortened():
    merged = merge_reports([document(*(cell(f"c{number}", "failed") for number in range(25)))])
    assert str(merged.find_failure()).endswith("c19 and 5 more")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (cell("a", "built", digest=A), cell("a", "built", digest=B), f"{A} in 1.json, {B} in 2.json"),
        (
            cell("a", "built", input=A),
            cell("a", "up-to-date", input=B),
            f"input {A} in 1.json, input {B} in 2.json",
        ),
        (
            cell("a", "built", digest=A, libzstd="1.5.6"),
            cell("a", "built", digest=B, libzstd="1.5.7"),
            f"{A} by libzstd 1.5.6 in 1.json, {B} by libzstd 1.5.7 in 2.json",
        ),
        (cell("a", "excluded"), cell("a", "built"), "excluded in 1.json, built in 2.json"),
        (cell("a", "infeasible"), cell("a", "other-shard"), "infeasible in 1.json, other-shard in 2.json"),
    ],
)
def test_contradictions_are_rejected(one, other, expected):
    with pytest.raises(BuildError, match="contradict") as caught:
        merge_reports([document(one, where="1.json"), document(other, where="2.json")])
    assert f"training:v1 a: {expected}" in str(caught.value)
    assert caught.value.remedy


def test_other_shard_s_cells_do_not_contradict():
    mine = document(cell("a", "built", input=A), cell("b", "other-shard", input=A), shard="1/2")
    theirs = document(cell("a", "other-shard", input=B), cell("b", "built", input=B), shard="2/2")
    assert merge_reports([mine, theirs]).find_failure() is None


STATUS = st.sampled_from(["built", "failed", "stopped", "up-to-date", "other-shard"])


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), STATUS), max_size=5), st.randoms())
def test_document_order_does_not_matter(cells, random):
    reports = [document(*(cell(name, status) for name, status in some.items())) for some in cells]
    shuffled = list(reports)
    random.shuffle(shuffled)
    assert statuses(merge_reports(reports)) == statuses(merge_reports(shuffled))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ([], "expected an object"),
        ({"schema": "imagematrix.host/v1"}, "schema is 'imagematrix.host/v1'"),
        ({"schema": "imagematrix.build/v2"}, "unsupported schema"),
        ({"schema": "imagematrix.build/v1"}, "cells: is missing"),
        ({"schema": "imagematrix.build/v1", "cells": [1]}, r"cells\[0\]: expected an object"),
        ({"schema": "imagematrix.build/v1", "cells": [cell("a", "maybe")]}, "'maybe' is not one of"),
        ({"schema": "imagematrix.build/v1", "cells": [cell("a", "built", seconds=-1)]}, "seconds"),
        ({"schema": "imagematrix.build/v1", "cells": [cell("a", "built", seconds="1")]}, "seconds"),
        ({"schema": "imagematrix.build/v1", "cells": [cell("a", "built", seconds=float("nan"))]}, "seconds"),
        ({"schema": "imagematrix.build/v1", "cells": [cell("a", "built", seconds=10**400)]}, "seconds"),
        ({"schema": "imagematrix.build/v1", "cells": [cell("a", "built", seconds=True)]}, "seconds"),
    ],
)
def test_invalid_document_is_rejected(data, expected):
    with pytest.raises(UsageError, match=expected) as caught:
        parse_report(data, "x.json")
    assert str(caught.value).startswith("x.json: ")


def test_invalid_shard_is_rejected():
    with pytest.raises(UsageError, match="invalid shard"):
        merge_reports([document(shard="0/0")])


def test_missing_file_is_rejected(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        load_report(tmp_path / "nowhere.json")


def test_whole_document_needs_no_documents_of_shards():
    whole = document(cell("a", "built"), cell("b", "built"))
    merged = merge_reports(
        [whole, document(cell("a", "built"), cell("b", "other-shard"), shard="1/2", where="y.json")]
    )
    assert merged.find_failure() is None
    assert merged.missing == ()


def test_error_of_a_whole_build_is_a_failure_until_its_cells_are_built():
    ended = document(shard="1/2", error="the engine is gone", where="b1.json")
    error = merge_reports([ended]).find_failure()
    assert "b1.json: the engine is gone" in str(error)
    assert merge_reports([ended]).to_json()["error"] == "b1.json: the engine is gone"
    other = document(cell("a", "other-shard"), cell("b", "built"), shard="2/2", where="b2.json")
    assert "no document has the outcome of: training:v1 a\n  b1.json: the engine is gone" in str(
        merge_reports([ended, other]).find_failure()
    )
    again = document(cell("a", "built"), cell("b", "other-shard"), shard="1/2")
    merged = merge_reports([ended, other, again])
    assert merged.find_failure() is None
    assert merged.to_json()["error"] is None
