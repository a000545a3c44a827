"""`imagematrix pull`: bring the image that fits this node best into the engine, before a job needs it."""

from __future__ import annotations

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
    """Pull the variant that fits this node best, by its digest, and print REFERENCE@DIGEST.

    An image that the engine has is left as it is. With --json, the answer is the Selection.
    """
    from imagematrix.cli.pulling import PullDisplay
    from imagematrix.launcher.machine import engine_machine
    from imagematrix.launcher.pull import pull

    engine_machine(described=host is not None or root is not None)
    node, wanted = node_of(host, root, nvidia_smi, gpus)
    selection = choose(
        image, catalog, (node, wanted), where=where, allow_cpu=allow_cpu, json=json, policy=policy
    )
    with PullDisplay(str(selection.selected)) as display:
        name = pull(selection, policy=policy, report=display)
    if json:
        print_json({**selection.to_json(), "digest": name.partition("@")[2] or selection.digest})
    else:
        print_text(name)
        remark(selection, wanted)
