"""The driver branches of data centers: when NVIDIA ends their support, and their newest known release.

The table is kept by hand; driver_branches.json has the source and the date of each row.
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType

from imagematrix.common.record import Record
from imagematrix.hardware.vendors import _data, versions

TYPE_CHECKING = False
if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping

UNLISTED = "unlisted"


class DriverRelease(Record):
    """A release of a driver; `source` is where it was seen, on `date`."""

    version: str
    source: str
    date: str


class DriverBranch(Record):
    """A branch such as 580. `end` is the last month of its support, "2028-06", or UNLISTED.

    `source` is where `end` was read, on `date`. `newest` is the newest release that was seen, or None.
    """

    name: str
    end: str
    source: str
    date: str
    newest: DriverRelease | None

    def has_ended(self, today: dt.date) -> bool:
        """Whether its support is over; it is, too, if NVIDIA no longer lists the branch."""
        return self.end == UNLISTED or self.end < f"{today:%Y-%m}"


@cache
def load_branches() -> Mapping[str, DriverBranch]:
    """Return the known branches by name."""
    table = _data.load("driver_branches.json")["branches"]
    return MappingProxyType(
        {
            name: DriverBranch(
                name=name,
                end=row["end"],
                source=row["source"],
                date=row["date"],
                newest=DriverRelease(**row["newest"]) if "newest" in row else None,
            )
            for name, row in table.items()
        }
    )


def get_branch(driver: str) -> DriverBranch | None:
    """Return the branch of a driver version, or None if the table lacks it, as it does those of Tegra."""
    return None if versions.is_tegra(driver) else load_branches().get(str(versions.get_branch(driver)))
