"""Ask pip for NVIDIA's wheels of each CUDA release, and write them with their hashes for the templates.

The Python Package Index has a package cuda-toolkit for each release, which requires the other packages in
exact versions. Only the packages' metadata is downloaded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "templates" / "cuda_wheels.j2"
RELEASES = ("12.9", "13.0", "13.1", "13.2", "13.3", "13.4", "13.5")
ARCHES = ("x86_64", "aarch64")
GLIBCS = (17, 24, 27, 28)  # minor versions of glibc in the wheels' tags
# The extras of cuda-toolkit for each part. The wheels of 12.9 have no nvcc.
PARTS = {
    "nvcc": ("nvcc", "cudart", "cccl", "crt", "nvvm"),
    "nvrtc": ("nvrtc",),
    "cublas": ("cublas",),
}
NO_NVCC = ("12.9",)
HEADER = """\
{# NVIDIA's wheels with the toolkits of CUDA releases, by release and part, in exact versions with the hashes
   of those for x86-64 and arm64. Written by ci/facts/wheels.py. #}
"""


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path, default=FILE, help="the file to write")
    file = parser.parse_args().file
    table = {
        release: {
            part: wheels(release, extras)
            for part, extras in PARTS.items()
            if (part, release) not in {("nvcc", name) for name in NO_NVCC}
        }
        for release in RELEASES
    }
    file.write_text(f"{HEADER}{{% set WHEELS = {json.dumps(table, indent=2)} %}}\n")


def wheels(release: str, extras: tuple[str, ...]) -> list[str]:
    """Return the wheels of a part, as lines of a requirements file."""
    versions: dict[str, list[str]] = {}
    for arch in ARCHES:
        for item in resolved(f"cuda-toolkit[{','.join(extras)}]=={release}.*", arch):
            name, version = item["metadata"]["name"], item["metadata"]["version"]
            if name != "cuda-toolkit":
                hashes = item["download_info"]["archive_info"]["hashes"]
                versions.setdefault(f"{name}=={version}", []).append(f"--hash=sha256:{hashes['sha256']}")
    short = [name for name, hashes in versions.items() if len(hashes) < len(ARCHES)]
    if short:
        raise SystemExit(f"CUDA {release}: different wheels for {' and '.join(ARCHES)}: {short}")
    return [" ".join((name, *sorted(set(hashes)))) for name, hashes in sorted(versions.items())]


def resolved(requirement: str, arch: str) -> list[dict[str, Any]]:
    """Return pip's report of the packages that it would install on this architecture."""
    tags = [f"manylinux_2_{minor}_{arch}" for minor in GLIBCS] + [f"manylinux2014_{arch}"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--dry-run", "--ignore-installed", "--only-binary=:all:", f"--report={report}"]
        options += [f"--target={folder}/target", *(f"--platform={tag}" for tag in tags)]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, requirement], check=True)
        return list(json.loads(report.read_text())["install"])


if __name__ == "__main__":
    main()
