"""The plan: what a build would do for each cell of a matrix, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from imagematrix.build.plan.build_inputs import BuildInputs
from imagematrix.build.plan.identity import TRIM

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from imagematrix.build.matrix.matrix import Cell
    from imagematrix.build.plan.context import Listing
    from imagematrix.build.plan.driver import DriverFolder
    from imagematrix.build.plan.execution import Execution
    from imagematrix.build.plan.identity import Identity
    from imagematrix.build.plan.protocols import Store, StoredVariant
    from imagematrix.build.plan.remote_driver import LockedDriver, RemoteDriver
    from imagematrix.errors import ImagematrixError

SCHEMA = "imagematrix.plan/v1"
REFUSED_REMEDY = (
    "raise the version with `imagematrix bump`, or revert the change; to try changes out in the engine, "
    "write `development: true` below `version` in matrix.yaml"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """The state that a matrix is planned against.

    Images belong in `store`; missing ones are adopted from `engine` if it has them, or built. `locked` are
    the known digests of base images. `resolve` returns the digest of any other image, or raises UsageError or
    EngineError; without it, or if the lock is `frozen`, nothing is resolved. `is_index` returns whether the
    image with a name and a digest is an index of images for several platforms, or raises the same. Without
    it, that is not checked. `find_recorded` returns the
    listing of the context with a digest, if it was recorded. `build_inputs` are those from the command line.
    `on_progress` is told what takes long. `drivers` are the locked drivers by https address; `resolve_driver`
    returns any other, from its address, version and platform, or raises UsageError or EngineError. With
    `adopts_earlier`, images of earlier versions are taken over.
    """

    resolve: Callable[[str], str] | None = None
    is_index: Callable[[str, str], bool] | None = None
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


class PlanStatus(StrEnum):
    """What a build would do for a feasible cell."""

    BUILD = "build"
    ADOPT = "adopt"
    UP_TO_DATE = "up-to-date"
    REFUSED = "refused"  # the store has the cell under the same version, built from other inputs
    FAILED = "failed"  # its context, its base, or that of an image it builds on cannot be read
    OTHER_SHARD = "other-shard"


class DropStatus(StrEnum):
    """Why a cell is not built: the matrix excludes it, a vendor's rule forbids it, or no host needs it."""

    EXCLUDED = "excluded"
    INFEASIBLE = "infeasible"
    UNNEEDED = "unneeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How a cell differs from its image `existing` in the store.

    `components` are the names of the changed inputs, `files` the changed paths in its context, if known.
    `before` are the components that the labels of the image state.
    """

    existing: StoredVariant
    components: tuple[str, ...]
    files: tuple[str, ...] = ()
    before: Mapping[str, str]

    @property
    def reference(self) -> str:
        """The reference of the image."""
        return self.existing.reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A feasible cell, and what a build would do for it.

    `bases` are the images it builds on, `needs` the images of this matrix among them. `identity` is None
    if a base's digest is unknown; `reference` then lacks the input digest. `difference` is set if the store
    has an image of the cell that was built from other inputs. `driver` is the user-mode driver that it takes
    from a folder, or None. `earlier` is the reference of an image of another version, built from the same
    inputs, whose layers it adopts. `labels` are those of the image of the same inputs in a store, if there is
    one. `execution` is how its build would run; None if it is not built, or if no builder is known. `error`
    is why it failed; `why` has its message.
    """

    cell: Cell
    status: PlanStatus
    reference: str
    why: str | None = None
    dockerfile: str = ""
    bases: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    identity: Identity | None = None
    difference: Difference | None = None
    driver: DriverFolder | RemoteDriver | None = None
    earlier: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    execution: Execution | None = None
    error: ImagematrixError | None = None

    @property
    def trims(self) -> bool:
        """Whether its build trims device code."""
        return self.identity is not None and TRIM in self.identity.components

    def to_json(self) -> dict[str, object]:
        """Return one element of the Plan document's `cells`."""
        return _item_to_json(
            self,
            why=self.why,
            reference=self.reference if self.identity else None,
            input=self.identity.digest if self.identity else None,
            changed=list(self.difference.components) if self.difference else [],
            files=list(self.difference.files) if self.difference else [],
            execution=self.execution.to_json() if self.execution else None,
        ) | {"from": self.earlier}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A cell that is not built. `rule` is the reason: a line of the matrix, or a vendor's rule.

    If no host needs it, `rule` is None, and `nearest_host` is the name of the host that fails the fewest of
    its rules.
    """

    cell: Cell
    status: DropStatus
    rule: str | None
    why: str | None
    nearest_host: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return one element of the Plan document's `cells`."""
        return _item_to_json(self, rule=self.rule, why=self.why, nearest_host=self.nearest_host)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a build would do for every cell, in the order of the matrix.

    `shard` is the part that the plan was narrowed to, such as "2/8", or None.
    `bases` are the digests of all base images of its cells, `contexts` the listings of the folders that they
    copy from. `unresolved` are the errors of bases and drivers whose digest is unknown, which fail only
    their cells. `lost` are the references of published images that the registry lost and no item rebuilds.
    `drivers` are those at https addresses. `hosts` is what the document says of the hosts that the plan was
    made for, or None.
    """

    items: tuple[Planned | Dropped, ...]
    bases: Mapping[str, str]
    contexts: Mapping[Path | None, Listing] = field(default_factory=dict)
    build_inputs: BuildInputs = field(default_factory=BuildInputs)
    shard: str | None = None
    unresolved: Mapping[str, ImagematrixError] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    drivers: Mapping[str, LockedDriver] = field(default_factory=dict)
    hosts: Mapping[str, object] | None = None

    def with_status(self, *statuses: PlanStatus) -> tuple[Planned, ...]:
        """Return the feasible cells with one of the statuses."""
        return tuple(item for item in self.items if isinstance(item, Planned) and item.status in statuses)

    def list_dropped(self, status: DropStatus) -> tuple[Dropped, ...]:
        """Return the cells that are not built, for the reason `status`."""
        return tuple(item for item in self.items if isinstance(item, Dropped) and item.status == status)

    def to_json(self) -> dict[str, object]:
        """Return the Plan document."""
        return {
            "schema": SCHEMA,
            "shard": self.shard,
            "for": self.hosts,
            "cells": [item.to_json() for item in self.items],
        }


def _item_to_json(item: Planned | Dropped, **facts: object) -> dict[str, object]:
    cell = item.cell
    return {
        "image": cell.image.name,
        "version": cell.image.version,
        "cell": cell.id,
        "axes": dict(cell.axes),
        "status": item.status,
        "rule": None,
        "why": None,
        "reference": None,
        "input": None,
        "from": None,
        "changed": [],
        "files": [],
        "nearest_host": None,
        "execution": None,
    } | facts


def get_full_name(cell: Cell) -> str:
    """Return the name of a cell among those of several images."""
    return f"{cell.image.name}:{cell.image.version} {cell.id}".rstrip()


def make_item_namer(items: Iterable[Planned | Dropped]) -> Callable[[Planned | Dropped], str]:
    """Return a function that names an item by its cell, with its image if `items` have several images.

    A cell of a matrix without axes has the name of its image.
    """
    images = {(item.cell.image.name, item.cell.image.version) for item in items}
    if len(images) > 1:
        return lambda item: get_full_name(item.cell)
    return lambda item: item.cell.id or get_full_name(item.cell)
