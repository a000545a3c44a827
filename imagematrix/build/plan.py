"""The plan: for each cell of a matrix what a build would do, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from imagematrix.build import identity
from imagematrix.errors import UsageError
from imagematrix.matrix.expand import Excluded, expand, only
from imagematrix.matrix.feasibility import infeasible
from imagematrix.matrix.problems import nearest
from imagematrix.render import dockerfile as dockerfiles
from imagematrix.render.render import Renderer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Any

    from imagematrix.build.backend import Present, Store
    from imagematrix.build.identity import Identity
    from imagematrix.matrix.expand import Expansion
    from imagematrix.matrix.matrix import Cell, Image, Matrix

__all__ = ["SCHEMA", "STATUSES", "Against", "Item", "Plan", "plan"]

SCHEMA = "imagematrix.plan/v1"
STATUSES = ("build", "adopt", "up-to-date", "refused", "excluded", "infeasible")


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """What a matrix is planned against.

    Images are to be in `store`; what it lacks is adopted from `engine`, if that has it, or built. `locked`
    are the digests of base images that are known already. `resolve` returns those of the others, or raises
    UsageError; without it, or where the lock is `frozen`, nothing is asked.
    """

    resolve: Callable[[str], str] | None = None
    store: Store | None = None
    engine: Store | None = None
    locked: Mapping[str, str] = field(default_factory=dict)
    frozen: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """What becomes of one cell.

    `status` is one of STATUSES; "refused" is a cell whose image is there under the same version, made of
    something else. `rule` names what excludes the cell or makes it infeasible. `bases` are the images it
    builds on, `needs` are those among them that are images of this matrix. `changed` are the components that
    differ from the image `instead` that is there.
    """

    cell: Cell
    status: str
    why: str | None = None
    rule: str | None = None
    dockerfile: str = ""
    bases: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
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
    """What a build would do for every cell, in the order of the matrix.

    `bases` are the digests of all base images that its cells build on.
    """

    items: tuple[Item, ...]
    bases: Mapping[str, str]

    def with_status(self, *statuses: str) -> tuple[Item, ...]:
        """Return the items that have one of the statuses."""
        return tuple(item for item in self.items if item.status in statuses)

    def to_json(self) -> dict[str, object]:
        """Return the Plan document."""
        return {"schema": SCHEMA, "cells": [item.to_json() for item in self.items]}


def plan(matrix: Matrix, against: Against, *, expression: str | None = None) -> Plan:
    """Return what a build of `matrix` would do; `expression` narrows it down as `--only` does.

    Raises UsageError where a base image is nowhere, or missing in a lock that is frozen.
    """
    expansion = expand(matrix)
    if expression:
        expansion = only(expansion, expression, matrix)
    planner = _Planner(matrix, against)
    items = tuple(planner.items(expansion))
    return Plan(items=items, bases=planner.bases)


class _Planner:
    """Looks up once what cells share: their image's context, the digests of bases, what the stores have."""

    def __init__(self, matrix: Matrix, against: Against) -> None:
        self.bases: dict[str, str] = {}
        self.images = {image.name: image for image in matrix.images}
        self._where = matrix.path
        self._against = against
        self._renderer = Renderer(matrix.templates)
        self._contexts: dict[Path, str] = {}
        self._present: dict[tuple[int, str], dict[str, list[Present]]] = {}
        self._items: dict[tuple[str, str], Item | None] = {}  # None while it is being worked out

    def items(self, expansion: Expansion) -> Iterator[Item]:
        for cell in expansion.cells:
            impossible = infeasible(cell)
            if impossible:
                yield Item(cell=cell, status="infeasible", rule=impossible.rule, why=impossible.why)
            else:
                yield self.item(cell)
        for dropped in expansion.excluded:
            yield self._excluded(dropped)

    def _excluded(self, dropped: Excluded) -> Item:
        rule = f"{self._where}:{dropped.rule.mark.line}"
        return Item(cell=dropped.cell, status="excluded", rule=rule, why=dropped.rule.why)

    def item(self, cell: Cell) -> Item:
        """Return what becomes of a feasible cell."""
        if len(self.images) == 1:
            return self._item(cell)
        known = cell.image.name, cell.id
        if known not in self._items:
            self._items[known] = None
            self._items[known] = self._item(cell)
        item = self._items[known]
        if item is None:
            raise UsageError(f"the image {cell.image.name} builds on itself (in the cell {cell.id})")
        return item

    def _item(self, cell: Cell) -> Item:
        others = _Images(self, cell)
        text = self._renderer.render(cell, others)
        bases: list[str] = []
        needs: list[str] = []
        digests: dict[str, str | None] = {}
        for name in dockerfiles.bases(text):
            other = others.named.get(name)
            (needs if other else bases).append(name)
            if other:
                digests[name] = other.identity.digest if other.identity else None
            else:
                digests[name] = self._base(name)
        found = {name: digest for name, digest in digests.items() if digest}
        made = None
        if len(found) == len(digests):
            made = identity.identify(cell, text, found, self._context(cell.image))
        return Item(
            cell=cell,
            dockerfile=text,
            bases=tuple(bases),
            needs=tuple(needs),
            identity=made,
            **(self._compared(cell, made) if made else {"status": "build"}),
        )

    def _compared(self, cell: Cell, made: Identity) -> dict[str, Any]:
        """Return what an item says of its store, or else of the engine."""
        reference = f"{cell.image.name}:{identity.tag(cell, made)}"
        there = self._there(self._against.store, cell)
        if any(one.input_digest == made.digest for one in there):
            return {"reference": reference, "status": "up-to-date"}
        if there and self._against.store:
            changed = made.changed(self._against.store.components(there[0].reference))
            return {
                "reference": reference,
                "status": "build" if cell.image.development else "refused",
                "why": f"{', '.join(changed)} changed",
                "changed": changed,
                "instead": there[0].reference,
            }
        local = self._there(self._against.engine, cell)
        adopted = any(one.input_digest == made.digest for one in local)
        return {"reference": reference, "status": "adopt" if adopted else "build"}

    def _context(self, image: Image) -> str:
        if image.context not in self._contexts:
            self._contexts[image.context] = identity.context_digest(image.context)
        return self._contexts[image.context]

    def _base(self, name: str) -> str | None:
        if name not in self.bases:
            digest = self._against.locked.get(name)
            if digest is None and self._against.frozen:
                raise UsageError(f"the lock does not have {name}", remedy="`imagematrix lock`, and commit it")
            if digest is None and self._against.resolve:
                digest = self._against.resolve(name)
            if digest is None:
                return None
            self.bases[name] = digest
        return self.bases[name]

    def _there(self, store: Store | None, cell: Cell) -> list[Present]:
        if store is None:
            return []
        known = id(store), cell.image.name
        if known not in self._present:
            found: dict[str, list[Present]] = {}
            for one in store.present(cell.image.name, cell.image.version):
                found.setdefault(one.cell, []).append(one)
            self._present[known] = found
        return self._present[known].get(cell.id, [])


class _Images(Mapping[str, str]):
    """What a template sees as `images`: by name the reference of another image of the same cell.

    `named` are the items of those it has asked for, by their references.
    """

    def __init__(self, planner: _Planner, cell: Cell) -> None:
        self.named: dict[str, Item] = {}
        self._planner = planner
        self._cell = cell

    def __getitem__(self, name: str) -> str:
        images = self._planner.images
        if name not in images:
            remedy = nearest(name, images) or f"it has {', '.join(images)}"
            raise UsageError(f"{self._cell.image.template}: the matrix has no image {name!r}", remedy=remedy)
        item = self._planner.item(replace(self._cell, image=images[name]))
        # Where a base is not known, this is what there is to say without it.
        reference = item.reference or f"{name}:{item.cell.image.version}-{item.cell.id}"
        self.named[reference] = item
        return reference

    def __iter__(self) -> Iterator[str]:
        return iter(self._planner.images)

    def __len__(self) -> int:
        return len(self._planner.images)
