"""Decompressing streams of Zstandard, by what there is: a library, Python 3.14 or newer, or the zstd program.

The library is a dependency of the package. The one-file program (`make zipapp`) has no compiled libraries.
"""

from __future__ import annotations

import subprocess
import threading
import weakref

from imagematrix.common.programs import find_program
from imagematrix.errors import EngineError
from imagematrix.images.oci.byte_stream import read_exactly

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from imagematrix.images.oci.byte_stream import ByteStream

WINDOW_LOG = 27
WINDOW = 1 << WINDOW_LOG  # the largest window of a stream, in bytes
PIECE = 1 << 20
PROGRAM = "zstd"
SAID = 1000  # bytes of an error that are shown
STDIN = "/*stdin*\\ : "  # how the program calls its input


def unzstd(raw: ByteStream) -> ByteStream:
    """Return the content of a stream of one or more frames.

    Its `read` raises ValueError if the stream is damaged or wants too much memory, ValueError or EOFError if
    it is truncated, unless a part of a frame is lost where only its content tells, and what `raw` raises.
    Raises EngineError if this machine cannot decompress it.
    """
    try:
        return _ZstandardLibrary(raw)
    except ModuleNotFoundError:
        pass
    try:
        return _PythonsZstandard(raw)
    except ModuleNotFoundError:
        return _ZstdProgram(raw)


class _ZstandardLibrary:
    """A stream decompressed by the library zstandard."""

    def __init__(self, raw: ByteStream) -> None:
        import zstandard

        self._error: type[Exception] = zstandard.ZstdError
        decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW)
        self._reader: Any = decompressor.stream_reader(raw, read_across_frames=True)  # type: ignore[arg-type]

    def read(self, size: int = PIECE, /) -> bytes:
        try:
            return read_exactly(self._reader.read, size)
        except self._error as error:
            raise ValueError(str(error)) from error


class _PythonsZstandard(_ZstandardLibrary):
    """A stream decompressed by Python's own library."""

    def __init__(self, raw: ByteStream) -> None:
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]

        self._error = zstd.ZstdError
        most = {zstd.DecompressionParameter.window_log_max: WINDOW_LOG}
        self._reader = zstd.ZstdFile(raw, options=most)


class _ZstdProgram:
    """A stream decompressed by the zstd program, which a thread feeds."""

    def __init__(self, raw: ByteStream) -> None:
        program = find_program(PROGRAM)
        if program is None:
            raise EngineError(
                "the layers are compressed with zstd, which nothing on this machine decompresses",
                remedy="install zstd (`apt install zstd`), or use Python 3.14, or the package of imagematrix",
            )
        self._process = subprocess.Popen(
            [program, "--decompress", "--stdout", "--quiet", f"--memory={WINDOW}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},  # it takes levels and threads from its variables
        )
        self._failed: list[BaseException] = []
        self._ended = False
        weakref.finalize(self, _end_process, self._process)
        feeding = threading.Thread(target=_feed_process, args=(raw, self._process, self._failed), daemon=True)
        feeding.start()
        self._feeding = feeding

    def read(self, size: int = PIECE, /) -> bytes:
        assert self._process.stdout is not None  # noqa: S101 - for the type checker
        data = b"" if self._ended or not size else self._process.stdout.read(size)
        if size and not self._ended and (size < 0 or len(data) < size):
            self._ended = True
            assert self._process.stderr is not None  # noqa: S101 - as above
            message = self._process.stderr.read(SAID).decode(errors="replace").strip()
            code = self._process.wait()
            self._feeding.join()
            if self._failed:
                raise self._failed[0]
            if code:
                raise ValueError(message.partition("\n")[0].removeprefix(STDIN) or f"zstd ended with {code}")
        return data


def _feed_process(raw: ByteStream, process: subprocess.Popen[bytes], failed: list[BaseException]) -> None:
    """Write a stream to the program; keep the error of the stream, if there is one, for its reader."""
    assert process.stdin is not None  # noqa: S101 - for the type checker
    try:
        with process.stdin as pipe:
            while piece := raw.read(PIECE):
                pipe.write(piece)
    except BrokenPipeError:  # it ended, and says why
        pass
    except BaseException as error:  # noqa: BLE001 - raised by who reads
        failed.append(error)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
