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
    from collections.abc import Callable
    from pathlib import Path

NAME = re.compile(r"(?:.*/)?[^/]+\.dist-info/RECORD")
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
    lines = []
    for line in text.splitlines(keepends=True):
        try:
            row = next(csv.reader([line]), [])
        except csv.Error as error:
            raise RecordError(f"its RECORD cannot be read: {error}") from error
        checksum = find_hash(row[0]) if row else None
        if checksum is None:
            lines.append(line)
            continue
        new_line = io.StringIO()
        ending = line[len(line.rstrip("\r\n")) :]
        csv.writer(new_line, lineterminator=ending).writerow([row[0], checksum, *row[2:]])
        lines.append(new_line.getvalue())
    return "".join(lines)
