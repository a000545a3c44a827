"""The step of a plan that identifies cells: the digests of bases, drivers and contexts, each found once."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cache
from typing import Generic, TypeVar

from imagematrix.build.dockerfile.dockerfile import find_frontend
from imagematrix.build.dockerfile.platforms import FLAG, list_builder_bases
from imagematrix.build.matrix.axis_values import COMPAT_DRIVER, COMPAT_FROM, DRIVER_FROM
from imagematrix.build.matrix.expand import expand_matrix
from imagematrix.build.plan import context, driver, identity, installer
from imagematrix.build.plan.build_inputs import BuildInputs
from imagematrix.build.plan.context_files import ContextFiles
from imagematrix.build.plan.download import HTTPS
from imagematrix.build.plan.lock import locate_lock, read_lock
from imagematrix.build.plan.plan import PlanContext, Planned, PlanStatus
from imagematrix.build.plan.remote_driver import RemoteDriver
from imagematrix.build.trim import program
from imagematrix.common.suggestions import suggest_nearest
from imagematrix.errors import EngineError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from imagematrix.build.matrix.expand import Expansion
    from imagematrix.build.matrix.matrix import Cell, Matrix
    from imagematrix.build.plan.context import Listing
    from imagematrix.build.plan.driver import DriverFolder
    from imagematrix.build.plan.identity import Identity
    from imagematrix.build.plan.remote_driver import LockedDriver

K = TypeVar("K")
V = TypeVar("V")


class Lookup(Generic[K, V]):
    """A function that is called once for each key: its results are kept, and its errors."""

    def __init__(self, work: Callable[[K], V]) -> None:
        self._work = work
        self._outcomes: dict[K, V | EngineError | UsageError] = {}

    def __call__(self, key: K) -> V:
        """Return the function's result; raise its EngineError or UsageError."""
        if key not in self._outcomes:
            try:
                self._outcomes[key] = self._work(key)
            except (EngineError, UsageError) as error:
                self._outcomes[key] = error
        outcome = self._outcomes[key]
        if isinstance(outcome, (EngineError, UsageError)):
            raise outcome
        return outcome


@dataclass(frozen=True, slots=True)
class RenderedCell:
    """A cell with its Dockerfile; `error` is why it cannot be built.

    `images` are the images that the Dockerfile names, `contexts` the other contexts. `needs` are the images
    of this matrix that its template looked up, so that it may build on them, by reference.
    """

    cell: Cell
    dockerfile: str
    images: tuple[str, ...]
    contexts: frozenset[str]
    needs: Mapping[str, Planned]
    error: EngineError | UsageError | None


def expand_with_compat(matrix: Matrix) -> Expansion:
    """Return the cells of a matrix, with what their cuda-compat states where its files or its lock tell.

    Raises MatrixError as `expand_matrix` does, and UsageError if the lock file is damaged.
    """
    _, drivers = read_lock(locate_lock(matrix.path))
    return InputFinder(PlanContext(drivers=drivers), matrix.path.parent).read_compat(expand_matrix(matrix))


