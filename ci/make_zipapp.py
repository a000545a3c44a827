#!/usr/bin/env python3
"""Writes one file with the parts of imagematrix that a node needs. A bare Python 3.11 or newer runs it.

    .venv/bin/python ci/make_zipapp.py FILE.pyz

The file has this checkout's package and the libraries that selecting and starting an image need, which pip
installs in their newest pure-Python release. Libraries that only building needs are left out.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from imagematrix.common import zipapp_writer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
# Only building and signatures need these.
OTHERS = ("cryptography", "iced-x86", "isal", "jinja2", "pynacl", "pyyaml", "zstandard")
PURE = ("--only-binary=:all:", "--platform=any", "--implementation=py", "--abi=none", "--python-version=3.11")
# rich highlights source code with pygments, which imagematrix does not use.
UNUSED = re.compile(
    r"bin/|[^/]*\.dist-info/|pygments/(?:formatters|lexers|styles)/(?!__init__|_mapping)|example\.py"
)
CARRIED = frozenset({".py", ".json", ".pem"})
CHART = "integrations/kubernetes/install/chart/"  # of the package, whose files have other names
MAIN = """\
import sys

from imagematrix.cli import main

try:
    main()
except ModuleNotFoundError as error:
    if (error.name or "imagematrix").startswith("imagematrix"):
        raise
    from imagematrix.common.zipapp_writer import WHOLE_PACKAGE

    print(f"imagematrix: this is the file for nodes, which has no {error.name}", file=sys.stderr)
    print(f"  {WHOLE_PACKAGE}", file=sys.stderr)
    raise SystemExit(2) from None
"""
INTERPRETER = b"#!/usr/bin/env python3\n"


def main() -> None:
    """Write the archive that the argument names."""
    target = Path(sys.argv[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [one for one in project["dependencies"] if not one.lower().startswith(OTHERS)]
    version = project["version"]
    metadata = (
        f"Metadata-Version: 2.1\nName: imagematrix\nVersion: {version}\n"
        f"Requires-Python: {project['requires-python']}\n"
    )
    contents = {
        "__main__.py": MAIN.encode(),
        f"imagematrix-{version}.dist-info/METADATA": metadata.encode(),
    }
    with tempfile.TemporaryDirectory() as libraries:
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-compile"]
        words = [*pip, *PURE, f"--target={libraries}", *needs]
        if subprocess.run(words, check=False).returncode:
            sys.exit("ci/make_zipapp.py: pip could not install the libraries")
        contents |= _carried(Path(libraries), "")
    contents |= _carried(ROOT / "imagematrix", "imagematrix/")
    target.write_bytes(zipapp_writer.write_archive(contents, INTERPRETER))
    target.chmod(0o755)
    print(f"{target}: {target.stat().st_size / 1e6:.2f} MB", file=sys.stderr)


def _carried(folder: Path, prefix: str) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a folder that the archive has: name and content."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        is_carried = path.suffix in CARRIED or name.startswith(CHART)
        if is_carried and path.is_file() and not UNUSED.match(name):
            yield prefix + name, path.read_bytes()


if __name__ == "__main__":
    main()
