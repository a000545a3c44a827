"""Versions of drivers, CUDA releases and PTX ISAs: their form and their order.

Equality is that of the strings, order that of the numbers.
"""

from __future__ import annotations

import operator
import re
from functools import lru_cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

DRIVER = re.compile(r"\d{1,4}(?:\.\d{1,4}){1,3}", re.ASCII)  # of a driver, such as 550.163.01
RELEASE = re.compile(r"\d{1,2}\.\d{1,2}", re.ASCII)  # of CUDA or of PTX' ISA, such as 12.4
CAPABILITY = re.compile(r"\d{1,2}\.\d", re.ASCII)  # a compute capability, such as 8.9

# The operators of conditions, each of which accepts some of them.
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}

# Tegra's board support packages number drivers by their own releases: 35.4.1 (JetPack 5), 540.4.0 (6), 580.00
# (7). Versions for other computers look like 384.81, 550.163.01 and 580.65.06.
TEGRA = re.compile(r"\d{1,2}(\.\d+)+|\d{3}\.\d\.\d|\d{3}\.00", re.ASCII)

# A CUDA release in the name of a file, such as libit_cuda118.so. It is compiled only when it is needed.
NAMED = r"(?a)(?<=[_.-])(cu(?:da)?[_-]?)(\d{2})\.?(\d{1,2})(?!\d)"


@lru_cache(maxsize=4096)
def make_sort_key(version: str) -> tuple[int, ...]:
    """Return the sort key of `version`: "580.65.06" gives (580, 65, 6).

    Versions with equal keys need not be equal: "580.65.06" is not "580.65.6".
    """
    return tuple(map(int, version.split(".")))


def parse_release_in_name(file: str) -> str | None:
    """Return the CUDA release in the name of a file: "11.8" of "libit_cuda118.so"; None if there is none."""
    match = re.search(NAMED, file.rpartition("/")[2])
    return f"{match[2]}.{int(match[3])}" if match else None


@lru_cache(maxsize=4096)
def is_tegra(driver: str) -> bool:
    """Whether this is a Tegra driver version: its CUDA release is that of its JetPack, not of its branch."""
    return TEGRA.fullmatch(driver) is not None


@lru_cache(maxsize=4096)
def get_branch(driver: str) -> int:
    """Return the branch of a driver version: 550 of "550.163.01"."""
    return int(driver.partition(".")[0])


def make_natural_key(word: str) -> tuple[Any, ...]:
    """Return the sort key for natural order, by the numbers in a word: "3.9" before "3.10"."""
    parts = re.split(r"0*([0-9]+)", word)
    # Numbers compare by their length and then as text, because Python refuses to convert thousands of digits.
    return tuple((len(part), part) if position % 2 else part for position, part in enumerate(parts))
