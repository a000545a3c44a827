"""Versions of drivers, CUDA releases and PTX ISAs: how they are written, and how they compare.

They are equal as strings, and ordered by their numbers.
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

# Tegra's board support numbers its drivers by its own releases: 35.4.1 (JetPack 5), 540.4.0 (6), 580.00 (7).
# Those of computers are such as 384.81, 550.163.01 and 580.65.06.
TEGRA = re.compile(r"\d{1,2}(\.\d+)+|\d{3}\.\d\.\d|\d{3}\.00", re.ASCII)


def order(version: str) -> tuple[int, ...]:
    """Return what orders `version` among others: "580.65.06" gives (580, 65, 6).

    Versions of equal order need not be the same: "580.65.06" is not "580.65.6".
    """
    return tuple(map(int, version.split(".")))


def is_tegra(driver: str) -> bool:
    """Whether this is the number of a Tegra's driver: its CUDA is that of its JetPack, not of its branch."""
    return TEGRA.fullmatch(driver) is not None


def branch(driver: str) -> int:
    """Return the branch of a driver version: 550 of "550.163.01"."""
    return int(driver.partition(".")[0])


def natural(word: str) -> tuple[Any, ...]:
    """Return what sorts words as a person would: by the numbers in them, "3.9" before "3.10"."""
    parts = re.split(r"0*([0-9]+)", word)
    return tuple((len(part), part) if place % 2 else part for place, part in enumerate(parts))
