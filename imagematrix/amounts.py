"""Amounts of bytes as people write them."""

from __future__ import annotations

import re

__all__ = ["parse"]

FORM = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([MGT]i?)B?", re.ASCII)
# G is decimal, because cards are sold that way: a card of 80 GB reports 79.6 GiB, and "80G" has to mean it.
UNITS = {"M": 1000**2, "G": 1000**3, "T": 1000**4, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4}


def parse(text: str) -> float | None:
    """Return an amount such as "40G", "1.5GiB" or "500MB" in bytes, or None if `text` is not one."""
    match = FORM.fullmatch(text)
    return float(match[1]) * UNITS[match[2]] if match else None
