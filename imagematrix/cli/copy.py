"""`imagematrix copy`: a published version in another registry."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.publish import load_signing_key, make_published_document, make_signer, print_published
from imagematrix.cli.shared.options import Json, Policy
from imagematrix.cli.shared.output import print_info, print_json, print_text
from imagematrix.errors import UsageError

EXAMPLE = "imagematrix copy registry.example.com/ml/training:v1 mirror.example.com/ml/training"


def command(
    name: Annotated[str, typer.Argument(metavar="IMAGE:VERSION", help="The version, with its registry.")],
    target: Annotated[
        str, typer.Argument(metavar="REGISTRY/NAME[:VERSION]", help="Where to, under the same version.")
    ],
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="TAG", help="Move this tag, such as latest, to the copy."),
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option(
            metavar="KEY", help="Sign the copy, too, with the private key in KEY: cosign's, or ECDSA in PEM."
        ),
    ] = None,
    policy: Policy = None,
    json: Json = False,
) -> None:
    """Copy a version to another registry: its images by digest, their signatures, and its index.

    Prints the index with its digest. Nothing is built, and nothing needs an engine. What policies require
    has to hold in both places. COSIGN_PASSWORD is the password of KEY.
    """
    from imagematrix.build.publish.version_copy import copy_version
    from imagematrix.common.image_reference import names_registry, split_published_version, split_version
    from imagematrix.images.catalog.sources import load_image_policies
    from imagematrix.images.oci.registry import Registry

    image, version = split_published_version(name)
    copy, new_version = split_version(target)
    if "@" in target or not names_registry(copy):
        remedy = "such as mirror.example.com/ml/training"
        raise UsageError(f"{target} is not the name of an image in a registry", remedy=remedy)
    if new_version not in (None, version):
        raise UsageError(
            f"a copy of {version} cannot be called {new_version}: its images have their version in them",
            remedy=f"leave out :{new_version}, or pass --alias {new_version}",
        )
    if (image, version) == (copy, version):
        raise UsageError(f"{name} would be copied to itself", remedy="name another registry or repository")
    key = load_signing_key(sign) if sign else None
    with Registry(image) as source, Registry(copy) as mirror:
        published = copy_version(
            source,
            mirror,
            version,
            alias or (),
            policies=load_image_policies(policy),
            sign=make_signer(mirror, key) if key else None,
            on_step=print_info,
        )
    print_published(f"{copy}:{version}", published)
    if json:
        print_json(make_published_document(copy, version, alias or [], published) | {"unneeded": []})
    else:
        print_text(f"{copy}:{version}@{published.digest}")
