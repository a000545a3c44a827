"""Extras: what only some commands need, as the metadata of the installed package lists it.

Modules of an extra are imported where they are used. `find_missing_extra` tells an import that failed because
the extra is not installed from one that failed for any other reason.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.metadata import Distribution

PACKAGE = "imagematrix"
# The modules of distributions that do not name them as themselves.
MODULES = {"grpcio": "grpc", "protobuf": "google.protobuf"}


def find_missing_extra(error: ModuleNotFoundError, command: str = "") -> str | None:
    """Return the extra that brings the module which `error` misses.

    Of several, it is the one that is a word of `command`, or else the smallest. None if no extra brings it,
    and if its distribution is installed, which is then broken.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        extras = list_extras(distribution(PACKAGE))
    except PackageNotFoundError:  # our modules were copied, not installed
        return None
    matching = [extra for extra, names in extras.items() if any(_is_lacking(name, error) for name in names)]
    words = command.split()
    return min(matching, key=lambda extra: (extra not in words, len(extras[extra])), default=None)


def make_install_command(extra: str) -> str:
    """Return the shell command that adds an extra to this installation.

    It finds our package there, so it asks no index for that name, which could be anybody's.
    """
    import shlex
    from importlib.util import find_spec

    installer = [sys.executable, "-m", "pip", "install"]
    if find_spec("pip") is None:  # as in environments that uv has made
        installer = ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*installer, f"{PACKAGE}[{extra}]"])


def list_extras(package: Distribution) -> dict[str, list[str]]:
    """Return the names of the distributions that each extra of a package brings."""
    from packaging.requirements import Requirement

    extras: dict[str, list[str]] = {name: [] for name in package.metadata.get_all("Provides-Extra") or ()}
    for requirement in map(Requirement, package.requires or ()):
        for extra, names in extras.items():
            marker = requirement.marker
            if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
                names.append(requirement.name)
    return extras


def _is_lacking(distribution_name: str, error: ModuleNotFoundError) -> bool:
    """Whether `error` misses the module of a distribution because that is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    module = MODULES.get(distribution_name, distribution_name)
    if not f"{module}.".startswith(f"{error.name}."):  # "google" is missing, too, without google.protobuf
        return False
    try:
        version(distribution_name)
    except PackageNotFoundError:
        return True
    return False
