"""What the site's pages have that plain Markdown has not: generated parts, and visible marks of code blocks.

A mark is a comment before a block of code, which a reader of the plain file need not see:

    <!-- generated: NAME -->      is replaced by a part of the reference
    <!-- file: PATH -->           the block is the content of a file, and gets its name as a caption
    <!-- not tested: REASON -->   no test runs the commands in the block, and the page says why
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from reference import PARTS

if TYPE_CHECKING:
    from sphinx.application import Sphinx

__all__ = ["expand", "setup"]

GENERATED = re.compile(r"^<!-- generated: (\S+) -->$", re.MULTILINE)
FILE = re.compile(r"^<!-- file: (\S+) -->\n```(\w+)$", re.MULTILINE)
NOT_TESTED = re.compile(r"^<!-- not tested: (.+) -->$", re.MULTILINE)


def expand(text: str) -> str:
    """Return a page with its generated parts, and with its marks in words."""
    text = GENERATED.sub(lambda mark: PARTS[mark[1]](), text)
    text = FILE.sub(r"```{code-block} \2\n:caption: \1\n", text)
    return NOT_TESTED.sub(r"*Not run by the tests: \1.*", text)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _read(_app: Sphinx, _page: str, source: list[str]) -> None:
    source[0] = expand(source[0])
