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
from imagematrix.build.matrix.expand import ExcludedCell, expand_matrix, select_cells, select_platforms
from imagematrix.build.matrix.feasibility import find_infeasibility
from imagematrix.build.plan import context, driver, flags, identity, installer
from imagematrix.build.plan.build_inputs import BuildInputs
from imagematrix.build.plan.context_files import ContextFiles
from imagematrix.build.plan.download import HTTPS
from imagematrix.build.plan.plan import Difference, Dropped, DropStatus, Plan, Planned, PlanStatus, full_name
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
    EngineError; without it, or if the lock is `frozen`, nothing is resolved. `recorded` returns the listing
    of the context with a digest, if it was recorded. `given` are the inputs from the command line. `note` is
    told what takes long. `drivers` are the locked drivers by https address; `resolve_driver` returns any
    other, from its address, version and platform, or raises UsageError or EngineError. With `adopts_earlier`,
    images of earlier versions are taken over.
    """

    resolve: Callable[[str], str] | None = None
    store: Store | None = None
    engine: Store | None = None
    locked: Mapping[str, str] = field(default_factory=dict)
    frozen: bool = False
    recorded: Callable[[str], Listing | None] | None = None
    given: BuildInputs | None = None
    note: Callable[[str], None] = lambda _: None
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
        leaving = find_skipped(matrix, expansion) if find_skipped else {}
        if platforms:
            expansion = select_platforms(expansion, platforms)
        if expression:
            expansion = select_cells(expansion, expression, matrix)
        planner = _Planner(matrix, against, renderer, leaving)
        items = tuple(planner.reuse_earlier_versions(tuple(planner.items(expansion))))
    return Plan(
        items=items,
        bases=planner.bases,
        contexts=planner.contexts,
        drivers=planner.drivers,
        given=against.given or BuildInputs(),
        unresolved=planner.unresolved,
        lost=tuple(
            sorted(planner.lost.difference(item.reference for item in items if isinstance(item, Planned)))
        ),
    )


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
        self._unread: dict[Path | None, UsageError] = {}
        self._images = {image.name: image for image in matrix.images}
        self._where = matrix.path
        self._against = against
        self._given = against.given or BuildInputs()
        self._renderer = renderer
        self._skipped = skipped
        self.drivers: dict[str, LockedDriver] = {}
        self._drivers: dict[tuple[str, str, str], DriverFolder | RemoteDriver | ImagematrixError] = {}
        self._faulty: dict[str, TemplateError] = {}  # by image and cell
        self._files_of: dict[Path | None, ContextFiles] = {}
        self._changed_files: dict[tuple[Path | None, str], tuple[str, ...]] = {}
        self._present: dict[tuple[int, str], dict[str, list[StoredVariant]]] = {}
        self._planned: dict[tuple[str, str], Planned] = {}
        self._unfinished: set[tuple[str, str]] = set()  # a cell, and the cells that it builds on

    def items(self, expansion: Expansion) -> Iterator[Planned | Dropped]:
        """Yield the items of an expansion; raise TemplateError once it is known which of them have faults."""
        verdicts = [(cell, find_infeasibility(cell)) for cell in expansion.cells]
        needed = [cell for cell, impossible in verdicts if not impossible and not self._is_skipped(cell)]
        self._renderer.announce(needed)
        for cell in needed:  # which shows the images below them
            with contextlib.suppress(TemplateError):
                self._plan_cell(cell)
        if self._faulty:
            raise merge_errors(self._faulty)
        for cell, impossible in verdicts:
            if impossible:
                rule, why = impossible.rule, impossible.why
                yield Dropped(cell=cell, status=DropStatus.INFEASIBLE, rule=rule, why=why)
            elif self._is_skipped(cell) and (cell.image.name, cell.id) not in self._planned:
                yield self._make_skipped(cell)
            else:
                yield self._plan_cell(cell)
        for dropped in expansion.excluded:
            yield self._make_excluded(dropped)

    def reuse_earlier_versions(self, items: Sequence[Planned | Dropped]) -> Iterator[Planned | Dropped]:
        """Yield the items; items whose inputs match an earlier version become ADOPT.

        The store is queried once for each image, because a registry takes several requests for each cell.
        """
        cells: dict[str, dict[str, str]] = {}
        for item in items:
            if isinstance(item, Planned) and item.identity and self._is_new(item):
                cells.setdefault(item.cell.image.name, {})[item.cell.id] = item.identity.digest
        store = self._against.store if self._against.adopts_earlier else None
        found = (
            {image: store.find_earlier_versions(image, digests) for image, digests in cells.items()}
            if store
            else {}
        )
        for item in items:
            earlier = found.get(item.cell.image.name, {}).get(item.cell.id)
            if isinstance(item, Planned) and earlier:
                why = f"the same inputs as {earlier}"
                yield replace(item, status=PlanStatus.ADOPT, earlier=earlier, why=why)
            else:
                yield item

    @staticmethod
    def _is_new(item: Planned) -> bool:
        """Whether no store has an image of this item's version and cell."""
        return item.status is PlanStatus.BUILD and item.why is None and not item.cell.image.development

    def _is_skipped(self, cell: Cell) -> bool:
        return (cell.image.name, cell.id) in self._skipped

    def _make_skipped(self, cell: Cell) -> Dropped:
        host = self._skipped[cell.image.name, cell.id]
        return Dropped(
            cell=cell,
            status=DropStatus.UNNEEDED,
            rule=None,
            why=f"no host would choose it; the nearest is {host}",
            nearest_host=host,
        )

    def _make_excluded(self, dropped: ExcludedCell) -> Dropped:
        rule = f"{self._where}:{dropped.rule.mark.line}"
        return Dropped(cell=dropped.cell, status=DropStatus.EXCLUDED, rule=rule, why=dropped.rule.why)

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
        own: dict[str, Planned] = {}  # images of this matrix that it may build on, by reference
        text, named = self._render_dockerfile(cell, own)
        names = [name for name in named if name not in (program.CONTEXT, driver.CONTEXT)]
        item = Planned(
            cell=cell,
            status=PlanStatus.BUILD,
            # Without the digests of bases, the input digest is unknown.
            reference=f"{cell.image.name}:{cell.image.version}-{cell.id}",
            dockerfile=text,
            bases=tuple(name for name in names if name not in own),
            needs=tuple(name for name in names if name in own),
        )
        # Before anything can fail, because a lock keeps the bases and drivers of cells that fail.
        digests = {name: self._resolve_base(name) for name in item.bases}
        source = self._find_driver_source(cell)
        if source in self._against.drivers:
            self.drivers[source] = self._against.drivers[source]
        try:
            flags.require_flag_source(cell, text)
            self._require_copied(cell, own, text)
        except UsageError as error:
            return _mark_failed(item, error)
        if driver.CONTEXT in named or DRIVER_FROM in cell.properties:
            try:
                item = replace(item, driver=self._find_driver(cell, named, stacked=bool(own)))
            except (EngineError, UsageError) as error:  # fails only the cells with this driver
                return _mark_failed(item, error)
        digests |= {name: need.digest if (need := own[name].identity) else None for name in item.needs}
        hindrance = next(self._find_blocking_errors(text, names, own), None)
        if hindrance:
            return _mark_failed(item, hindrance)
        resolved = {name: digests[name] for name in names}
        bases = {name: digest for name, digest in resolved.items() if digest}
        if len(bases) < len(resolved) or self._given.values(cell.image) is None:
            return item
        try:
            context_digest = self._list_context(cell.image).digest
        except UsageError as error:  # fails only the cells of this image
            return _mark_failed(item, error)
        trims = program.CONTEXT in named
        made = identity.identify(
            cell,
            text,
            bases,
            context_digest,
            self._given,
            trims=trims,
            driver=item.driver.digest if item.driver else None,
        )
        item = replace(item, identity=made, reference=f"{cell.image.name}:{identity.format_tag(cell, made)}")
        return self._compare_with_stores(item, made)

    def _render_dockerfile(self, cell: Cell, own: dict[str, Planned]) -> tuple[str, tuple[str, ...]]:
        """Return the Dockerfile of a cell and the images that it names; add those of this matrix to `own`."""
        rendered = self._renderer.render(cell, partial(self._resolve_own_image, cell, own))
        try:
            text = complete_dockerfile(rendered, cell, self._given.args)
            names = dockerfiles.list_bases(text)
            if cell.image.context is None:
                self._require_no_files(cell, text)
        except DockerfileError as error:
            found = [*error.faults, *dockerfiles.find_faults(error.dockerfile)]
            with contextlib.suppress(UsageError):  # of a context that cannot be read
                found += self._find_missing_sources(cell, error.dockerfile)
            located = self._locate_faults(cell, own, rendered, error.dockerfile, found)
            self._faulty[full_name(cell)] = located
            raise located from error
        return text, names

    def _require_no_files(self, cell: Cell, text: str) -> None:
        """Raise DockerfileError if a Dockerfile copies files, for an image without a context."""
        found = self._find_missing_sources(cell, text)
        if found:
            raise DockerfileError(text, found)

    def _require_copied(self, cell: Cell, own: dict[str, Planned], text: str) -> None:
        """Raise TemplateError if a Dockerfile copies files that its context lacks."""
        found = self._find_missing_sources(cell, text)
        if found:
            rendered = self._renderer.render(cell, partial(self._resolve_own_image, cell, own))
            raise self._locate_faults(cell, own, rendered, text, found)

    def _find_missing_sources(self, cell: Cell, text: str) -> list[Fault]:
        """Return the faults of paths that a Dockerfile copies; raise UsageError for an unreadable context."""
        files = self._find_context_files(cell.image.context)
        return dockerfiles.find_missing_sources(
            text, files.complaint, [flags.STAGE] if "march" in cell.axes else []
        )

    def _find_context_files(self, folder: Path | None) -> ContextFiles:
        if folder not in self._files_of:
            self._files_of[folder] = ContextFiles(folder)
        return self._files_of[folder]

    def _locate_faults(
        self, cell: Cell, own: dict[str, Planned], rendered: str, text: str, found: Iterable[Fault]
    ) -> TemplateError:
        """Return the error for faults of the Dockerfile `text`, which was completed from `rendered`."""
        origins = self._renderer.find_origins(cell, partial(self._resolve_own_image, cell, own), rendered)
        folder = self._renderer.folder
        return locate_faults(dict.fromkeys(found), text, cell.image.template, folder, origins)

    def _find_blocking_errors(
        self, text: str, names: Sequence[str], own: Mapping[str, Planned]
    ) -> Iterator[ImagematrixError]:
        """Yield why a cell whose Dockerfile `text` names the images `names` cannot be built."""
        for name in names:
            error = own[name].error if name in own else None
            if error:
                message = f"it builds on {own[name].cell.image.name}: {error}"
                kind = UsageError if isinstance(error, UsageError) else type(error)
                yield kind(message, remedy=error.remedy)
            error = self.unresolved.get(name)
            if error and name == dockerfiles.find_frontend(text):
                message = (
                    f"the line # syntax={name} names an image that reads the Dockerfile, not a base: {error}"
                )
                remedy = f"remove this line, unless the Dockerfile needs it; otherwise {error.remedy}"
                yield type(error)(message, remedy=remedy)
            elif error:
                yield error

    def _resolve_own_image(self, cell: Cell, own: dict[str, Planned], name: str) -> str:
        """Return the reference of the image `name` of the same cell, and add it to `own`."""
        if name not in self._images:
            remedy = suggest_nearest(name, self._images) or f"it has {', '.join(self._images)}"
            raise UsageError(f"{cell.image.template}: the matrix has no image {name!r}", remedy=remedy)
        item = self._plan_cell(replace(cell, image=self._images[name]))
        own[item.reference] = item
        return item.reference

    def _compare_with_stores(self, item: Planned, made: Identity) -> Planned:
        """Return `item` with the status of its identity `made` in the store, or else in the engine."""
        cell = item.cell
        present = self._list_present(self._against.store, cell)
        same = _find_identical(present, cell, made)
        # A development image is replaced, even under the same reference.
        others = [image for image in present if image is not same and image.reference != item.reference]
        replaceable = cell.image.development or all(image.development for image in others)
        if same and not same.lost and replaceable:
            return replace(item, status=PlanStatus.UP_TO_DATE, labels=same.labels)
        if others and self._against.store:
            difference, why = self._describe_difference(self._against.store, others[0].reference, cell, made)
            if same:
                why += f", and there are both {same.reference} and {difference.reference}"
            status = PlanStatus.BUILD if replaceable else PlanStatus.REFUSED
            return replace(item, status=status, why=why, difference=difference)
        in_engine = _find_identical(self._list_present(self._against.engine, cell), cell, made)
        if in_engine:
            why = "the engine has it, so it is pushed and not built"
            return replace(item, status=PlanStatus.ADOPT, labels=in_engine.labels, why=why)
        return replace(item, why="the registry lost it") if same else item

    def _describe_difference(
        self, store: Store, reference: str, cell: Cell, made: Identity
    ) -> tuple[Difference, str]:
        """Return how a cell differs from the image `reference`, as data and as a sentence."""
        before = store.components(reference)
        changed = made.changed(before)
        files = (
            self._find_changed_files(cell.image, before.get("context", "")) if "context" in changed else ()
        )
        named = f": {shorten_words(files, SHOWN, more=', …')}" if files else ""
        difference = Difference(reference=reference, components=changed, files=files)
        return difference, f"{', '.join(changed)} changed{named}"

    def _find_changed_files(self, image: Image, before: str) -> tuple[str, ...]:
        """Return the files that differ from the context with the digest `before`, if it was recorded."""
        key = image.context, before
        if key not in self._changed_files:
            recorded = self._against.recorded and self._against.recorded(before)
            self._changed_files[key] = self._list_context(image).changed(recorded) if recorded else ()
        return self._changed_files[key]

    def _list_context(self, image: Image) -> Listing:
        if image.context in self._unread:
            raise self._unread[image.context]
        if image.context not in self.contexts:
            try:
                paths = self._find_context_files(image.context).names
                self.contexts[image.context] = context.list_context(image.context, paths)
            except UsageError as error:
                self._unread[image.context] = error
                raise
            except (OSError, ValueError, RecursionError) as error:
                self._unread[image.context] = UsageError(f"{image.context}: cannot be read: {error}")
                raise self._unread[image.context] from error
        return self.contexts[image.context]

    def _find_driver(
        self, cell: Cell, named: Collection[str], *, stacked: bool
    ) -> DriverFolder | RemoteDriver | None:
        """Return the driver that a cell takes from `driver_from`, or None; raise an error if it cannot.

        `named` are the images and contexts that its Dockerfile names. If it is `stacked` on another image of
        the matrix, it can get the driver from that image.
        """
        name = self._find_driver_source(cell)
        wanted = driver.CONTEXT in named
        if wanted and not name:
            version = cell.axes.get("driver")
            raise UsageError(f"the driver {version} has neither driver_base nor {DRIVER_FROM}")
        if not wanted and name and not stacked:
            raise UsageError(f"the template takes the driver from elsewhere, not from {DRIVER_FROM}")
        if not wanted or not name:
            return None
        key = name, cell.axes["driver"], cell.platform
        if key not in self._drivers:
            read = self._find_remote_driver if name.startswith(HTTPS) else self._read_local_driver
            try:
                self._drivers[key] = read(*key)
            except (EngineError, UsageError) as error:
                self._drivers[key] = error
        result = self._drivers[key]
        if isinstance(result, ImagematrixError):
            raise result
        return result

    @staticmethod
    def _find_driver_source(cell: Cell) -> str:
        """Return the path or address that the driver of a cell comes from, empty if it has none."""
        name = cell.properties.get(DRIVER_FROM)
        return driver.expand_driver_source(name, cell.axes["driver"], cell.platform) if name else ""

    def _find_remote_driver(self, address: str, version: str, platform: str) -> RemoteDriver:
        locked = self._against.drivers.get(address)
        if locked:
            found = RemoteDriver(address=address, version=version, platform=platform, locked=locked)
        elif self._against.resolve_driver:
            try:
                found = self._against.resolve_driver(address, version, platform)
            except (EngineError, UsageError) as error:
                self.unresolved[address] = error
                raise
        else:
            remedy = "run `imagematrix lock`, and commit the file"
            raise UsageError(f"{address} not found in the lock file", remedy=remedy)
        self.drivers[address] = found.locked
        return found

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
        folder = installer.unpack_installer(source, version, platform, self._against.note)
        return driver.read_driver_folder(folder, version, platform, source)

    def _resolve_base(self, name: str) -> str | None:
        if name not in self.bases and name not in self.unresolved:
            digest = self._against.locked.get(name)
            if digest is None and self._against.frozen:
                remedy = "run `imagematrix lock`, and commit the file"
                raise UsageError(f"{name} not found in the lock file", remedy=remedy)
            if digest is None and self._against.resolve:
                try:
                    digest = self._against.resolve(name)
                except (EngineError, UsageError) as error:
                    self.unresolved[name] = error
            if digest:
                self.bases[name] = digest
        return self.bases.get(name)

    def _list_present(self, store: Store | None, cell: Cell) -> list[StoredVariant]:
        if store is None:
            return []
        key = id(store), cell.image.name
        if key not in self._present:
            by_cell: dict[str, list[StoredVariant]] = {}
            for image in store.list_variants(cell.image.name, cell.image.version):
                by_cell.setdefault(image.cell, []).append(image)
                if image.lost:
                    self.lost.add(image.reference)
            self._present[key] = by_cell
        return self._present[key].get(cell.id, [])


def _mark_failed(item: Planned, error: ImagematrixError) -> Planned:
    why = str(error).replace("\n", "; ")
    return replace(item, status=PlanStatus.FAILED, why=why, error=error)


def _find_identical(present: list[StoredVariant], cell: Cell, made: Identity) -> StoredVariant | None:
    """Return the image of the cell that was built from the inputs of `made`, or None.

    A final version has no development images: these have a label that says so, and are never pushed.
    """
    same = (image for image in present if image.input_digest == made.digest)
    return next((image for image in same if cell.image.development or not image.development), None)
