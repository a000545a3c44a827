"""The host and the catalog that the options of `select`, `explain` and `run` name."""

from __future__ import annotations

from imagematrix.catalog.sources import open_catalog
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

    from imagematrix.catalog.catalog import Catalog
    from imagematrix.node.host import Host

__all__ = ["catalog_of", "node_of", "require_image"]


def node_of(
    file: Path | None, root: Path | None, nvidia_smi: Path | None, gpus: str | None
) -> tuple[Host, str | None]:
    """Return the host and the requested GPUs: `gpus`, or else those that the environment names.

    The host is the one saved in `file`, or this one (or the captured tree `root`) as probed now. The
    environment applies to this machine only: if it names GPUs, the host has no others.
    """
    host = _host_of(file, root, nvidia_smi)
    if any(option is not None for option in (file, root, nvidia_smi)):
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
    """Return the catalog that `open_catalog` opens; print a note if it is not the default one."""
    return open_catalog(image, name, note=_note)


def require_image(image: str | None, catalog: str | None) -> None:
    """Raise UsageError if the options --image and --catalog name neither."""
    if image is None and catalog is None:
        raise UsageError("no image given", remedy="give --image IMAGE[:VERSION], or --catalog FILE|REF")


def _note(text: str) -> None:
    from imagematrix.cli.output import info

    info(f"imagematrix: {text}")
