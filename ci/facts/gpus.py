"""Add the GPUs of a pci.ids file (in Debian the package pci.ids) to gpus.json.

A name in this file starts with the codename of the chip, sometimes with letters for the kind of board. The
product follows in brackets: "AD102GL [L40S]". The file has neither compute capabilities nor the driver
branches that support a chip; these are maintained by hand. Unknown chips are reported on stderr. Existing
products are not changed; remove an entry to update its name.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

TABLE = Path(__file__).parents[2] / "imagematrix" / "hardware" / "vendors" / "gpus.json"
PCI_IDS = Path("/usr/share/misc/pci.ids")
NVIDIA = re.compile(r"^10de  .*\n((?:[\t#].*\n|\n)*)", re.MULTILINE)
# Sound and USB controllers have other words after the codename.
GPU = re.compile(r"^\t([0-9a-f]{4})  (\w+)(?: \[(?!.*NVSwitch)(.+)\]| Engineering Sample)?$", re.MULTILINE)
FERMI_OR_NEWER = re.compile(r"(?:G[FKMPVAHBR]|AD|TU)\d{3}|G[A-Z]\d{2}[A-Z]")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pci-ids", type=Path, default=PCI_IDS, help="the file to read")
    parser.add_argument("--table", type=Path, default=TABLE, help="the file to add to")
    parser.add_argument("--as-of", help="the date to record in it")
    arguments = parser.parse_args()
    data = json.loads(arguments.table.read_text())
    chips = data["chips"]
    there = {number for chip in chips.values() for number in chip["devices"]}
    for number, codename, name in gpus(arguments.pci_ids.read_text()):
        chip = max((chip for chip in chips if codename.startswith(chip)), key=len, default=None)
        if chip is None and FERMI_OR_NEWER.match(codename):
            print(f"{number} {codename} {name}: chip not in the table", file=sys.stderr)
        elif chip is not None and number not in there:
            chips[chip]["devices"][number] = name or codename
            print(f"{number} {codename} {name}")
    for chip in chips.values():
        chip["devices"] = dict(sorted(chip["devices"].items()))
    data["as_of"] = arguments.as_of or data["as_of"]
    arguments.table.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def gpus(text: str) -> list[tuple[str, str, str]]:
    """Return possible GPUs among NVIDIA's devices: device id, codename, name of the product or ""."""
    nvidia = NVIDIA.search(text)
    return GPU.findall(nvidia.group(1)) if nvidia else []


if __name__ == "__main__":
    main()
