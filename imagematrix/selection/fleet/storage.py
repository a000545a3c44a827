"""What the variants of a catalog take in a registry or an engine, read from a Sizes document."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from imagematrix.common import json_documents
from imagematrix.common.text import quote_word
from imagematrix.errors import UsageError
from imagematrix.images.oci.manifest import LARGEST

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from imagematrix.images.catalog.catalog import Catalog

SCHEMA = "imagematrix.sizes/v1"


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The layers of variants: `variants` has their digests by reference, `layers` the bytes of each.

    The bytes are `compressed`, as in a registry, or not, as in an engine. Variants whose layers are unknown
    are absent.
    """

    variants: Mapping[str, frozenset[str]]
    layers: Mapping[str, int]
    compressed: bool

    def get_pull_size(self, reference: str) -> int | None:
        """Return the bytes of a variant, which a node without any of its layers pulls; None if unknown."""
        return self.sum_sizes([reference]) if reference in self.variants else None

    def get_unshared_size(self, reference: str) -> int | None:
        """Return the bytes of the layers of a variant that no other variant has; None if unknown."""
        if reference not in self.variants:
            return None
        return sum(
            self.layers[digest] for digest in self.variants[reference] if self._use_counts[digest] == 1
        )

    def sum_sizes(self, references: Iterable[str]) -> int:
        """Return the bytes of these variants together, each layer counted once."""
        digests = frozenset().union(*(self.variants.get(reference, ()) for reference in references))
        return sum(self.layers[digest] for digest in digests)

    @cached_property
    def total(self) -> int:
        """The bytes of all variants together, each layer counted once."""
        return self.sum_sizes(self.variants)

    @cached_property
    def largest(self) -> int:
        """The bytes of the largest variant."""
        return max(map(self.sum_sizes, ([reference] for reference in self.variants)), default=0)

    @cached_property
    def unshared(self) -> int:
        """The bytes of all variants if they shared no layer."""
        return sum(self.sum_sizes([reference]) for reference in self.variants)

    @cached_property
    def _use_counts(self) -> Counter[str]:
        return Counter(digest for digests in self.variants.values() for digest in digests)


def load_storage(path: Path, catalog: Catalog) -> Storage:
    """Return what the variants of a catalog take, from the document of `ls --size --json` in `path`.

    Raises UsageError if it is not one, or is about none of these variants.
    """
    fields = json_documents.Fields(json_documents.read_json(path), str(path))
    fields.require_schema(SCHEMA)
    references = {variant.reference for variant in catalog.variants}
    entries = {entry.get_text("reference"): entry for entry in fields.list_objects("variants")}
    variants = {
        reference: frozenset(entry.get_texts("layers"))
        for reference, entry in entries.items()
        if reference in references and entry.has("size")
    }
    if references.isdisjoint(entries):
        name = f"{catalog.image}:{catalog.version}"
        raise UsageError(
            f"{path} has no variant of {name}",
            remedy=f"write it with `imagematrix ls {quote_word(name)} --size --json`",
        )
    layer_fields = fields.get_object_or_empty("layers")
    layers = {}
    for digest in frozenset().union(*variants.values()):
        size = layer_fields.get_object_or_empty(digest).get_integer("size")
        if not 0 <= size <= LARGEST:
            raise layer_fields.fail(digest, "is not a number of bytes")
        layers[digest] = size
    return Storage(
        variants=variants,
        layers=layers,
        compressed=all(entries[reference].get_boolean("compressed") for reference in variants),
    )
