"""What `select`, `explain` and `run` share: the host and the catalog that their options name."""

from __future__ import annotations

from imagematrix.catalog.sources import open_catalog

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from imagematrix.catalog.catalog import Catalog
    from imagematrix.node.host import Host

__all__ = ["catalog_of", "node_of"]


def node_of(
    file: Path | None, root: Path | None, nvidia_smi: Path | None, gpus: str | None
) -> tuple[Host, str | None]:
    """Return the host, and which of its GPUs are wanted: `gpus`, or else what the environment names.

    The host is the one saved in `file`, or this one (or the captured tree `root`) as it is probed now. What
    the environment says is about this machine and no other. Where it names GPUs, the host has no others.
    """
    host = _host_of(file, root, nvidia_smi)
    if any(given is not None for given in (file, root, nvidia_smi)):
        return host, gpus
    from imagematrix.gpus.visible import within

    return within(host, gpus)


def _host_of(file: Path | None, root: Path | None, nvidia_smi: Path | None) -> Host:
    if file is not None:
        from imagematrix.node.host import Host

        return Host.load(file)
    from imagematrix.node.probe import probe

    return probe(root or "/", smi=nvidia_smi)


def catalog_of(image: str | None, name: str | None) -> Catalog:
    """Return the catalog that `open_catalog` opens; where it is not the usual one, say so."""
    return open_catalog(image, name, note=_say)


def _say(text: str) -> None:
    from imagematrix.cli.output import say

    say(f"imagematrix: {text}")
