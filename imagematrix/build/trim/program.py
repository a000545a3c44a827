"""The trimming part of the package as one file, for build stages, where imagematrix is not installed.

It needs only Python 3.11 or newer.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from imagematrix.common import zipapp_writer

CONTEXT = "imagematrix-trim"  # the named build context that contains the program
FILE = "trim.pyz"
MODULE = "imagematrix.build.trim.stage"
TABLE = "imagematrix/hardware/vendors/cuda.json"


def write_program(parent: Path) -> Path:
    """Write the program to a new folder, alone in a new folder of `parent`, and return its folder.

    BuildKit caches a context by the folder's name, and transfers a file again if its time differs. So the
    folder is named by the program's digest, and the file's time is always the same.
    """
    raw = zipapp_writer.write_archive(
        {"__main__.py": zipapp_writer.make_main(MODULE), **zipapp_writer.collect_sources([MODULE], [TABLE])}
    )
    folder = Path(tempfile.mkdtemp(dir=parent), hashlib.sha256(raw).hexdigest())
    folder.mkdir()
    (folder / FILE).write_bytes(raw)
    os.utime(folder / FILE, (0, 0))
    return folder