class InputFinder:
    """Finds what decides the identities of cells, beside their Dockerfiles.

    `bases` are the digests of their bases, `drivers` those at https addresses, `contexts` the listings of
    contexts, and `unresolved` the errors of bases and addresses. Drivers may be in the folder `folder`.
    """

    def __init__(self, against: PlanContext, folder: Path) -> None:
        self.bases: dict[str, str] = {}
        self.drivers: dict[str, LockedDriver] = {}
        self.unresolved: dict[str, EngineError | UsageError] = {}
        self.contexts: dict[Path | None, Listing] = {}
        self.build_inputs = against.build_inputs or BuildInputs()
        self.find_files = cache(ContextFiles)
        self.list_context = Lookup(self._read_context)
        self._against = against
        self._folder = folder
        self._read_drivers = Lookup(self._read_driver)
        self._require_index = Lookup(self._check_index)

    def read_compat(self, expansion: Expansion) -> Expansion:
        """Return an expansion whose cells have what their cuda-compat states.

        If it cannot be read, the cell stays without, and `identify_cell` reports the error.
        """
        if all(cell.axes.get("driver") != COMPAT_DRIVER for cell in expansion.cells):
            return expansion
        return replace(expansion, cells=tuple(map(self._read_compat, expansion.cells)))

    def _read_compat(self, cell: Cell) -> Cell:
        source = _expand_driver_source(cell) if cell.driver == COMPAT_DRIVER else None
        with contextlib.suppress(EngineError, UsageError):
            if source:
                return replace(cell, compat=self._read_cell_driver(cell, source).compat)
        return cell

    def _read_cell_driver(self, cell: Cell, source: str) -> DriverFolder | RemoteDriver:
        return self._read_drivers((source, cell.axes["driver"], cell.platform))

    def identify_cell(self, rendered: RenderedCell) -> Planned:
        """Return a cell with its identity; without it if a base's digest or a build argument is unknown.

        An error that concerns only some cells makes them FAILED; whatever is known of them by then stays.
        Raises UsageError if a frozen lock lacks a base.
        """
        cell = rendered.cell
        bases = tuple([name for name in rendered.images if name not in rendered.needs])
        needs = tuple([name for name in rendered.images if name in rendered.needs])
        # Before anything can fail, because a lock keeps the bases and drivers of cells that fail.
        for name in bases:
            self._resolve_base(name)
        source = _expand_driver_source(cell)
        if source and source in self._against.drivers:
            self.drivers[source] = self._against.drivers[source]
        its_driver, cell_identity, failure = None, None, None
        try:
            if rendered.error:
                raise rendered.error
            its_driver = self._find_driver(rendered, source)
            self._require_bases(rendered)
            cell_identity = self._identify(rendered, its_driver)
        except (EngineError, UsageError) as error:
            failure = error
        # Without the digests of bases, the input digest is unknown.
        tag = identity.format_tag(cell, cell_identity) if cell_identity else f"{cell.image.version}-{cell.id}"
        return Planned(
            cell=cell,
            status=PlanStatus.FAILED if failure else PlanStatus.BUILD,
            reference=f"{cell.image.name}:{tag}",
            why=str(failure).replace("\n", "; ") if failure else None,
            dockerfile=rendered.dockerfile,
            bases=bases,
            needs=needs,
            identity=cell_identity,
            driver=its_driver,
            error=failure,
        )

    def _find_driver(self, rendered: RenderedCell, source: str | None) -> DriverFolder | RemoteDriver | None:
        """Return the driver that a cell takes from files that the matrix names, or None.

        If it is built on another image of the matrix, it can get the driver from that image. Raises an error
        if it cannot have its driver.
        """
        cell = rendered.cell
        uses_source = driver.CONTEXT in rendered.contexts
        if cell.driver == COMPAT_DRIVER and not source:
            remedy = f"name a folder or a package: `{COMPAT_FROM}: drivers/cuda-compat.deb`"
            raise UsageError(f"the driver {COMPAT_DRIVER} has no {COMPAT_FROM}", remedy=remedy)
        if uses_source and not source:
            version = cell.axes.get("driver")
            raise UsageError(f"the driver {version} has neither driver_base nor {DRIVER_FROM}")
        if not uses_source and source and not rendered.needs:
            name = _get_source_property(cell)
            raise UsageError(f"the template takes the driver from elsewhere, not from {name}")
        if not source or not (uses_source or cell.driver == COMPAT_DRIVER):
            return None
        found = self._read_cell_driver(cell, source)
        return found if uses_source else None

    def _require_bases(self, rendered: RenderedCell) -> None:
        """Raise the error of the first image that a cell cannot be built on, or UsageError.

        An image that is also used for the machine that builds has to be an index: the digest of one
        platform's image would depend on the builder, and so would the identity.
        """
        for name in rendered.images:
            need = rendered.needs.get(name)
            if need and need.error:
                message = f"it builds on {need.cell.image.name}: {need.error}"
                kind = UsageError if isinstance(need.error, UsageError) else type(need.error)
                raise kind(message, remedy=need.error.remedy)
            error = self.unresolved.get(name)
            if error and name == find_frontend(rendered.dockerfile):
                message = (
                    f"the line # syntax={name} names an image that reads the Dockerfile, not a base: {error}"
                )
                remedy = f"remove this line, unless the Dockerfile needs it; otherwise {error.remedy}"
                raise type(error)(message, remedy=remedy)
            if error:
                raise error
        if FLAG in rendered.dockerfile:
            for name in list_builder_bases(rendered.dockerfile):
                if name in self.bases:
                    self._require_index(name)

    def _check_index(self, name: str) -> None:
        """Raise UsageError if a base is known to be the image of one platform."""
        with contextlib.suppress(EngineError):  # a registry that does not answer stops the build, too
            if self._against.is_index and not self._against.is_index(name, self.bases[name]):
                raise UsageError(
                    f"the base image {name} is for one platform, but stages take it for the machine that "
                    "builds (FROM --platform=$BUILDPLATFORM)",
                    remedy="name an index of images for all platforms, as registries have it, and run "
                    "`imagematrix lock --upgrade`; or build on machines of the image's platform only, and "
                    "leave out --platform",
                )

    def _identify(
        self, rendered: RenderedCell, its_driver: DriverFolder | RemoteDriver | None
    ) -> Identity | None:
        cell, images, needs = rendered.cell, rendered.images, rendered.needs
        digests = {name: self.bases[name] for name in images if name in self.bases and name not in needs}
        identities = ((name, needs[name].identity) for name in images if name in needs)
        digests |= {name: known.digest for name, known in identities if known}
        if len(digests) < len({*images}) or self.build_inputs.get_arguments(cell.image) is None:
            return None
        return identity.identify(
            cell,
            rendered.dockerfile,
            digests,
            self.list_context(cell.image.context).digest,
            self.build_inputs,
            trims=program.CONTEXT in rendered.contexts,
            driver=its_driver.digest if its_driver else None,
        )

    def _read_context(self, folder: Path | None) -> Listing:
        try:
            listing = context.list_context(folder, self.find_files(folder).names)
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{folder}: cannot be read: {error}") from error
        self.contexts[folder] = listing
        return listing

    def _read_driver(self, key: tuple[str, str, str]) -> DriverFolder | RemoteDriver:
        source, version, platform = key
        if source.startswith(HTTPS):
            return self._find_remote_driver(source, version, platform)
        try:
            return self._read_local_driver(source, version, platform)
        except OSError as error:
            raise UsageError(f"{error.filename or source}: {error.strerror or error}") from error

    def _find_remote_driver(self, address: str, version: str, platform: str) -> RemoteDriver:
        locked = self._against.drivers.get(address)
        if locked and (version == COMPAT_DRIVER) != bool(locked.compat):
            remedy = "run `imagematrix lock --upgrade`, and commit the file"
            raise UsageError(f"the lock file has {address} as another kind of driver", remedy=remedy)
        if locked:
            remote = RemoteDriver(address=address, version=version, platform=platform, locked=locked)
        elif self._against.resolve_driver:
            try:
                remote = self._against.resolve_driver(address, version, platform)
            except (EngineError, UsageError) as error:
                self.unresolved[address] = error
                raise
        else:
            remedy = "run `imagematrix lock`, and commit the file"
            raise UsageError(f"{address} not found in the lock file", remedy=remedy)
        self.drivers[address] = remote.locked
        return remote

    def _read_local_driver(self, name: str, version: str, platform: str) -> DriverFolder:
        source = self._folder / name
        if source.is_dir():
            return driver.read_driver_folder(source, version, platform)
        if not source.exists():
            near = (path for level in ("*", "*/*") for path in sorted(self._folder.glob(level)))
            names = [str(path.relative_to(self._folder)) for path in near]
            raise UsageError(
                f"{source} of the driver {version} not found", remedy=suggest_nearest(name, names)
            )
        if not source.is_file():  # reading a pipe or a device may never end
            raise UsageError(f"{source} of the driver {version} is neither a file nor a folder")
        folder = installer.unpack_installer(source, version, platform, self._against.on_progress)
        return driver.read_driver_folder(folder, version, platform, source)

    def _resolve_base(self, name: str) -> None:
        if name in self.bases or name in self.unresolved:
            return
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


def _get_source_property(cell: Cell) -> str:
    return COMPAT_FROM if cell.driver == COMPAT_DRIVER else DRIVER_FROM


def _expand_driver_source(cell: Cell) -> str | None:
    """Return the path or address that the driver of a cell comes from; None if it has none."""
    name = cell.properties.get(_get_source_property(cell))
    return driver.expand_driver_source(name, cell.axes["driver"], cell.platform) if name else None
