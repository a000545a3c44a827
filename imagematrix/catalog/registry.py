"""The Catalog that a registry's image index is, read with one request.

Each manifest of the index has its variant in its annotations, under the names that images have in their
labels.
"""

from __future__ import annotations

from imagematrix.catalog import index
from imagematrix.errors import UnknownImageError
from imagematrix.registry import Reference, Registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.catalog.catalog import Catalog

__all__ = ["catalog"]


def catalog(name: str) -> Catalog:
    """Return the catalog of `name`, such as registry:5000/ml/training:v1.

    Raises UnknownImageError where the registry has none, EngineError where it can't be reached or refuses,
    UsageError where what it has is no catalog.
    """
    reference = Reference.parse(name)
    with Registry(reference.name) as registry:
        found = registry.manifest(reference.tag)
    if found is None:
        raise UnknownImageError(f"the registry {reference.registry} has no {name}")
    return index.catalog(found.raw, reference)
