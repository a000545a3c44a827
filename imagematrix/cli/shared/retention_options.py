"""What `retire` and `prune` have in common: which versions to keep, and messages about them."""

from __future__ import annotations

import contextlib
import sys

from imagematrix.cli.shared.output import print_info, warn
from imagematrix.common.text import format_count, shorten_words
from imagematrix.errors import ImagematrixError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence, Sized
    from pathlib import Path

    from imagematrix.build.retire.retention import Retention

SHOWN = 5  # hosts


def make_retention(
    keep: int | None,
    protect: Sequence[str] | None,
    hosts: Sequence[Path] | None,
    newer: str | None = None,
    *,
    names: str = "--keep N, --protect VERSION or --hosts HOSTS",
) -> Retention:
    """Return what to keep; raise UsageError if neither this nor `newer` is given. `names` are the options."""
    from imagematrix.build.retire.retention import Retention
    from imagematrix.selection.fleet.hosts import load_hosts

    if keep is None and newer is None and not protect and not hosts:
        raise UsageError("no option says what to keep", remedy=f"pass {names}")
    loaded = load_hosts(*hosts, stream=sys.stdin.buffer) if hosts else {}
    return Retention(keep=keep or 0, protect=frozenset(protect or ()), hosts=loaded)


def warn_of_unserved(names: Sequence[str]) -> None:
    """Warn that nothing is kept for some hosts, because nothing serves them."""
    if names:
        warn(f"no version serves {format_count(len(names), 'host')}: {shorten_words(names, SHOWN)}")


def flush_stdout() -> None:
    """Write what was printed to stdout to its end: nothing may be removed that was not shown."""
    sys.stdout.flush()


@contextlib.contextmanager
def report_removed_count(removed: Sized, whole: str) -> Iterator[None]:
    """If an error ends the removal of the `whole`, say how much was `removed` before."""
    try:
        yield
    except ImagematrixError:
        if removed:
            print_info(f"removed {len(removed)} of {whole}")
        raise
