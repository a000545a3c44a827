"""The table of official wheels for CPUs in the reference, which `make test-cpu-wheels` writes."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
WHEELS = tomllib.loads((ROOT / "ci/cpu_wheels.toml").read_text())["wheel"]
PAGE = (ROOT / "docs/reference/cpu-wheels.md").read_text()
HEAD, _, *ROWS = (
    [cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\|.*", PAGE, re.MULTILINE)
)
PIN = re.compile(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}")
WRONG = {("fits", "SIGILL"), ("refused", "runs")}


def test_rows_are_in_the_order_of_the_wheels():
    names = [row[0] for row in ROWS]
    assert names == [wheel["name"] for wheel in WHEELS if wheel["name"] in names]


def test_wheels_are_named_by_hash():
    for wheel in WHEELS:
        pins = [PIN.fullmatch(pin).groups() for pin in wheel["wheels"]]
        assert wheel["name"] == " ".join(pins[0])


def test_wrong_answers_are_marked_and_explained():
    reasons = {wheel["name"]: wheel.get("why", "") for wheel in WHEELS}
    for name, _, source, *cells, why, date in ROWS:
        wrong = [cell for cell in cells if tuple(cell.strip("*").split(", ")) in WRONG]
        assert wrong == [cell for cell in cells if cell.startswith("**")]
        assert why == reasons[name]
        assert bool(why) == bool(wrong)
        assert source in {"bytes", "claim", "probable", "unknown"}
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
    assert len(HEAD) == len(ROWS[0])
