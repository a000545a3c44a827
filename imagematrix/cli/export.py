"""`imagematrix export`: the same matrix for another tool."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.options import File, Only
from imagematrix.cli.output import counted, info
from imagematrix.cli.planning import planned, workshop
from imagematrix.errors import TagMovedError, UsageError
from imagematrix.export.targets import TARGETS
from imagematrix.planning.plan import PlanStatus
from imagematrix.spelling import nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from imagematrix.matrix.matrix import Cell
    from imagematrix.planning.backend import Order

__all__ = ["command"]


def command(
    target: Annotated[
        str,
        typer.Argument(
            metavar=f"{{{'|'.join(TARGETS)}}}",
            help=f"{'; '.join(f'{name}: {target.help}' for name, target in TARGETS.items())}.",
            autocompletion=lambda: list(TARGETS),
        ),
    ],
    file: File = Path("matrix.yaml"),
    only: Only = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            min=1,
            metavar="N",
            help="At most N jobs, each a shard; default: one job per cell, up to the CI system's limit.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="Write to files in DIR.")
    ] = None,
) -> None:
    """Write the matrix as the jobs of a CI system, or for docker buildx bake."""
    if target not in TARGETS:
        remedy = nearest(target, TARGETS) or f"one of {', '.join(TARGETS)}"
        raise UsageError(f"invalid export target: {target!r}", remedy=remedy)
    files = TARGETS[target].files(_Matrix(file, only), jobs)
    if output is None:
        if len(files) > 1:
            remedy = "write them to a folder with -o DIR, or select fewer cells with --only"
            raise UsageError(f"cannot write {len(files)} files to stdout", remedy=remedy)
        sys.stdout.write("".join(files.values()))
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (output / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{error.filename}: {error.strerror}") from error
    info(f"wrote {counted(len(files), 'file')} to {output}")


class _Matrix:
    """A matrix file as a Source."""

    def __init__(self, file: Path, only: str | None) -> None:
        self.expression = only or ""
        self._file = file
        self._only = only

    def cells(self) -> list[Cell]:
        from imagematrix.planning.planner import Against

        plan = planned(self._file, Against(), self._only)
        # A cell that fails here may be built elsewhere; if it fails there, its job reports that.
        return [item.cell for item in plan.with_status(PlanStatus.BUILD, PlanStatus.FAILED)]

    def orders(self, place: Callable[[str], str]) -> list[Order]:
        from imagematrix.builder.compiler import Compilers
        from imagematrix.builder.maker import ordered
        from imagematrix.planning.given import Given

        with workshop(push=False, given=Given()) as shop:
            plan = planned(self._file, shop.against, self._only)
            refused = plan.with_status(PlanStatus.REFUSED)
            if refused:
                remedy = "run `imagematrix plan` for details, and raise the version in matrix.yaml"
                message = f"a version would change in {counted(len(refused), 'cell')}"
                raise TagMovedError(message, remedy=remedy)
            for item in plan.with_status(PlanStatus.FAILED):
                raise UsageError(f"{item.cell.id}: {item.why}")
            items = plan.with_status(PlanStatus.BUILD, PlanStatus.UP_TO_DATE)
            for item in items:
                if item.trims:
                    raise UsageError(f"{item.cell.id}: only `build` can trim device code")
                if item.driver:
                    raise UsageError(f"{item.cell.id}: only `build` can take a driver from a folder")
            if not items:
                raise UsageError("nothing to export: no cell can be built")
            compilers = Compilers(items, shop.builder)
            pins = {base: shop.builder.pinned(base, digest) for base, digest in plan.bases.items()}
            orders = []
            for item in items:
                images = {base: where for base in item.bases if (where := pins[base])}
                images |= {need: place(need) for need in item.needs}
                sources = plan.given.sources(item.cell, item.cell.image.context, images)
                order = ordered(item, sources, partial(compilers.flags, item, sources))
                # Labels are computed lazily by a builder, which must still be open.
                orders.append(replace(order, labels=dict(order.labels)))
            return orders
