"""Files of a layer that are decoded after the whole layer was read.

Only then is it known which files belong to a distribution's packages, whose code is not decoded.
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import replace
from typing import Self

from imagematrix.audit import elf, libraries
from imagematrix.audit.cpu.scan import decodable, scan
from imagematrix.audit.packages import Sums
from imagematrix.audit.window import Window
from imagematrix.scratch import disk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from imagematrix.audit.elf import Elf
    from imagematrix.audit.objects import File

__all__ = ["Later"]

# Larger files are not compared with packages, which have few such files. They are kept without the sections
# that have no code for the CPU, whose names begin with one of these.
WHOLE = 192 << 20  # bytes
BULKY = (".nv_fatbin", "__nv_relfatbin", ".hip_fatbin", ".debug_", ".nvFatBin")
PAGE = 4096
PIECE = 1 << 20


class Later:
    """The files of a layer to decode, and the checksums of its packages' files. Use as a context manager."""

    def __init__(self) -> None:
        self.sums = Sums()
        self._kept: dict[str, tuple[File, int]] = {}
        self._end = 0
        self._stack = contextlib.ExitStack()
        self._file: BinaryIO

    def __enter__(self) -> Self:
        self._file = self._stack.enter_context(tempfile.TemporaryFile(dir=disk()))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def keep(self, path: str, file: File, window: Window) -> None:
        """Keep a file for decoding if it has code for the CPU and is no library of NVIDIA's."""
        self._kept.pop(path, None)
        headers = elf.read(window) if file.linked else None
        if headers and decodable(headers, window) and not libraries.of_nvidia(path, file.soname):
            self._copy(headers, window)
            self._kept[path] = (file, self._end)
            self._end += -(-window.size // PAGE) * PAGE

    def decoded(self) -> Iterator[tuple[str, File, File]]:
        """Yield each kept file's path, the File as it was kept, and the File with the result of decoding."""
        for path, (file, start) in self._kept.items():
            window = Window(self._file, start, file.size)
            headers = elf.read(window)
            if file.size <= WHOLE and self.sums.has(window):
                yield path, file, replace(file, packaged=True)
            elif headers:
                yield path, file, replace(file, host=scan(path, headers, window))

    def _copy(self, headers: Elf, window: Window) -> None:
        self._file.truncate(self._end + window.size)  # omitted sections become holes, which take no space
        here = 0
        for start, end in [*_bulky(headers, window.size), (window.size, window.size)]:
            for at in range(here, start, PIECE):
                self._file.seek(self._end + at)
                self._file.write(window.at(at, min(PIECE, start - at)))
            here = max(here, end)


def _bulky(headers: Elf, size: int) -> list[tuple[int, int]]:
    if size <= WHOLE:
        return []
    return sorted(
        (one.offset, one.offset + one.size) for one in headers.sections if one.name.startswith(BULKY)
    )
