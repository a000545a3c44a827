"""The sizes of the variants of a version: each alone, in addition to the others, and in total."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from imagematrix.build.stores.engine import EngineStore
from imagematrix.common import json_documents
from imagematrix.common.image_reference import Reference, names_registry
from imagematrix.errors import EngineError
from imagematrix.images.oci.manifest import Descriptor, ImageManifest, parse_manifest
from imagematrix.images.oci.parts import read_config_layers
from imagematrix.images.oci.registry import Registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from imagematrix.images.catalog.catalog import Catalog, Variant
    from imagematrix.images.oci.parts import SizedLayer

SCHEMA = "imagematrix.sizes/v1"
REQUESTS = 8  # at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedVariant:
    """A variant with its layers, the lowest first; None if it was not found, or the sizes are unknown.

    The sizes are `compressed` in a registry, and uncompressed in an engine. `pull` is the number of bytes
    that this machine's engine would pull; None if unknown.
    """

    variant: Variant
    parts: tuple[SizedLayer, ...] | None
    compressed: bool
    pull: int | None = None

    @property
    def size(self) -> int | None:
        """The bytes of its layers."""
        return None if self.parts is None else sum(part.size for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The variants of a version with their layers."""

    catalog: Catalog
    variants: tuple[SizedVariant, ...]

    @property
    def layers(self) -> dict[str, SizedLayer]:
        """All layers by digest, each once."""
        return {part.digest: part for variant in self.variants for part in variant.parts or ()}

    @property
    def total(self) -> int:
        """The bytes of all layers, each counted once."""
        return sum(part.size for part in self.layers.values())

    def compute_added(self) -> list[int | None]:
        """Return for each variant the bytes of its layers that no other variant has."""
        users = Counter(
            digest for variant in self.variants for digest in {part.digest for part in variant.parts or ()}
        )
        return [
            None
            if variant.parts is None
            else sum(
                part.size
                for part in {part.digest: part for part in variant.parts}.values()
                if users[part.digest] == 1
            )
            for variant in self.variants
        ]

    def list_rows(self) -> list[dict[str, object]]:
        """Return the Sizes document's `variants`."""
        return [
            {
                "reference": variant.variant.reference,
                "digest": variant.variant.digest,
                "compressed": variant.compressed,
                "size": variant.size,
                "adds": adds,
                "pull": variant.pull,
                "layers": [part.digest for part in variant.parts or ()],
            }
            for variant, adds in zip(self.variants, self.compute_added(), strict=True)
        ]

    def to_json(self) -> dict[str, object]:
        """Return the Sizes document."""
        return {
            "schema": SCHEMA,
            "image": self.catalog.image,
            "version": self.catalog.version,
            "total": self.total,
            "variants": self.list_rows(),
            "layers": {
                digest: {"size": part.size, "made_by": part.made_by}
                for digest, part in sorted(self.layers.items())
            },
        }


def measure_sizes(catalog: Catalog) -> Sizes:
    """Return the sizes of the variants of a catalog, in their registries or in the engine.

    Raises EngineError if one of these cannot be reached. Variants in registries need no engine.
    """
    with ExitStack() as stack, ThreadPoolExecutor(REQUESTS) as pool:
        remote = [variant.reference for variant in catalog.variants if names_registry(variant.reference)]
        names = {Reference.parse(reference).name for reference in remote}
        registries = {name: stack.enter_context(Registry(name)) for name in names}
        try:
            engine = stack.enter_context(EngineStore())
        except EngineError:
            if len(remote) < len(catalog.variants):
                raise
            engine = None
        present: frozenset[str] | None = None  # uncompressed layers in the engine, if it can list them
        if remote and engine:
            with suppress(EngineError):
                present = engine.list_all_layers()

        def measure(variant: Variant) -> SizedVariant:
            if engine and not names_registry(variant.reference):
                parts = engine.list_parts(variant.reference)
                return SizedVariant(variant=variant, parts=parts, compressed=False)
            return _measure_remote(registries[Reference.parse(variant.reference).name], variant, present)

        return Sizes(catalog=catalog, variants=tuple(pool.map(measure, catalog.variants)))


def _measure_remote(registry: Registry, variant: Variant, present: frozenset[str] | None) -> SizedVariant:
    reference = variant.reference
    manifest = registry.find_manifest(variant.digest or Reference.parse(reference).tag)
    document = parse_manifest(manifest.raw, reference, Descriptor) if manifest else None
    if not isinstance(document, ImageManifest) or document.config is None:
        return SizedVariant(variant=variant, parts=None, compressed=True)
    image = json_documents.Fields(
        json_documents.parse_json(registry.fetch_small_blob(document.config.digest), reference), reference
    )
    layers = [(layer.digest, layer.size) for layer in document.layers or ()]
    contents = image.get_object_or_empty("rootfs").get_texts("diff_ids")
    pull = None
    if present is not None and len(contents) == len(layers):
        pull = sum(
            size for content, (_, size) in zip(contents, layers, strict=True) if content not in present
        )
    return SizedVariant(
        variant=variant, parts=read_config_layers(layers, image.data), compressed=True, pull=pull
    )
