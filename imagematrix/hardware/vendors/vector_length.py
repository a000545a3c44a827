"""Scalable vectors (SVE) of a length that is fixed when code is compiled.

On CPUs with vectors of another length, such code computes wrong results, without SIGILL. No flag of
/proc/cpuinfo tells the length, so no image may contain such code.

Sources: -msve-vector-bits in GCC's manual (AArch64 Options) and Clang's; __ARM_FEATURE_SVE_BITS in the Arm C
Language Extensions, which is 0 or absent where the length is not fixed.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

OPTION = "-msve-vector-bits"
END = r"""\s"'`;,)\]\\"""  # what may follow an option in a shell, a Dockerfile, a list or a program
VALUE = re.compile(OPTION + "=(?!scalable(?![^" + END + "]))[^" + END + "]*")
MACRO = re.compile(r"^#define __ARM_FEATURE_SVE_BITS (\d+)", re.MULTILINE)
REMEDY = f"remove it, or write {OPTION}=scalable"


def find_options(text: str) -> Iterator[re.Match[str]]:
    """Yield the compiler options in `text` that fix the length of vectors; a variable may do so, too."""
    return VALUE.finditer(text) if OPTION in text else iter(())


def explain_option(option: str) -> str:
    """Return why no image may be built with an option that fixes the length of vectors."""
    return f"{option} fixes the length of vectors: on CPUs with another length, code computes wrong results"


def get_bits_from_macros(text: str) -> int:
    """Return the bits of the vectors for which a compiler with these macros makes code; 0 for any length."""
    found = MACRO.search(text)
    return int(found[1]) if found else 0
