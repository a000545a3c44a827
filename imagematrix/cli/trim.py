"""`imagematrix trim`: removing device code that cannot run on the given GPUs from files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.shared.options import Json
from imagematrix.cli.shared.output import escape_text, print_info, print_json, print_table, warn
from imagematrix.common.text import format_count
from imagematrix.common.units import MEGABYTE, format_megabytes

EXAMPLE = "imagematrix trim --compute 9.0 --dry-run torch-2.8.0.whl"
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from imagematrix.build.trim.examination import Amount
    from imagematrix.build.trim.trim import TrimReport


def command(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Files, folders, wheels and static libraries.")
    ],
    compute: Annotated[
        list[str],
        typer.Option("--compute", metavar="CAP", help="Keep what runs on this GPU, such as 9.0; repeatable."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Trim copies in DIR instead of the files."),
    ] = None,
    keep_ptx: Annotated[
        bool, typer.Option("--keep-ptx", help="Keep all PTX; it also runs on newer GPUs.")
    ] = False,
    drop_dead: Annotated[
        bool,
        typer.Option(
            "--drop-dead",
            help="Also empty fatbins that have no code for these GPUs; not yet tried on a GPU.",
        ),
    ] = False,
    include_nvidia: Annotated[
        bool,
        typer.Option(
            "--include-nvidia",
            help="Also trim NVIDIA's libraries; see their license before you pass them on.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed, and how much of a layer that is.")
    ] = False,
    json: Json = False,
) -> None:
    """Remove device code that cannot run on the given GPUs from files, folders and wheels, in place.

    Every cubin that runs on one of them is kept, and PTX if no cubin does. Files keep their length, and
    wheels stay valid.
    """
    from imagematrix.build.trim.rules import Rules, parse_capabilities
    from imagematrix.build.trim.trim import trim

    rules = Rules(
        computes=parse_capabilities(compute), keep_ptx=keep_ptx, drop_dead=drop_dead, nvidia=include_nvidia
    )
    report = trim(
        paths, rules, output=output, dry_run=dry_run, measure=_measure_compressed if dry_run else None
    )
    if json:
        print_json(report.to_json())
    else:
        _print_results(report)
    _print_warnings(report)


def _measure_compressed(pieces: Iterable[bytes]) -> int:
    import zstandard

    writer = zstandard.ZstdCompressor().compressobj()
    return sum(len(writer.compress(piece)) for piece in pieces) + len(writer.flush())


def _print_results(report: TrimReport) -> None:
    columns = ("file", "status", "keeps", "removes", "removed", *(["compressed"] if report.dry_run else []))
    rows = []
    for result in report.results:
        row = [
            escape_text(result.path),
            result.status.value,
            _format_targets(result.kept),
            _format_targets(result.dropped),
            f"{result.removed_size / MEGABYTE:.1f} of {format_megabytes(result.size)}",
        ]
        if report.dry_run:
            row.append("-" if result.compressed is None else format_megabytes(result.compressed))
        rows.append(row)
    if rows:
        print_table(columns, rows)
    removed = sum(result.removed_size for result in report.results)
    verb = "would be removed" if report.dry_run else "removed"
    files = format_count(sum(bool(result.edits) for result in report.results), "file")
    print_info(f"{format_megabytes(removed)} {verb} from {files}, of {len(report.results)} with device code")


def _format_targets(amounts: Sequence[Amount]) -> str:
    prefixes = {"cubin": "sm_", "ptx": "PTX ", "other": "other "}
    return ", ".join(f"{prefixes[amount.kind]}{amount.target}" for amount in amounts) or "-"


def _print_warnings(report: TrimReport) -> None:
    computes = ", ".join(report.rules.computes)
    for result in report.results:
        if result.status == "unsupported":
            warn(f"{result.path} does not run on {computes}: it has no device code for it")
        elif result.status == "damaged":
            warn(f"{result.path} is unchanged: {result.why or 'its device code is damaged'}")
        elif result.missing:
            warn(f"{result.path} has no device code that runs on {', '.join(result.missing)}")
    dead = [result for result in report.results if result.dead and result.status != "unsupported"]
    if dead and not report.rules.drop_dead:
        fatbins = format_count(sum(result.dead for result in dead), "fatbin")
        files = format_count(len(dead), "file")
        print_info(f"{fatbins} in {files} with nothing that runs on {computes} are unchanged")
    for path in report.recorded:
        warn(f"{path} has another hash in RECORD, which now has its own: was it altered, or trimmed before?")
    for path in report.linked:
        warn(f"{path} has a hard link outside the given paths, which keeps the original content")
