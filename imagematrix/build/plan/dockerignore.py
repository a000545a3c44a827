"""The patterns of a .dockerignore, applied to a folder as BuildKit does.

docker-py has them, too, but ignores case, and takes longer to load than reading most matrices.
"""

from __future__ import annotations

import os
import posixpath
import re
from dataclasses import dataclass

from imagematrix.build.plan.wildcard import ANY, FOLDERS, WITHIN, Wildcard
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WORD = re.compile(r"\*\*/?|\*|\?|\[\^?(?:\\.|[^\]\\])+\]|\\?.", re.DOTALL)
# What BuildKit takes, by the rules of Go's filepath.Match.
CLASS = r"\[\^?(?:(?:\\.|[^\\\]-])(?:-(?:\\.|[^\\\]-]))?)+\]"
VALID = re.compile(rf"(?:{CLASS}|\\.|[^\[\\])*", re.DOTALL)
LONGEST = 4096  # characters of a pattern; a path has no more
WILD = re.compile(r"[*?\[\\]")
IN_CLASS = re.compile(r"(?<!\\)[\[&~|]")  # characters that Python may reinterpret in the future
# BuildKit passes escapes to RE2, where an escaped letter or digit is never literal. These mean the same in
# Python, in ASCII; others are rejected.
SPECIAL = re.compile(r"\\[A-Za-z0-9]")
COMMON = frozenset("afnrtvdDwW")
WILD_CLASS = re.compile(r"(?<!\\)[*?]")  # BuildKit ends the class here and begins another


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pattern:
    """One pattern. `is_negated` is whether it begins with "!" and includes again.

    `start` precedes its wildcards; it is all of a pattern whose `wildcard` is None.
    """

    wildcard: Wildcard | None
    back: bool
    start: str

    def matches(self, name: str) -> bool:
        if self.wildcard is None:
            return name == self.start
        return name.startswith(self.start) and self.wildcard.matches(name)

    def may_match_below(self, folder: str) -> bool:
        return self.start.startswith(f"{folder}/") or f"{folder}/".startswith(self.start)


def list_unignored(folder: Path, patterns: Sequence[str]) -> list[str]:
    """Return the paths below `folder` that `patterns` do not exclude, relative to it.

    Folders of files that are included again are included, too. Raises UsageError for an invalid pattern,
    OSError if a folder cannot be read.
    """
    compiled = [_compile_pattern(pattern) for pattern in patterns]
    included: set[str] = set()
    pending = [("", [False] * len(compiled))]
    while pending:
        parent, matched = pending.pop()
        with os.scandir(f"{folder}/{parent}") as entries:
            for entry in entries:
                name = parent + entry.name
                matches, is_excluded = _match_patterns(name, compiled, matched)
                if not is_excluded:
                    while name and name not in included:
                        included.add(name)
                        name = name.rpartition("/")[0]
                if entry.is_dir(follow_symlinks=False) and (
                    not is_excluded
                    or any(
                        pattern.back and pattern.may_match_below(parent + entry.name) for pattern in compiled
                    )
                ):
                    pending.append((f"{parent}{entry.name}/", matches))
    return list(included)


def _match_patterns(
    name: str, patterns: Sequence[_Pattern], parent_matches: Sequence[bool]
) -> tuple[list[bool], bool]:
    """Return which patterns match a path, and whether it is excluded. A parent's matches hold below it."""
    is_excluded = False
    matches = []
    for pattern, parent_match in zip(patterns, parent_matches, strict=True):
        # Like BuildKit, evaluate a pattern only if it would change the result.
        is_match = parent_match or (pattern.back == is_excluded and pattern.matches(name))
        matches.append(is_match)
        if is_match:
            is_excluded = not pattern.back
    return matches, is_excluded


def _compile_pattern(text: str) -> _Pattern:
    word = text.strip()
    is_negated = word.startswith("!")
    path = posixpath.normpath(word.removeprefix("!").strip()).lstrip("/")
    wildcard_match = WILD.search(path)
    if len(path) > LONGEST:
        remedy = "write several patterns, with wildcards"
        raise UsageError(f"a pattern in .dockerignore has more than {LONGEST} characters", remedy=remedy)
    if not VALID.fullmatch(path):
        remedy = "close each [ with ], and write \\[ or \\\\ for the character itself"
        raise UsageError(f"{text!r} in .dockerignore is not a valid pattern", remedy=remedy)
    wildcard = None
    try:
        if wildcard_match and path.startswith("**") and not WILD.search(path, 2) and path[2:3] != "/":
            # A suffix, while all other ** stand for whole folders.
            wildcard = Wildcard([ANY, *map(re.escape, path[2:])])
        elif wildcard_match:
            words = WORD.findall(path)
            wildcard = Wildcard(
                [_compile_word(word, last=at == len(words)) for at, word in enumerate(words, 1)]
            )
    except (re.error, ValueError) as error:
        raise UsageError(f"{text!r} in .dockerignore is not a valid pattern: {error}") from error
    return _Pattern(
        wildcard=wildcard, back=is_negated, start=path[: wildcard_match.start()] if wildcard_match else path
    )


def _compile_word(word: str, *, last: bool) -> str:
    """Return the part of a Wildcard for one word of a pattern; raise ValueError if none is safe."""
    for special in SPECIAL.findall(word):
        if special[1] not in COMMON:
            raise ValueError(f"{special} is not supported")
    if word.startswith("**"):
        return ANY if last else FOLDERS
    if word == "*":
        return WITHIN
    if word == "?":
        return "[^/]"
    if len(word) > 1 and word[0] == "[":
        if WILD_CLASS.search(word):
            raise ValueError(f"a wildcard in {word} is not supported")
        return "[" + IN_CLASS.sub(r"\\\g<0>", word[1:])
    return word if SPECIAL.fullmatch(word) else re.escape(word[-1])
