"""Output for GitHub Actions and GitLab, which untrusted text cannot inject commands into."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from imagematrix.build.reports.outcome import DROPPED, OPEN, STATUSES, parse_report
from imagematrix.cli.shared import ci

HOSTILE = "\x1b[0Ksection_end:1:x\r\x1b[0K\n::error::pwned\n##[error]x\n::endgroup::\n%0A::set-output"


def outcomes(*cells):
    whole = [{"image": "training", "version": "v1"} | cell for cell in cells]
    return parse_report({"schema": "imagematrix.build/v1", "cells": whole}, "x").outcomes


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"GITHUB_ACTIONS": "true"}, "github"),
        ({"GITLAB_CI": "true"}, "gitlab"),
        ({"GITHUB_ACTIONS": "false", "GITLAB_CI": ""}, None),
    ],
)
def test_ci_system_is_detected(monkeypatch, variables, expected):
    for name in ("GITHUB_ACTIONS", "GITLAB_CI"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ci.find_ci_system() == expected


def commands(text):
    """Return the workflow commands that a GitHub runner would execute in `text`."""
    result = []
    for line in text.split("\n"):
        command = re.match(r"\s*::([a-z0-9-]+)(?: ([^:]*))?::(.*)", line) or re.search(
            r"##\[([a-z]+)()\](.*)", line
        )
        if command:
            result.append(command.groups())
    return result


@given(st.text() | st.just(HOSTILE), st.text() | st.just(HOSTILE))
def test_untrusted_text_contains_no_github_commands(text, headline):
    output = ci.format_failure("github", "training:v1 a,b", headline, text)
    (group, end, error) = commands(output)
    assert group == ("group", None, "training:v1 a,b: failed")
    assert end == ("endgroup", None, "")
    assert error[:2] == ("error", "title=training%3Av1 a%2Cb")
    assert output.split("\n")[-1] == f"::error {error[1]}::{error[2]}"


def test_values_are_escaped_for_github():
    output = ci.format_failure("github", "a", "50% of\ntwo", "text")
    assert output.endswith("\n::error title=a::50%25 of%0Atwo")


SECTION = re.compile(r"section_(start|end):(\d+):(\w+)(\[collapsed=true\])?\r\x1b\[0K")


@given(st.text() | st.just(HOSTILE), st.text() | st.just(HOSTILE))
def test_untrusted_text_opens_no_gitlab_sections(text, headline):
    output = ci.format_failure("gitlab", "cpu-znver4", headline, text)
    start, end = SECTION.findall(output)
    assert (start[0], start[3], end[0], end[3]) == ("start", "[collapsed=true]", "end", "")
    assert start[2] == end[2]
    assert output.count("\x1b") == 4


def test_summary_lists_failures_first():
    result = outcomes(
        {"cell": "a", "status": "built", "seconds": 12.34},
        {"cell": "b", "status": "up-to-date"},
        {"cell": "c", "status": "failed", "seconds": 1},
        {"cell": "d", "status": "excluded"},
        {"cell": "e", "status": "other-shard"},
    )
    assert ci.format_table(result) == (
        "### imagematrix: 1 failed, 1 built, 1 up-to-date, 1 excluded\n\n"
        "| image | cell | | seconds |\n|---|---|---|--:|\n"
        "| training:v1 | c | failed | 1.0 |\n"
        "| training:v1 | a | built | 12.3 |\n"
        "| training:v1 | b | up-to-date |  |\n\n"
    )
    assert ci.format_table(()) == "### imagematrix: no cells\n\n"


def test_cell_names_are_escaped_in_markdown():
    table = ci.format_table(outcomes({"cell": "a|b<img src=x>`c`\n# d", "status": "built", "seconds": 1}))
    assert "<img" not in table
    assert len(table.splitlines()) == 6
    assert table.splitlines()[4].count("|") == 5


@pytest.mark.parametrize(("count", "length"), [(10_000, 40), (3, 500_000)])
def test_summary_length_is_limited(count, length):
    cells = [{"cell": f"{number:0{length}}", "status": "built", "seconds": 1} for number in range(count)]
    table = ci.format_table(outcomes(*cells))
    assert len(table.encode()) < 300 * 1024
    left = int(re.search(r"and (\d+) more", table)[1])
    assert table.count("| built |") == count - left


def test_summary_is_appended_to_the_github_file(monkeypatch, tmp_path, capsys):
    page = tmp_path / "summary.md"
    page.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    ci.write_summary(())
    assert page.read_text() == "before\n"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    ci.write_summary(())
    assert page.read_text() == "before\n### imagematrix: no cells\n\n"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    ci.write_summary(())
    assert capsys.readouterr().err == f"cannot write the summary for GitHub: {tmp_path}: Is a directory\n"


@pytest.mark.parametrize("status", [one for one in STATUSES if one not in (*OPEN, *DROPPED)])
def test_every_outcome_is_in_the_summary_and_in_the_report(cli, tmp_path, status):
    cell = {"image": "training", "version": "v1", "cell": "cpu-znver4", "status": status}
    (outcome,) = outcomes(cell)
    assert f"### imagematrix: 1 {status}\n" in ci.format_table([outcome])
    assert f"| cpu-znver4 | {status} |" in ci.format_table([outcome])
    (tmp_path / "build.json").write_text(json.dumps({"schema": "imagematrix.build/v1", "cells": [cell]}))
    assert f" {status} " in cli("report", tmp_path / "build.json").out


def test_tests_of_images_have_a_column_in_the_summary_and_in_the_report(cli, tmp_path):
    why = f"it needs a GPU{HOSTILE}"
    cells = [
        {"cell": "a", "status": "built", "test": {"outcome": "not-tested", "why": why}},
        {"cell": "b", "status": "tested", "test": {"outcome": "passed", "why": None}},
        {"cell": "c", "status": "built", "test": None},
    ]
    table = ci.format_table(outcomes(*cells))
    assert "| image | cell | | test | seconds |" in table
    assert "| b | tested | passed |" in table
    assert "| a | built | not tested here: " in table
    assert "| c | built |  |" in table
    assert not commands(table)
    whole = [{"image": "training", "version": "v1"} | cell for cell in cells]  # type: ignore[operator]
    (tmp_path / "build.json").write_text(json.dumps({"schema": "imagematrix.build/v1", "cells": whole}))
    shown = cli("report", tmp_path / "build.json")
    assert shown.code == 0
    assert "not tested here: " in shown.out
    assert not commands(shown.out)
