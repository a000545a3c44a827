"""The plan: for each cell of a matrix what a build would do, and why."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.build import identity
from imagematrix.matrix.expand import Excluded, expand, only
from imagematrix.matrix.feasibility import infeasible
from imagematrix.render import dockerfile as dockerfiles
from imagematrix.render.render import Renderer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from imagematrix.build.backend import Backend, Present
    from imagematrix.build.identity import Identity
    from imagematrix.matrix.expand import Expansion
    from imagematrix.matrix.matrix import Cell, Image, Matrix

__all__ = ["SCHEMA", "STATUSES", "Item", "Plan", "plan"]

SCHEMA = "imagematrix.plan/v1"
STATUSES = ("build", "up-to-date", "refused", "other-shard", "excluded", "infeasible")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """What becomes of one cell.

    `status` is one of STATUSES; "refused" is a cell whose image is there under the same version, made of
    something else, "other-shard" one that another job builds. `rule` names what excludes the cell or makes it
    infeasible. `changed` are the components that differ from the image `instead` that is there.
    """

    cell: Cell
    status: str
    why: str | None = None
    rule: str | None = None
    dockerfile: str = ""
    identity: Identity | None = None
    reference: str | None = None
    changed: tuple[str, ...] = ()
    instead: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return one element of the Plan document's `cells`."""
        return {
            "image": self.cell.image.name,
            "version": self.cell.image.version,
            "cell": self.cell.id,
            "axes": dict(self.cell.axes),
            "status": self.status,
            "rule": self.rule,
            "why": self.why,
            "reference": self.reference,
            "input": self.identity.digest if self.identity else None,
            "changed": list(self.changed),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a build would do for every cell, in the order of the matrix; `shard` is such as "2/8"."""

    items: tuple[Item, ...]
    shard: str | None = None

    def with_status(self, status: str) -> tuple[Item, ...]:
        """Return the items of one status."""
        return tuple(item for item in self.items if item.status == status)

    def to_json(self) -> dict[str, object]:
        """Return the Plan document."""
        return {"schema": SCHEMA, "shard": self.shard, "cells": [item.to_json() for item in self.items]}


def plan(matrix: Matrix, backend: Backend | None, *, expression: str | None = None) -> Plan:
    """Return what a build of `matrix` would do; `expression` narrows it down as `--only` does.

    Without a `backend` nothing is compared: every cell that can be built is to be built, and has no identity
    yet, for the digests of its bases are not known.
    """
    expansion = expand(matrix)
    if expression:
        expansion = only(expansion, expression, matrix)
    builder = _Planner(matrix, backend)
    return Plan(items=tuple(builder.items(expansion)))


class _Planner:
    """Looks up once what cells share: their image's context, the digests of bases, what the store has."""

    def __init__(self, matrix: Matrix, backend: Backend | None) -> None:
        self._renderer = Renderer(matrix.templates)
        self._where = matrix.path
        self._backend = backend
        self._contexts: dict[Path, str] = {}
        self._bases: dict[str, str] = {}
        self._present: dict[str, dict[str, Present]] = {}

    def items(self, expansion: Expansion) -> Iterator[Item]:
        for cell in expansion.cells:
            impossible = infeasible(cell)
            if impossible:
                yield Item(cell=cell, status="infeasible", rule=impossible.rule, why=impossible.why)
            else:
                yield self._item(cell)
        for dropped in expansion.excluded:
            yield self._excluded(dropped)

    def _excluded(self, dropped: Excluded) -> Item:
        rule = f"{self._where}:{dropped.rule.mark.line}"
        return Item(cell=dropped.cell, status="excluded", rule=rule, why=dropped.rule.why)

    def _item(self, cell: Cell) -> Item:
        text = self._renderer.render(cell)
        names = dockerfiles.bases(text)
        if self._backend is None:
            return Item(cell=cell, status="build", dockerfile=text)
        bases = {name: self._base(self._backend, name) for name in names}
        made = identity.identify(cell, text, bases, self._context(cell.image))
        reference = f"{cell.image.name}:{identity.tag(cell, made)}"
        there = self._there(self._backend, cell.image).get(cell.id)
        changed: tuple[str, ...] = ()
        status = "build"
        if there and there.input_digest == made.digest:
            status = "up-to-date"
        elif there:
            status = "build" if cell.image.development else "refused"
            changed = made.changed(there.components)
        return Item(
            cell=cell,
            status=status,
            why=f"{', '.join(changed)} changed" if changed else None,
            dockerfile=text,
            identity=made,
            reference=reference,
            changed=changed,
            instead=there.reference if there and changed else None,
        )

    def _context(self, image: Image) -> str:
        if image.context not in self._contexts:
            self._contexts[image.context] = identity.context_digest(image.context)
        return self._contexts[image.context]

    def _base(self, backend: Backend, name: str) -> str:
        if name not in self._bases:
            self._bases[name] = backend.resolve(name)
        return self._bases[name]

    def _there(self, backend: Backend, image: Image) -> dict[str, Present]:
        if image.name not in self._present:
            found = backend.present(image.name, image.version)
            self._present[image.name] = {item.cell: item for item in found}
        return self._present[image.name]
