"""The Catalog saved in a file."""

from __future__ import annotations

from imagematrix.catalog.catalog import Catalog

__all__ = ["catalog"]


def catalog(name: str) -> Catalog:
    """Return the Catalog in the file `name`; raise UsageError if it is not one."""
    return Catalog.load(name)
