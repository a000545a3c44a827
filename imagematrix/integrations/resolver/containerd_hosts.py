"""containerd's configuration for reading a registry through the resolver (hosts.toml)."""

from __future__ import annotations

from imagematrix.common import files
from imagematrix.common.image_reference import Reference, names_registry
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

MARK = "# Written by `imagematrix resolver`.\n"
# After any error, containerd tries the next host, and in the end the server. If that were the registry, a
# refusal by the resolver would lead to the registry's default image.
TEXT = """\
server = "http://{address}"

[host."http://{address}"]
  capabilities = ["pull", "resolve"]
"""


def require_mirrorable(upstream: str) -> str:
    """Return `upstream` if it is a registry that containerd can mirror; raise UsageError otherwise."""
    repository = f"{upstream}/repository"
    if "/" in upstream or upstream.startswith("oci:") or not names_registry(repository):
        raise UsageError(f"containerd mirrors only whole registries, and {upstream} is not one")
    Reference.parse(repository)
    return upstream


def write_hosts_file(folder: Path, registry: str, address: str) -> Path:
    """Write hosts.toml for `registry` below `folder`, such as /etc/containerd/certs.d, and return its path.

    Raises UsageError if there is one that imagematrix did not write, or if it cannot be written.
    """
    path = folder / require_mirrorable(registry) / "hosts.toml"
    text = MARK + TEXT.format(address=address)
    try:
        if path.exists() and not path.read_bytes().startswith(MARK.encode()):
            remedy = f"remove it, or set its server to the resolver: {address}"
            raise UsageError(f"{path} was not written by imagematrix", remedy=remedy)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace_file(path, text.encode())
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror}"
        raise UsageError(message, remedy="pass a folder that you can write to") from error
    return path
