"""Trimming files, folders and wheels, in place or in copies."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from imagematrix.audit import archives
from imagematrix.audit.window import Window
from imagematrix.errors import UsageError
from imagematrix.trim import edits, files, records, wheel
from imagematrix.trim.examine import Finding, Status, examine, interesting
from imagematrix.trim.files import Name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from typing import IO, BinaryIO

    from imagematrix.trim.edits import Edit
    from imagematrix.trim.rules import Rules
    from imagematrix.trim.wheel import Look

    Measure = Callable[[Iterable[bytes]], int]

__all__ = ["Report", "trim"]

PIECE = 1 << 20
# A file without anything to remove may have been trimmed by an earlier run that was killed before it updated
# the RECORD.
DONE = (Status.TRIMMED, Status.UNCHANGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results for files with device code; with `dry_run`, nothing was written.

    A file in a wheel is named by the wheel's path, "!/" and its own path. `linked` are the trimmed files with
    hard links outside the given paths; these links keep the untrimmed file.
    """

    rules: Rules
    dry_run: bool
    findings: tuple[Finding, ...]
    linked: tuple[str, ...]


def trim(
    paths: Sequence[Path],
    rules: Rules,
    *,
    output: Path | None = None,
    dry_run: bool = False,
    measure: Measure | None = None,
) -> Report:
    """Trim files, all files in folders, and wheels; raise UsageError.

    Each file is replaced atomically by a new one with the same length, mode, owner and times: processes that
    have it open keep the old file, and an interruption leaves either the old or the new file. All hard links
    among `paths` lead to the new file. With `output`, copies of `paths` in that folder are trimmed instead.
    The hashes of trimmed files in a RECORD are updated. `measure` returns the compressed size of bytes.
    """
    listed = files.listed(paths, output)
    trimmed: set[Path] = set()
    findings: list[Finding] = []
    linked: list[str] = []
    look = partial(_look, rules, measure)
    try:
        if not dry_run:
            listed.create()
        try:
            for names in listed.files:
                with _opened(names[0].source, look) as examined:
                    findings += examined.findings
                    if any(finding.status in DONE for finding in examined.findings):
                        trimmed.update(name.target for name in names)
                    if examined.write:
                        linked += [str(names[0].source)] * (examined.status.st_nlink > len(names))
                    if not dry_run:
                        _put(names, examined)
        finally:  # after an error, too, for the files that are already trimmed
            if not dry_run:
                for names in listed.files:
                    _record(names, trimmed)
        if not dry_run:
            listed.finish()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise UsageError(f"{where}{error.strerror or error}") from error
    return Report(rules=rules, dry_run=dry_run, findings=tuple(findings), linked=tuple(linked))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Examined:
    """An open file: its findings, and a function that writes it trimmed, None if nothing is to be removed."""

    file: BinaryIO
    status: os.stat_result
    findings: Sequence[Finding]
    write: Callable[[IO[bytes]], None] | None


@contextlib.contextmanager
def _opened(path: Path, look: Look) -> Iterator[_Examined]:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        window = Window(file, 0, status.st_size)
        head = window.at(0, archives.HEAD)
        if path.suffix == wheel.SUFFIX and head.startswith(archives.ZIP):
            with wheel.opened(str(path), window, look) as inside:
                write = inside.write if inside.changed else None
                yield _Examined(file=file, status=status, findings=inside.findings, write=write)
            return
        finding = look(str(path), window) if interesting(head) else None
        yield _Examined(
            file=file,
            status=status,
            findings=[finding] if finding else [],
            write=partial(_write, window, finding.edits) if finding and finding.edits else None,
        )


def _look(rules: Rules, measure: Measure | None, path: str, window: Window) -> Finding | None:
    finding = examine(path, window, rules)
    if measure and finding and finding.edits:
        return dataclasses.replace(finding, compressed=measure(edits.removed_bytes(window, finding.edits)))
    return finding


def _put(names: Sequence[Name], examined: _Examined) -> None:
    """Write the trimmed file; if nothing is removed, only copy it if it has another target."""
    first = names[0]
    if examined.write:
        files.replace(names, examined.status, examined.write)
    elif first.source != first.target:
        examined.file.seek(0)
        files.replace(names, examined.status, partial(shutil.copyfileobj, examined.file))


def _write(window: Window, changes: Sequence[Edit], target: IO[bytes]) -> None:
    for piece in edits.edited(window, changes):
        if isinstance(piece, int):
            target.seek(piece, os.SEEK_CUR)  # leave a hole: zeros that take no disk space
        else:
            target.write(piece)


def _record(names: Sequence[Name], trimmed: Collection[Path]) -> None:
    """Update the hashes of trimmed files in a RECORD; after an error, its copy may not exist yet."""
    target = names[0].target
    if not (trimmed and records.NAME.fullmatch(target.as_posix()) and target.exists()):
        return
    folder = target.parent.parent
    real = {Path(os.path.realpath(file)): file for file in trimmed}
    basenames = {file.name for file in real}

    def hashed(path: str) -> str | None:
        # Resolving links, such as lib64, takes time, so only paths named like a trimmed file are resolved.
        if "\0" in path or os.path.basename(path) not in basenames:  # noqa: PTH119 - text, perhaps no path
            return None
        file = real.get(Path(os.path.realpath(folder / path)))
        return records.digest(_content(file)) if file and file.exists() else None

    before = target.read_bytes()
    text = before.decode("utf-8", "surrogateescape")
    after = records.updated(text, hashed).encode("utf-8", "surrogateescape")
    if after != before:
        own = [Name(name.target, name.target) for name in names]
        files.replace(own, target.stat(), lambda file: file.write(after))


def _content(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece
