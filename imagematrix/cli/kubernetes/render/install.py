"""`imagematrix kubernetes render install`: everything that runs the webhook in a cluster."""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
import shlex
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.kubernetes.options import OnUnknown, is_denied, parse_resource_kinds
from imagematrix.cli.kubernetes.render.options import PullSecret, print_manifests, require_registry
from imagematrix.cli.shared.options import AllowCpu, Image, Where
from imagematrix.cli.shared.output import print_info, warn
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.integrations.kubernetes.install.upgrade import Resource

WORD = re.compile("[A-Za-z0-9][-.A-Za-z0-9]*", re.ASCII)


def command(
    image: Image,
    program: Annotated[
        str, typer.Option("--program", metavar="IMAGE", help="An image with imagematrix and a shell.")
    ],
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="IMAGE:VERSION...", help="More versions that the webhook serves."),
    ] = None,
    namespace: Annotated[
        str, typer.Option("--namespace", metavar="NAME", help="The namespace to install to.")
    ] = "imagematrix",
    on_unknown: OnUnknown = "default",
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude-namespace",
            metavar="NAME",
            help="A namespace whose pods the webhook ignores; repeatable.",
        ),
    ] = None,
    pull_secret: PullSecret = None,
    timeout: Annotated[
        int, typer.Option("--timeout", min=1, max=30, metavar="S", help="The webhook's time limit.")
    ] = 5,
    tls: Annotated[
        tuple[Path, Path, Path] | None,
        typer.Option("--tls", metavar="CERT KEY CA", help="The webhook's certificate; default: a new one."),
    ] = None,
    previous: Annotated[
        Path | None,
        typer.Option(
            "--previous",
            metavar="FILE",
            help="Upgrade the installation in FILE: keep its certificate, until 60 days before its end.",
        ),
    ] = None,
    conditions: Annotated[
        bool,
        typer.Option(
            "--match-conditions/--no-match-conditions",
            help="Send only pods with the image to the webhook, from Kubernetes 1.28 on.",
        ),
    ] = True,
    events: Annotated[
        bool,
        typer.Option(
            "--events/--no-events",
            help="Let the webhook write Events about pods that cannot start, for which it lists pods.",
        ),
    ] = True,
    device_plugin: Annotated[
        bool, typer.Option("--device-plugin", help="Also a DaemonSet that offers the nodes' GPUs.")
    ] = False,
    dra_driver: Annotated[
        bool,
        typer.Option(
            "--dra-driver", help="In its place, a DaemonSet that publishes the nodes' GPUs for DRA."
        ),
    ] = False,
    by: Annotated[
        list[str] | None,
        typer.Option("--by", metavar="{product|class}", help="As for `device-plugin`; repeatable."),
    ] = None,
    kubelet: Annotated[
        str | None,
        typer.Option(
            "--kubelet",
            metavar="FOLDER",
            help="The --root-dir of the nodes' kubelets; default: /var/lib/kubelet.",
        ),
    ] = None,
    where: Where = None,
    allow_cpu: AllowCpu = False,
) -> None:
    """Write everything that runs the webhook in a cluster and labels its nodes.

    IMAGE:VERSION is in a registry. With --device-plugin or --dra-driver, the nodes' GPUs are offered, too.
    """
    if by and not device_plugin:
        raise UsageError("--by is for --device-plugin")
    if kubelet and not (device_plugin or dra_driver):
        raise UsageError("--kubelet is for --device-plugin and --dra-driver")
    from imagematrix.integrations.kubernetes.install import certificates
    from imagematrix.integrations.kubernetes.install.install import (
        Installation,
        make_manifests,
        make_service_names,
    )
    from imagematrix.integrations.kubernetes.install.upgrade import read_installation, renew_certificate
    from imagematrix.launcher.kubelet.sockets import ROOT_DIR
    from imagematrix.selection.query import parse_where

    parse_where(where or ())  # an invalid condition would end the webhook
    where_options = [word for condition in where or () for word in ("--where", condition)]
    installation = Installation(
        names=tuple(map(_parse_version, dict.fromkeys([image, *(more or ())]))),
        program=program,
        namespace=namespace,
        excluded=tuple(dict.fromkeys(exclude or ())),
        deny=is_denied(on_unknown),
        timeout_s=timeout,
        pull_secret=pull_secret,
        options=(*where_options, *(["--allow-cpu"] if allow_cpu else [])),
        conditions=conditions,
        plugin=parse_resource_kinds(by) if device_plugin else None,
        dra=dra_driver,
        kubelet=kubelet or ROOT_DIR,
        events=events,
    )
    names = make_service_names(installation.namespace)
    loaded = certificates.load_certificate(*tls, names[0]) if tls else None
    if previous is None:
        print_manifests(make_manifests(installation, loaded or certificates.make_certificate(names)))
        return
    before = read_installation(previous, installation.namespace)
    certificate = renew_certificate(before.tls, loaded, names, dt.datetime.now(dt.UTC))
    manifests = list(make_manifests(installation, certificate, upgrade=True))
    print_manifests(manifests)
    is_kept = certificate.chain == before.tls.chain
    print_info(
        "the certificate is kept" if is_kept else "the certificate is new; both authorities are trusted"
    )
    for resource in before.list_obsolete(manifests):
        warn(f"no longer part of the installation: {resource}", _format_removal(resource))


def _format_removal(resource: Resource) -> str | None:
    """Return how to remove a resource; None if its names are not those of a cluster's object."""
    if not all(map(WORD.fullmatch, filter(None, dataclasses.astuple(resource)))):
        return None
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    namespace = ["-n", resource.namespace] if resource.namespace else []
    words = ["delete", *namespace, kind.lower(), resource.name]
    return f"once the upgrade is complete, remove it with `kubectl {shlex.join(words)}`"


def _parse_version(name: str) -> str:
    """Return IMAGE:VERSION, which must be in a registry, where the webhook reads its catalog."""
    from imagematrix.common.image_reference import Reference

    require_registry(name)
    if "@" in name:
        raise UsageError(f"{name}: expected a version, not a digest")
    reference = Reference.parse(name)
    return f"{reference.name}:{reference.tag}"
