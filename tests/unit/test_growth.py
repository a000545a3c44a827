"""Work grows as it should: what each operation does for n and for four times n is counted, not timed."""

import json
import os
import subprocess
import sys
from collections import deque
from functools import partial
from pathlib import Path

import pytest
from counting import counted
from operations import LINEAR, OPERATIONS, TIMES

ROOT = Path(__file__).parents[2]
GROWTH = ROOT / "tests" / "growth"
CHANGE = 0.1  # of a count, that is told
PYTHON = (3, 11)  # whose counts are kept: another one has other lines
REMEDY = "if that is meant, run `make counts`, and commit tests/growth/counts.json"


def test_operations_grow_as_what_they_are_given():
    """Both judgements are in one test, so that the operations are counted once."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(
        [sys.executable, GROWTH / "counts.py"],
        env=environment | {"PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    counts = json.loads(done.stdout)
    assert [*counts] == [one.name for one in OPERATIONS]
    assert list(filter(None, (grown(one, *counts[one.name]) for one in OPERATIONS))) == []
    if sys.version_info[:2] == PYTHON:
        kept = json.loads((GROWTH / "counts.json").read_text())
        now = {name: sum(pair[0].values()) for name, pair in counts.items()}
        assert list(changed(kept, now)) == [], REMEDY


def grown(operation, once, more):
    """Return what to say of an operation that does too much for four times n, with the functions that do."""
    factor = sum(more.values()) / sum(once.values())
    if factor <= operation.factor:
        return None
    beyond = sorted(more, key=lambda name: TIMES * once.get(name, 0) - more[name])[:5]
    shown = ", ".join(f"{name} ({once.get(name, 0)} -> {more[name]})" for name in beyond)
    return f"{operation.name}: {factor:.2f} times the work for {TIMES} times the {operation.grows}: {shown}"


def changed(kept, now):
    for name in sorted({*kept, *now}):
        before, after = kept.get(name), now.get(name)
        if None in (before, after) or abs(after - before) > CHANGE * before:
            yield f"{name}: {before} -> {after}"


def test_a_change_of_more_than_a_tenth_is_told():
    kept = {"same": 100, "less": 100, "more": 100, "gone": 1}
    now = {"same": 110, "less": 89, "more": 111, "new": 1}
    assert [one.partition(":")[0] for one in changed(kept, now)] == ["gone", "less", "more", "new"]


def planned_by_a_sum(cells):
    items = dict[int, int | None]()
    for cell in range(cells):
        items[cell] = None
        if sum(item is None for item in items.values()) == 1:
            items[cell] = work(cell)


def planned_by_count(cells):
    items = dict[int, int | None]()
    for cell in range(cells):
        items[cell] = None
        if [*items.values()].count(None) == 1:
            items[cell] = work(cell)


def planned_with_a_set(cells):
    finished, unfinished = dict[int, int](), set[int]()
    for cell in range(cells):
        unfinished.add(cell)
        if len(unfinished) == 1:
            finished[cell] = work(cell)
        unfinished.remove(cell)


def work(cell):
    """Execute about as many lines as planning a cell does."""
    for _ in range(700):
        cell += 1
    return cell


@pytest.mark.parametrize(
    ("plan", "is_linear"), [(planned_by_a_sum, False), (planned_by_count, False), (planned_with_a_set, True)]
)
def test_a_walk_over_all_cells_for_each_is_found(plan, is_linear):
    once, more = (counted(partial(plan, cells), ROOT / "tests").total() for cells in (200, TIMES * 200))
    assert (more / once <= LINEAR) == is_linear


@pytest.mark.parametrize(
    ("call", "walked"),
    [
        (lambda: ([0] * 500).count(1), True),
        (lambda: deque([0] * 500).count(1), True),
        (lambda: dict.fromkeys(range(500)).copy(), True),
        (lambda: ("x" * 64 * 500).find("y"), True),
        (lambda: dict.fromkeys(range(500)).get(1), False),
        (lambda: set(range(500)).discard(1), False),
        (lambda: ([0] * 500).append(1), False),
        (lambda: ("x" * 64 * 500).startswith("y"), False),
    ],
)
def test_methods_count_as_what_they_walk_over(call, walked):
    assert (counted(call, ROOT / "tests").total() > 500) == walked
