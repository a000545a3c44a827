"""Versions of drivers, CUDA releases and PTX ISAs: their form and their order.

Equality is that of the strings, order that of the numbers.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["CAPABILITY", "DRIVER", "RELEASE", "branch", "is_tegra", "natural", "order"]

DRIVER = re.compile(r"\d{1,4}(?:\.\d{1,4}){1,3}", re.ASCII)  # of a driver, such as 550.163.01
RELEASE = re.compile(r"\d{1,2}\.\d{1,2}", re.ASCII)  # of CUDA or of PTX' ISA, such as 12.4
CAPABILITY = re.compile(r"\d{1,2}\.\d", re.ASCII)  # a compute capability, such as 8.9

# Tegra's board support packages number drivers by their own releases: 35.4.1 (JetPack 5), 540.4.0 (6), 580.00
# (7). Versions for other computers look like 384.81, 550.163.01 and 580.65.06.
TEGRA = re.compile(r"\d{1,2}(\.\d+)+|\d{3}\.\d\.\d|\d{3}\.00", re.ASCII)


def order(version: str) -> tuple[int, ...]:
    """Return the sort key of `version`: "580.65.06" gives (580, 65, 6).

    Versions with equal keys need not be equal: "580.65.06" is not "580.65.6".
    """
    return tuple(map(int, version.split(".")))


def is_tegra(driver: str) -> bool:
    """Whether this is a Tegra driver version: its CUDA release is that of its JetPack, not of its branch."""
    return TEGRA.fullmatch(driver) is not None


def branch(driver: str) -> int:
    """Return the branch of a driver version: 550 of "550.163.01"."""
    return int(driver.partition(".")[0])


def natural(word: str) -> tuple[Any, ...]:
    """Return the sort key for natural order, by the numbers in a word: "3.9" before "3.10"."""
    parts = re.split(r"0*([0-9]+)", word)
    return tuple((len(part), part) if position % 2 else part for position, part in enumerate(parts))
