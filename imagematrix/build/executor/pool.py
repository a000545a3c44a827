"""A pool of builders, used as one."""

from __future__ import annotations

import contextlib
from itertools import zip_longest
from queue import SimpleQueue

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import TextIO

    from imagematrix.build.dockerfile.steps import Recipe
    from imagematrix.build.plan.protocols import Builder, BuildRequest, BuildSources, BuiltImage, SharedPrefix
    from imagematrix.images.oci.parts import SizedLayer


class Pool:
    """A Builder that passes each image to one of several builders with a free slot.

    `builders` are given with the number of slots of each.
    """

    def __init__(self, builders: Sequence[tuple[Builder, int]]) -> None:
        self._builders = tuple(builder for builder, _ in builders)
        self._free: SimpleQueue[Builder] = SimpleQueue()
        # Round-robin, so that few builds are spread over all builders.
        for turn in zip_longest(*([builder] * slots for builder, slots in builders)):
            for builder in filter(None, turn):
                self._free.put(builder)

    @property
    def local(self) -> bool:
        """Whether all of them find the images of the engine by their names."""
        return all(builder.local for builder in self._builders)

    def pin_by_digest(self, reference: str, digest: str) -> str | None:
        """Return the source of a base image with `digest`; None if all builders find it by name."""
        sources = (builder.pin_by_digest(reference, digest) for builder in self._builders)
        return next(filter(None, sources), None)

    def pin_by_immovable_name(self, reference: str, digest: str) -> str | None:
        """Return the source of a base image with `digest`, by a name that cannot move."""
        sources = (builder.pin_by_immovable_name(reference, digest) for builder in self._builders)
        return next(filter(None, sources), None)

    def find_prefixes(
        self, images: Mapping[str, Recipe], helpers: Mapping[str, Recipe], jobs: int
    ) -> Mapping[str, tuple[SharedPrefix, ...]]:
        """Return the prefixes to build before each image and each helper, which all builders do alike."""
        return self._builders[0].find_prefixes(images, helpers, jobs)

    def export(
        self, dockerfile: str, sources: BuildSources, first: Sequence[SharedPrefix] = ()
    ) -> dict[str, str]:
        """Build `dockerfile` and return the text files in its last stage, by name.

        It takes no slot, because builds wait for it.
        """
        return self._builders[0].export(dockerfile, sources, first)

    def export_base_layers(
        self, base: str, sources: BuildSources, sibling_references: Collection[str]
    ) -> tuple[Path, ...]:
        """Return the layer files of `base` as images built on it have them, from the first builder."""
        return self._builders[0].export_base_layers(base, sources, sibling_references)

    def add_early_labels(self, order: BuildRequest, promise: Callable[[], Mapping[str, str]]) -> BuildRequest:
        """Return the request with the labels that its build needs, which all builders do alike."""
        return self._builders[0].add_early_labels(order, promise)

    @contextlib.contextmanager
    def make(self, order: BuildRequest, log: TextIO, on_step: Callable[[str], None]) -> Iterator[BuiltImage]:
        """Build an image without naming it yet; its slot is free as soon as it is built."""
        with contextlib.ExitStack() as stack:
            builder = self._free.get()
            try:
                image = stack.enter_context(builder.make(order, log, on_step))
            finally:
                self._free.put(builder)
            yield image

    def list_parts(self, image: BuiltImage) -> tuple[SizedLayer, ...]:
        """Return the layers of a built image; all builders read layouts and use the same engine."""
        return self._builders[0].list_parts(image)

    def stop(self) -> None:
        """Stop all running builds."""
        for builder in self._builders:
            builder.stop()
