"""`imagematrix kubernetes render`: manifests with the image of each class."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.kubernetes.options import NodesFile, OnUnknown, cluster, denies, kinds, narrowed_catalog
from imagematrix.cli.options import AllowCpu, CatalogName, Image, Where
from imagematrix.cli.output import print_text, warn
from imagematrix.errors import UsageError
from imagematrix.spelling import require_known

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from imagematrix.kubernetes.classes import Class, Classes
    from imagematrix.kubernetes.install import Installation
    from imagematrix.kubernetes.manifests import Manifest

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
    dra_driver: Annotated[
        bool,
        typer.Option(
            "--dra-driver", help="install: in its place a DaemonSet that publishes the nodes' GPUs for DRA."
        ),
    ] = False,
    by: Annotated[
        list[str] | None,
        typer.Option("--by", metavar="{product|class}", help="install: as for `device-plugin`; repeatable."),
    ] = None,
    kubelet: Annotated[
        str | None,
        typer.Option(
            "--kubelet",
            metavar="FOLDER",
            help="install: the --root-dir of the nodes' kubelets; default: /var/lib/kubelet.",
        ),
    ] = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
) -> None:
    """Write manifests that run the image of each class, by digest, on the nodes of that class."""
    require_known(kind, KINDS, "kind")
    if kind == "compatibility":
        from imagematrix.kubernetes.compatibility import compatibility

        variants = narrowed_catalog(image, catalog, where).variants
        _print(compatibility(variant, allow_cpu=allow_cpu) for variant in variants)
        return
    if kind == "install":
        if program is None:
            raise UsageError("no program given", remedy="give --program IMAGE, an image with imagematrix")
        if by and not device_plugin:
            raise UsageError("--by is for --device-plugin")
        if kubelet and not (device_plugin or dra_driver):
            raise UsageError("--kubelet is for --device-plugin and --dra-driver")
        from imagematrix.kubelet.sockets import ROOT_DIR
        from imagematrix.kubernetes.install import Installation
        from imagematrix.selection.question import parse

        parse(where or ())  # an invalid condition would end the webhook
        asked = [word for condition in where or () for word in ("--where", condition)]
        installation = Installation(
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
            dra=dra_driver,
            kubelet=kubelet or ROOT_DIR,
        )
        _print(_install(installation, tls))
        return
    if nodes is None:
        raise UsageError("no nodes given", remedy="give --nodes NODES.json, from `kubectl get nodes -o json`")
    grouped = cluster(nodes, image, catalog, gpus=None, allow_cpu=allow_cpu, where=where)
    from imagematrix.kubernetes.manifests import Workload, flavors, manifests
    from imagematrix.kubernetes.placed import chosen

    classes = chosen(grouped.classes, only or ())
    if kind == "flavors":
        _print(flavors(classes))
        return
    if kind == "policy":
        _print(_policy(grouped, name, used_as, on_unknown))
    else:
        workload = Workload(
            name=name or _name(grouped),
            arguments=tuple(arguments or ()),
            gpus=gpus,
            resource=resource,
            pods=pods,
            pull_secret=pull_secret,
        )
        _print(manifests(kind, workload, classes))
    _warn(classes)


def _print(documents: Iterable[Manifest]) -> None:
    from imagematrix.kubernetes.yaml import dump

    print_text(dump(*documents))


def _install(installation: Installation, files: tuple[Path, Path, Path] | None) -> Iterator[Manifest]:
    from imagematrix.kubernetes import authority
    from imagematrix.kubernetes.install import install, service_names

    names = service_names(installation.namespace)
    tls = authority.load(*files, names[0]) if files else authority.make(names)
    return install(installation, tls)


def _registry_name(name: str) -> str:
    """Return IMAGE:VERSION, which must be in a registry, where the webhook reads its catalog."""
    from imagematrix.reference import Reference, names_registry

    if not names_registry(name):
        raise UsageError(f"{name} is not in a registry", remedy="give the name of a published version")
    if "@" in name:
        raise UsageError(f"{name}: expected a version, not a digest")
    reference = Reference.parse(name)
    return f"{reference.name}:{reference.tag}"


def _policy(grouped: Classes, name: str | None, used_as: str | None, on_unknown: str) -> Iterator[Manifest]:
    from imagematrix.kubernetes.admission import policy
    from imagematrix.kubernetes.placed import require_labels
    from imagematrix.kubernetes.policy import objects

    require_labels(grouped.classes)
    version = f"{grouped.catalog.image}:{grouped.catalog.version}"
    made = policy(used_as or version, grouped, deny=denies(on_unknown))
    named = f"{_name(grouped)}-{grouped.catalog.version}".lower().replace("_", "-").replace(".", "-")
    return objects(made, name or named)


def _name(grouped: Classes) -> str:
    """Return the last part of the image's name as the name of a workload."""
    return grouped.catalog.image.rpartition("/")[2].replace("_", "-").replace(".", "-")[:63].strip("-")


def _warn(classes: Sequence[Class]) -> None:
    from imagematrix.kubernetes.placed import RELABEL

    for each in classes:
        if each.miss:
            warn(f"nothing fits the class {each.name}: {each.miss.why}", each.miss.fix)
        elif len(each.placeable) < len(each.nodes):
            names = ", ".join(node.name for node in each.nodes if node not in each.placeable)
            warn(f"no pods of the class {each.name} for nodes with another class label: {names}", RELABEL)
        elif each.variant and each.variant.digest is None:
            warn(
                f"{each.variant.reference}: the catalog has no digest",
                "use the catalog of a published version",
            )
