"""`imagematrix select`: the one reference that fits this node best."""

from __future__ import annotations

from imagematrix.catalog.sources import confirm
from imagematrix.cli.choosing import choose, node_of, remark
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
        Policy,
        Root,
        Where,
    )

__all__ = ["command"]


def command(
    image: Image,
    host: HostFile = None,
    catalog: CatalogName = None,
    policy: Policy = None,
    gpus: Gpus = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
    root: Root = None,
    nvidia_smi: NvidiaSmi = None,
    json: Json = False,
) -> None:
    """Print the reference of the variant that fits this node best."""
    node, wanted = node_of(host, root, nvidia_smi, gpus)
    selection = choose(
        image, catalog, (node, wanted), where=where, allow_cpu=allow_cpu, json=json, policy=policy
    )
    confirm(image, catalog, [str(selection.selected)])
    if json:
        print_json(selection.to_json())
    else:
        print_text(str(selection.selected))
        remark(selection, wanted)
