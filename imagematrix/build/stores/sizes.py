"""The sizes of the images of a version: each alone, in addition to the others, and in total."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from imagematrix.build.stores.engine import EngineStore
from imagematrix.common import json_documents
from imagematrix.common.image_reference import Reference, names_registry
from imagematrix.errors import EngineError
from imagematrix.images.oci.manifest import Descriptor, ImageManifest, parse_manifest
from imagematrix.images.oci.parts import read_config_layers
from imagematrix.images.oci.registry import Registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from imagematrix.images.catalog.catalog import Catalog, Variant
    from imagematrix.images.catalog.warm_image import WarmImage
    from imagematrix.images.oci.parts import SizedLayer

SCHEMA = "imagematrix.sizes/v1"
REQUESTS = 8  # at the same time
Listed = TypeVar("Listed", bound="Variant | WarmImage")


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedImage(Generic[Listed]):
    """An image of a catalog with its layers, the lowest first.

    `parts` is None if the image was not found, or the sizes are unknown. The sizes are `compressed` in a
    registry, and uncompressed in an engine. `pull` is the number of bytes that this machine's engine would
    pull; None if unknown.
    """

    image: Listed
    parts: tuple[SizedLayer, ...] | None
    compressed: bool
    pull: int | None = None

    @property
    def size(self) -> int | None:
        """The bytes of its layers."""
        return None if self.parts is None else sum(part.size for part in self.parts)

    @property
    def layers(self) -> dict[str, SizedLayer]:
        """Its layers by digest, each once."""
        return {part.digest: part for part in self.parts or ()}

    def make_row(self, adds: int | None) -> dict[str, object]:
        """Return an element of the Sizes document; `adds` are the bytes of the layers that only it has."""
        return {
            "reference": self.image.reference,
            "digest": self.image.digest,
            "compressed": self.compressed,
            "size": self.size,
            "adds": adds,
            "pull": self.pull,
            "layers": [part.digest for part in self.parts or ()],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The variants of a version and their warm images, with their layers."""

    catalog: Catalog
    variants: tuple[SizedImage[Variant], ...]
    warm: tuple[SizedImage[WarmImage], ...] = ()

    @property
    def images(self) -> list[SizedImage[Variant] | SizedImage[WarmImage]]:
        """The variants, then the warm images."""
        return [*self.variants, *self.warm]

    @property
    def layers(self) -> dict[str, SizedLayer]:
        """All layers by digest, each once."""
        return {digest: part for image in self.images for digest, part in image.layers.items()}

    @property
    def total(self) -> int:
        """The bytes of all layers, each counted once."""
        return sum(part.size for part in self.layers.values())

    def compute_added(self) -> list[int | None]:
        """Return for each variant the bytes of its layers that no other variant has.

        Its warm images do not count: they have all of its layers, and go with it.
        """
        return _compute_added(self.variants)

    def compute_added_by_warm(self) -> list[int | None]:
        """Return for each warm image the bytes of its layers that no variant and no other one has."""
        return _compute_added(self.warm, {digest for image in self.variants for digest in image.layers})

    def list_rows(self) -> list[dict[str, object]]:
        """Return the Sizes document's `variants`."""
        return [image.make_row(adds) for image, adds in zip(self.variants, self.compute_added(), strict=True)]

    def to_json(self) -> dict[str, object]:
        """Return the Sizes document."""
        warm = [
            {"base": image.image.base, **image.make_row(adds)}
            for image, adds in zip(self.warm, self.compute_added_by_warm(), strict=True)
        ]
        return {
            "schema": SCHEMA,
            "image": self.catalog.image,
            "version": self.catalog.version,
            "total": self.total,
            "variants": self.list_rows(),
            **({"warm": warm} if warm else {}),
            "layers": {
                digest: {"size": part.size, "made_by": part.made_by}
                for digest, part in sorted(self.layers.items())
            },
        }


def _compute_added(images: Sequence[SizedImage[Listed]], others: Iterable[str] = ()) -> list[int | None]:
    """Return for each image the bytes of its layers that no other has, and that are not among `others`."""
    users = Counter(others)
    for image in images:
        users.update(image.layers.keys())
    return [
        None
        if image.parts is None
        else sum(part.size for digest, part in image.layers.items() if users[digest] == 1)
        for image in images
    ]


def measure_sizes(catalog: Catalog) -> Sizes:
    """Return the sizes of the images of a catalog, in their registries or in the engine.

    Raises EngineError if one of these cannot be reached. Images in registries need no engine.
    """
    with ExitStack() as stack, ThreadPoolExecutor(REQUESTS) as pool:
        references = [variant.reference for variant in catalog.variants]
        references += [image.reference for image in catalog.warm]
        remote = [reference for reference in references if names_registry(reference)]
        names = {Reference.parse(reference).name for reference in remote}
        registries = {name: stack.enter_context(Registry(name)) for name in names}
        try:
            engine = stack.enter_context(EngineStore())
        except EngineError:
            if len(remote) < len(references):
                raise
            engine = None
        present: frozenset[str] | None = None  # uncompressed layers in the engine, if it can list them
        if remote and engine:
            with suppress(EngineError):
                present = engine.list_all_layers()

        def measure(image: Listed) -> SizedImage[Listed]:
            if engine and not names_registry(image.reference):
                return SizedImage(image=image, parts=engine.list_parts(image.reference), compressed=False)
            return _measure_remote(registries[Reference.parse(image.reference).name], image, present)

        return Sizes(
            catalog=catalog,
            variants=tuple(pool.map(measure, catalog.variants)),
            warm=tuple(pool.map(measure, catalog.warm)),
        )


def _measure_remote(registry: Registry, image: Listed, present: frozenset[str] | None) -> SizedImage[Listed]:
    reference = image.reference
    manifest = registry.find_manifest(image.digest or Reference.parse(reference).tag)
    document = parse_manifest(manifest.raw, reference, Descriptor) if manifest else None
    if not isinstance(document, ImageManifest) or document.config is None:
        return SizedImage(image=image, parts=None, compressed=True)
    config = json_documents.Fields(
        json_documents.parse_json(registry.fetch_small_blob(document.config.digest), reference), reference
    )
    layers = [(layer.digest, layer.size) for layer in document.layers or ()]
    contents = config.get_object_or_empty("rootfs").get_texts("diff_ids")
    pull = None
    if present is not None and len(contents) == len(layers):
        pull = sum(
            size for content, (_, size) in zip(contents, layers, strict=True) if content not in present
        )
    return SizedImage(image=image, parts=read_config_layers(layers, config.data), compressed=True, pull=pull)
