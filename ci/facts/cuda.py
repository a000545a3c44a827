"""Query ptxas for its targets and PTX ISA version, and update cuda.json.

ptxas is in CUDA toolkits, in Debian's nvidia-cuda-toolkit and in PyPI's nvidia-cuda-nvcc; it needs no GPU.
Drivers, host compilers and the row of a new release are maintained by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path

TABLE = Path(__file__).parents[2] / "imagematrix" / "hardware" / "vendors" / "cuda.json"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ptxas", default="ptxas", help="the program to ask")
    parser.add_argument("--table", type=Path, default=TABLE, help="the file to change")
    parser.add_argument("--as-of", help="the date to record in it")
    arguments = parser.parse_args()
    data = json.loads(arguments.table.read_text())
    name = release(arguments.ptxas)
    if name not in data["releases"]:
        parser.exit(1, f"CUDA {name} has no row in {arguments.table}\n")
    row = {"ptx_isa": ptx_isa(arguments.ptxas), "targets": " ".join(targets(arguments.ptxas))}
    data["releases"][name] |= row
    data["as_of"] = arguments.as_of or data["as_of"]
    arguments.table.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    print(f"CUDA {name}: PTX ISA {row['ptx_isa']}, targets {row['targets']}")


def release(ptxas: str) -> str:
    """Return the CUDA release of `ptxas`."""
    return one(r"release (\d+\.\d+)", run(ptxas, "--version"))


def targets(ptxas: str) -> list[str]:
    """Return the targets that `ptxas` supports, in order."""
    numbers = set(re.findall(r"'sm_(\d+[af]?)'", run(ptxas, "--help")))
    return sorted(numbers, key=lambda target: (int(target.rstrip("af")), target))


def ptx_isa(ptxas: str) -> str:
    """Return the newest PTX ISA version that `ptxas` supports, from its error about a newer version."""
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "new.ptx"
        source.write_text(".version 99.9\n.target sm_90\n")
        return one(r"current version is '([\d.]+)'", run(ptxas, str(source), "-o", f"{directory}/new.cubin"))


def one(pattern: str, text: str) -> str:
    """Return the group of `pattern` in `text`."""
    match = re.search(pattern, text)
    if match is None:
        raise SystemExit(f"no {pattern!r} in the output of ptxas: {text}")
    return match.group(1)


def run(*command: str) -> str:
    """Return the output of `command`."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout + result.stderr


if __name__ == "__main__":
    main()
