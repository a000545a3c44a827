"""The OCI runtime of Swarm's tasks as one file: a script that becomes runc, followed by an archive.

The engine calls it for every step in the life of every container. So only the creation of a container that
may be a Swarm task starts Python; all other calls cost no more than a shell. Python imports this package from
the archive, so the node needs no installed copy of it.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
import zipfile
from pathlib import Path

from imagematrix.common import zipapp_writer
from imagematrix.common.programs import find_program
from imagematrix.errors import ProbeError
from imagematrix.integrations.swarm.node_config import RUNTIME
from imagematrix.integrations.swarm.resources import PREFIX
from imagematrix.integrations.swarm.runtime import SETTINGS
from imagematrix.launcher.gpu_claims.locks import SHARED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from imagematrix.integrations.swarm.runtime import RuntimeSettings

# Of Python's options, -I keeps out the caller's variables and folders, and -S spares the start the search for
# installed packages.
SCRIPT = """\
#!/bin/sh
# The OCI runtime of this node's engine, written by `imagematrix swarm node-config`. It adds the GPUs that
# Swarm assigned to a task, and becomes runc. Do not edit it: an archive follows.
runc={runc}
python={python}
create= bundle=. log= last=
for word; do
    case $word in
        create) create=1 ;;
        --bundle=* | -bundle=*) bundle=${{word#*=}} ;;
        --log=* | -log=*) log=${{word#*=}} ;;
    esac
    case $last in
        --bundle | -bundle | -b) bundle=$word ;;
        --log | -log) log=$word ;;
    esac
    last=$word
done
if [ "$create" ] && grep -q {prefix} "$bundle/config.json" 2>/dev/null; then
    [ -x "$python" ] && exec "$python" -I -S -c {start} "$0" "$runc" "$@"
    message="imagematrix: $python not found; write this file anew: imagematrix swarm node-config"
    [ "$log" ] && printf '{{"level":"error","msg":"%s"}}\\n' "$message" >> "$log"
    echo "$message" >&2
    exit 1
fi
exec "$runc" "$@"
"""
ROOTS = (
    "imagematrix.integrations.swarm.runtime",
    "imagematrix.hardware.host.nvml_query",
)  # the second runs in a separate process
NVML = "pynvml"  # a single module, which queries the driver


def make_program(settings: RuntimeSettings) -> bytes:
    """Return the file for this node; raise ProbeError if the node has no runc."""
    runc = find_program("runc")
    if runc is None:
        raise ProbeError("runc not found on PATH", remedy="install runc, which Docker needs too")
    # The interpreter of the node, not of a virtual environment that may be removed.
    python = Path(sys.base_prefix, "bin", "python3")
    if not python.exists():
        python = Path(sys.executable).resolve()
    script = SCRIPT.format(
        runc=shlex.quote(runc),
        python=shlex.quote(str(python)),
        prefix=PREFIX,
        start=shlex.quote(zipapp_writer.make_start_code(ROOTS[0])),
    )
    modules = zipapp_writer.collect_sources(ROOTS)
    # Files that every start of a task reads are not compressed.
    stored = {
        SETTINGS: json.dumps(settings.to_json()).encode(),
        zipapp_writer.COMPILED: zipapp_writer.compile_modules(modules),
    }
    contents = {**modules, **stored}
    if spec := importlib.util.find_spec(NVML):
        loader: Any = spec.loader
        contents[f"{NVML}.py"] = loader.get_data(str(spec.origin))
    return zipapp_writer.write_archive(contents, script.encode(), stored=stored)


def get_installed_locks(info: Mapping[str, Any]) -> str | None:
    """Return the lock folder of the runtime in the engine's information; None without this runtime.

    A runtime that cannot be read is taken to use the usual folder.
    """
    runtime = (info.get("Runtimes") or {}).get(RUNTIME)
    if not isinstance(runtime, dict):
        return None
    try:
        with zipfile.ZipFile(str(runtime.get("path"))) as archive:
            return str(json.loads(archive.read(SETTINGS))["locks"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, zipfile.BadZipFile):
        return SHARED
