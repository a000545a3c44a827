"""`imagematrix kubernetes render`: manifests with the image of each class."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.choosing import catalog_of
from imagematrix.cli.kubernetes.options import NodesFile, OnUnknown, cluster, denies, kinds
from imagematrix.cli.options import AllowCpu, CatalogName, Image, Where
from imagematrix.cli.output import print_text, warn
from imagematrix.errors import UsageError
from imagematrix.spelling import nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from imagematrix.catalog.catalog import Catalog
    from imagematrix.kubernetes.classes import Class, Classes
    from imagematrix.kubernetes.install import Installation

__all__ = ["command"]

KINDS = {
    "job": "a Job for each class",
    "deployment": "a Deployment for each class",
    "daemonset": "a DaemonSet for each class",
    "jobset": "a JobSet, with one image for all ranks",
    "leaderworkerset": "a LeaderWorkerSet, with one image for all ranks",
    "flavors": "a ResourceFlavor of Kueue for each class",
    "policy": "an admission policy that gives pods the image of their class",
    "compatibility": "an image-compatibility artifact of NFD for each variant",
    "install": "everything that runs the webhook in a cluster and labels its nodes",
}


def command(
    kind: Annotated[
        str,
        typer.Argument(
            metavar=f"{{{'|'.join(KINDS)}}}",
            help=f"{'; '.join(f'{name}: {what}' for name, what in KINDS.items())}.",
            autocompletion=lambda: list(KINDS),
        ),
    ],
    image: Image,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- ARGUMENT...]",
            help="Arguments for the image's program; for install, more versions.",
        ),
    ] = None,
    nodes: NodesFile = None,
    catalog: CatalogName = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--class", metavar="NAME", help="Only for this class; repeatable."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="The workload's name; default: the image's.")
    ] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, metavar="N", help="GPUs for each pod.")] = None,
    resource: Annotated[
        str,
        typer.Option("--resource", metavar="NAME", help="The cluster's resource name for GPUs."),
    ] = "nvidia.com/gpu",
    pods: Annotated[
        int, typer.Option("--pods", min=1, metavar="N", help="The number of pods, such as ranks or replicas.")
    ] = 1,
    on_unknown: OnUnknown = "default",
    used_as: Annotated[
        str | None,
        typer.Option(
            "--as", metavar="NAME", help="policy: the name to replace in pods; default: the image's."
        ),
    ] = None,
    program: Annotated[
        str | None,
        typer.Option("--program", metavar="IMAGE", help="install: an image with imagematrix and a shell."),
    ] = None,
    namespace: Annotated[
        str, typer.Option("--namespace", metavar="NAME", help="install: the namespace to install to.")
    ] = "imagematrix",
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude-namespace",
            metavar="NAME",
            help="install: a namespace whose pods the webhook ignores; repeatable.",
        ),
    ] = None,
    pull_secret: Annotated[
        str | None,
        typer.Option("--pull-secret", metavar="NAME", help="The Secret with the credentials for registries."),
    ] = None,
    timeout: Annotated[
        int,
        typer.Option("--timeout", min=1, max=30, metavar="S", help="install: the webhook's time limit."),
    ] = 5,
    tls: Annotated[
        tuple[Path, Path, Path] | None,
        typer.Option(
            "--tls", metavar="CERT KEY CA", help="install: the webhook's certificate; default: a new one."
        ),
    ] = None,
    conditions: Annotated[
        bool,
        typer.Option(
            "--match-conditions/--no-match-conditions",
            help="install: send only pods with the image to the webhook, from Kubernetes 1.28 on.",
        ),
    ] = True,
    device_plugin: Annotated[
        bool,
        typer.Option("--device-plugin", help="install: also a DaemonSet that offers the nodes' GPUs."),
    ] = False,
    by: Annotated[
        list[str] | None,
        typer.Option("--by", metavar="{product|class}", help="install: as for `device-plugin`; repeatable."),
    ] = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
) -> None:
    """Write manifests that run the image of each class, by digest, on the nodes of that class."""
    from imagematrix.kubernetes.yaml import dump

    if kind not in KINDS:
        remedy = nearest(kind, KINDS) or f"one of {', '.join(KINDS)}"
        raise UsageError(f"invalid kind: {kind!r}", remedy=remedy)
    if kind == "compatibility":
        print_text(dump(*_artifacts(catalog_of(image, catalog), where, allow_cpu=allow_cpu)).rstrip("\n"))
        return
    if kind == "install":
        if program is None:
            raise UsageError("no program given", remedy="give --program IMAGE, an image with imagematrix")
        if by and not device_plugin:
            raise UsageError("--by is for --device-plugin")
        from imagematrix.kubernetes.install import Installation
        from imagematrix.selection.question import parse

        parse(where or ())  # an invalid condition would end the webhook
        asked = [word for condition in where or () for word in ("--where", condition)]
        made = Installation(
            names=tuple(map(_registry_name, dict.fromkeys([image, *(arguments or ())]))),
            program=program,
            namespace=namespace,
            excluded=tuple(exclude or ()),
            deny=denies(on_unknown),
            timeout_s=timeout,
            pull_secret=pull_secret,
            options=(*asked, *(["--allow-cpu"] if allow_cpu else [])),
            conditions=conditions,
            plugin=kinds(by) if device_plugin else None,
        )
        print_text(dump(*_install(made, tls)).rstrip("\n"))
        return
    if nodes is None:
        raise UsageError("no nodes given", remedy="give --nodes NODES.json, from `kubectl get nodes -o json`")
    grouped = cluster(nodes, image, catalog, gpus=None, allow_cpu=allow_cpu, where=where)
    from imagematrix.kubernetes.manifests import Workload, flavors, manifests
    from imagematrix.kubernetes.placed import chosen

    classes = chosen(grouped.classes, only or ())
    if kind == "flavors":
        print_text(dump(*flavors(classes)).rstrip("\n"))
        return
    if kind == "policy":
        print_text(dump(*_policy(grouped, name, used_as, on_unknown)).rstrip("\n"))
        _warn(classes)
        return
    workload = Workload(
        name=name or _name(grouped),
        arguments=tuple(arguments or ()),
        gpus=gpus,
        resource=resource,
        pods=pods,
        pull_secret=pull_secret,
    )
    print_text(dump(*manifests(kind, workload, classes)).rstrip("\n"))
    _warn(classes)


def _artifacts(catalog: Catalog, where: Sequence[str] | None, *, allow_cpu: bool) -> list[dict[str, Any]]:
    from imagematrix.kubernetes.compatibility import compatibility
    from imagematrix.selection.question import narrowed, parse

    variants = narrowed(catalog, parse(where or ())).variants
    return [compatibility(variant, allow_cpu=allow_cpu) for variant in variants]


def _install(made: Installation, files: tuple[Path, Path, Path] | None) -> list[dict[str, Any]]:
    from imagematrix.kubernetes import authority
    from imagematrix.kubernetes.install import install, service_names

    names = service_names(made.namespace)
    tls = authority.load(*files, names[0]) if files else authority.make(names)
    return list(install(made, tls))


def _registry_name(name: str) -> str:
    """Return IMAGE:VERSION, which must be in a registry, where the webhook reads its catalog."""
    from imagematrix.reference import Reference, names_registry

    if not names_registry(name):
        raise UsageError(f"{name} is not in a registry", remedy="give the name of a published version")
    if "@" in name:
        raise UsageError(f"{name}: expected a version, not a digest")
    reference = Reference.parse(name)
    return f"{reference.name}:{reference.tag}"


def _policy(grouped: Classes, name: str | None, used_as: str | None, on_unknown: str) -> list[dict[str, Any]]:
    from imagematrix.kubernetes.admission import policy
    from imagematrix.kubernetes.policy import objects

    version = f"{grouped.catalog.image}:{grouped.catalog.version}"
    made = policy(used_as or version, grouped, deny=denies(on_unknown))
    named = f"{_name(grouped)}-{grouped.catalog.version}".lower().replace("_", "-").replace(".", "-")
    return list(objects(made, name or named))


def _name(grouped: Classes) -> str:
    """Return the last part of the image's name as the name of a workload."""
    return grouped.catalog.image.rpartition("/")[2].replace("_", "-").replace(".", "-")[:63].strip("-")


def _warn(classes: Sequence[Class]) -> None:
    for each in classes:
        if each.miss:
            warn(f"nothing fits the class {each.name}: {each.miss.why}", each.miss.fix)
        elif each.variant and each.variant.digest is None:
            warn(
                f"{each.variant.reference}: the catalog has no digest",
                "use the catalog of a published version",
            )
