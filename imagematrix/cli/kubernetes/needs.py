"""`imagematrix kubernetes needs`: what an image's variants need from a node, for a scheduler."""

from __future__ import annotations

from typing import Annotated

import typer

from imagematrix.cli.kubernetes.options import load_narrowed_catalog
from imagematrix.cli.shared.options import AllowCpu, CatalogName, Image, Json, Policy, Where
from imagematrix.cli.shared.output import print_document, print_json
from imagematrix.common.suggestions import require_known


def command(
    image: Image,
    catalog: CatalogName = None,
    policy: Policy = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
    dra_driver: Annotated[
        str,
        typer.Option(
            "--dra-driver",
            metavar="NAME",
            help="The DRA driver whose devices the selectors are for: gpu.nvidia.com or gpu.imagematrix.io.",
        ),
    ] = "gpu.nvidia.com",
    json: Json = False,
) -> None:
    """Print what each variant needs from a node: node affinity, and a device selector for DRA."""
    from imagematrix.integrations.kubernetes.client.yaml import dump_yaml
    from imagematrix.integrations.kubernetes.workloads.needs_document import DRA_DRIVERS, make_needs_document

    require_known(dra_driver, DRA_DRIVERS, "--dra-driver")
    needs = make_needs_document(
        load_narrowed_catalog(image, catalog, where, policy), allow_cpu=allow_cpu, dra_driver=dra_driver
    )
    if json:
        print_json(needs)
    else:
        print_document(dump_yaml(needs))
