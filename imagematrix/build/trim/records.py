"""The RECORD of a Python package, in a wheel or installed, which lists files with their hashes.

https://packaging.python.org/en/latest/specifications/recording-installed-packages/
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

NAME = re.compile(r"(?:.*/)?[^/]+\.dist-info/RECORD")
LIMIT = 16 << 20  # bytes; those of the largest packages have one MiB
SIGNATURE = re.compile(r"[^/]+\.dist-info/RECORD\.(?:jws|p7s)")


class RecordError(ValueError):
    """A RECORD that cannot be read, or that does not fit the files of its wheel."""


def hash_file(path: Path) -> str:
    """Return the hash of a file in the encoding of a RECORD."""
    with path.open("rb") as file:
        return encode_digest(hashlib.file_digest(file, "sha256").digest())


def encode_digest(digest: bytes) -> str:
    """Return a SHA-256 digest in the encoding of a RECORD."""
    return f"sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


def update_record(text: str, find_hash: Callable[[str], str | None]) -> str:
    """Return a RECORD with new hashes: `find_hash` returns that of a path, or None to keep the line.

    Raises RecordError if a line cannot be read.
    """
    lines = io.StringIO(text).readlines()  # unlike str.splitlines, at \n only: names may have the others
    reader = csv.reader(lines)
    updated = []
    end = 0
    try:
        for row in reader:
            line, end = "".join(lines[end : reader.line_num]), reader.line_num
            checksum = find_hash(row[0]) if row else None
            updated.append(line if checksum is None else _format_row([row[0], checksum, *row[2:]], line))
    except csv.Error as error:
        raise RecordError(f"its RECORD cannot be read: {error}") from error
    return "".join(updated)


def require_small(size: int) -> None:
    """Raise RecordError if a wheel's RECORD of so many bytes is not to be read.

    A byte of it takes much time and memory, and compressed it may be a thousand times smaller.
    """
    if size > LIMIT:
        raise RecordError(f"its RECORD has {size} bytes, more than {LIMIT}")


def _format_row(row: Sequence[str], line: str) -> str:
    """Return a row as a line that ends as another one does."""
    new_line = io.StringIO()
    csv.writer(new_line, lineterminator=line[len(line.rstrip("\r\n")) :]).writerow(row)
    return new_line.getvalue()
