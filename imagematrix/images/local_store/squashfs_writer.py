"""Writing an image as a squashfs: mksquashfs reads its files as a tar, so no unpacked copy is needed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tarfile
import tempfile
from typing import cast

from imagematrix.common.programs import find_program
from imagematrix.common.text import make_headline
from imagematrix.errors import EngineError, UsageError
from imagematrix.images.local_store.folder import FULL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from typing import IO

    from imagematrix.images.local_store.merged_image import MergedFile

PROGRAM = "mksquashfs"
REMEDY = "`apt install squashfs-tools` (4.5 or newer), or pull with --unpacked, which needs no program"
LEVEL = 1  # of zstd: of TensorFlow's files, level 3 makes 5 % less in 1.5 times the time
MEMORY = "512M"  # for its queues: by default, a quarter of the machine, of which a job may have less
BLOCK = tarfile.BLOCKSIZE
LONGEST = 1 << 16  # bytes of its messages


def require_mksquashfs() -> str:
    """Return the path of mksquashfs; raise UsageError if there is none."""
    program = find_program(PROGRAM)
    if program is None:
        raise UsageError(f"{PROGRAM} is not installed", remedy=REMEDY)
    return program


def write_squashfs(
    path: Path,
    members: Iterable[MergedFile],
    latest: int,
    *,
    processors: int | None = None,
    on_bytes: Callable[[int], object] = lambda _: None,
) -> None:
    """Write the members, of which the first is the root, to the new file `path`.

    `latest` is the latest of their times. All files belong to root, who in a container is the caller. The
    same members give the same bytes with the same squashfs-tools, on any number of `processors`, by default
    all. `on_bytes` is told the bytes of content as they are passed on. Raises UsageError without
    squashfs-tools, EngineError if they fail, OSError if the disk is full, and what `members` raises.
    """
    remaining = iter(members)
    root = next(remaining)
    command = [
        require_mksquashfs(),
        "-",
        str(path),
        "-tar",
        "-comp",
        "zstd",
        "-Xcompression-level",
        str(LEVEL),
    ]
    command += ["-root-time", str(root.mtime), "-root-mode", f"{root.mode:o}"]
    # An ordinary user's container has one user id, as which it cannot write over the files of others.
    command += ["-all-root", "-no-xattrs", "-no-progress", "-quiet"]
    command += ["-noappend", "-mem", MEMORY, "-processors", str(processors or len(os.sched_getaffinity(0)))]
    # This sets the time of the file system and, before 4.6, that of the root, which would be the current one.
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(latest), "LC_ALL": "C"}
    complete = False
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
        ) as process:
            stdin = cast("IO[bytes]", process.stdin)
            try:
                with contextlib.suppress(BrokenPipeError):  # it ended, and says why
                    _write_tar(stdin, remaining, on_bytes)
                    complete = True
            except BaseException:
                process.kill()
                raise
            finally:
                with contextlib.suppress(BrokenPipeError):
                    stdin.close()
        errors.seek(0)
        messages = errors.read(LONGEST).decode(errors="replace")
    if process.returncode or not complete:
        for code in FULL:
            if os.strerror(code) in messages:
                raise OSError(code, os.strerror(code), str(path))
        raise EngineError(f"{PROGRAM}: {make_headline(messages)}", remedy=REMEDY)


def _write_tar(file: IO[bytes], members: Iterable[MergedFile], on_bytes: Callable[[int], object]) -> None:
    for member in members:
        info = tarfile.TarInfo(member.path.lstrip("/"))
        info.type, info.mode, info.mtime, info.size = member.kind, member.mode, member.mtime, member.size
        info.uid, info.gid = member.uid, member.gid
        info.linkname = member.target.lstrip("/") if member.kind == tarfile.LNKTYPE else member.target
        file.write(info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))
        if member.content:
            file.writelines(member.read_pieces(on_bytes))
            file.write(bytes(-member.size % BLOCK))
    file.write(bytes(2 * BLOCK))
