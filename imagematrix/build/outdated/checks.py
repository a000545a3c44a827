"""The checks: each compares what planned cells use with what there is now."""

from __future__ import annotations

from imagematrix.build.outdated.finding import AgeFinding
from imagematrix.common.image_reference import Reference
from imagematrix.errors import EngineError, ImagematrixError, UnknownImageError
from imagematrix.hardware.vendors import cuda, driver_branches, versions
from imagematrix.images.catalog import labels
from imagematrix.images.catalog.sources import open_catalog
from imagematrix.images.oci.registry import Registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from imagematrix.build.plan.plan import Planned

PUSH = "push a base that was made on this machine to a registry, and use its name there"


def check_bases(items: Sequence[Planned], locked: Mapping[str, str]) -> Iterator[AgeFinding]:
    """Yield the locked bases that have another digest in their registry by now.

    Those that are named by digest never move, and those that are not locked are resolved by the next build.
    """
    for name, digest in sorted(locked.items()):
        users = tuple(item for item in items if name in item.bases)
        if not users or "@" in name:
            continue
        reference = Reference.parse(name)
        now, why, remedy = None, f"the registry {reference.registry} does not have it", PUSH
        try:
            with Registry(reference.name) as registry:
                now = registry.digest(reference.tag)
        except (EngineError, UnknownImageError) as error:
            # Docker Hub denies access to what it does not have.
            why, remedy = str(error), "; ".join(filter(None, (error.remedy, PUSH)))
        if now is not None:
            why = "its tag has another image in its registry"
        if now != digest:
            source = reference.registry
            yield AgeFinding(
                kind="base",
                name=name,
                used=digest,
                now=now,
                why=why,
                source=source,
                items=users,
                remedy=remedy,
            )


def check_drivers(items: Sequence[Planned], today: dt.date) -> Iterator[AgeFinding]:
    """Yield the drivers whose branch is past its end, or has a newer release, by the table."""
    users: dict[str, list[Planned]] = {}
    for item in items:
        if item.cell.driver_version:
            users.setdefault(item.cell.driver_version, []).append(item)
    for driver in sorted(users, key=versions.make_sort_key):
        branch = driver_branches.get_branch(driver)
        if branch is None:
            now, reasons = None, ["the table of driver branches lacks it"]
            source, date = "imagematrix", None
        else:
            newest = branch.newest
            newer = (
                newest
                if newest and versions.make_sort_key(newest.version) > versions.make_sort_key(driver)
                else None
            )
            ended = branch if branch.has_ended(today) else None
            if not newer and not ended:
                continue
            now = newer.version if newer else f"end of {branch.name}"
            reasons = []
            if ended and branch.end == driver_branches.UNLISTED:
                reasons.append(f"NVIDIA no longer lists the branch {branch.name}")
            elif ended:
                reasons.append(f"support of the branch {branch.name} ended in {branch.end}")
            if newer:
                reasons.append(f"{newer.version} is newer")
            entries = [entry for entry in (ended, newer) if entry]
            source = ", ".join(entry.source for entry in entries)
            date = min(entry.date for entry in entries)
        yield AgeFinding(
            kind="driver",
            name=driver,
            used=driver,
            now=now,
            why=", ".join(reasons),
            source=source,
            date=date,
            items=tuple(users[driver]),
        )


def check_toolkits(items: Sequence[Planned], policy: Path | None = None) -> Iterator[AgeFinding]:
    """Yield the CUDA releases of existing images for which the tables say another oldest driver than a label.

    A label states it if the tables of the release that built the image lacked the toolkit.
    """
    by_version: dict[str, dict[str, Planned]] = {}
    for item in items:
        name = f"{item.cell.image.name}:{item.cell.image.version}"
        by_version.setdefault(name, {})[item.cell.id] = item
    for name, cells in by_version.items():
        try:
            catalog = open_catalog(name, policy=policy)
        except UnknownImageError:  # it was never built
            continue
        except ImagematrixError as error:
            yield AgeFinding(
                kind="toolkit",
                name=name,
                used="its labels",
                now=None,
                why=str(error),
                source=name,
                items=tuple(cells.values()),
            )
            continue
        stale: dict[tuple[str, str, str], list[Planned]] = {}
        for variant in catalog.variants:
            table_driver = cuda.get_lowest_driver(variant.cuda) if variant.cuda else None
            label_driver = variant.oldest_driver
            cell = labels.get_cell(variant.reference.rpartition(":")[2])
            if table_driver and label_driver and table_driver != label_driver and cell in cells:
                stale.setdefault((str(variant.cuda), label_driver, table_driver), []).append(cells[cell])
        for (release, label_driver, table_driver), stale_items in sorted(stale.items()):
            yield AgeFinding(
                kind="toolkit",
                name=f"CUDA {release}",
                used=label_driver,
                now=table_driver,
                why="the tables now have its oldest driver, which differs from the label",
                source="imagematrix/hardware/vendors/cuda.json",
                items=tuple(stale_items),
            )
