"""JUnit XML: a test case for each cell, well-formed with any log."""

from xml.etree import ElementTree as ET

import junitparser
import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.build.reports.junit import format_junit
from imagematrix.build.reports.outcome import parse_report

CELLS = [
    {"cell": "a", "status": "built", "seconds": 1.25},
    {"cell": "b", "status": "failed", "seconds": 2, "error": "step 3\nERROR: exit code: 1"},
    {"cell": "c", "status": "stopped", "seconds": 0},
    {"cell": "d", "status": "up-to-date"},
    {
        "cell": "h",
        "status": "skipped",
        "seconds": 0,
        "error": "the image that it builds on was not built: base:v1-h",
    },
    {"cell": "e", "status": "other-shard"},
    {"cell": "f", "status": "excluded"},
    {"cell": "g", "status": "infeasible"},
]


def outcomes(cells):
    whole = [{"image": "ml/training", "version": "v1"} | cell for cell in cells]
    return parse_report({"schema": "imagematrix.build/v1", "cells": whole}, "x").outcomes


@pytest.fixture
def suites(tmp_path):
    """Call it with a JUnit document to get its suites as a JUnit parser reads them."""

    def read(document):
        path = tmp_path / "junit.xml"
        path.write_bytes(document)
        return list(junitparser.JUnitXml.fromfile(str(path)))

    return read


def test_every_cell_of_the_build_is_a_test_case(suites):
    (suite,) = suites(format_junit(outcomes(CELLS), lambda _: "the log"))
    assert (suite.tests, suite.failures, suite.errors, suite.skipped, suite.time) == (5, 1, 0, 2, 3.25)
    cases = list(suite)
    assert [(case.classname, case.name, case.time) for case in cases] == [
        ("ml/training:v1", "a", 1.25),
        ("ml/training:v1", "b", 2.0),
        ("ml/training:v1", "c", 0.0),
        ("ml/training:v1", "d", 0.0),
        ("ml/training:v1", "h", 0.0),
    ]
    assert [[type(result).__name__ for result in case.result] for case in cases] == [
        [],
        ["Failure"],
        ["Skipped"],
        [],
        ["Skipped"],
    ]
    assert [case.result[0].message for case in (cases[2], cases[4])] == [
        "the build was stopped",
        "the image that it builds on was not built: base:v1-h",
    ]
    (failure,) = cases[1].result
    assert (failure.message, failure.text) == ("ERROR: exit code: 1", "the log")


def test_empty_build_gives_a_valid_document(suites):
    (suite,) = suites(format_junit((), lambda _: ""))
    assert (suite.tests, suite.time) == (0, 0.0)


# An ESC would be removed together with the characters after it.
@given(st.text(st.characters(exclude_categories=(), exclude_characters="\x1b")))
def test_hostile_text_is_escaped(text):
    text += ']]></failure><failure message="x">&amp;<![CDATA[\x1b[0m\x00'
    failed = [{"cell": text, "status": "failed", "seconds": 1, "error": text}]
    document = ET.fromstring(format_junit(outcomes(failed), lambda _: text))  # noqa: S314 - the subject of the test
    assert [element.tag for element in document.iter()] == ["testsuites", "testsuite", "testcase", "failure"]
    (failure,) = document.iter("failure")
    assert failure.text.endswith(']]></failure><failure message="x">&amp;<![CDATA[\ufffd')


def test_tests_of_images_are_cases_of_their_own(suites):
    cells = [
        {"cell": "a", "status": "built", "seconds": 1, "test": {"outcome": "passed", "why": None}},
        {
            "cell": "b",
            "status": "failed",
            "seconds": 1,
            "error": "x",
            "test": {"outcome": "failed", "why": "x\ncode 3"},
        },
        {"cell": "c", "status": "up-to-date", "test": {"outcome": "not-tested", "why": "no GPU"}},
        {"cell": "d", "status": "built", "seconds": 1, "test": None},
    ]
    (suite,) = suites(format_junit(outcomes(cells), lambda _: "the log"))
    assert (suite.tests, suite.failures, suite.skipped) == (7, 2, 1)
    found = {case.name: [(type(one).__name__, one.message) for one in case.result] for case in suite}
    assert found["a test"] == []
    assert found["b test"] == [("Failure", "code 3")]
    assert found["c test"] == [("Skipped", "not tested here: no GPU")]
    assert "d test" not in found
