"""The files of a project that a package index lists, in JSON (PEP 691) or in HTML (PEP 503)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from html import unescape
from urllib.parse import unquote

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion

from imagematrix.common import json_documents

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from packaging.tags import Tag
    from packaging.utils import BuildTag
    from packaging.version import Version

# Python's parser of HTML takes time that grows with the square of a page, which an index chooses.
COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
LINK = re.compile(r"""<a\s((?:[^<>"']|"[^"]*+"|'[^']*+')*+)>""", re.IGNORECASE)
ATTRIBUTE = re.compile(r"""([^\s"'=<>/]+)(?:\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'=<>]+)))?""")
SHA256 = re.compile(r"(?:^|&)sha256=([0-9a-f]{64})")
LONGEST = 512  # characters of a file name, or of the Pythons that a file is for
MOST_TAGS = 1_000  # of a wheel, which has one for each combination of the words in its name
REASON = 200  # characters of why a file was yanked


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelFile:
    """A file of a release: a wheel, or a source distribution without `tags`.

    `yanked` is why it should no longer be used, perhaps "", or None. `python` are the Pythons it is for.
    """

    name: str
    version: Version
    build: BuildTag
    tags: frozenset[Tag]
    sha256: str | None
    yanked: str | None
    python: SpecifierSet


def parse_file_list(body: bytes, url: str) -> list[WheelFile]:
    """Return the files in the answer of an index; raise UsageError if it is neither JSON nor HTML.

    Files whose names are not those of wheels or source distributions are left out.
    """
    if body.lstrip()[:1] == b"<":
        links = _list_links(body.decode(errors="replace"))
        return [file for fields in links if (file := _parse_file(*fields))]
    fields = json_documents.Fields(json_documents.parse_json(body, url), url)
    files = []
    for entry in fields.list_objects("files"):
        yanked = entry.data.get("yanked")  # true, or the reason (PEP 592)
        reason = (yanked if isinstance(yanked, str) else "")[:REASON] if yanked else None
        sha256 = entry.get_text_map("hashes").get("sha256")
        python = entry.get_text_or_none("requires-python") or ""
        file = _parse_file(entry.get_text("filename"), sha256, reason, python)
        if file:
            files.append(file)
    return files


def _list_links(page: str) -> Iterator[tuple[str, str | None, str | None, str]]:
    """Yield the names of the files that a page links, with their hashes, why yanked, and their Pythons."""
    for link in LINK.finditer(COMMENT.sub("", page)):
        attributes = {
            name.lower(): unescape(double or single or bare)
            for name, double, single, bare in ATTRIBUTE.findall(link[1])
        }
        path, _, fragment = attributes.get("href", "").partition("#")
        sha256 = SHA256.search(fragment)
        name = unquote(path.partition("?")[0].rpartition("/")[2])
        yanked = attributes.get("data-yanked")
        python = attributes.get("data-requires-python", "")
        yield name, sha256 and sha256[1], yanked and yanked[:REASON], python


def _parse_file(name: str, sha256: str | None, yanked: str | None, python: str) -> WheelFile | None:
    build: BuildTag = ()
    tags: frozenset[Tag] = frozenset()
    words = (part.count(".") + 1 for part in name.removesuffix(".whl").rsplit("-", 3)[1:])
    if len(name) > LONGEST or math.prod(words) > MOST_TAGS:
        return None
    try:
        if name.endswith(".whl"):
            _, version, build, tags = parse_wheel_filename(name)
        else:
            _, version = parse_sdist_filename(name)
    except (InvalidSdistFilename, InvalidWheelFilename, InvalidVersion):
        return None
    try:
        pythons = SpecifierSet(python if len(python) <= LONGEST else "")
    except InvalidSpecifier:
        pythons = SpecifierSet()
    return WheelFile(
        name=name, version=version, build=build, tags=tags, sha256=sha256, yanked=yanked, python=pythons
    )
