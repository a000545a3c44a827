"""The table of official wheels in the reference, which ci/recipes.py frameworks writes."""

import re
import tomllib
from pathlib import Path

from imagematrix.hardware.vendors import _data

ROOT = Path(__file__).parents[3]
IMAGES = tomllib.loads((ROOT / "ci/frameworks.toml").read_text())["image"]
PAGE = (ROOT / "docs/reference/frameworks.md").read_text()
HEAD, _, *ROWS = (
    [cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\|.*", PAGE, re.MULTILINE)
)
PIN = re.compile(r"([a-z0-9-]+)==(\S+) --hash=sha256:[0-9a-f]{64}")


def test_every_image_has_a_row():
    assert [row[0] for row in ROWS] == [image["name"] for image in IMAGES]


def test_differences_from_the_documentation_are_marked_and_explained():
    computes = [name for name in HEAD if name[0].isdigit()]
    for image, (_, *answers, says, why, date) in zip(IMAGES, ROWS, strict=True):
        documented = image.get("documented")
        for compute, answer in zip(computes, answers, strict=True):
            differs = documented is not None and (answer.strip("*") != "no") != (compute in documented)
            assert answer.startswith("**") == differs, (image["name"], compute)
        assert why == image.get("why", "")
        assert bool(why) == any(answer.startswith("**") for answer in answers)
        assert says == (f"[{image['says']}]({image['source']})" if documented else "nothing")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)


def test_guards_of_files_are_checked_in_real_wheels():
    """The sources of the first and of the last version of each row are compared."""
    pins = {PIN.fullmatch(pin).groups() for image in IMAGES for pin in image["wheels"]}
    rows = _data.load("guarded.json")["rows"]
    assert {(row["package"], row[end]) for row in rows for end in ("first", "last")} <= pins
