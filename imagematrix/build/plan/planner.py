"""Planning: comparing the cells of a matrix with existing images."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from functools import partial

from imagematrix.build.dockerfile import dockerfile as dockerfiles
from imagematrix.build.dockerfile.instructions import DockerfileError
from imagematrix.build.dockerfile.render import Renderer, complete_dockerfile
from imagematrix.build.dockerfile.template_error import TemplateError, locate_faults, merge_errors
from imagematrix.build.matrix.axis_values import DRIVER_FROM
from imagematrix.build.matrix.expand import expand_matrix, select_cells, select_platforms
from imagematrix.build.matrix.feasibility import find_infeasibility
from imagematrix.build.plan import context, driver, flags, identity, installer
from imagematrix.build.plan.build_inputs import BuildInputs
from imagematrix.build.plan.context_files import ContextFiles
from imagematrix.build.plan.download import HTTPS
from imagematrix.build.plan.plan import (
    Difference,
    Dropped,
    DropStatus,
    Plan,
    Planned,
    PlanStatus,
    get_full_name,
)
from imagematrix.build.plan.remote_driver import RemoteDriver
from imagematrix.build.trim import program
from imagematrix.common.suggestions import suggest_nearest
from imagematrix.common.text import shorten_words
from imagematrix.errors import EngineError, ImagematrixError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from imagematrix.build.dockerfile.instructions import Fault
    from imagematrix.build.matrix.expand import Expansion
    from imagematrix.build.matrix.matrix import Cell, Image, Matrix
    from imagematrix.build.plan.context import Listing
    from imagematrix.build.plan.driver import DriverFolder
    from imagematrix.build.plan.identity import Identity
    from imagematrix.build.plan.protocols import Store, StoredVariant
    from imagematrix.build.plan.remote_driver import LockedDriver

    # Returns the cells of an expansion that no host needs, by image and id, each with the nearest host.
    FindSkippedCells = Callable[[Matrix, Expansion], Mapping[tuple[str, str], str]]

SHOWN = 5  # files listed in a reason
DEEPEST = 100  # images of the matrix that build on each other


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """The state that a matrix is planned against.

    Images belong in `store`; missing ones are adopted from `engine` if it has them, or built. `locked` are
    the known digests of base images. `resolve` returns the digest of any other image, or raises UsageError or
    EngineError; without it, or if the lock is `frozen`, nothing is resolved. `find_recorded` returns the
    listing of the context with a digest, if it was recorded. `build_inputs` are those from the command line.
    `on_progress` is told what takes long. `drivers` are the locked drivers by https address; `resolve_driver`
    returns any other, from its address, version and platform, or raises UsageError or EngineError. With
    `adopts_earlier`, images of earlier versions are taken over.
    """

    resolve: Callable[[str], str] | None = None
    store: Store | None = None
    engine: Store | None = None
    locked: Mapping[str, str] = field(default_factory=dict)
    frozen: bool = False
    find_recorded: Callable[[str], Listing | None] | None = None
    build_inputs: BuildInputs | None = None
    on_progress: Callable[[str], None] = lambda _: None
    drivers: Mapping[str, LockedDriver] = field(default_factory=dict)
    resolve_driver: Callable[[str, str, str], RemoteDriver] | None = None
    adopts_earlier: bool = True


def plan(
    matrix: Matrix,
    against: PlanContext,
    *,
    expression: str | None = None,
    platforms: Collection[str] = (),
    find_skipped: FindSkippedCells | None = None,
) -> Plan:
    """Return what a build of `matrix` would do; `expression` selects cells as `--only` does.

    With `platforms`, such as linux/arm64, only cells for these are selected. Cells of `find_skipped` are
    only built if another image of the matrix builds on them. Neither selection plays a part in that.

    Raises TemplateError with the faults of all Dockerfiles, UsageError if a base image is missing in a frozen
    lock, or if no cell has one of the platforms.
    """
    names = [image.name for image in matrix.images]
    with Renderer(matrix.templates, names, matrix.property_names) as renderer:
        expansion = expand_matrix(matrix)
        skipped = find_skipped(matrix, expansion) if find_skipped else {}
        if platforms:
            expansion = select_platforms(expansion, platforms)
        if expression:
            expansion = select_cells(expansion, expression, matrix)
        planner = _Planner(matrix, against, renderer, skipped)
        items = tuple(planner.reuse_earlier_versions(tuple(planner.plan_cells(expansion))))
    return Plan(
        items=items,
        bases=planner.bases,
        contexts=planner.contexts,
        drivers=planner.drivers,
        build_inputs=against.build_inputs or BuildInputs(),
        unresolved=planner.unresolved,
        lost=tuple(
            sorted(planner.lost.difference(item.reference for item in items if isinstance(item, Planned)))
        ),
    )


@dataclass(frozen=True, slots=True)
class _RenderedCell:
    """The Dockerfile of a cell: what its template gives, and the whole text.

    `images` are the images and contexts that it names. `needs` are the images of this matrix that its
    template looked up, so that it may build on them, by reference.
    """

    template_output: str
    text: str
    images: tuple[str, ...]
    needs: Mapping[str, Planned]


class _Planner:
    """Looks up shared facts once: contexts, the digests of bases, the images in the stores."""

    def __init__(
        self,
        matrix: Matrix,
        against: PlanContext,
        renderer: Renderer,
        skipped: Mapping[tuple[str, str], str],
    ) -> None:
        self.bases: dict[str, str] = {}
        self.contexts: dict[Path | None, Listing] = {}
        self.lost: set[str] = set()
        self.unresolved: dict[str, ImagematrixError] = {}
        self._unreadable_contexts: dict[Path | None, UsageError] = {}
        self._images = {image.name: image for image in matrix.images}
        self._where = matrix.path
        self._plan_context = against
        self._build_inputs = against.build_inputs or BuildInputs()
        self._renderer = renderer
        self._skipped = skipped
        self.drivers: dict[str, LockedDriver] = {}
        self._drivers: dict[tuple[str, str, str], DriverFolder | RemoteDriver | ImagematrixError] = {}
        self._template_errors: dict[str, TemplateError] = {}  # by image and cell
        self._context_files: dict[Path | None, ContextFiles] = {}
        self._changed_files: dict[tuple[Path | None, str], tuple[str, ...]] = {}
        self._variants: dict[tuple[int, str], dict[str, list[StoredVariant]]] = {}
        self._planned: dict[tuple[str, str], Planned] = {}
        self._unfinished: set[tuple[str, str]] = set()  # a cell, and the cells that it builds on

    def plan_cells(self, expansion: Expansion) -> Iterator[Planned | Dropped]:
        """Yield the items of an expansion; raise TemplateError once it is known which of them have faults."""
        verdicts = [(cell, find_infeasibility(cell)) for cell in expansion.cells]
        needed = [
            cell
            for cell, infeasible in verdicts
            if not infeasible and (cell.image.name, cell.id) not in self._skipped
        ]
        self._renderer.announce(needed)
        for cell in needed:  # which shows the images below them
            with contextlib.suppress(TemplateError):
                self._plan_cell(cell)
        if self._template_errors:
            raise merge_errors(self._template_errors)

        for cell, infeasible in verdicts:
            key = cell.image.name, cell.id
            if infeasible:
                status, rule, why = DropStatus.INFEASIBLE, infeasible.rule, infeasible.why
                yield Dropped(cell=cell, status=status, rule=rule, why=why)
            elif key in self._skipped and key not in self._planned:
                host = self._skipped[key]
                why = f"no host would choose it; the nearest is {host}"
                status = DropStatus.UNNEEDED
                yield Dropped(cell=cell, status=status, rule=None, why=why, nearest_host=host)
            else:
                yield self._plan_cell(cell)
        for excluded in expansion.excluded:
            line = f"{self._where}:{excluded.rule.mark.line}"
            why_excluded = excluded.rule.why
            yield Dropped(cell=excluded.cell, status=DropStatus.EXCLUDED, rule=line, why=why_excluded)

    def reuse_earlier_versions(self, items: Sequence[Planned | Dropped]) -> Iterator[Planned | Dropped]:
        """Yield the items; items whose inputs match an earlier version become ADOPT.

        The store is queried once for each image, because a registry takes several requests for each cell.
        """
        cells: dict[str, dict[str, str]] = {}
        for item in items:
            # No store has an image of this version and cell, or there would be another status or a reason.
            if (
                isinstance(item, Planned)
                and item.identity
                and item.status is PlanStatus.BUILD
                and item.why is None
                and not item.cell.image.development
            ):
                cells.setdefault(item.cell.image.name, {})[item.cell.id] = item.identity.digest
        store = self._plan_context.store if self._plan_context.adopts_earlier else None
        by_image = (
            {image: store.find_earlier_versions(image, digests) for image, digests in cells.items()}
            if store
            else {}
        )
        for item in items:
            earlier = by_image.get(item.cell.image.name, {}).get(item.cell.id)
            if isinstance(item, Planned) and earlier:
                why = f"the same inputs as {earlier}"
                yield replace(item, status=PlanStatus.ADOPT, earlier=earlier, why=why)
            else:
                yield item

    def _plan_cell(self, cell: Cell) -> Planned:
        """Return the plan of a feasible cell; raise UsageError if its image builds on itself."""
        key = cell.image.name, cell.id
        if key in self._unfinished:
            raise UsageError(f"the image {cell.image.name} builds on itself (in the cell {cell.id})")
        if key not in self._planned:
            if len(self._unfinished) == DEEPEST:
                raise UsageError(f"more than {DEEPEST} images build on each other (in the cell {cell.id})")
            self._unfinished.add(key)
            try:
                self._planned[key] = self._plan_from_template(cell)
            finally:
                self._unfinished.remove(key)
        return self._planned[key]

    def _plan_from_template(self, cell: Cell) -> Planned:
        """Return what a build would do for a cell.

        An error that concerns only some cells makes them FAILED; whatever is known of them by then stays.
        """
        rendered = self._render_dockerfile(cell)
        names = [name for name in rendered.images if name not in (program.CONTEXT, driver.CONTEXT)]
        item = Planned(
            cell=cell,
            status=PlanStatus.BUILD,
            # Without the digests of bases, the input digest is unknown.
            reference=f"{cell.image.name}:{cell.image.version}-{cell.id}",
            dockerfile=rendered.text,
            bases=tuple(name for name in names if name not in rendered.needs),
            needs=tuple(name for name in names if name in rendered.needs),
        )

        # Before anything can fail, because a lock keeps the bases and drivers of cells that fail.
        digests = {name: self._resolve_base(name) for name in item.bases}
        source = _expand_driver_source(cell)
        if source and source in self._plan_context.drivers:
            self.drivers[source] = self._plan_context.drivers[source]

        # An error fails only the cells with this flag, file or driver.
        try:
            flags.require_flag_source(cell, rendered.text)
            missing = self._find_missing_sources(cell, rendered.text)
            if missing:
                raise self._locate_faults(cell, rendered.template_output, rendered.text, missing)
            if driver.CONTEXT in rendered.images or DRIVER_FROM in cell.properties:
                item = replace(item, driver=self._find_driver(cell, rendered))
        except (EngineError, UsageError) as error:
            return _mark_failed(item, error)
        blocking = next(self._find_blocking_errors(names, rendered), None)
        if blocking:
            return _mark_failed(item, blocking)

        # The identity needs the digest of each base, the build arguments, and the files of the context.
        for name in item.needs:
            need = rendered.needs[name].identity
            digests[name] = need.digest if need else None
        bases = {name: digest for name in names if (digest := digests[name])}
        if len(bases) < len(digests) or self._build_inputs.get_arguments(cell.image) is None:
            return item
        try:
            context_digest = self._list_context(cell.image).digest
        except UsageError as error:  # fails only the cells of this image
            return _mark_failed(item, error)
        cell_identity = identity.identify(
            cell,
            rendered.text,
            bases,
            context_digest,
            self._build_inputs,
            trims=program.CONTEXT in rendered.images,
            driver=item.driver.digest if item.driver else None,
        )
        reference = f"{cell.image.name}:{identity.format_tag(cell, cell_identity)}"
        item = replace(item, identity=cell_identity, reference=reference)
        return self._compare_with_stores(item, cell_identity)

    def _render_dockerfile(self, cell: Cell) -> _RenderedCell:
        """Return the Dockerfile of a cell; raise TemplateError, and remember it, if it has faults."""
        rendering = self._renderer.render(cell, partial(self._resolve_own_image, cell))
        cause: DockerfileError | None = None
        try:
            text = complete_dockerfile(rendering.text, cell, self._build_inputs.args)
            images = dockerfiles.list_bases(text)
            faults = self._find_missing_sources(cell, text) if cell.image.context is None else []
        except DockerfileError as error:
            cause, text, images = error, error.dockerfile, ()
            faults = [*error.faults, *dockerfiles.find_faults(text)]
            with contextlib.suppress(UsageError):  # of a context that cannot be read
                faults += self._find_missing_sources(cell, text)
        if faults:
            located = self._locate_faults(cell, rendering.text, text, faults)
            self._template_errors[get_full_name(cell)] = located
            raise located from cause
        needs = {reference: self._planned[name, cell.id] for name, reference in rendering.images.items()}
        return _RenderedCell(rendering.text, text, images, needs)

    def _find_missing_sources(self, cell: Cell, text: str) -> list[Fault]:
        """Return the faults of paths that a Dockerfile copies; raise UsageError for an unreadable context."""
        files = self._find_context_files(cell.image.context)
        return dockerfiles.find_missing_sources(
            text, files.find_complaint, [flags.STAGE] if "march" in cell.axes else []
        )

    def _find_context_files(self, folder: Path | None) -> ContextFiles:
        if folder not in self._context_files:
            self._context_files[folder] = ContextFiles(folder)
        return self._context_files[folder]

    def _locate_faults(
        self, cell: Cell, template_output: str, text: str, faults: Iterable[Fault]
    ) -> TemplateError:
        """Return the error for faults of a Dockerfile, which was completed from its template's output."""
        origins = self._renderer.find_origins(cell, partial(self._resolve_own_image, cell), template_output)
        folder = self._renderer.folder
        return locate_faults(dict.fromkeys(faults), text, cell.image.template, folder, origins)

    def _find_blocking_errors(
        self, names: Sequence[str], rendered: _RenderedCell
    ) -> Iterator[ImagematrixError]:
        """Yield why a cell cannot be built on the images `names`, which its Dockerfile names."""
        for name in names:
            need = rendered.needs.get(name)
            error = need.error if need else None
            if need and error:
                message = f"it builds on {need.cell.image.name}: {error}"
                kind = UsageError if isinstance(error, UsageError) else type(error)
                yield kind(message, remedy=error.remedy)
            error = self.unresolved.get(name)
            if error and name == dockerfiles.find_frontend(rendered.text):
                message = (
                    f"the line # syntax={name} names an image that reads the Dockerfile, not a base: {error}"
                )
                remedy = f"remove this line, unless the Dockerfile needs it; otherwise {error.remedy}"
                yield type(error)(message, remedy=remedy)
            elif error:
                yield error

    def _resolve_own_image(self, cell: Cell, name: str) -> str:
        """Return the reference of the image `name` of the same cell, which is planned first."""
        if name not in self._images:
            remedy = suggest_nearest(name, self._images) or f"it has {', '.join(self._images)}"
            raise UsageError(f"{cell.image.template}: the matrix has no image {name!r}", remedy=remedy)
        return self._plan_cell(replace(cell, image=self._images[name])).reference

    def _compare_with_stores(self, item: Planned, identity: Identity) -> Planned:
        """Return `item` with the status of its identity in the store, or else in the engine."""
        cell = item.cell
        variants = self._list_variants(self._plan_context.store, cell)
        identical = _find_identical(variants, cell, identity)
        # A development image is replaced, even under the same reference.
        conflicts = [
            variant
            for variant in variants
            if variant is not identical and variant.reference != item.reference
        ]
        is_replaceable = cell.image.development or all(variant.development for variant in conflicts)
        if identical and not identical.lost and is_replaceable:
            return replace(item, status=PlanStatus.UP_TO_DATE, labels=identical.labels)
        if conflicts and self._plan_context.store:
            existing = conflicts[0].reference
            difference, why = self._describe_difference(self._plan_context.store, existing, cell, identity)
            if identical:
                why += f", and there are both {identical.reference} and {difference.reference}"
            status = PlanStatus.BUILD if is_replaceable else PlanStatus.REFUSED
            return replace(item, status=status, why=why, difference=difference)
        in_engine = _find_identical(self._list_variants(self._plan_context.engine, cell), cell, identity)
        if in_engine:
            why = "the engine has it, so it is pushed and not built"
            return replace(item, status=PlanStatus.ADOPT, labels=in_engine.labels, why=why)
        return replace(item, why="the registry lost it") if identical else item

    def _describe_difference(
        self, store: Store, reference: str, cell: Cell, identity: Identity
    ) -> tuple[Difference, str]:
        """Return how a cell differs from the image `reference`, as data and as a sentence."""
        before = store.get_components(reference)
        components = identity.find_changed_components(before)
        files: tuple[str, ...] = ()
        if "context" in components:
            # Many cells share a context. Its files are known if that with the earlier digest was recorded.
            key = cell.image.context, before.get("context", "")
            if key not in self._changed_files:
                recorded = self._plan_context.find_recorded and self._plan_context.find_recorded(key[1])
                self._changed_files[key] = (
                    self._list_context(cell.image).find_changed_paths(recorded) if recorded else ()
                )
            files = self._changed_files[key]
        shown = f": {shorten_words(files, SHOWN, more=', …')}" if files else ""
        difference = Difference(reference=reference, components=components, files=files)
        return difference, f"{', '.join(components)} changed{shown}"

    def _list_context(self, image: Image) -> Listing:
        if image.context in self._unreadable_contexts:
            raise self._unreadable_contexts[image.context]
        if image.context not in self.contexts:
            try:
                paths = self._find_context_files(image.context).names
                self.contexts[image.context] = context.list_context(image.context, paths)
            except UsageError as error:
                self._unreadable_contexts[image.context] = error
                raise
            except (OSError, ValueError, RecursionError) as error:
                self._unreadable_contexts[image.context] = UsageError(
                    f"{image.context}: cannot be read: {error}"
                )
                raise self._unreadable_contexts[image.context] from error
        return self.contexts[image.context]

    def _find_driver(self, cell: Cell, rendered: _RenderedCell) -> DriverFolder | RemoteDriver | None:
        """Return the driver that a cell takes from `driver_from`, or None; raise an error if it cannot.

        If it is built on another image of the matrix, it can get the driver from that image.
        """
        source = _expand_driver_source(cell)
        uses_source = driver.CONTEXT in rendered.images
        if uses_source and not source:
            version = cell.axes.get("driver")
            raise UsageError(f"the driver {version} has neither driver_base nor {DRIVER_FROM}")
        if not uses_source and source and not rendered.needs:
            raise UsageError(f"the template takes the driver from elsewhere, not from {DRIVER_FROM}")
        if not uses_source or not source:
            return None
        key = source, cell.axes["driver"], cell.platform
        if key not in self._drivers:
            read = self._find_remote_driver if source.startswith(HTTPS) else self._read_local_driver
            try:
                self._drivers[key] = read(*key)
            except (EngineError, UsageError) as error:
                self._drivers[key] = error
        result = self._drivers[key]
        if isinstance(result, ImagematrixError):
            raise result
        return result

    def _find_remote_driver(self, address: str, version: str, platform: str) -> RemoteDriver:
        locked = self._plan_context.drivers.get(address)
        if locked:
            remote = RemoteDriver(address=address, version=version, platform=platform, locked=locked)
        elif self._plan_context.resolve_driver:
            try:
                remote = self._plan_context.resolve_driver(address, version, platform)
            except (EngineError, UsageError) as error:
                self.unresolved[address] = error
                raise
        else:
            remedy = "run `imagematrix lock`, and commit the file"
            raise UsageError(f"{address} not found in the lock file", remedy=remedy)
        self.drivers[address] = remote.locked
        return remote

    def _read_local_driver(self, name: str, version: str, platform: str) -> DriverFolder:
        source = self._where.parent / name
        if source.is_dir():
            return driver.read_driver_folder(source, version, platform)
        if not source.exists():
            near = (path for level in ("*", "*/*") for path in sorted(self._where.parent.glob(level)))
            names = [str(path.relative_to(self._where.parent)) for path in near]
            raise UsageError(
                f"{source} of the driver {version} not found", remedy=suggest_nearest(name, names)
            )
        folder = installer.unpack_installer(source, version, platform, self._plan_context.on_progress)
        return driver.read_driver_folder(folder, version, platform, source)

    def _resolve_base(self, name: str) -> str | None:
        if name not in self.bases and name not in self.unresolved:
            digest = self._plan_context.locked.get(name)
            if digest is None and self._plan_context.frozen:
                remedy = "run `imagematrix lock`, and commit the file"
                raise UsageError(f"{name} not found in the lock file", remedy=remedy)
            if digest is None and self._plan_context.resolve:
                try:
                    digest = self._plan_context.resolve(name)
                except (EngineError, UsageError) as error:
                    self.unresolved[name] = error
            if digest:
                self.bases[name] = digest
        return self.bases.get(name)

    def _list_variants(self, store: Store | None, cell: Cell) -> list[StoredVariant]:
        if store is None:
            return []
        key = id(store), cell.image.name
        if key not in self._variants:
            by_cell: dict[str, list[StoredVariant]] = {}
            for variant in store.list_variants(cell.image.name, cell.image.version):
                by_cell.setdefault(variant.cell, []).append(variant)
                if variant.lost:
                    self.lost.add(variant.reference)
            self._variants[key] = by_cell
        return self._variants[key].get(cell.id, [])


def _expand_driver_source(cell: Cell) -> str | None:
    """Return the path or address that the driver of a cell comes from; None if it has none."""
    name = cell.properties.get(DRIVER_FROM)
    return driver.expand_driver_source(name, cell.axes["driver"], cell.platform) if name else None


def _mark_failed(item: Planned, error: ImagematrixError) -> Planned:
    why = str(error).replace("\n", "; ")
    return replace(item, status=PlanStatus.FAILED, why=why, error=error)


def _find_identical(variants: list[StoredVariant], cell: Cell, identity: Identity) -> StoredVariant | None:
    """Return the image of the cell that was built from the inputs of this identity, or None.

    A final version has no development images: these have a label that says so, and are never pushed.
    """
    matches = (variant for variant in variants if variant.input_digest == identity.digest)
    return next((variant for variant in matches if cell.image.development or not variant.development), None)
