"""The chart of a Coverage: a row for hosts of one kind of hardware, a column for each variant."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from imagematrix.common.groups import group_values
from imagematrix.errors import UsageError
from imagematrix.hardware.vendors import versions
from imagematrix.selection.rule import select_relevant
from imagematrix.selection.rules.device_code import get_served_targets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable
    from typing import Any

    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.selection.fleet.coverage import Coverage, Service
    from imagematrix.selection.fleet.hardware_kinds import HardwareKind

CELLS = 10_000  # of the table; with more, browsers get slow, and nobody finds anything
COLUMNS = 100  # with more variants, those that fit no host are omitted


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartColumn:
    """One variant; `group` is the heading that it shares with its neighbours, perhaps as the `first`."""

    group: str
    label: str
    service: Service
    smallest: bool
    first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartCell:
    """How many hosts of a row get a variant, and whether it fits any."""

    hosts: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class ChartRow:
    """Hosts of alike hardware: `kinds`, the one with the most hosts first."""

    kinds: tuple[HardwareKind, ...]

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """The names of all hosts, sorted."""
        return tuple(sorted(name for kind in self.kinds for name in kind.hosts))

    @property
    def unserved(self) -> int:
        """How many hosts get nothing."""
        return sum(len(kind.hosts) for kind in self.kinds if kind.selected is None)

    @property
    def gpus(self) -> str:
        """The hosts' GPUs, without their number if that differs."""
        return _get_common_text(kind.gpus for kind in self.kinds) or self.kinds[0].models

    @property
    def driver(self) -> str:
        """The hosts' driver."""
        return self.kinds[0].driver

    @property
    def level(self) -> str:
        """The psABI levels of the hosts' processors, or their architectures."""
        return ", ".join(sorted({kind.level for kind in self.kinds}))

    @property
    def cpu(self) -> str:
        """The hosts' processors, or how many models there are."""
        models = {kind.cpu for kind in self.kinds}
        return _get_common_text(models) or f"{len(models)} models of CPU"

    @property
    def selected(self) -> tuple[tuple[str, int], ...]:
        """The variants that hosts get with the number of these hosts, most first."""
        hosts: Counter[str] = Counter()
        for kind in self.kinds:
            if kind.selected is not None:
                hosts[kind.selected] += len(kind.hosts)
        return tuple(sorted(hosts.items(), key=lambda item: (-item[1], item[0])))

    @property
    def refusals(self) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
        """The rules that variants fail on the first kind, with the reason and the variants, most first."""
        answer = self.kinds[0].answer
        if isinstance(answer, UsageError):
            return ()
        refused = group_values(
            ((result.rule, result.why), variant.reference)
            for variant, failing in answer.decision.refusals
            for result in select_relevant(failing)
        )
        return tuple(
            (rule, why, tuple(sorted(variants)))
            for (rule, why), variants in sorted(refused.items(), key=lambda item: (-len(item[1]), item[0]))
        )

    def make_cells(self, columns: Iterable[ChartColumn]) -> list[ChartCell]:
        """Return a cell for each column."""
        hosts, fits = dict(self.selected), frozenset().union(*(kind.fits for kind in self.kinds))
        references = [column.service.reference for column in columns]
        return [ChartCell(hosts=hosts.get(name, 0), fits=name in fits) for name in references]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Some columns and rows of a coverage; the `hidden` rows have the fewest hosts."""

    columns: tuple[ChartColumn, ...]
    rows: tuple[ChartRow, ...]
    hidden: tuple[ChartRow, ...]

    @property
    def headlines(self) -> list[tuple[str, int]]:
        """The headings that columns share, with the number of these columns."""
        groups = groupby(self.columns, lambda column: column.group)
        return [(name, len(list(columns))) for name, columns in groups]


def make_chart(coverage: Coverage, *, cells: int = CELLS) -> Chart:
    """Return the chart of a coverage with at most `cells` cells.

    Hosts are as far apart as that allows: by everything that describes them; without the number of their
    GPUs and the model of their CPU; without the level of their CPU.
    """
    columns = _make_columns(coverage)
    room = max(1, cells // max(1, len(columns)))
    make_keys: tuple[Callable[[HardwareKind], Hashable], ...] = (
        lambda kind: (kind.gpus, kind.driver, kind.level, kind.cpu, kind.selected, kind.fits),
        lambda kind: (kind.models, kind.driver, kind.level),
        lambda kind: (kind.models, kind.driver, kind.sample.arch),
    )
    groupings = [_group_rows(coverage.kinds, make_key) for make_key in make_keys]
    rows = next((rows for rows in groupings if len(rows) <= room), groupings[-1])
    positions = {column.service.reference: position for position, column in enumerate(columns)}
    # From the upper left to the lower right; those without an image come first.
    shown = sorted(rows[:room], key=lambda row: positions[row.selected[0][0]] if row.selected else -1)
    return Chart(columns=tuple(columns), rows=tuple(shown), hidden=tuple(rows[room:]))


def _group_rows(
    kinds: Iterable[HardwareKind], make_key: Callable[[HardwareKind], Hashable]
) -> list[ChartRow]:
    """Return kinds with equal keys as rows, the most hosts first."""
    groups = group_values((make_key(kind), kind) for kind in kinds)
    rows = [
        ChartRow(kinds=tuple(sorted(group, key=lambda kind: (-len(kind.hosts), kind.hosts))))
        for group in groups.values()
    ]
    return sorted(rows, key=lambda row: (-len(row.hosts), row.hosts))


def _make_columns(coverage: Coverage) -> list[ChartColumn]:
    """Return the variants, grouped by driver and CUDA release."""
    smallest = frozenset(coverage.smallest.variants)
    services = {
        service.reference: service
        for service in coverage.variants
        if service.fits or len(coverage.variants) <= COLUMNS
    }
    columns: list[ChartColumn] = []
    for variant in sorted(coverage.catalog.variants, key=_make_column_key):
        if variant.reference in services:
            group = _name_group(variant)
            columns.append(
                ChartColumn(
                    group=group,
                    label=_make_column_label(variant),
                    service=services[variant.reference],
                    smallest=variant.reference in smallest,
                    first=not columns or columns[-1].group != group,
                )
            )
    return columns


def _make_column_key(variant: Variant) -> tuple[Any, ...]:
    cuda = versions.make_sort_key(variant.cuda) if variant.cuda else ()
    driver = (
        versions.make_sort_key(variant.driver.version) if variant.driver and variant.driver.version else ()
    )
    cubins = [(int(cubin.rstrip("af")), cubin) for cubin in get_served_targets(variant)]
    # The group comes before the rest, so that it is not split.
    return (
        not variant.gpu,
        cuda,
        driver,
        _name_group(variant),
        cubins,
        len(variant.cpu_flags),
        variant.reference,
    )


def _name_group(variant: Variant) -> str:
    if not variant.gpu:
        return "CPU only"
    if variant.driver is None or variant.driver.version is None:
        driver = "the host's driver"
    elif variant.driver.mode == "compat":
        driver = f"cuda-compat {variant.driver.version}"
    else:
        driver = variant.driver.version
    return f"CUDA {variant.cuda} \N{MIDDLE DOT} {driver}"


def _make_column_label(variant: Variant) -> str:
    codes = [f"sm_{cubin}" for cubin in get_served_targets(variant)] + [
        f"PTX {ptx.target}" for ptx in variant.ptx
    ]
    more = f" +{len(codes) - 1}" if len(codes) > 1 else ""
    march = variant.march or variant.platform.removeprefix("linux/")
    return f"{codes[0]}{more} {march}" if codes else march


def _get_common_text(texts: Iterable[str]) -> str | None:
    """Return the only text of several, or None if they differ."""
    first, *rest = dict.fromkeys(texts)
    return None if rest else first
