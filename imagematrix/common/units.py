"""Amounts of bytes and of time as people write them."""

from __future__ import annotations

import re

MEGABYTE = 1_000_000
FORM = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([MGT]i?)B?", re.ASCII)
# G is decimal, because cards are sold that way: a card of 80 GB reports 79.6 GiB, and "80G" has to mean it.
UNITS = {"M": 1000**2, "G": 1000**3, "T": 1000**4, "Mi": 1024**2, "Gi": 1024**3, "Ti": 1024**4}
DURATION = re.compile(r"(\d{1,6})([smhdw])", re.ASCII)
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def parse_size(text: str) -> float | None:
    """Return an amount such as "40G", "1.5GiB" or "500MB" in bytes, or None if `text` is not one."""
    match = FORM.fullmatch(text)
    return float(match[1]) * UNITS[match[2]] if match else None


def format_megabytes(size: int | None, digits: int = 1) -> str:
    """Return bytes for people, such as "81.5 MB", or "?" for None."""
    return "?" if size is None else f"{size / MEGABYTE:.{digits}f} MB"


def parse_duration(text: str) -> int | None:
    """Return a duration such as "90m", "12h" or "7d" in seconds, or None if `text` is not one."""
    match = DURATION.fullmatch(text)
    return int(match[1]) * SECONDS[match[2]] if match else None
