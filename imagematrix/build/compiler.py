"""Which CPU flags a march needs: asked of the compiler in the image, before the image is built.

A template's stage named `compiler` has the compiler its code is built with. For every march of the plan that
stage is asked once for its predefined macros (`cc -march=M -dM -E`); the answer goes into the labels.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from imagematrix.errors import BuildError
from imagematrix.facts import marches
from imagematrix.matrix.feasibility import ARCHES
from imagematrix.render.dockerfile import through_stage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from imagematrix.build.backend import Backend
    from imagematrix.build.plan import Item
    from imagematrix.matrix.matrix import Cell

__all__ = ["STAGE", "required_flags"]

STAGE = "compiler"


def required_flags(items: Iterable[Item], backend: Backend) -> Mapping[str, frozenset[str]]:
    """Return the flags that each item's code needs, by reference; raise BuildError.

    Where a template has no stage `compiler`, the shipped table answers for the cell's property `compiler`.
    """
    groups: dict[tuple[str, Path], list[Item]] = {}
    found: dict[str, frozenset[str]] = {}
    for item in items:
        march = item.cell.axes.get("march")
        stage = through_stage(item.dockerfile, STAGE)
        if march is None:
            found[str(item.reference)] = frozenset()
        elif stage is None:
            found[str(item.reference)] = _from_table(item.cell, march)
        else:
            groups.setdefault((stage, item.cell.image.context), []).append(item)
    for (stage, context), members in groups.items():
        found |= _ask(stage, context, members, backend)
    return found


def _ask(stage: str, context: Path, items: list[Item], backend: Backend) -> dict[str, frozenset[str]]:
    options = {marches.option(item.cell.axes["march"]): item for item in items}
    words = " ".join(sorted(options))
    script = (
        f"for option in {words}; do "
        'cc "$option" -dM -E -x c /dev/null > "/macros/$option" || rm "/macros/$option"; done'
    )
    asked = (
        f"{stage}\nFROM {STAGE} AS imagematrix-macros\nRUN mkdir /macros && {script}\n"
        "FROM scratch\nCOPY --from=imagematrix-macros /macros /\n"
    )
    with tempfile.TemporaryDirectory(prefix="imagematrix-") as folder:
        backend.export(asked, context, Path(folder))
        answers = {path.name: path.read_text() for path in Path(folder).iterdir()}
    found = {}
    for item in items:
        option = marches.option(item.cell.axes["march"])
        if option not in answers:
            raise BuildError(
                f"the compiler of {item.cell.id} does not know {option}",
                remedy="exclude these cells, or take a base with a newer compiler",
            )
        arch, march = ARCHES[item.cell.platform], item.cell.axes["march"]
        found[str(item.reference)] = marches.flags_from_macros(answers[option], arch, march)
    return found


def _from_table(cell: Cell, march: str) -> frozenset[str]:
    compiler = cell.properties.get("compiler", "")
    flags = marches.required(march, compiler)
    if flags is None:
        raise BuildError(
            f"nobody can tell which CPU flags {cell.id} needs",
            remedy=f"name the template's stage that has the compiler {STAGE!r}, "
            "or give the cell a property `compiler` such as gcc-14",
        )
    return flags
