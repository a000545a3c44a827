"""The page of a fleet: one self-contained HTML file without scripts. What comes from outside is escaped."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from os.path import commonprefix

from imagematrix.common.groups import group_values
from imagematrix.common.units import format_megabytes
from imagematrix.errors import sanitize_text
from imagematrix.selection.fleet.chart import CELLS, make_chart
from imagematrix.selection.fleet.loss import LOSSES
from imagematrix.selection.fleet.upgrade import Loss

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from jinja2 import Template

    from imagematrix.selection.fleet.coverage import Coverage
    from imagematrix.selection.fleet.staleness import StalenessFinding
    from imagematrix.selection.fleet.storage import Storage
    from imagematrix.selection.fleet.unserved_hosts import UnservedHosts
    from imagematrix.selection.miss import Miss

TEMPLATE = "page.html"
LISTED = 40  # reasons or changes in a list, which then says how many were omitted
OPEN = 8  # of these that are shown at once; the reader opens the others
NAMED = 12  # hosts or variants in a list, which then says how many were omitted
FOUND = 500  # hosts of one row, which searching the page finds
LONGEST = 500  # characters of a text; only hostile ones have more
SHORT = 19  # characters of a digest
THOUSAND = 1_000
MEGABYTE = 1_000_000
GIGABYTE = 1_000_000_000
PAPER = 45  # columns of the chart that fit on a sheet of paper
TALL = 20  # rows of the chart, of which more scroll below its headings; no screen has room for as many


def render_page(
    coverage: Coverage,
    *,
    storage: Storage | None = None,
    aged: Sequence[StalenessFinding] | None = None,
    cells: int = CELLS,
) -> str:
    """Return the page of a fleet; its chart has at most `cells` cells.

    `storage` adds what the variants take, `aged` what is outdated.
    """
    # Names of hosts are paths, shown without the folder that all of them share. commonpath refuses names of
    # which some are absolute; what follows the last slash is no folder.
    names = [name for kind in coverage.kinds for name in kind.hosts]
    folder, slash, _ = commonprefix(names).rpartition("/")  # noqa: RUF071
    return _load_template().render(
        short=coverage.shorten_reference,
        host=lambda name: name.removeprefix(folder + slash),
        coverage=coverage,
        chart=make_chart(coverage, cells=cells),
        storage=storage,
        aged=aged,
        losses=LOSSES,
        listed=LISTED,
        opened=OPEN,
        found=FOUND,
        paper=PAPER,
        tall=TALL,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _PageReason:
    """Hosts without an image, or that would lose their `old` ones; `miss` tells their common reason."""

    hosts: Sequence[str]
    old: Sequence[str]
    nearest: Sequence[str]
    miss: Miss


def _group_by_reason(losses: Iterable[UnservedHosts | Loss]) -> list[_PageReason]:
    """Group hosts whose reasons differ only in the nearest variant, the most hosts first."""
    groups = group_values((_make_reason_key(loss.miss), loss) for loss in losses)
    reasons = [
        _PageReason(
            hosts=sorted(host for loss in group for host in loss.hosts),
            old=sorted({loss.old for loss in group if isinstance(loss, Loss)}),
            nearest=sorted({loss.miss.nearest for loss in group if loss.miss.nearest}),
            miss=group[0].miss,
        )
        for group in groups.values()
    ]
    return sorted(reasons, key=lambda reason: (-len(reason.hosts), reason.hosts))


def _make_reason_key(miss: Miss) -> Hashable:
    words = None if miss.told else (miss.why, miss.shown)
    return words, tuple((rule.rule, rule.why, rule.shown) for rule in miss.relevant)


@cache
def _load_template() -> Template:
    from importlib.resources import files

    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_sanitize_text,
    )
    environment.filters |= {
        "amount": _format_size,
        "brief": _format_number,
        # Enough of a digest to tell it from others; any other text as it is.
        "digest": lambda text: text[:SHORT] if text.startswith("sha256:") else text,
        "named": _join_first_names,
        "number": "{:,}".format,
        "reasons": _group_by_reason,
    }
    return environment.from_string((files(__package__) / TEMPLATE).read_text("utf-8"))


def _sanitize_text(value: object) -> object:
    """Return text of others without control characters, and not longer than a reader can use."""
    if type(value) is not str:  # a number, or HTML of a macro
        return value
    return sanitize_text(value if len(value) <= LONGEST else f"{value[:LONGEST]}\N{HORIZONTAL ELLIPSIS}")


def _join_first_names(names: Sequence[str], most: int = NAMED) -> tuple[Sequence[str], int]:
    """Return the first names, and how many there are besides."""
    return names[:most], max(0, len(names) - most)


def _format_size(size: int | None) -> str:
    if size is None or MEGABYTE <= size < GIGABYTE:
        return format_megabytes(size)
    if size >= GIGABYTE:
        return f"{size / GIGABYTE:.2f} GB"
    return f"{size / THOUSAND:.1f} kB" if size else "0"


def _format_number(number: int) -> str:
    """Format a number for a narrow column: 831, 2.6k, 12k."""
    if number < THOUSAND:
        return str(number)
    thousands = number / THOUSAND
    return f"{thousands:.1f}k" if thousands < 9.95 else f"{thousands:.0f}k"  # noqa: PLR2004 - 9.95 is 10.0
