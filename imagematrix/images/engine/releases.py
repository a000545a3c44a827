"""What releases of Docker cannot do, for capabilities about which an engine tells nothing but its version.

Whatever an engine can be asked, it is asked (`system`). The tests have an engine on both sides of every row.
"""

from __future__ import annotations

from imagematrix.common.json_documents import parse_natural
from imagematrix.common.record import Record


class Capability(Record):
    """A capability that Docker has from the release `since` on; some have lost it with the release `lost`."""

    since: tuple[int, int]
    lost: tuple[int, int] = (0, 0)

    def is_in(self, docker: str | None) -> bool:
        """Whether a version of Docker has it.

        True for None, another engine, and for what is no version: builds from the sources may have a name or
        a commit, and are taken for new.
        """
        major, _, rest = (docker or "").partition(".")
        number = parse_natural(major)
        return (
            number is None
            or not self.lost <= (number, parse_natural(rest.partition(".")[0]) or 0) < self.since
        )

    def __str__(self) -> str:
        major, minor = self.since
        return f"Docker {major}.{minor}" if minor else f"Docker {major}"


# BuildKit with `COPY --link`, SOURCE_DATE_EPOCH and OCI layouts.
BUILDS = Capability(since=(23, 0))
# Unpacking layers that are compressed with zstd. Without it, Docker fails with "archive/tar: invalid tar
# header" once it has pulled such a layer.
ZSTD_LAYERS = Capability(since=(23, 0))
ZSTD_REMEDY = f"install {ZSTD_LAYERS} or newer, or build the image with `compression: gzip`"
# Tasks that have both a generic resource and an overlay network. A manager without it rejects them on nodes
# that are not managers, because "assigned node no longer meets constraints" (moby/moby#44378).
OVERLAYS_WITH_GPUS = Capability(since=(26, 0), lost=(20, 10))
