"""Whether a file loads libcuda, or one of the libraries that compile device code when a program runs.

Its device code need not be in the image. Python sources name the library in a string of its
own or import NVIDIA's bindings; a pattern such as "libnvrtc.so.*" only looks for libraries of others.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

SOURCE = ".py"
LIBRARY = r"lib(?:cuda|nvrtc|nvJitLink|nvvm)\.so(?:\.\d+)*"
NEEDED = re.compile(LIBRARY, re.ASCII)
NAMED = re.compile(
    rb"""(["'])%s\1|^[ \t]*(?:from|import)[ \t]+cuda(?:\.(?:bindings|core)\b|[ \t]+import\b)"""
    % LIBRARY.encode(),
    re.MULTILINE,
)
LONGEST = 4 << 20  # bytes of a source that are read


def loads_driver(needed: Iterable[str]) -> bool:
    """Whether one of the libraries in a dynamic section is libcuda or a compiler."""
    return any(map(NEEDED.fullmatch, needed))


def loads_driver_in_source(text: bytes) -> bool:
    """Whether a Python source names libcuda or a compiler, or imports NVIDIA's bindings for them."""
    return NAMED.search(text) is not None
