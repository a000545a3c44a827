"""The files that enroot reads in an image: its environment, and the script that starts its program.

enroot takes nothing else from a squashfs: see doc/image-format.md of enroot, and docker::configure in its
src/docker.sh. `enroot import` writes the same files.
"""

from __future__ import annotations

import io
import tarfile
from shlex import join, quote

from imagematrix.common.json_documents import Fields
from imagematrix.images.oci.process import ImageProcess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

ENVIRONMENT, SCRIPT, LOCAL, MOUNTS = "etc/environment", "etc/rc", "etc/rc.local", "etc/fstab"
# Pyxis writes to rc.local what a job runs instead of the image's entrypoint.
START = """\
{exports}mkdir -p {folder} 2> /dev/null
cd {folder} && unset OLDPWD || exit 1
if [ -s /etc/rc.local ]; then
    . /etc/rc.local
fi
if [ $# -gt 0 ]; then
    exec {entrypoint} "$@"
else
    exec {command}
fi
"""


def make_layer(config: Mapping[str, Any]) -> bytes:
    """Return a layer, a tar, with enroot's files for an image with the configuration `config`.

    Raises UsageError if the configuration is damaged.
    """
    process = ImageProcess.from_config(
        Fields(config, "the image's configuration").get_object_or_empty("config")
    )
    command = [*process.entrypoint, *process.command] or ["/bin/sh"]
    # A line of the environment's file is a variable, so a variable of several lines is set by the script.
    lines = [line for line in process.variables if "\n" not in line]
    exports = [
        f"export {name}={quote(value)}\n"
        for name, _, value in (line.partition("=") for line in process.variables if line not in lines)
        if name.isidentifier()
    ]
    script = START.format(
        exports="".join(exports),
        folder=quote(process.folder),
        entrypoint=join(process.entrypoint),
        command=join(command),
    )
    files = {ENVIRONMENT: "".join(f"{line}\n" for line in lines), SCRIPT: script, LOCAL: "", MOUNTS: ""}
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, text in files.items():
            content = text.encode(errors="surrogateescape")
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    return raw.getvalue()
