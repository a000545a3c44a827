"""Reading the tables that lie beside this module."""

from __future__ import annotations

import json
from functools import cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["load"]


@cache
def load(name: str) -> dict[str, Any]:
    """Return the table in the file `name`. It is read once and shared: callers never change it."""
    directory = __file__.rpartition("/")[0]
    with open(f"{directory}/{name}", "rb") as file:  # noqa: PTH123 - pathlib is slow to import
        table: dict[str, Any] = json.load(file)
    return table
