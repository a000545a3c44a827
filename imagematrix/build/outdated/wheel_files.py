"""The files of a project that a package index lists, in JSON (PEP 691) or in HTML (PEP 503)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from html.parser import HTMLParser
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
    from packaging.tags import Tag
    from packaging.utils import BuildTag
    from packaging.version import Version

SHA256 = re.compile(r"#(?:.*&)?sha256=([0-9a-f]{64})")
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
        page = _SimplePage()
        page.feed(body.decode(errors="replace"))
        page.close()
        return [file for fields in page.files if (file := _parse_file(*fields))]
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


class _SimplePage(HTMLParser):
    """The links of a page, each with its hash, why it was yanked, and its Pythons."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[tuple[str, str | None, str | None, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        href = attributes.get("href") or ""
        if tag == "a" and href:
            sha256 = SHA256.search(href)
            name = unquote(re.split("[?#]", href, maxsplit=1)[0].rpartition("/")[2])
            yanked = (attributes["data-yanked"] or "") if "data-yanked" in attributes else None
            python = attributes.get("data-requires-python") or ""
            self.files.append((name, sha256 and sha256[1], yanked and yanked[:REASON], python))


def _parse_file(name: str, sha256: str | None, yanked: str | None, python: str) -> WheelFile | None:
    build: BuildTag = ()
    tags: frozenset[Tag] = frozenset()
    try:
        if name.endswith(".whl"):
            _, version, build, tags = parse_wheel_filename(name)
        else:
            _, version = parse_sdist_filename(name)
    except (InvalidSdistFilename, InvalidWheelFilename, InvalidVersion):
        return None
    try:
        pythons = SpecifierSet(python)
    except InvalidSpecifier:
        pythons = SpecifierSet()
    return WheelFile(
        name=name, version=version, build=build, tags=tags, sha256=sha256, yanked=yanked, python=pythons
    )
