"""What is generated in pages: parts of the reference, the texts of links, and the entries of lists of pages.

    .venv/bin/python docs/_ext/generated.py     writes anew what is stale in all pages

It is committed, so that pages are whole where they are read in the repository:

    <!-- generated: NAME -->      the part of the reference with this name follows, up to
    <!-- end: NAME -->
    <!-- pages -->                a list of links follows, whose texts are the titles of the pages
    [](PAGE.md#HEADING)           gets the title of the page or heading as its text, once
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import reference

ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "tests/README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)
PART = re.compile(r"^(<!-- generated: (\S+) -->\n).*?^(<!-- end: \2 -->)$", re.MULTILINE | re.DOTALL)
LIST = re.compile(r"^<!-- pages(?:: (?P<caption>.+))? -->\n(?P<entries>(?:- .*\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^- \[.*?\](?=\()", re.MULTILINE)
UNTITLED = re.compile(r"(?<!!)\[\]\((?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
BLOCK = re.compile(r"^(`{3,}).*?^\1$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anew(page: Path, text: str) -> str:
    """Return the text of a page with all that is generated in it made anew.

    KeyError: a part, or a heading to which a link leads, does not exist.
    """
    text = PART.sub(lambda part: f"{part[1]}\n{reference.PARTS[part[2]]().strip()}\n\n{part[3]}", text)
    text = LIST.sub(lambda pages: ENTRY.sub("- []", pages[0]), text)
    return UNTITLED.sub(lambda link: f"[{_title(page, link)}]{link[0][2:]}", text)


def headings(text: str) -> dict[str, str]:
    """Return the headings of a page by their anchors, in the repository and on the site."""
    return {anchor(heading): heading for heading in HEADING.findall(BLOCK.sub("", text))}


def anchor(heading: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _title(page: Path, link: re.Match[str]) -> str:
    target = page.parent / link["path"] if link["path"] else page
    found = headings(target.read_text(encoding="utf-8"))
    return found[link["anchor"]] if link["anchor"] else next(iter(found.values()))


def main() -> None:
    """Write the pages that are stale, and name them."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := anew(page, text)) != text:
            page.write_text(new, encoding="utf-8")
            sys.stderr.write(f"{page.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
