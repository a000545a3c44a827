"""The site's extensions of Markdown: generated parts, and notes on code blocks.

Both are comments in the Markdown file:

    <!-- generated: NAME -->      is replaced by a generated part of the reference
    <!-- file: PATH -->           the next block is the content of a file, whose name becomes a caption
    <!-- not tested: REASON -->   no test runs the commands in the next block; the site says why
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
    """Return a page with its comments replaced by generated parts, captions and notes."""
    text = GENERATED.sub(lambda mark: PARTS[mark[1]](), text)
    text = FILE.sub(r"```{code-block} \2\n:caption: \1\n", text)
    return NOT_TESTED.sub(r"*Not run by the tests: \1.*", text)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register with Sphinx."""
    app.connect("source-read", _read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _read(_app: Sphinx, _page: str, source: list[str]) -> None:
    source[0] = expand(source[0])
