"""The tables of official wheels for CPUs in the reference, which `make test-cpu-wheels` writes."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WHEELS = tomllib.loads((ROOT / "ci/cpu_wheels.toml").read_text())
PAGE = (ROOT / "docs/reference/cpu-wheels.md").read_text()
TABLES = {
    machine: [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\|.*", text, re.MULTILINE)
    ]
    for machine, text in re.findall(r"<!-- wheels: (\S+) -->(.*?)<!-- end -->", PAGE, re.DOTALL)
}
PIN = re.compile(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}")
WRONG = {("fits", "SIGILL"), ("refused", "runs")}


def test_each_machine_has_a_table():
    assert TABLES.keys() == WHEELS.keys()


@pytest.mark.parametrize("machine", TABLES)
def test_rows_are_in_the_order_of_the_wheels(machine):
    names = [row[0] for row in TABLES[machine][2:]]
    assert names == [wheel["name"] for wheel in WHEELS[machine] if wheel["name"] in names]
    assert names


def test_wheels_are_named_by_hash():
    for wheel in (wheel for wheels in WHEELS.values() for wheel in wheels):
        pins = [PIN.fullmatch(pin).groups() for pin in wheel["wheels"]]
        assert wheel["name"] == " ".join(pins[0])


@pytest.mark.parametrize("machine", TABLES)
def test_wrong_answers_are_marked_and_explained(machine):
    reasons = {wheel["name"]: wheel.get("why", "") for wheel in WHEELS[machine]}
    head, _, *rows = TABLES[machine]
    for name, _, source, *cells, why, date in rows:
        wrong = [cell for cell in cells if tuple(cell.strip("*").split(", ")) in WRONG]
        assert wrong == [cell for cell in cells if cell.startswith("**")]
        assert why == reasons[name]
        assert bool(why) == bool(wrong)
        assert source in {"bytes", "claim", "probable", "unknown"}
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
    assert len(head) == len(rows[0])
