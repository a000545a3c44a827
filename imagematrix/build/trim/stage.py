"""The command line of `program` in a build stage: `imagematrix trim` with a short output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from imagematrix.build.trim.rules import Rules, parse_capabilities
from imagematrix.build.trim.trim import trim
from imagematrix.errors import UsageError, sanitize_line


def main() -> None:
    """Trim the paths in the arguments, and print the result for each file."""
    parser = argparse.ArgumentParser(prog="trim")
    parser.add_argument("--compute", action="append", required=True)
    parser.add_argument("--keep-ptx", action="store_true")
    parser.add_argument("--drop-dead", action="store_true")
    parser.add_argument("--include-nvidia", action="store_true")
    parser.add_argument("paths", nargs="+", type=Path)
    options = parser.parse_args()
    try:
        rules = Rules(
            computes=parse_capabilities(options.compute),
            keep_ptx=options.keep_ptx,
            drop_dead=options.drop_dead,
            nvidia=options.include_nvidia,
        )
        report = trim(options.paths, rules)
    except UsageError as error:
        sys.exit("\n".join([f"trim: {error}", *([error.remedy] if error.remedy else [])]))
    for result in report.results:
        missing = f", nothing for {' '.join(result.missing)}" if result.missing else ""
        why = f": {result.why}" if result.why else ""
        removed = f"{result.removed_size} of {result.size} bytes removed"
        print(sanitize_line(f"{result.status.value}: {result.path}: {removed}{missing}{why}"))  # noqa: T201 - its answer
    for path in report.recorded:
        print(sanitize_line(f"altered, or trimmed before: {path}: RECORD had another hash"))  # noqa: T201
