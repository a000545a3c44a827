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


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedDriver:
    """The digests of what is at an address: of the `file`, and of the `driver` in it as it is in an image."""

    file: str
    driver: str


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

    def fetch_folder(self, on_progress: Callable[[str], None]) -> DriverFolder:
        """Return its files, downloaded if the cache does not have them.

        Raises EngineError if they cannot be downloaded, and UsageError if they are not those that are locked.
        """
        folder, _ = _download_driver(self.address, self.version, self.platform, self.locked.file, on_progress)
        if folder.digest != self.digest:
            raise UsageError(
                f"{self.address} gives the driver {folder.digest}, not {self.digest} as locked",
                remedy="run `imagematrix lock --upgrade`, and commit the file",
            )
        return folder


def resolve_driver(
    address: str, version: str, platform: str, on_progress: Callable[[str], None]
) -> RemoteDriver:
    """Return the driver that is at `address` now; raise EngineError or UsageError."""
    folder, file = _download_driver(address, version, platform, None, on_progress)
    locked = LockedDriver(file=file, driver=folder.digest)
    return RemoteDriver(address=address, version=version, platform=platform, locked=locked)


def _download_driver(
    address: str, version: str, platform: str, expected: str | None, on_progress: Callable[[str], None]
) -> tuple[DriverFolder, str]:
    """Return the driver at an address, and the digest of the file there."""
    file, digest = fetch_file(address, expected, on_progress)
    folder = installer.unpack_installer(file, version, platform, on_progress, digest)
    return driver.read_driver_folder(folder, version, platform, address), digest
