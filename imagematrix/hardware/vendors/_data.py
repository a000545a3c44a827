"""Loading the tables next to this module."""

from __future__ import annotations

import json
from functools import cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


@cache
def load(name: str) -> dict[str, Any]:
    """Return the table in the file `name`. It is read once and shared: callers must not change it."""
    # The loader can also read from a zip archive; importlib.resources is slow to import.
    loader: Any = __spec__.loader
    table: dict[str, Any] = json.loads(loader.get_data(f"{__file__.rpartition('/')[0]}/{name}"))
    return table
