"""Processes that scan files, and how they end."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from multiprocessing import Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path

import pytest
from compiling import compiled
from images import tar

from imagematrix.audit.binaries import elf
from imagematrix.audit.binaries.cpu import scanners
from imagematrix.audit.binaries.cpu.scan import scan_file
from imagematrix.audit.binaries.cpu.scanners import Scanners
from imagematrix.audit.binaries.window import Window
from imagematrix.audit.images import layer
from imagematrix.common.child_modules import make_child_command
from imagematrix.errors import AuditError

SOON = 30  # seconds, on a slow machine
LOOP = "double s = 0; for (int i = 0; i < 64; i++) s += a[i] * {0}; return s;"
SUMS = "".join(f"double s{number}(double *a) {{ {LOOP.format(number)} }}\n" for number in range(50))
MARCHES = ("x86-64", "nehalem", "haswell", "x86-64-v4")
VPADDD = 0xC2FEF5C5  # vpaddd %ymm2, %ymm1, %ymm0


@pytest.fixture(autouse=True)
def two_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(scanners, "LARGE", 1)


@pytest.fixture
def started(monkeypatch):
    """Return the processes that were started."""
    found = []
    real = subprocess.Popen

    def start(*args, **options):
        found.append(real(*args, **options))
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return found


@pytest.fixture(scope="module")
def compiled_libraries(tmp_path_factory):
    """Return the paths of libraries that need different flags."""
    folder = tmp_path_factory.mktemp("libraries")
    return [
        compiled(folder / f"{march}.so", SUMS, "-O3", "-shared", "-fPIC", f"-march={march}")
        for march in MARCHES
    ]


@pytest.fixture(scope="module")
def long(tmp_path_factory):
    """Return the path of a library that takes more than ten seconds to scan."""
    code = f".fill 40000000, 4, {VPADDD}"
    source = f'__asm__(".globl f; .type f, @function; f: {code}; ret; .size f, . - f");'
    return compiled(tmp_path_factory.mktemp("long") / "long.so", source, "-shared")


@pytest.fixture
def open_window():
    """Call it with a path to get a window on that file."""
    with contextlib.ExitStack() as opened:
        yield lambda path: Window(opened.enter_context(path.open("rb")), 0, path.stat().st_size)


@pytest.fixture
def libraries(compiled_libraries, open_window):
    """Return the headers of libraries that need different flags, and windows on them, by their paths."""
    windows = {str(path): open_window(path) for path in compiled_libraries}
    return {path: (elf.read_elf(window), window) for path, window in windows.items()}


def found(scanning, libraries):
    waiting = {path: scanning.start_scan(path, *library) for path, library in libraries.items()}
    return {path: result() for path, result in waiting.items()}


def found_alone(libraries):
    return {path: scan_file(path, *library) for path, library in libraries.items()}


def test_processes_find_what_one_thread_finds(started, libraries):
    with Scanners() as scanning:
        assert found(scanning, libraries) == found(scanning, libraries) == found_alone(libraries)
    assert 1 <= len(started) <= 2
    assert all(process.returncode == -signal.SIGKILL for process in started)


def test_threads_share_processes(started, libraries):
    alone = found_alone(libraries)
    results = []
    with Scanners() as scanning:
        threads = [
            threading.Thread(target=lambda: results.append(found(scanning, libraries))) for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [alone] * 5
    assert len(started) <= 2


def test_small_file_starts_no_process(started, libraries, monkeypatch):
    monkeypatch.setattr(scanners, "LARGE", 1 << 20)
    with Scanners() as scanning:
        assert found(scanning, libraries) == found_alone(libraries)
    assert not started


def test_one_processor_starts_no_process(started, libraries, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with Scanners() as scanning:
        assert found(scanning, libraries) == found_alone(libraries)
    assert not started


@pytest.mark.parametrize("executable", ["/bin/true", "/bin/cat", "/nonexistent", ""])
def test_program_that_embeds_python_scans_by_itself(libraries, monkeypatch, executable):
    monkeypatch.setattr(scanners, "PATIENCE", 1)
    monkeypatch.setattr(sys, "executable", executable)
    with Scanners() as scanning:
        assert found(scanning, libraries) == found_alone(libraries)


def test_parts_of_one_file_are_scanned_at_the_same_time(libraries, tmp_path):
    path = tmp_path / "all"
    path.write_bytes(b"".join(window.read_at(0, window.size) for _, window in libraries.values()))
    with path.open("rb") as file, Scanners() as scanning:
        parts, start = {}, 0
        for name, (headers, window) in libraries.items():
            parts[name] = headers, Window(file, start, window.size)
            start += window.size
        assert found(scanning, parts) == found_alone(libraries)


def test_error_in_a_process_is_raised_here(libraries):
    *_, library = libraries.values()
    with Scanners() as scanning, pytest.raises(TypeError):
        scanning.start_scan(None, *library)()


def test_killed_process_makes_a_layer_unreadable(started, libraries, tmp_path):
    """The kernel does so when memory is short."""
    program = compiled(tmp_path / "p", "int main(void) { return 0; }").read_bytes()
    with Scanners() as scanning:
        found(scanning, libraries)
        for process in started:
            process.kill()
        with pytest.raises(AuditError, match="the process that decoded /bin/p was killed"):
            layer.read_layer(io.BytesIO(tar(("bin/p", program))), "sha256:x", scanning.start_scan)


def test_processes_end_at_once_when_they_are_closed(started, long, open_window):
    window = open_window(long)
    with Scanners() as scanning:
        result = scanning.start_scan("/lib/long.so", elf.read_elf(window), window)
        while not started:
            time.sleep(0.01)
        begin = time.monotonic()
    with pytest.raises(EOFError):
        result()
    assert time.monotonic() - begin < SOON / 2
    assert started[0].returncode == -signal.SIGKILL


def test_processes_end_with_a_killed_parent(long):
    program = (
        "import os; os.sched_getaffinity = lambda _: {0, 1}\n"
        "import subprocess; real = subprocess.Popen\n"
        "def start(*a, **k):\n"
        "    process = real(*a, **k); print(process.pid, flush=True); return process\n"
        "subprocess.Popen = start\n"
        "from pathlib import Path\n"
        "from imagematrix.audit.binaries import elf\n"
        "from imagematrix.audit.binaries.cpu.scanners import Scanners\n"
        "from imagematrix.audit.binaries.window import Window\n"
        f"path = Path({str(long)!r})\n"
        "window = Window(path.open('rb'), 0, path.stat().st_size)\n"
        "with Scanners() as scanning: scanning.start_scan('/l', elf.read_elf(window), window)()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        time.sleep(1)  # the process is scanning by now, or still starting
        parent.kill()
    deadline = time.monotonic() + SOON / 2
    while _runs(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_process_serves_until_its_connection_closes(libraries):
    own, other = Pipe()
    *_, (path, (headers, window)) = libraries.items()
    command = [*make_child_command(scanners.__name__), str(other.fileno())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[other.fileno()]) as process:
        other.close()
        with closing(own):
            assert own.recv() is None
            own.send((path, 0, window.size))
            send_handle(own, window.fileno(), process.pid)
            assert own.recv() == scan_file(path, headers, window)
        assert process.wait(SOON) == 0
