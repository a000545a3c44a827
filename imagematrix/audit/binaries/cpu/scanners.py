"""Processes that scan large files: threads of Python would decode one file after the other."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Self, cast

from imagematrix.audit.binaries import elf
from imagematrix.audit.binaries.cpu.scan import list_code_sections, scan_file, scan_later
from imagematrix.audit.binaries.window import Window
from imagematrix.common.child_modules import make_child_command
from imagematrix.images.oci import deflate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from typing import BinaryIO

    from imagematrix.audit.binaries.elf import Elf
    from imagematrix.audit.binaries.host_code import HostCode

LARGE = 8 << 20  # bytes of code, which take longer to decode than a process takes to start
MOST = 8  # scanners: this process reads layers no faster than they scan
PATIENCE = 60  # seconds until a process has to be ready


class Scanners:
    """Processes that scan files, at most one for each processor; thread-safe. Use it as a context manager.

    Large files start them. They end with this process, however it ends.
    """

    def __init__(self) -> None:
        self._most = min(deflate.count_threads(), MOST)
        self._threads = ThreadPoolExecutor(self._most, thread_name_prefix="scan")
        self._of_thread = threading.local()
        self._started: list[_Scanner] = []
        self._closed = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
        for scanner in self._started:
            scanner.kill()
        self._threads.shutdown(cancel_futures=True)
        for scanner in self._started:
            scanner.close()

    def start_scan(self, path: str, headers: Elf, window: Window) -> Callable[[], HostCode]:
        """Start to scan a file that `is_decodable`; return a function that waits for the result.

        The result is that of `scan_file`. The file of `window` has to stay open, with all bytes written. A
        small file is scanned by that function, and a large one without a process, because there may be no
        more, by a thread. The function raises EOFError if a process has ended, for example because memory
        was short.
        """
        code = sum(section.size for section in list_code_sections(headers))
        if self._most == 1 or code < LARGE:
            return scan_later(path, headers, window)
        return self._threads.submit(self._scan, path, window).result

    def _scan(self, path: str, window: Window) -> HostCode:
        part = window.fileno(), path, window.start, window.size
        scanner = self._get_scanner()
        return scanner.scan(*part) if scanner else _scan_part(*part)

    def _get_scanner(self) -> _Scanner | None:
        """Return the process of this thread."""
        if not hasattr(self._of_thread, "scanner"):
            self._of_thread.scanner = new = _Scanner.start()
            if new:
                with self._lock:
                    self._started.append(new)
                    closed = self._closed
                if closed:
                    new.kill()
        scanner: _Scanner | None = self._of_thread.scanner
        return scanner


class _Scanner:
    """A process that scans one file at a time."""

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection) -> None:
        self._process = process
        self._connection = connection

    @classmethod
    def start(cls) -> _Scanner | None:
        """Return a new process that is ready, or None if there can be none."""
        from multiprocessing import Pipe  # imported late: most commands need no process

        connection, far_end = Pipe()
        with far_end:
            number = far_end.fileno()
            command = [*make_child_command(__name__), str(number)]
            try:
                # In a session of its own, it gets no signal from a terminal.
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, pass_fds=[number], start_new_session=True
                )
            except OSError:
                connection.close()
                return None
        result = cls(process, connection)
        with contextlib.suppress(EOFError, OSError):
            if connection.poll(PATIENCE):
                connection.recv()
                return result
        result.kill()  # a program that embeds Python may be no Python itself
        result.close()
        return None

    def scan(self, descriptor: int, path: str, start: int, size: int) -> HostCode:
        """Return what `scan_file` returns for a part of an open file, or raise what it raises.

        Raises EOFError if the process has ended.
        """
        from multiprocessing.reduction import send_handle

        try:
            self._connection.send((path, start, size))
            send_handle(self._connection, descriptor, self._process.pid)
            result: HostCode | Exception = self._connection.recv()
        except (EOFError, OSError) as error:
            raise EOFError(f"the process that decoded {path} was killed") from error
        if isinstance(result, Exception):
            raise result
        return result

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def close(self) -> None:
        """Close the connection to the process, which has ended."""
        self._connection.close()


def main() -> None:
    """Scan the files that a process of `Scanners` gets, until the process that started it ends.

    The argument is the descriptor of the connection.
    """
    from multiprocessing.connection import Connection
    from multiprocessing.reduction import recv_handle

    threading.Thread(target=_end_with_input, daemon=True).start()
    with Connection(int(sys.argv[1])) as connection, contextlib.suppress(EOFError, OSError):
        connection.send(None)
        while True:
            part = connection.recv()
            file = recv_handle(connection)
            try:
                result: HostCode | Exception = _scan_part(file, *part)
            except Exception as error:  # noqa: BLE001 - raised in the process that wants the result
                result = error
            finally:
                os.close(file)
            connection.send(result)


def _end_with_input() -> None:
    os.read(0, 1)  # returns when the other process, which writes nothing, ends
    os._exit(1)


def _scan_part(descriptor: int, path: str, start: int, size: int) -> HostCode:
    window = Window(cast("BinaryIO", _OpenFile(descriptor)), start, size)
    headers = elf.read_elf(window)
    assert headers is not None  # noqa: S101 - who asks has read them; for the type checker
    return scan_file(path, headers, window)


class _OpenFile(io.RawIOBase):
    """A file with a position of its own: all that read an open file share the other one."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._at = 0

    def seek(self, offset: int, _whence: int = io.SEEK_SET, /) -> int:
        self._at = offset
        return offset

    def read(self, size: int = -1, /) -> bytes:
        return os.pread(self._descriptor, size, self._at)
