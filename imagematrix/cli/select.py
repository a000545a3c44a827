"""`imagematrix select`: the one reference that fits this node best."""

from __future__ import annotations

from imagematrix.cli.choosing import catalog_of, node_of
from imagematrix.cli.output import print_json, print_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.cli.options import (
        AllowCpu,
        CatalogName,
        Gpus,
        HostFile,
        Image,
        Json,
        NvidiaSmi,
        Root,
        Where,
    )

__all__ = ["command"]


def command(
    image: Image,
    host: HostFile = None,
    catalog: CatalogName = None,
    gpus: Gpus = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
    root: Root = None,
    nvidia_smi: NvidiaSmi = None,
    json: Json = False,
) -> None:
    """Print the reference of the variant that fits this node best."""
    from imagematrix.selection.question import parse
    from imagematrix.selection.select import select
    from imagematrix.selection.selection import NothingFits

    try:
        node, wanted = node_of(host, root, nvidia_smi, gpus)
        selection = select(
            node, catalog_of(image, catalog), gpus=wanted, allow_cpu=allow_cpu, where=parse(where or ())
        )
    except NothingFits as error:
        if json:
            print_json(error.selection.to_json())
        raise
    if json:
        print_json(selection.to_json())
    else:
        print_text(str(selection.selected))
