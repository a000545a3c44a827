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
# A file in which nothing is left to remove may have been trimmed by a run that was killed before it came to
# the RECORD.
DONE = (Status.TRIMMED, Status.UNCHANGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was done to files with device code, or would be with `dry_run`.

    Files in a wheel are named by its path, "!/" and their own. `linked` are the trimmed files that have names
    outside of the paths that were given, too, which keep the file as it was.
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

    A file is replaced by a new one of the same length, mode, owner and times, in one step: who has it open
    keeps the old one, and however this ends, there is the old one or the new one. All names that a file has
    among `paths` become names of the new one. With `output`, copies of `paths` in that folder are trimmed
    instead. The hashes in a RECORD of what is trimmed are made true. `measure` returns how many bytes some
    have when they are compressed.
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
        finally:  # also those of files that were trimmed before an error
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
    """An open file: what was found, and what writes it trimmed, None where nothing is to be taken out."""

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
        return dataclasses.replace(finding, compressed=measure(edits.taken_out(window, finding.edits)))
    return finding


def _put(names: Sequence[Name], examined: _Examined) -> None:
    """Write what becomes of a file."""
    first = names[0]
    if examined.write:
        files.replace(names, examined.status, examined.write)
    elif first.source != first.target:
        examined.file.seek(0)
        files.replace(names, examined.status, partial(shutil.copyfileobj, examined.file))


def _write(window: Window, changes: Sequence[Edit], target: IO[bytes]) -> None:
    for piece in edits.edited(window, changes):
        if isinstance(piece, int):
            target.seek(piece, os.SEEK_CUR)  # which leaves a hole: zeros that take no space on the disk
        else:
            target.write(piece)


def _record(names: Sequence[Name], trimmed: Collection[Path]) -> None:
    """Make the hashes true that a RECORD has of trimmed files; a copy may not have it yet after an error."""
    target = names[0].target
    if not (trimmed and records.NAME.fullmatch(target.as_posix()) and target.exists()):
        return
    folder = target.parent.parent
    real = {Path(os.path.realpath(file)): file for file in trimmed}
    basenames = {file.name for file in real}

    def hashed(path: str) -> str | None:
        # Links, such as lib64, are only followed for the few names that may be those of trimmed files.
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
