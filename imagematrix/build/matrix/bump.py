"""Raising versions in the text of a matrix, whose other characters all stay."""

from __future__ import annotations

import re

from imagematrix.build.matrix import document
from imagematrix.build.matrix.document import Mapping, Scalar
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping as Versions


NUMBER = re.compile(r"[0-9]+")
ANCHOR = re.compile(r"&\S+\s+")  # before a scalar


def raise_version(version: str, *, minor: bool) -> str:
    """Return the version after this one: its last number, or with `minor` its second, plus one.

    v1 becomes v2, or v1.1 with `minor`; v1.4.2 becomes v1.4.3, or v1.5.0. Raises UsageError if it has no
    number.
    """
    numbers = list(NUMBER.finditer(version))
    if not numbers:
        raise UsageError(
            f"the version {version!r} has no number to raise", remedy="name the new one with --to"
        )
    if minor and len(numbers) == 1:
        return f"{version[: numbers[0].end()]}.1{version[numbers[0].end() :]}"
    position = 1 if minor else len(numbers) - 1
    parts = [version[: numbers[position].start()]]
    for index, number in enumerate(numbers[position:], position):
        value = int(number[0]) + 1 if index == position else 0
        end = numbers[index + 1].start() if index + 1 < len(numbers) else len(version)
        parts += [str(value).zfill(len(number[0])), version[number.end() : end]]
    return "".join(parts)


def replace_versions(text: str, versions: Versions[str, str], where: str) -> str:
    """Return the text of a valid matrix with new versions for images by name.

    Images that share one version by an alias or a merge get the new one together. Raises UsageError if the
    text does not allow that, such as for two new versions of one such place.
    """
    root = document.parse_yaml(text, where)
    lines = text.splitlines(keepends=True)
    changes: dict[tuple[int, int], tuple[str, str]] = {}
    for name, version in versions.items():
        node = root
        for key in ("images", name, "version"):
            assert isinstance(node, Mapping)  # noqa: S101 - the matrix is valid; for the type checker
            node = node.entries[key][1]
        assert isinstance(node, Scalar)  # noqa: S101 - likewise
        mark, change = (node.mark.line, node.mark.column), (str(node.text), version)
        if changes.setdefault(mark, change) != change:
            raise UsageError(f"{where}:{mark[0]}:{mark[1]}: several images share this version")
    for (line, column), (old, new) in sorted(changes.items(), reverse=True):
        content = lines[line - 1]
        anchor = ANCHOR.match(content, column - 1)
        start = anchor.end() if anchor else column - 1
        start += content[start : start + 1] in ("'", '"')
        if not content.startswith(old, start):
            raise UsageError(
                f"{where}:{line}:{column}: cannot replace the version {old!r}", remedy="edit it by hand"
            )
        lines[line - 1] = f"{content[:start]}{new}{content[start + len(old) :]}"
    return "".join(lines)
