"""`imagematrix slurm node-config`: what a node says in Slurm's configuration, and what is wrong there."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.shared.options import HostFile, Json
from imagematrix.cli.shared.output import print_document, print_info, print_json, warn
from imagematrix.common.text import format_count, quote_word
from imagematrix.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.hardware.host.host import Host as HostRecord


def command(
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", metavar="DIR", help="Write oci.conf and gres.NODE.conf into DIR; print the rest."
        ),
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Save this node's Host in the folder `hosts` of the site's file.")
    ] = False,
    node: Annotated[
        str | None, typer.Option("--node", metavar="NAME", help="The name of the node in Slurm.")
    ] = None,
    shards: Annotated[
        int, typer.Option("--shards", metavar="N", min=0, help="Let N jobs share each GPU, as shards.")
    ] = 0,
    program: Annotated[
        str | None,
        typer.Option("--program", metavar="PATH", help="Where this program is on the nodes."),
    ] = None,
    host: HostFile = None,
    json: Json = False,
) -> None:
    """Print oci.conf for jobs in containers, and what gres.conf and slurm.conf say of this node.

    Says what differs in the files that Slurm has, and what there would keep jobs from working.
    """
    from imagematrix.hardware.host.host import Host
    from imagematrix.hardware.host.probe import probe
    from imagematrix.integrations.slurm import checks, node_config
    from imagematrix.integrations.slurm.configuration import find_slurm_conf

    name = node or os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    described = Host.load(host) if host else probe()
    oci = node_config.render_oci_conf(program or _locate_program())
    lines = node_config.make_node_lines(described, name, shards)
    texts = {"oci": oci, "gres": lines.gres, "slurm": lines.slurm}
    if save:  # before files are compared, which may not be possible: tasks wait for the Host
        _save_host(described, name)
    path = find_slurm_conf(os.environ)
    findings = (
        checks.find_differences(
            Path(path).parent,
            name,
            oci,
            lines,
            shards=shards > 0,
            version=checks.get_release() if not host else None,
        )
        if path
        else []
    )
    if to is not None:
        _write_file(to / "oci.conf", oci)
        _write_file(to / f"gres.{name}.conf", lines.gres)
    if json:
        problems = [{"what": finding.what, "remedy": finding.remedy} for finding in findings]
        print_json({"schema": node_config.SCHEMA, "node": name, "files": texts, "findings": problems})
    elif to is not None:
        print_document(lines.slurm)
    else:
        print_document("\n".join(f"# {kind}.conf\n{text}" for kind, text in texts.items()))
    if path is None:
        print_info("imagematrix: no slurm.conf on this node, so nothing was compared")
    for finding in findings if not json else ():
        warn(finding.what, finding.remedy)
    mig = sum(gpu.mig is not None for gpu in described.gpus)
    if mig:
        warn(
            f"left out: {format_count(mig, 'GPU')} in MIG mode",
            "let slurmd find their devices: AutoDetect=nvml in gres.conf",
        )


def _locate_program() -> str:
    """Return the path of this program, which oci.conf names; raise UsageError if it cannot be started."""
    # Not resolved: a link in /usr/local/bin stays one.
    path = os.path.abspath(sys.argv[0])  # noqa: PTH100
    if not os.access(path, os.X_OK):  # `python -m imagematrix`
        raise UsageError(f"{path} is not a program", remedy="name that of the nodes with --program PATH")
    return path


def _save_host(host: HostRecord, name: str) -> None:
    """Save the Host as NAME.json where all nodes find it."""
    from imagematrix.common import json_documents
    from imagematrix.common.settings import read_site
    from imagematrix.integrations.slurm.step_catalog import prepare_folder

    folder = read_site().hosts
    if folder is None:
        raise UsageError(
            "--save: the site's file names no folder", remedy="set hosts in /etc/imagematrix/site.toml"
        )
    # Made here, it would be hidden by what is mounted there later. pathlib raises for a broken mount.
    if not os.path.isdir(folder):  # noqa: PTH112
        raise UsageError(f"{folder} is not there", remedy="mount it, or create it where all nodes find it")
    _write_file(Path(folder) / f"{name}.json", json_documents.dump_json(host.to_json()))
    try:
        prepare_folder(folder)
    except OSError as error:
        remedy = f"let its owner run `chmod 1777 {quote_word(error.filename)}`"
        raise UsageError(f"{error.filename}: {error.strerror}", remedy=remedy) from error


def _write_file(path: Path, text: str) -> None:
    from imagematrix.common import files

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace_file(path, text.encode(), 0o644)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    print_info(f"wrote {path}")
