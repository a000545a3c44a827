"""Update the names of CPU flags in cpuid.json that Linux prints in /proc/cpuinfo, from a kernel's headers.

The folder is the root of a kernel's source, or /usr/src/linux-headers-VERSION-common of Debian, which has the
headers of all architectures. The rest of the table is maintained by hand, from the vendors' manuals. It must
have every flag that compilers need and kernels do not print: the script says what is missing or superfluous,
and compares the bits with those that the kernel knows.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

TABLES = Path(__file__).parents[2] / "imagematrix" / "hardware" / "vendors"
TABLE = TABLES / "cpuid.json"
X86 = "arch/x86/include/asm/cpufeatures.h"
ARM = "arch/arm64/include/uapi/asm/hwcap.h"
# #define X86_FEATURE_SM3  (12*32+ 1) /* SM3 instructions */, and with a name in quotes if it is printed.
DEFINED = re.compile(r'#define X86_FEATURE_(\w+)\s+\(\s*(\d+)\*32\s*\+\s*(\d+)\)(?:\s*/\* "([^"]+)")?')
WORDS = {"12": ("7.1", "eax"), "20": ("80000021.0", "eax")}  # enum cpuid_leafs


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--headers", type=Path, required=True, help="the folder with the kernel's headers")
    parser.add_argument("--kernel", required=True, help="the kernel's version, such as 7.2.12")
    parser.add_argument("--table", type=Path, default=TABLE, help="the file to change")
    parser.add_argument("--as-of", help="the date to record in it")
    arguments = parser.parse_args()
    defined = DEFINED.findall((arguments.headers / X86).read_text())
    capabilities = re.findall(r"#define HWCAP\d?_(\w+)", (arguments.headers / ARM).read_text())
    table = json.loads(arguments.table.read_text())
    table["as_of"] = arguments.as_of or table["as_of"]
    table["kernel"] = arguments.kernel
    table["printed"] = {
        "x86_64": " ".join(sorted({printed for *_, printed in defined if printed})),
        "aarch64": " ".join(sorted({name.lower().replace("_", "") for name in capabilities})),
    }
    arguments.table.write_text(json.dumps(table, indent=1) + "\n")
    marches = json.loads((TABLES / "marches.json").read_text())["x86_64"]
    needed = {flag for sets in marches.values() for flags in sets.values() for flag in flags.split()}
    unprinted = needed - set(table["printed"]["x86_64"].split())
    for flag in sorted(unprinted ^ table["bits"].keys()):
        print(f"{flag}: {'missing' if flag in unprinted else 'superfluous'}")
    for name, word, bit, _ in defined:
        row = table["bits"].get(name.lower())
        if row and word in WORDS and (row["leaf"], row["register"], row["bit"]) != (*WORDS[word], int(bit)):
            print(f"{name.lower()}: the kernel has {WORDS[word]}, bit {bit}")


if __name__ == "__main__":
    main()
