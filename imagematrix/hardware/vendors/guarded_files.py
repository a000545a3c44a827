"""Files of Python packages with device code that are used on some GPUs only: guarded.json.

The audit reads most such questions in a package's own sources. The table has those that it does not see: they
stand far from where the file is loaded, or only a program that asks for a file's functions uses it. A row
holds for the versions whose sources were read, and for files that are as in the wheel: the audit compares
them with the package's RECORD.
"""

from __future__ import annotations

import re
from functools import cache

from imagematrix.common.record import Record
from imagematrix.hardware.vendors import _data, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# A final release or a post-release, perhaps with a local version such as "+cu128".
VERSION = re.compile(r"(\d{1,4}(?:\.\d{1,4}){1,3}(?:\.post\d{1,3})?)(?:\+[a-z0-9.]+)?", re.ASCII)


class GuardedFile(Record):
    """A file at `path` in a package of the versions `first` to `last`.

    `text` is a line in the module `source` of the package that shows who uses the file: one that asks for the
    capability or calls the file's functions, or, if `only_importer`, the import in the only module that names
    the file.
    """

    package: str
    first: str
    last: str
    path: str
    source: str
    text: str
    only_importer: bool = False


def find_rows(package: str, version: str) -> Iterator[GuardedFile]:
    """Yield the rows for a version of a package; the name is normalised."""
    match = VERSION.fullmatch(version)
    if match:
        key = _make_sort_key(match[1])
        for row in _load_rows():
            if row.package == package and _make_sort_key(row.first) <= key <= _make_sort_key(row.last):
                yield row


def is_listed(path: str) -> bool:
    """Whether the path of a file in an image ends with that of some row."""
    return path.endswith(_list_path_ends())


def normalize_name(name: str) -> str:
    """Return the normalised name of a package (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _make_sort_key(version: str) -> tuple[int, ...]:
    return versions.make_sort_key(version.replace("post", ""))


@cache
def _list_path_ends() -> tuple[str, ...]:
    return tuple(sorted({f"/{row.path}" for row in _load_rows()}))


@cache
def _load_rows() -> tuple[GuardedFile, ...]:
    return tuple(
        GuardedFile(
            package=row["package"],
            first=row["first"],
            last=row["last"],
            path=row["path"],
            source=row["guard"]["source"],
            text=row["guard"]["text"],
            only_importer=row["guard"].get("only_importer", False),
        )
        for row in _data.load("guarded.json")["rows"]
    )
