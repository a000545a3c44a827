"""containerd's configuration for a registry that it is to read by way of the resolver (hosts.toml)."""

from __future__ import annotations

from imagematrix import files
from imagematrix.errors import UsageError
from imagematrix.reference import Reference, names_registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["mirrored", "write"]

MARK = "# Written by `imagematrix resolver --containerd`.\n"
# containerd goes on with the next host after any error, at last with the server. Were that the registry, its
# default image would follow a refusal.
TEXT = """\
server = "http://{address}"

[host."http://{address}"]
  capabilities = ["pull", "resolve"]
"""


def mirrored(upstream: str) -> str:
    """Return the registry of which containerd can have a mirror; raise UsageError if `upstream` is none."""
    named = f"{upstream}/repository"
    if "/" in upstream or upstream.startswith("oci:") or not names_registry(named):
        raise UsageError(f"containerd has mirrors of whole registries, and {upstream} is none")
    Reference.parse(named)
    return upstream


def write(folder: Path, registry: str, address: str) -> Path:
    """Write hosts.toml for `registry` below `folder`, such as /etc/containerd/certs.d, and return its path.

    Raises UsageError if there is one that somebody else wrote, or if it cannot be written.
    """
    path = folder / mirrored(registry) / "hosts.toml"
    text = MARK + TEXT.format(address=address)
    try:
        if path.exists() and not path.read_text("utf-8").startswith(MARK):
            remedy = f"remove it, or make the resolver its server: {address}"
            raise UsageError(f"{path} was written by somebody else", remedy=remedy)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, text.encode())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be written: {error}") from error
    return path
