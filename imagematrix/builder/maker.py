"""Making the image of one cell: build, audit, store. Work that cells share is done once."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import cache
from typing import Self

from imagematrix import record
from imagematrix.audit import march, proof, runtime
from imagematrix.audit.claims import broken, of_layers
from imagematrix.builder import budget
from imagematrix.builder.compiler import Compilers
from imagematrix.builder.logs import opened
from imagematrix.builder.reproducible import difference
from imagematrix.builder.result import BuildStatus, Result
from imagematrix.catalog.labels import read
from imagematrix.errors import AuditError, BuildError, ImagematrixError
from imagematrix.oci import layout
from imagematrix.planning import driver, labels
from imagematrix.planning.backend import Later, Order
from imagematrix.planning.plan import PlanStatus
from imagematrix.render.dockerfile import beginning
from imagematrix.trim import program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import TextIO

    from imagematrix.audit.layer import Layer
    from imagematrix.audit.layers import Layers
    from imagematrix.catalog.catalog import Ptx, Variant
    from imagematrix.planning.backend import Builder, Made, Sources, Store
    from imagematrix.planning.context import Snapshots
    from imagematrix.planning.plan import Plan, Planned

    Flags = Callable[[], frozenset[str]]
    Facts = tuple[tuple[str, str], ...]
    Code = tuple[tuple[str, ...], tuple[Ptx, ...]]

__all__ = ["Maker", "ordered"]


def ordered(item: Planned, sources: Sources, flags: Flags, facts: Facts = ()) -> Order:
    """Return the order for a planned item; `flags` returns the CPU flags of its code.

    `facts` are the facts of its catalog entry that its bytes prove.
    """
    return Order(
        reference=item.reference,
        dockerfile=item.dockerfile,
        sources=sources,
        labels=Later(lambda: labels.for_item(item, flags(), facts)),
        replaces=item.difference.reference if item.difference else None,
    )


class Maker:
    """Makes the images of a plan; thread-safe. Use it as a context manager.

    With `verify` it makes each image twice, even up-to-date ones.
    """

    def __init__(
        self,
        items: Sequence[Planned],
        plan: Plan,
        snapshots: Snapshots,
        builder: Builder,
        store: Store,
        layers: Layers,
        *,
        verify: bool,
    ) -> None:
        self._items = items
        self._to_build = [item for item in items if verify or item.status is PlanStatus.BUILD]
        self._bases = plan.bases
        self._given = plan.given
        self._snapshots = snapshots
        self._builder = builder
        self._store = store
        self._verify = verify
        self._compilers = Compilers(self._to_build, builder)
        self._made: dict[str, Made] = {}
        self._needed = {need for item in items for need in item.needs}
        self._kept = contextlib.ExitStack()  # layouts that other images build on
        self._layers = layers
        self._pins: dict[str, str | None] = {}
        self._program: Path | None = None  # the folder with the program for builds that trim
        self._drivers: dict[str, Path] = {}  # the folders of drivers, by their digests

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()

    def prepare(self) -> None:
        """Pin the bases and copy the contexts; raise UsageError or EngineError for a missing base.

        A missing base would otherwise fail every cell, one after the other. All contexts are copied at the
        start, because their files may be edited during the builds.
        """
        names = dict.fromkeys(name for item in self._items for name in item.bases)
        self._pins = {name: self._builder.held(name, self._bases[name]) for name in names}
        drivers = {item.driver.listing.digest: item.driver for item in self._to_build if item.driver}
        trims = any(item.trims for item in self._to_build)
        folder = self._snapshots.folder
        self._program = program.put(folder) if trims else None
        self._drivers = {digest: driver.put(files, folder) for digest, files in drivers.items()}
        for context in dict.fromkeys(item.cell.image.context for item in self._to_build):
            with contextlib.suppress(ImagematrixError, OSError):  # reported by its cells
                self._snapshots.of(context)

    def query_compilers(self) -> None:
        """Query the CPU flags while the first images are built; their builds report the errors."""
        for item in self._compilers.representatives():
            with contextlib.suppress(ImagematrixError, OSError):
                self._compilers.flags(item, self._sources(item))

    def export_bases(self, exported: Callable[[], object]) -> None:
        """Export the bases of the images, call `exported`, and read them; the builds report the errors.

        The first images finish at the same time, and each would otherwise export its base.
        """
        firsts: dict[tuple[str | None, str], Planned] = {}
        for item in self._to_build:
            firsts.setdefault((beginning(item.dockerfile), item.cell.platform), item)
        paths: list[Path] = []
        try:
            for (base, _), item in firsts.items():
                if base in item.bases:
                    with contextlib.suppress(ImagematrixError, OSError):
                        paths += self._builder.base_layers(base, self._sources(item))
        finally:
            exported()
        for path in paths:
            with contextlib.suppress(ImagematrixError, OSError):
                self._layer(path)

    def make(
        self, item: Planned, log: Path, step: Callable[[str], None], release_slot: Callable[[], None]
    ) -> Result:
        """Make and store one image, or adopt it; `release_slot` is called when the next build may start.

        Raises ImagematrixError or OSError on failure.
        """
        if item.status is PlanStatus.ADOPT and not self._verify:
            return self._adopted(item)
        sources = self._sources(item)
        flags = cache(lambda: self._compilers.flags(item, sources))
        if not self._compilers.queries(item):
            flags()  # unknown flags are better reported before the build
        order = ordered(item, sources, flags, proof.BUILT if self._builder.reproducible else ())
        with opened(log) as file:
            try:
                return self._stored(item, order, flags, file, step, release_slot)
            except layout.HollowError:  # the store lost a layer, or another store needs it
                return self._stored(item, replace(order, apart=True), flags, file, step, release_slot)

    def _adopted(self, item: Planned) -> Result:
        return Result(item=item, status=BuildStatus.ADOPTED, digest=self._store.adopt(item.reference))

    def _stored(
        self,
        item: Planned,
        order: Order,
        flags: Flags,
        log: TextIO,
        step: Callable[[str], None],
        release_slot: Callable[[], None],
    ) -> Result:
        warnings: tuple[str, ...] = ()
        with contextlib.ExitStack() as stack:
            try:
                made = stack.enter_context(self._builder.make(order, log, step))
            except BuildError as error:
                raise self._compilers.reason(item, error) from error
            self._snapshots.require(item.cell.image.context)
            if not self._verify:
                release_slot()
            if item.cell.image.budget is not None:
                parts = self._builder.parts(made)
                budget.require(item.cell.image.budget, parts, compressed=made.layout is not None)
            if made.layout:
                promised = read(order.labels, reference=order.reference, digest=None, size=None)
                code, facts, warnings = self._proven(item, layout.Image(made.layout, made.digest), promised)
                # Labels are set before the audit, which seldom changes them.
                if (code, facts) != ((promised.cubins, promised.ptx), promised.facts):
                    order = replace(order, labels=Later(lambda: labels.for_item(item, flags(), facts, code)))
                    return self._stored(item, order, flags, log, step, release_slot)
            if self._verify:
                self._built_again(order, made, log)
            result = self._put(item, order, made)
            if order.reference in self._needed:  # images built on it may take it from its layout
                self._kept.push(stack.pop_all())
        self._made[order.reference] = made
        return replace(result, reproducible=made.layout is not None, warnings=warnings)

    def _put(self, item: Planned, order: Order, made: Made) -> Result:
        """Store a built image; an existing image that was only verified is unchanged."""
        if item.status is PlanStatus.UP_TO_DATE:
            return Result(item=item, status=BuildStatus.VERIFIED, digest=made.digest)
        if item.status is PlanStatus.ADOPT:
            return self._adopted(item)
        return Result(item=item, status=BuildStatus.BUILT, digest=self._store.store(order, made))

    def _built_again(self, order: Order, made: Made, log: TextIO) -> None:
        if made.layout is None:
            raise BuildError("the engine's classic image store cannot verify that an image is reproducible")
        with self._builder.make(replace(order, afresh=True), log, lambda _: None) as again:
            assert again.layout is not None  # noqa: S101 - from the same builder; for the type checker
            differs = difference(
                layout.Image(made.layout, made.digest), layout.Image(again.layout, again.digest)
            )
        if differs:
            raise BuildError(f"not reproducible: the second build differs: {differs}")

    def _sources(self, item: Planned) -> Sources:
        places = {name: self._pins[name] for name in item.bases}
        for name in item.needs:
            places[name] = self._store.source(name, local=self._builder.local)
            made = self._made.get(name)
            if places[name] is None and not self._builder.local and made and made.layout:
                places[name] = f"oci-layout://{made.layout}@{made.digest}"
            if places[name] is None:  # BuildKit would take somebody else's image of this name from Docker Hub
                message = f"the image that it builds on is not built yet: {name}"
                raise BuildError(message, remedy="build it first, or in the same build")
        images = {name: place for name, place in places.items() if place}
        if item.trims:
            images[program.CONTEXT] = str(self._program)
        if item.driver:
            images[driver.CONTEXT] = str(self._drivers[item.driver.listing.digest])
        context = self._snapshots.of(item.cell.image.context)
        return self._given.sources(item.cell, context, images)

    def _proven(
        self, item: Planned, image: layout.Image, promised: Variant
    ) -> tuple[Code, Facts, tuple[str, ...]]:
        """Return the device code for the labels of an image, the facts that its bytes prove, and warnings.

        Raises AuditError if the bytes contradict the entry, or if a march is doubtful and `strict_march` is
        set.
        """
        audited = of_layers(map(self._layer, image.layer_files), promised)
        code = proof.code(audited, promised) if item.trims else (promised.cubins, promised.ptx)
        promised = record.replace(promised, cubins=code[0], ptx=code[1])
        why = broken(audited, promised)
        if why:
            raise AuditError(why)
        warnings = march.doubts(audited, promised)
        if warnings and item.cell.image.strict_march:
            raise AuditError("; ".join(warnings))
        warnings += runtime.doubts(audited, promised)
        return code, proof.proven(audited, promised), tuple(warnings)

    def _layer(self, path: Path) -> Layer:
        return self._layers.read(f"sha256:{path.name}", lambda _: layout.solid(path).open("rb"))
