"""The plan: for each cell of a matrix what a build would do, and why."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from imagematrix.errors import UsageError
from imagematrix.matrix.expand import Excluded, expand, only
from imagematrix.matrix.feasibility import infeasible
from imagematrix.planning import context, identity, schema1
from imagematrix.planning.given import Given
from imagematrix.planning.identity import Identity
from imagematrix.render import dockerfile as dockerfiles
from imagematrix.render.render import Renderer
from imagematrix.spelling import nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from typing import Any

    from imagematrix.matrix.expand import Expansion
    from imagematrix.matrix.matrix import Cell, Image, Matrix
    from imagematrix.planning.backend import Present, Store
    from imagematrix.planning.context import Listing

__all__ = ["SCHEMA", "STATUSES", "Against", "Item", "Plan", "plan"]

SCHEMA = "imagematrix.plan/v1"
SHOWN = 5  # files that a reason names
STATUSES = ("build", "adopt", "up-to-date", "refused", "failed", "other-shard", "excluded", "infeasible")


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """What a matrix is planned against.

    Images are to be in `store`; what it lacks is adopted from `engine`, if that has it, or built. `locked`
    are the digests of base images that are known already. `resolve` returns those of the others, or raises
    UsageError; without it, or where the lock is `frozen`, nothing is asked. `recorded` returns what a context
    held that had a digest, where that is known. `given` is what the command line gives to builds.
    """

    resolve: Callable[[str], str] | None = None
    store: Store | None = None
    engine: Store | None = None
    locked: Mapping[str, str] = field(default_factory=dict)
    frozen: bool = False
    recorded: Callable[[str], Listing | None] | None = None
    given: Given | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """What becomes of one cell.

    `status` is one of STATUSES; "refused" is a cell whose image is there under the same version, made of
    something else, "failed" one whose context can't be read, "other-shard" one that another job builds.
    `rule` names what excludes the cell or makes it infeasible. `bases` are the images it builds on,
    `needs` are those among them that are images of this matrix. `changed` are the components that differ
    from the image `instead` that is there, `files` the paths of its context that do, where that is known.
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
    files: tuple[str, ...] = ()
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
            "files": list(self.files),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a build would do for every cell, in the order of the matrix; `shard` is such as "2/8".

    `bases` are the digests of all base images that its cells build on, `contexts` what there is to copy.
    """

    items: tuple[Item, ...]
    bases: Mapping[str, str]
    contexts: Mapping[Path, Listing] = field(default_factory=dict)
    given: Given = field(default_factory=Given)
    shard: str | None = None

    def with_status(self, *statuses: str) -> tuple[Item, ...]:
        """Return the items that have one of the statuses."""
        return tuple(item for item in self.items if item.status in statuses)

    def to_json(self) -> dict[str, object]:
        """Return the Plan document."""
        return {"schema": SCHEMA, "shard": self.shard, "cells": [item.to_json() for item in self.items]}


def plan(matrix: Matrix, against: Against, *, expression: str | None = None) -> Plan:
    """Return what a build of `matrix` would do; `expression` narrows it down as `--only` does.

    Raises UsageError where a base image is nowhere, or missing in a lock that is frozen.
    """
    with Renderer(matrix.templates, (image.name for image in matrix.images)) as renderer:
        expansion = expand(matrix)
        if expression:
            expansion = only(expansion, expression, matrix)
        planner = _Planner(matrix, against, renderer)
        items = tuple(planner.items(expansion))
    return Plan(items=items, bases=planner.bases, contexts=planner.contexts, given=against.given or Given())


class _Planner:
    """Looks up once what cells share: their image's context, the digests of bases, what the stores have."""

    def __init__(self, matrix: Matrix, against: Against, renderer: Renderer) -> None:
        self.bases: dict[str, str] = {}
        self.contexts: dict[Path, Listing] = {}
        self._unread: dict[Path, UsageError] = {}
        self.images = {image.name: image for image in matrix.images}
        self._where = matrix.path
        self._against = against
        self._renderer = renderer
        self._before: dict[Path, str] = {}  # digests of contexts by schema 1
        self._changed: dict[tuple[Path, str], tuple[str, ...]] = {}
        self._present: dict[tuple[int, str], dict[str, list[Present]]] = {}
        self._items: dict[tuple[str, str], Item | None] = {}  # None while it is being worked out

    def items(self, expansion: Expansion) -> Iterator[Item]:
        impossibles = [infeasible(cell) for cell in expansion.cells]
        known = zip(expansion.cells, impossibles, strict=True)
        self._renderer.ahead(cell for cell, impossible in known if not impossible)
        for cell, impossible in zip(expansion.cells, impossibles, strict=True):
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
        others: dict[str, Item] = {}  # by their references
        text = self._renderer.render(cell, partial(self._other, cell, others))
        bases: list[str] = []
        needs: list[str] = []
        digests: dict[str, str | None] = {}
        for name in dockerfiles.bases(text):
            other = others.get(name)
            (needs if other else bases).append(name)
            if other:
                digests[name] = other.identity.digest if other.identity else None
            else:
                digests[name] = self._base(name)
        found = {name: digest for name, digest in digests.items() if digest}
        lost = next((other for other in others.values() if other.status == "failed"), None)
        if lost:
            return Item(cell=cell, status="failed", why=f"it builds on {lost.cell.image.name}: {lost.why}")
        made = None
        given = self._against.given or Given()
        if len(found) == len(digests) and given.values(cell.image) is not None:
            try:
                context_digest = self._context(cell.image).digest
            except UsageError as error:  # which costs no cell of another image
                return Item(cell=cell, status="failed", why=str(error))
            made = identity.identify(cell, text, found, context_digest, given)
        return Item(
            cell=cell,
            dockerfile=text,
            bases=tuple(bases),
            needs=tuple(needs),
            **(self._compared(cell, made) if made else {"status": "build"}),
        )

    def _other(self, cell: Cell, others: dict[str, Item], name: str) -> str:
        """Return the reference of the image `name` of the same cell, and add it to `others`."""
        if name not in self.images:
            remedy = nearest(name, self.images) or f"it has {', '.join(self.images)}"
            raise UsageError(f"{cell.image.template}: the matrix has no image {name!r}", remedy=remedy)
        item = self.item(replace(cell, image=self.images[name]))
        # Where a base is not known, this is what there is to say without it.
        reference = item.reference or f"{name}:{item.cell.image.version}-{item.cell.id}"
        others[reference] = item
        return reference

    def _compared(self, cell: Cell, made: Identity) -> dict[str, Any]:
        """Return what an item says of its store, or else of the engine."""
        there = self._there(self._against.store, cell)
        same, own = self._same(there, cell, made)
        others = [one for one in there if one is not same]
        if same and not same.lost and (cell.image.development or not others):
            return {**own, "status": "up-to-date"}
        if others and self._against.store:
            instead = others[0].reference
            before = self._against.store.components(instead)
            old = self._by_schema1(cell.image, made) if before.get("schema") == schema1.SCHEMA else None
            changed = (old or made).changed(before)
            files = self._files(cell.image, before.get("context", "")) if "context" in changed else ()
            named = f": {', '.join(files[:SHOWN])}{', …' * (len(files) > SHOWN)}" if files else ""
            tie = f", and there are both {same.reference} and {instead}" if same else ""
            return {
                **own,
                "status": "build" if cell.image.development else "refused",
                "why": f"{', '.join(changed)} changed{named}{tie}",
                "changed": changed,
                "files": files,
                "instead": instead,
            }
        engine = self._there(self._against.engine, cell)
        local, here = self._same(engine, cell, made) if engine else (None, own)
        why = "the registry lost it" if same else None
        return {**(own if same else here), "status": "adopt" if local else "build", "why": why}

    def _same(
        self, there: list[Present], cell: Cell, made: Identity
    ) -> tuple[Present | None, dict[str, Any]]:
        """Return which image among `there` is made of the same, if one is, and what it says to an item."""
        by_input = {one.input_digest: one for one in reversed(there)}
        found: Identity | None = made
        if there and made.digest not in by_input:
            found = self._by_schema1(cell.image, made)
        if found and found.digest in by_input:
            one = by_input[found.digest]
            return one, {"identity": found, "reference": one.reference}
        return None, {"identity": made, "reference": f"{cell.image.name}:{identity.tag(cell, made)}"}

    def _by_schema1(self, image: Image, made: Identity) -> Identity | None:
        if image.context not in self._before:
            self._before[image.context] = schema1.context_digest(image.context)
        components = schema1.components(made.components, self._before[image.context])
        return Identity(components=components) if components else None

    def _files(self, image: Image, before: str) -> tuple[str, ...]:
        """Return which files differ from those of the context with the digest `before`, if that is known."""
        if (image.context, before) not in self._changed:
            recorded = self._against.recorded and self._against.recorded(before)
            files = self._context(image).changed(recorded) if recorded else ()
            self._changed[image.context, before] = files
        return self._changed[image.context, before]

    def _context(self, image: Image) -> Listing:
        if image.context in self._unread:
            raise self._unread[image.context]
        if image.context not in self.contexts:
            try:
                self.contexts[image.context] = context.listing(image.context)
            except UsageError as error:
                self._unread[image.context] = error
                raise
            except (OSError, ValueError, RecursionError) as error:
                self._unread[image.context] = UsageError(f"{image.context} can't be read: {error}")
                raise self._unread[image.context] from error
        return self.contexts[image.context]

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
