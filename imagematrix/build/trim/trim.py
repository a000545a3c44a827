"""Trimming files, folders and wheels, in place or in copies."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from imagematrix.audit.binaries import archives
from imagematrix.audit.binaries.window import Window
from imagematrix.build.trim import edits, files, records, wheel
from imagematrix.build.trim.examination import FileResult, TrimStatus, examine_file, is_candidate_file
from imagematrix.build.trim.files import PathPair
from imagematrix.build.trim.rules import VERSION
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import IO, BinaryIO

    from imagematrix.build.trim.edits import Edit
    from imagematrix.build.trim.rules import Rules

    Measure = Callable[[Iterable[bytes]], int]

SCHEMA = "imagematrix.trim/v1"
RECORDS = "*.dist-info/RECORD"
# A file without anything to remove may have been trimmed by an earlier run that was killed before it updated
# the RECORD.
DONE = (TrimStatus.TRIMMED, TrimStatus.UNCHANGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimReport:
    """The results for files with device code; with `dry_run`, nothing was written.

    A file in a wheel is named by the wheel's path, "!/" and its own path. `linked` are the trimmed files with
    hard links outside the given paths; these links keep the untrimmed file. `recorded` are the files
    from which nothing was removed, and whose hash in a RECORD was corrected.
    """

    rules: Rules
    dry_run: bool
    results: tuple[FileResult, ...]
    linked: tuple[str, ...]
    recorded: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the Trim document."""
        return {
            "schema": SCHEMA,
            "rules": VERSION,
            "computes": list(self.rules.computes),
            "keep_ptx": self.rules.keep_ptx,
            "drop_dead": self.rules.drop_dead,
            "include_nvidia": self.rules.nvidia,
            "dry_run": self.dry_run,
            "removed": sum(result.removed_size for result in self.results),
            "files": [result.to_json() for result in self.results],
            "linked": list(self.linked),
            "recorded": list(self.recorded),
        }


