"""Comparing versions of drivers, CUDA releases and PTX ISAs: equality is of strings, order of numbers."""

from __future__ import annotations

__all__ = ["branch", "order"]


def order(version: str) -> tuple[int, ...]:
    """Return what orders `version` among others: "580.65.06" gives (580, 65, 6).

    Versions of equal order need not be the same: "580.65.06" is not "580.65.6".
    """
    return tuple(map(int, version.split(".")))


def branch(driver: str) -> int:
    """Return the branch of a driver version: 550 of "550.163.01"."""
    return int(driver.partition(".")[0])
