"""`imagematrix kubernetes needs`: what an image's variants need from a node, for a scheduler."""

from __future__ import annotations

from imagematrix.cli.kubernetes.options import narrowed_catalog
from imagematrix.cli.options import AllowCpu, CatalogName, Image, Json, Where
from imagematrix.cli.output import print_json, print_text

__all__ = ["command"]


def command(
    image: Image,
    catalog: CatalogName = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
    json: Json = False,
) -> None:
    """Print what each variant needs from a node: node affinity, and a device selector for DRA."""
    from imagematrix.kubernetes.needs import document
    from imagematrix.kubernetes.yaml import dump

    needs = document(narrowed_catalog(image, catalog, where), allow_cpu=allow_cpu)
    if json:
        print_json(needs)
    else:
        print_text(dump(needs))
