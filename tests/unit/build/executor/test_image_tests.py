"""When images are tested: before they are stored, also those that are taken over; and what is reported."""

import pytest

from imagematrix.build.executor.image_tester import ImageTestError, ImageTestOutcome, ImageTestResult
from imagematrix.build.executor.result import combine_failures, make_build_document
from imagematrix.build.plan.build_inputs import parse_build_inputs
from imagematrix.errors import BuildError, UsageError

CPU = "cuda=none,march=znver4"
TEST = ("version: v1", "version: v1\n    test: [check]")
PASSED = ImageTestResult(outcome=ImageTestOutcome.PASSED)
UNTESTED = ImageTestResult(outcome=ImageTestOutcome.NOT_TESTED, why="no GPU")


@pytest.fixture(autouse=True)
def _no_matrix_in_the_context(project):
    (project().parent / ".dockerignore").write_text("*\n")


@pytest.fixture
def carry_out(carry_out, tester):
    """Call it with a plan of one cell to get its result."""

    def call(plan):
        (result,) = carry_out(plan, tester=tester)
        return result

    return call


@pytest.mark.parametrize("layers", [None, []])
def test_image_is_tested_before_it_is_stored(planned, carry_out, backend, tester, layers, conforms):
    backend.layers = layers
    tester.results["cpu-znver4"] = PASSED
    plan = planned(TEST, only=CPU)
    result = carry_out(plan)
    assert (result.status, result.test) == ("built", PASSED)
    assert tester.calls[0][:2] == ("cpu-znver4", "made")
    assert tester.noted == {"cpu-znver4": PASSED}
    document = conforms(make_build_document(plan, [result]))
    assert document["cells"][0]["test"] == {"outcome": "passed", "why": None}


def test_failed_test_fails_its_cell_and_stores_nothing(planned, carry_out, backend, tester, conforms):
    tester.errors["cpu-znver4"] = ImageTestError("last words", "its test failed with exit code 3")
    plan = planned(TEST, only=CPU)
    result = carry_out(plan)
    assert (result.status, result.test.outcome) == ("failed", "failed")
    assert isinstance(combine_failures([result]), BuildError)
    assert combine_failures([result]).exit_code == 6
    assert not backend.images
    assert not tester.noted
    (cell,) = conforms(make_build_document(plan, [result]))["cells"]
    assert cell["test"]["why"].endswith("its test failed with exit code 3")


def test_image_of_an_earlier_version_is_tested_before_it_is_taken_over(planned, carry_out, backend, tester):
    backend.layers = []
    carry_out(planned(TEST, only=CPU))
    kept = dict(backend.images)
    plan = planned(("version: v1", "version: v2\n    test: [check]"), only=CPU)
    tester.errors["cpu-znver4"] = ImageTestError("no")
    assert carry_out(plan).status == "failed"
    assert backend.images == kept
    tester.errors.clear()
    tester.results["cpu-znver4"] = UNTESTED
    result = carry_out(plan)
    assert (result.status, result.test) == ("adopted", UNTESTED)
    cell, how, reference, digest = tester.calls[-1]
    assert (cell, how, digest) == ("cpu-znver4", "stored", backend.inspect_image(reference).digest)
    assert reference in kept


def test_test_is_no_part_of_the_identity_and_runs_again_if_it_is_due(
    planned, carry_out, backend, tester, conforms
):
    carry_out(planned(only=CPU))
    made = len(backend.called("make"))
    plan = planned(TEST, only=CPU)
    assert [item.status for item in plan.items] == ["up-to-date"]
    tester.results["cpu-znver4"] = UNTESTED
    (cell,) = conforms(make_build_document(plan, [], tester=tester))["cells"]
    assert cell["test"] == {"outcome": "not-tested", "why": "no GPU"}
    tester.dues.add("cpu-znver4")
    tester.results["cpu-znver4"] = PASSED
    result = carry_out(plan)
    assert (result.status, result.test) == ("tested", PASSED)
    assert len(backend.called("make")) == made, "nothing was rebuilt"
    tester.errors["cpu-znver4"] = ImageTestError("no")
    assert carry_out(plan).status == "failed"
    assert len(backend.images) == 1, "the image stays"


def test_secrets_of_tests_are_known_and_read(planned, monkeypatch, tmp_path):
    test = "test: {command: a, secrets: [token, other]}"
    (item,) = planned(("version: v1", f"version: v1\n    {test}"), only=CPU).items
    (tmp_path / "file").write_bytes(b"from a file")
    monkeypatch.setenv("SECRET", "from a variable")
    given = parse_build_inputs([f"id=token,src={tmp_path}/file", "id=other,env=SECRET"])
    given.require_known([item.cell.image])
    assert "secrets" not in given.list_components(item.cell.image)
    assert (given.read_secret("token"), given.read_secret("other")) == (b"from a file", b"from a variable")
    with pytest.raises(UsageError, match="the secret absent is missing"):
        given.read_secret("absent")
