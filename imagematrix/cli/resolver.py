"""`imagematrix resolver`: a registry on a node that answers a version with the variant that fits the node."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.shared.options import Health, HostFile, list_typed_options
from imagematrix.cli.shared.output import print_info, print_text
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

REMEDY = "pass a file that has the password for clients in it"
# The options that are allowed with those that make the command do something else than serve.
ALLOWED_WITH = {
    "sweep": {"upstream", "listen", "token_file", "namespace"},
    "containerd": {"upstream", "listen"},
}


def command(
    context: typer.Context,
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="REGISTRY", help="The registry that has the images, or an OCI layout as oci:FOLDER."
        ),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS:PORT", help="Listen on this address.")
    ] = "127.0.0.1:5050",
    health: Health = None,
    host: HostFile = None,
    node_class: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            metavar="NAME=FILE",
            help="Use the host saved in FILE for tags that end in -class.NAME; repeatable.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Read the password for clients from FILE; needed beyond loopback."),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Serve only images with the signatures that FILE requires."),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Keep the last answers, for a restart while the registry is unreachable."
        ),
    ] = None,
    changed: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Touch FILE at the start and whenever the node has changed."),
    ] = None,
    containerd: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write hosts.toml for the upstream below FOLDER, such as /etc/containerd/certs.d, and exit.",
        ),
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="Remove names from the engine that now refer to another image; requires a running resolver.",
        ),
    ] = False,
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="NAMESPACE",
            help="With --sweep: remove the upstream's names from containerd's NAMESPACE, such as k8s.io.",
        ),
    ] = None,
) -> None:
    """Serve a read-only registry on this node, with the fitting variant under each tag.

    `docker pull 127.0.0.1:5050/training:v1` then gets the image for this node, and so does any scheduler that
    has one image name for all nodes. Everything else passes through.
    """
    from imagematrix.integrations.http_service.http_server import Address

    _require_one_task(list_typed_options(context))
    if sweep:
        from imagematrix.integrations.resolver.containerd_hosts import require_mirrorable
        from imagematrix.integrations.resolver.untag import ContainerdNames, DockerNames, untag

        Address.parse(listen)  # raises an error; names begin with the address as it is written
        names = (
            ContainerdNames(require_mirrorable(_parse_upstream(upstream)), namespace)
            if namespace
            else DockerNames(listen)
        )
        for name in untag(names, listen, print_info, token=_read_token(token_file)):
            print_text(name)
        return
    upstream = _parse_upstream(upstream)
    if containerd:
        from imagematrix.integrations.resolver.containerd_hosts import write_hosts_file

        print_text(str(write_hosts_file(containerd, upstream, str(Address.parse(listen)))))
        return
    from imagematrix.integrations.resolver.node import ReloadedHost
    from imagematrix.integrations.resolver.server import ResolverSettings, serve

    token = _read_token(token_file)
    classes = {}
    for text in node_class or ():
        name, equals, file = text.partition("=")
        if not equals or not file:
            raise UsageError(f"invalid class {text!r}: expected NAME=FILE")
        if name in classes:
            raise UsageError(f"two files for the class {name}")
        classes[name] = ReloadedHost.from_file(Path(file))
    serve(
        ResolverSettings(
            upstream=upstream,
            listen=listen,
            health=health,
            node=ReloadedHost.from_file(host) if host else ReloadedHost.from_probe(),
            classes=classes,
            token=token,
            changed=changed,
            policy=policy,
            state=state,
        ),
        on_message=print_info,
    )


def _require_one_task(typed: Mapping[str, str]) -> None:
    """Raise UsageError if one of the options that were typed would have no effect."""
    for task, others in ALLOWED_WITH.items():
        for name, option in typed.items() if task in typed else ():
            if name != task and name not in others:
                raise UsageError(f"{option} has no effect with --{task}", remedy="leave out one of them")
    if "namespace" in typed and "sweep" not in typed:
        raise UsageError("--namespace is for --sweep")


def _parse_upstream(upstream: str | None) -> str:
    if upstream is None:
        raise UsageError("--upstream is required", remedy="name the registry that has the images")
    return upstream


def _read_token(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        token = file.read_text("utf-8").strip()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}", remedy=REMEDY) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not text in UTF-8", remedy=REMEDY) from error
    if not token:
        raise UsageError(f"{file} is empty", remedy=REMEDY)
    return token
