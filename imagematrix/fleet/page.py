"""The report of a Coverage as one self-contained HTML file. Names of hosts and images are escaped."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import groupby

from imagematrix.errors import UsageError
from imagematrix.facts import versions
from imagematrix.fleet.loss import LOSSES
from imagematrix.selection.rules.device_code import served
from imagematrix.text import shortened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence
    from typing import Any

    from jinja2 import Template

    from imagematrix.catalog.catalog import Variant
    from imagematrix.fleet.coverage import Coverage, Service
    from imagematrix.fleet.kinds import Kind
    from imagematrix.selection.candidate import Candidate

__all__ = ["page"]

TEMPLATE = "page.html"
CELLS = 20_000  # of the table; with more, browsers get slow
COLUMNS = 100  # with more variants, those that fit no host are omitted
LISTED = 40  # reasons or changes in a list, which then says how many were omitted
THOUSAND = 1_000
NAMED = 12  # hosts in a list, which then says how many were omitted


@dataclass(frozen=True, slots=True, kw_only=True)
class _PageColumn:
    """One variant; `group` is the heading that it shares with its neighbours."""

    group: str
    label: str
    service: Service
    smallest: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _PageCell:
    """The state of a variant for a row, "selected", "fits" or "refused", and its tooltip."""

    state: str
    tip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _PageRow:
    """Hosts with the same description, selected variant and fitting variants."""

    names: tuple[str, ...]
    kind: Kind
    cells: tuple[_PageCell, ...]


def page(coverage: Coverage, *, cells: int = CELLS) -> str:
    """Return the page; a table of more than `cells` cells shows only the rows with the most hosts."""
    columns = _columns(coverage)
    groups = _groups(coverage.kinds, columns)
    rows = [_row(kinds, columns) for kinds in groups[: max(1, cells // max(1, len(columns)))]]
    return _template().render(
        short=coverage.short,
        coverage=coverage,
        columns=columns,
        headlines=[(name, len(list(some))) for name, some in groupby(columns, lambda one: one.group)],
        rows=rows,
        listed=LISTED,
        losses=LOSSES,
        hidden=groups[len(rows) :],
    )


@cache
def _template() -> Template:
    from importlib.resources import files

    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"brief": _brief, "named": _named}
    return environment.from_string((files(__package__) / TEMPLATE).read_text("utf-8"))


def _columns(coverage: Coverage) -> list[_PageColumn]:
    """Return the variants, grouped by driver and CUDA release."""
    smallest = frozenset(coverage.smallest.variants)
    services = {
        service.reference: service
        for service in coverage.variants
        if service.fits or len(coverage.variants) <= COLUMNS
    }
    return [
        _PageColumn(
            group=_group(variant),
            label=_label(variant),
            service=services[variant.reference],
            smallest=variant.reference in smallest,
        )
        for variant in sorted(coverage.catalog.variants, key=_place)
        if variant.reference in services
    ]


def _place(variant: Variant) -> tuple[Any, ...]:
    cuda = versions.order(variant.cuda) if variant.cuda else ()
    driver = versions.order(variant.driver.version) if variant.driver and variant.driver.version else ()
    cubins = [(int(cubin.rstrip("af")), cubin) for cubin in served(variant)]
    # The group comes before the rest, so that it is not split.
    return not variant.gpu, cuda, driver, _group(variant), cubins, len(variant.cpu_flags), variant.reference


def _group(variant: Variant) -> str:
    if not variant.gpu:
        return "CPU only"
    if variant.driver is None or variant.driver.version is None:
        carried = "the host's driver"
    elif variant.driver.mode == "compat":
        carried = f"cuda-compat {variant.driver.version}"
    else:
        carried = variant.driver.version
    return f"CUDA {variant.cuda} \N{MIDDLE DOT} {carried}"


def _label(variant: Variant) -> str:
    codes = [f"sm_{cubin}" for cubin in served(variant)] + [f"PTX {ptx.target}" for ptx in variant.ptx]
    more = f" +{len(codes) - 1}" if len(codes) > 1 else ""
    march = variant.march or variant.platform.removeprefix("linux/")
    return f"{codes[0]}{more} {march}" if codes else march


def _groups(kinds: Iterable[Kind], columns: Sequence[_PageColumn]) -> list[tuple[Kind, ...]]:
    """Return kinds with equal descriptions as groups: most hosts first, then by selected variant."""
    groups: dict[Hashable, list[Kind]] = {}
    for kind in kinds:
        look = kind.gpus, kind.driver, kind.level, kind.cpu, kind.selected, kind.fits
        groups.setdefault(look, []).append(kind)
    places = {column.service.reference: place for place, column in enumerate(columns)}
    return sorted(
        map(tuple, groups.values()),
        key=lambda some: (
            -sum(len(kind.hosts) for kind in some),
            places.get(some[0].selected or "", -1),
            some[0].hosts,
        ),
    )


def _row(kinds: Sequence[Kind], columns: Sequence[_PageColumn]) -> _PageRow:
    answer = kinds[0].answer
    if isinstance(answer, UsageError):
        cells = tuple(_PageCell(state="refused", tip=str(answer)) for _ in columns)
    else:
        candidates = {candidate.reference: candidate for candidate in answer.candidates}
        cells = tuple(_cell(candidates[column.service.reference]) for column in columns)
    names = tuple(sorted(name for kind in kinds for name in kind.hosts))
    return _PageRow(names=names, kind=kinds[0], cells=cells)


def _cell(candidate: Candidate) -> _PageCell:
    if candidate.rank is None:
        state, lines = "refused", [f"{rule.rule}: {rule.why}" for rule in candidate.failing]
    elif candidate.rank == 1:
        state, lines = "selected", ["selected: it fits best"]
    else:
        state, lines = "fits", [f"fits, rank {candidate.rank}"]
    return _PageCell(state=state, tip="\n".join([candidate.reference, *lines]))


def _named(hosts: Sequence[str], count: int = NAMED) -> str:
    return shortened(hosts, count, more=", {} more")


def _brief(number: int) -> str:
    """Format a number for a narrow column: 831, 2.6k, 12k."""
    if number < THOUSAND:
        return str(number or "")
    thousands = number / THOUSAND
    return f"{thousands:.1f}k" if thousands < 9.95 else f"{thousands:.0f}k"  # noqa: PLR2004 - 9.95 is 10.0
