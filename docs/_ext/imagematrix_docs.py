"""The site's extensions of Markdown: lists of pages, and notes on code blocks.

They are comments in the Markdown file:

    <!-- pages: CAPTION -->       the pages in the list below belong to this one; the caption may be left out
    <!-- file: PATH -->           the next block is the content of a file, whose name becomes a caption
    <!-- not tested: REASON -->   no test runs the commands in the next block; the site says why
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from generated import LIST

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ENTRY = re.compile(r"^- \[.*?\]\((\S+)\.md\)", re.MULTILINE)
FILE = re.compile(r"^<!-- file: (\S+) -->\n```(\w+)$", re.MULTILINE)
NOT_TESTED = re.compile(r"^<!-- not tested: (.+) -->$", re.MULTILINE)


def expand(text: str) -> str:
    """Return a page with its comments replaced by trees of pages, captions and notes."""
    text = LIST.sub(_tree, text)
    text = FILE.sub(r"```{code-block} \2\n:caption: \1\n", text)
    return NOT_TESTED.sub(r"*Not run by the tests: \1.*", text)


def _tree(pages: re.Match[str]) -> str:
    """Return a list of pages as it is, and after it the tree from which the site makes its sidebar."""
    caption = f":caption: {pages['caption']}\n" if pages["caption"] else ""
    names = "\n".join(ENTRY.findall(pages["entries"]))
    return f"{pages['entries']}\n```{{toctree}}\n:hidden:\n{caption}\n{names}\n```\n"


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _read(_app: Sphinx, _page: str, source: list[str]) -> None:
    source[0] = expand(source[0])
