"""The CPU flags for which Go compiled a program, from the build information that it writes into it.

Programs check GOAMD64 when they start, and end if the CPU lacks a flag of the level. For the format, see
https://pkg.go.dev/debug/buildinfo (Go 1.18 or newer, which also is the first release that writes these
settings); for the settings, https://go.dev/wiki/MinimumRequirements.
"""

from __future__ import annotations

import re

from imagematrix.hardware.vendors import marches

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.audit.binaries.elf import Elf
    from imagematrix.audit.binaries.window import Window

SECTION = ".go.buildinfo"
MAGIC = b"\xff Go buildinf:"
LARGEST = 1 << 20  # bytes of a section: a line for each module of the program
AMD64 = re.compile(rb"^build\tGOAMD64=v([1-4])$", re.MULTILINE)
ARM64 = re.compile(rb"^build\tGOARM64=v([89])\.(\d)((?:,[a-z]+)*)$", re.MULTILINE)
FIRST_WITH_ATOMICS = (8, 1)  # versions of the architecture: those from here on have them
OPTIONS = {b"lse": frozenset(["atomics"]), b"crypto": frozenset(["aes", "pmull", "sha1", "sha2"])}


def find_go_flags(elf: Elf, window: Window) -> frozenset[str]:
    """Return the flags beyond the baseline for which Go compiled a program; none if something else did."""
    for section in elf.find_sections(SECTION):
        raw = window.read_at(section.offset, min(section.size, LARGEST))
        if not raw.startswith(MAGIC):
            continue
        if level := AMD64.search(raw):
            return frozenset().union(*(flags for _, flags in marches.LEVELS[1 : int(level[1])]))
        if version := ARM64.search(raw):
            atomics = OPTIONS[b"lse"] if (int(version[1]), int(version[2])) >= FIRST_WITH_ATOMICS else ()
            options = [OPTIONS.get(word, frozenset()) for word in version[3].split(b",")]
            return frozenset(atomics).union(*options)
    return frozenset()
