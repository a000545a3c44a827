"""The environment of buildx, without variables that would change an image but not its identity."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PROXIES", "proxies", "scrubbed"]

# Source policies, labels from git, attestations, other frontends: see docs.docker.com, "Build variables".
DECIDING = ("BUILDX_", "BUILDKIT_", "EXPERIMENTAL_BUILDKIT_", "SOURCE_DATE_EPOCH", "DOCKER_DEFAULT_PLATFORM")
KEPT = ("BUILDX_CONFIG",)  # the location of builders for --builder
# Set in every build by docker's own configuration (config.json, "proxies") unless overridden.
PROXIES = ("ALL_PROXY", "FTP_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the variables that change what buildx and BuildKit build."""
    return {
        name: value for name, value in environment.items() if name in KEPT or not name.startswith(DECIDING)
    } | {"BUILDX_METADATA_PROVENANCE": "disabled"}


def proxies(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the proxy variables in `environment`, in upper case."""
    return tuple(name for name in PROXIES if environment.get(name) or environment.get(name.lower()))