def trim(
    paths: Sequence[Path],
    rules: Rules,
    *,
    output: Path | None = None,
    dry_run: bool = False,
    measure: Measure | None = None,
) -> TrimReport:
    """Trim files, all files in folders, and wheels; raise UsageError.

    Each file is replaced atomically by a new one with the same length, mode, owner and times: processes that
    have it open keep the old file, and an interruption leaves either the old or the new file. All hard links
    among `paths` lead to the new file. With `output`, copies of `paths` in that folder are trimmed instead.
    The hashes of trimmed files in a RECORD are updated, also if it is not among `paths` but in a folder above
    them. `measure` returns the compressed size of bytes.
    """
    listing = files.list_files(paths, output)
    trimmed: dict[Path, bool] = {}  # whether something was removed, by path
    recorded: list[str] = []
    results: list[FileResult] = []
    linked: list[str] = []
    try:
        if not dry_run:
            listing.create()
        try:
            for names in listing.files:
                with _open_examined(names[0].source, rules, measure) as examined:
                    results += examined.results
                    if any(result.status in DONE for result in examined.results):
                        trimmed.update({name.target: bool(examined.write) for name in names})
                    if examined.write and names[0].source == names[0].target:
                        linked += [str(names[0].source)] * (examined.status.st_nlink > len(names))
                    if not dry_run:
                        _write_file(names, examined)
        finally:  # after an error, too, for the files that are already trimmed
            if not dry_run:
                recorded += _update_records(listing.files, trimmed)
        if not dry_run:
            listing.finish()
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise UsageError(f"{where}{error.strerror or error}") from error
    return TrimReport(
        rules=rules, dry_run=dry_run, results=tuple(results), linked=tuple(linked), recorded=tuple(recorded)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Examined:
    """An open file: its results, and a function that writes it trimmed, None if nothing is to be removed."""

    file: BinaryIO
    status: os.stat_result
    results: Sequence[FileResult]
    write: Callable[[IO[bytes]], None] | None


@contextlib.contextmanager
def _open_examined(path: Path, rules: Rules, measure: Measure | None) -> Iterator[_Examined]:
    def examine(name: str, window: Window) -> FileResult | None:
        result = examine_file(name, window, rules)
        if measure and result and result.edits:
            removed_bytes = edits.read_removed_bytes(window, result.edits)
            return dataclasses.replace(result, compressed=measure(removed_bytes))
        return result

    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        window = Window(file, 0, status.st_size)
        head = window.read_at(0, archives.HEAD)
        if path.suffix == wheel.SUFFIX and head.startswith(archives.ZIP):
            contents = wheel.examine_wheel(str(path), window, examine)
            rewrite = contents.write if contents.changed else None
            yield _Examined(file=file, status=status, results=contents.results, write=rewrite)
            return
        result = examine(str(path), window) if is_candidate_file(head) else None
        results = [result] if result else []
        write = partial(_write_edited, window, result.edits) if result and result.edits else None
        yield _Examined(file=file, status=status, results=results, write=write)


def _write_file(names: Sequence[PathPair], examined: _Examined) -> None:
    """Write the trimmed file; if nothing is removed, only copy it if it has another target."""
    first = names[0]
    if examined.write:
        files.replace_files(names, examined.status, examined.write)
    elif first.source != first.target:
        examined.file.seek(0)
        files.replace_files(names, examined.status, partial(shutil.copyfileobj, examined.file))


def _write_edited(window: Window, changes: Sequence[Edit], target: IO[bytes]) -> None:
    for piece in edits.apply_edits(window, changes):
        if isinstance(piece, int):
            target.seek(piece, os.SEEK_CUR)  # leave a hole: zeros that take no disk space
        else:
            target.write(piece)


def _update_records(listed: Iterable[Sequence[PathPair]], trimmed: Mapping[Path, bool]) -> Iterator[str]:
    """Update each RECORD among the listed files and above trimmed ones; yield files that were trimmed before.

    After an error, the copy of a RECORD may not exist yet.
    """
    if not trimmed:
        return
    by_real_path = {Path(os.path.realpath(file)): file for file in trimmed}
    basenames = {path.name for path in by_real_path}

    def find_file(folder: Path, path: str) -> Path | None:
        # Resolving links, such as lib64, takes time, so only paths named like a trimmed file are resolved.
        if "\0" in path or os.path.basename(path) not in basenames:  # noqa: PTH119 - text, perhaps no path
            return None
        return by_real_path.get(Path(os.path.realpath(folder / path)))

    given = [names for names in listed if records.NAME.fullmatch(names[0].target.as_posix())]
    known = {Path(os.path.realpath(name.target)) for names in given for name in names}
    above = [(PathPair(path, path),) for path in _find_records_above(by_real_path) if path not in known]
    for names in (*given, *above):
        if names[0].target.exists():
            yield from _update_record(names, trimmed, find_file)


def _find_records_above(files: Iterable[Path]) -> Iterator[Path]:
    """Yield each RECORD of installed packages in the folders above these files."""
    folders = {folder for file in files for folder in file.parents}
    for folder in sorted(folders):
        found: list[Path] = []
        with contextlib.suppress(OSError):  # a folder that this user may not list
            found = sorted(folder.glob(RECORDS))
        yield from (path for path in found if path.is_file() and not path.is_symlink())


def _update_record(
    names: Sequence[PathPair], trimmed: Mapping[Path, bool], find_file: Callable[[Path, str], Path | None]
) -> list[str]:
    """Update the hashes of files in a RECORD, and return those of them that were not trimmed now.

    `find_file` returns the trimmed file at a path in a folder.
    """
    target = names[0].target
    corrected: list[str] = []

    def find_hash(path: str) -> str | None:
        file = find_file(target.parent.parent, path)
        if not file or not file.exists():
            return None
        checksum = records.hash_file(file)
        if not trimmed[file] and checksum not in text:
            corrected.append(str(file))
        return checksum

    try:
        before = target.read_bytes()
        text = before.decode("utf-8", "surrogateescape")
        after = records.update_record(text, find_hash).encode("utf-8", "surrogateescape")
    except records.RecordError as error:
        raise UsageError(f"{target.parent}: {error}", remedy="install the package again") from error
    if after != before:
        copies = [PathPair(name.target, name.target) for name in names]
        files.replace_files(copies, target.stat(), lambda file: file.write(after))
    return corrected
