"""Patterns of .dockerignore, as BuildKit applies them."""

import os
import re

import pytest

from imagematrix.build.plan.dockerignore import list_unignored
from imagematrix.errors import UsageError


@pytest.fixture
def leave(tmp_path):
    """Return the files that patterns do not exclude."""

    def left_of(files, patterns):
        for file in files:
            path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return sorted(list_unignored(tmp_path, patterns))

    return left_of


@pytest.mark.parametrize(
    ("pattern", "out", "kept"),
    [
        ("a", ["a"], ["b/a", "A", "ab"]),
        ("*.log", ["x.log", ".log"], ["X.LOG", "sub/x.log", "x.log2"]),
        ("*/*.log", ["sub/x.log"], ["x.log", "sub/sub/x.log"]),
        ("**/*.log", ["x.log", "sub/x.log", "sub/sub/x.log"], ["x.logs"]),
        ("**.log", ["x.log", "sub/x.log", ".log"], ["x.logs"]),
        ("**/x", ["x", "sub/x", "sub/sub/x/y"], ["sub/ax", "xx"]),
        ("**", ["x", "sub/x"], []),
        ("sub/**", ["sub/x", "sub/sub/x"], ["sub2"]),
        ("sub", ["sub/x", "sub/sub/x"], ["sub2/sub"]),
        ("/sub//x/", ["sub/x/y"], ["sub/y"]),
        ("./sub/../x", ["x"], ["sub/x"]),
        ("  x  ", ["x"], ["y"]),
        ("a**/*.txt", ["a/x.txt", "a/b/x.txt", "ab/x.txt"], ["b/a/x.txt"]),
        ("a?c", ["abc"], ["ac", "a/c"]),
        ("a[b-d]e", ["ace"], ["ae", "aae"]),
        ("a[^b-d]e", ["aae"], ["ace"]),
        ("a[[&&~]e", ["a[e", "a&e", "a~e"], ["aae"]),
        (r"a[\]]e", ["a]e"], ["a[e"]),
        (r"a\*e", ["a*e"], ["abe"]),
        (r"a\\", ["a\\"], ["a"]),
        (r"x\a", ["x\a"], ["xa", "x\\a"]),
        (r"x[\d]\d", ["x11"], ["xd", "xdd", "x\u0661\u0661"]),
        ("a.(b)+{c}|$^", ["a.(b)+{c}|$^"], ["ab"]),
        (".", [], ["x"]),
    ],
)
def test_pattern_excludes_matching_files(leave, pattern, out, kept):
    result = leave([*out, *kept], [pattern])
    out = {os.path.normpath(file) for file in out}
    assert not out & set(result)
    assert set(kept) <= set(result)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["*", "!docs"], ["docs", "docs/a.md", "docs/b.md", "docs/sub", "docs/sub/c.md"]),
        (["docs", "!docs/a.md"], ["docs", "docs/a.md", "x"]),
        (["docs", "! docs/*.md"], ["docs", "docs/a.md", "docs/b.md", "x"]),
        (["docs", "!**/c.md"], ["docs", "docs/sub", "docs/sub/c.md", "x"]),
        (["**", "!docs/sub", "docs/sub/c.md"], ["docs", "docs/sub"]),
        (["!docs/a.md", "docs"], ["x"]),
        (["docs", "!other/x"], ["x"]),
    ],
)
def test_negated_patterns_include_files_again(leave, patterns, expected):
    assert leave(["x", "docs/a.md", "docs/b.md", "docs/sub/c.md"], patterns) == expected


def test_links_to_folders_are_not_folders(leave, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "x").touch()
    (tmp_path / "link").symlink_to("real")
    assert leave([], ["real/x"]) == ["link", "real"]


def test_excluded_folders_are_not_read(leave, tmp_path, monkeypatch):
    opened = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: opened.append(path) or scandir(path))
    assert leave(["out/x", "in/x"], ["out", "!in/x"]) == ["in", "in/x"]
    assert opened == [f"{tmp_path}/", f"{tmp_path}/in/"]


@pytest.mark.parametrize(
    "pattern",
    ["[b-a]", "a[", "[]", "[]a]", "[a-]", "[^]", "a\\", r"x\q", r"x\Qy\E", r"\1", r"[\pL]", "[*]", "x[a?]"],
)
def test_invalid_pattern_is_rejected(leave, pattern):
    with pytest.raises(
        UsageError, match=rf"{re.escape(repr(pattern))} in .dockerignore is not a valid pattern"
    ):
        leave([], [pattern])


def test_a_pattern_longer_than_any_path_is_refused(leave):
    assert leave(["a"], ["*" + "b" * 4095]) == ["a"]
    with pytest.raises(UsageError, match="more than 4096 characters"):
        leave(["a"], ["*" + "b" * 4096])


@pytest.mark.parametrize("pattern", ["*a" * 20 + "*b", "**/a" * 20 + "*b", "[^b]*" * 20 + "b"])
def test_no_pattern_takes_longer_than_it_is_long(leave, pattern):
    assert leave(["a" * 60], [pattern, "b" + pattern]) == ["a" * 60]
    assert leave(["a" * 60 + "ba"], [pattern]) == ["a" * 60, "a" * 60 + "ba"]
