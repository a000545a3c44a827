"""`imagematrix swarm node-config`: makes this node offer its GPUs to Docker Swarm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from imagematrix.cli.shared.options import HostFile
from imagematrix.cli.shared.output import print_block, print_info, warn


def command(
    file: Annotated[Path, typer.Option("--file", metavar="FILE", help="The engine's configuration.")] = Path(
        "/etc/docker/daemon.json"
    ),
    vram: Annotated[
        str | None,
        typer.Option(
            "--vram",
            metavar="SIZE|all",
            help="Also offer memory: shares of SIZE on any GPU, or the MiB of the node's only GPU.",
        ),
    ] = None,
    runtime: Annotated[
        Path, typer.Option("--runtime", metavar="FILE", help="Where to install the OCI runtime.")
    ] = Path("/usr/local/bin/imagematrix-runtime"),
    host: HostFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the change.")] = False,
) -> None:
    """Make this node offer its GPUs to Docker Swarm, and pass assigned GPUs to tasks.

    Merges the GPUs, labels about the hardware, and the OCI runtime of Swarm tasks into daemon.json, and
    prints the change. Restart the engine afterwards.
    """
    import json

    from imagematrix.hardware.host.host import Host
    from imagematrix.hardware.host.probe import probe
    from imagematrix.images.engine import engine_process
    from imagematrix.images.engine.engine_process import DOCKERD
    from imagematrix.integrations.swarm import engine_file
    from imagematrix.integrations.swarm.node_config import (
        FLAGS,
        make_offer,
        merge_config,
        parse_engine_config,
    )
    from imagematrix.integrations.swarm.program import make_program
    from imagematrix.integrations.swarm.runtime import RuntimeSettings
    from imagematrix.launcher.gpu_claims.locks import SHARED, locate_locks

    text = engine_file.read_engine_file(file)
    config = parse_engine_config(text, str(file))
    node = Host.load(host) if host else probe()
    engine = engine_file.find_daemon(file.absolute(), engine_process.read_command_lines(DOCKERD))
    engine.refuse_flags(FLAGS)
    changed = merge_config(config, make_offer(node, vram), str(runtime.absolute()))
    locks = locate_locks()
    settings = RuntimeSettings(
        data_root=engine.get_data_root(config), address=engine.get_address(config), host=node, locks=locks
    )
    if locks != SHARED:
        print_info(f"tasks will use the GPU locks in {locks}, as launches must")
    content = make_program(settings)
    installed = engine_file.read_bytes(runtime) == content
    if not installed:
        print_info(f"{runtime} {'would be' if dry_run else 'is'} written")
    if not (dry_run or installed):
        engine_file.replace_file(runtime, content, 0o755)
    if changed == config:
        print_info(f"{file} is up to date")
        return
    after = json.dumps(changed, indent=engine_file.get_indent(text), ensure_ascii=False) + "\n"
    print_block(engine_file.make_diff(file, text, after))
    if dry_run:
        return
    engine_file.write_engine_file(file, after, lambda why: warn(f"{file} was not validated: {why}"))
    print_info("restart the engine for the change to take effect: systemctl restart docker")
