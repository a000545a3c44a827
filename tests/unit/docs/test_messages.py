"""Messages that pages quote are those of the code, also where no test runs the command that prints them."""

import re
from pathlib import Path
from types import CodeType

import pages
import pytest

import imagematrix

WORDS = 3  # of a longer row that have to be in a row in the code, which has variables between others


@pytest.fixture(scope="module")
def texts():
    """The strings in the code, without its docstrings."""
    paths = Path(imagematrix.__file__).parent.rglob("*.py")
    codes = (compile(path.read_text(), path, "exec", optimize=2) for path in paths)
    return "\n".join(text for code in codes for text in strings(code))


def strings(constant):
    """Yield the strings in a constant of compiled code, such as a function."""
    if isinstance(constant, str):
        yield constant
    inner = constant.co_consts if isinstance(constant, CodeType) else constant
    if isinstance(inner, (tuple, frozenset)):
        for each in inner:
            yield from strings(each)


def quoted(text):
    """Yield each error message in the blocks of a page, and what to do about it."""
    for block in pages.blocks(text):
        for message in re.findall(r"^(?:.*: )?imagematrix: (.+(?:\n  \S.*)*)", block.text, re.MULTILINE):
            yield from message.split("\n")


def runs(message):
    """Yield the rows of plain words in a message."""
    for run in re.findall(r"(?:(?<=\s)|^)[a-z']+(?: [a-z']+)*(?=[\s,;:.]|$)", message.strip()):
        yield run.split()


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_quoted_messages_are_in_the_code(page, texts):
    unknown = [
        message
        for message in quoted(page.read_text())
        for words in runs(message)
        if len(words) > WORDS
        and not any(" ".join(words[i : i + WORDS]) in texts for i in range(len(words) - WORDS + 1))
    ]
    assert unknown == []


def test_messages_are_found_in_pages():
    assert sum(1 for page in pages.PAGES for _ in quoted(page.read_text())) > 20
    found = [" ".join(words) for words in runs("requested 2 GPUs, as many as node7 has: none")]
    assert found == ["requested", "as many as", "has", "none"]
