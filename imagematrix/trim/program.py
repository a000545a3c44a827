"""The trimming part of the package as one file, for build stages, where imagematrix is not installed.

It needs only Python 3.11 or newer.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CONTEXT", "put"]

CONTEXT = "imagematrix-trim"  # the named build context that contains the program
FILE = "trim.pyz"
PACKAGE = Path(__file__).parent.parent
FILES = (
    *("__init__.py", "deflate.py", "errors.py", "record.py", "scratch.py", "spelling.py"),
    *(f"audit/{name}.py" for name in ("__init__", "archives", "device_code", "driver_file", "elf", "fatbin")),
    *(f"audit/{name}.py" for name in ("libraries", "notes", "window")),
    *(f"facts/{name}" for name in ("__init__.py", "_data.py", "cuda.json", "cuda.py", "device_code.py")),
    "facts/versions.py",
    *(f"trim/{name}.py" for name in ("__init__", "edits", "examine", "files", "records")),
    *(f"trim/{name}.py" for name in ("rules", "stage", "trim", "wheel")),
)
MAIN = b"from imagematrix.trim.stage import main\n\nmain()\n"


def put(parent: Path) -> Path:
    """Write the program to a new folder, alone in a new folder of `parent`, and return its folder.

    BuildKit caches a context by the folder's name, and transfers a file again if its time differs. So the
    folder is named by the program's digest, and the file's time is always the same.
    """
    with tempfile.TemporaryFile() as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in _contents():
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
        file.seek(0)
        raw = file.read()
    folder = Path(tempfile.mkdtemp(dir=parent), hashlib.sha256(raw).hexdigest())
    folder.mkdir()
    (folder / FILE).write_bytes(raw)
    os.utime(folder / FILE, (0, 0))
    return folder


def _contents() -> Iterator[tuple[str, bytes]]:
    yield "__main__.py", MAIN
    for name in FILES:
        yield f"imagematrix/{name}", (PACKAGE / name).read_bytes()
