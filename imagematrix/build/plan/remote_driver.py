"""A driver at an https address, as the lock file states it: known before it is downloaded."""

from __future__ import annotations

from dataclasses import dataclass

from imagematrix.build.plan import driver, installer
from imagematrix.build.plan.download import fetch_file
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from imagematrix.build.plan.driver import DriverFolder
    from imagematrix.images.catalog.catalog import UserModeDriver


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedDriver:
    """The digests of what is at an address: of the `file`, and of the `driver` in it as it is in an image.

    `compat` is what the note in cuda-compat states, or None for the driver of a node.
    """

    file: str
    driver: str
    compat: UserModeDriver | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteDriver:
    """The driver `version` for `platform` at `address`."""

    address: str
    version: str
    platform: str
    locked: LockedDriver

    @property
    def digest(self) -> str:
        """The digest of its files in an image."""
        return self.locked.driver

    @property
    def compat(self) -> UserModeDriver | None:
        """What the note in cuda-compat states, or None for the driver of a node."""
        return self.locked.compat

    def fetch_folder(self, on_progress: Callable[[str], None]) -> DriverFolder:
        """Return its files, downloaded if the cache does not have them.

        Raises EngineError if they cannot be downloaded, and UsageError if they are not those that are locked.
        """
        folder, _ = _download_driver(self.address, self.version, self.platform, self.locked.file, on_progress)
        remedy = "run `imagematrix lock --upgrade`, and commit the file"
        if folder.digest != self.digest:
            message = f"{self.address} gives the driver {folder.digest}, not {self.digest} as locked"
            raise UsageError(message, remedy=remedy)
        if folder.compat != self.compat:
            message = f"{self.address} has another note of cuda-compat than the lock file states"
            raise UsageError(message, remedy=remedy)
        return folder


def resolve_driver(
    address: str, version: str, platform: str, on_progress: Callable[[str], None]
) -> RemoteDriver:
    """Return the driver that is at `address` now; raise EngineError or UsageError."""
    folder, file = _download_driver(address, version, platform, None, on_progress)
    locked = LockedDriver(file=file, driver=folder.digest, compat=folder.compat)
    return RemoteDriver(address=address, version=version, platform=platform, locked=locked)


def _download_driver(
    address: str, version: str, platform: str, expected: str | None, on_progress: Callable[[str], None]
) -> tuple[DriverFolder, str]:
    """Return the driver at an address, and the digest of the file there."""
    file, digest = fetch_file(address, expected, on_progress)
    folder = installer.unpack_installer(file, version, platform, on_progress, digest)
    return driver.read_driver_folder(folder, version, platform, address), digest
