"""The benchmark runs: every group that needs no engine. The page of results has a place for each group."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
QUICK = (
    "plan",
    "`imagematrix plan",
    "`python -c pass`",
    "the CPU's flags",
    "select,",
    "`imagematrix select --gang`",
)


def test_benchmark_prints_rows():
    """It ends with an error if a group fails, or if the page of results lacks a group."""
    done = subprocess.run(
        [sys.executable, ROOT / "ci/bench", "--quick", "--smallest"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    head, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line
    ]
    assert head == ["what", "ours", "ratio", "instead", "limit", "met"]
    rows = rows[1:]
    assert [name for name in QUICK if not any(row[0].startswith(name) for row in rows)] == []
    assert {row[-1] for row in rows} == {""}, "no time is judged"
    assert re.match(r"Commit [0-9a-f]{12}", done.stdout)


WRITE = """
import pathlib, sys
sys.path.append("ci/bench")
import measure, results
results.PAGE = pathlib.Path(sys.argv[1])
origin = results.Origin(commit="0123456789ab", day="2026-11-28", machine="2 x a CPU")
row = measure.Row(what="to plan", ours="1 s", bar="2 s", met=True)
results.write("plan", origin, measure.Pace(seconds=0.0086), [row])
"""
PAGE = """\
before
<!-- measured: plan -->
old
<!-- end -->
between
<!-- measured: gang -->
kept
<!-- end -->
after
"""


def test_a_table_is_written_with_its_commit_machine_and_pass(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    subprocess.run([sys.executable, "-c", WRITE, page], cwd=ROOT, check=True)
    table = [
        "Commit 0123456789ab, 2026-11-28, 2 x a CPU; `pass` took 8.6 ms.",
        "",
        "| what | ours | ratio | instead | limit | met |",
        "|---|---|---|---|---|---|",
        "| to plan | 1 s |  |  | 2 s | yes |",
    ]
    assert page.read_text() == PAGE.replace("old\n", "\n{}\n\n".format("\n".join(table)))
