"""Building into the engine's classic image store, which supports no OCI layouts.

BuildKit puts the image there itself: timestamps are not rewritten, labels are those of the build, and nobody
reads the bytes of the layers.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

from imagematrix.build.executor.buildx import UNATTESTED, Buildx
from imagematrix.build.executor.solver import SolveRequest
from imagematrix.build.plan.protocols import BuiltImage
from imagematrix.errors import BuildError, UsageError
from imagematrix.images.catalog.labels import OCCASIONAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from pathlib import Path
    from typing import TextIO

    from imagematrix.build.plan.protocols import BuildRequest, BuildSources


class ClassicBuilder(Buildx):
    """The Builder of an engine with the classic image store."""

    parallel_exports = 1

    def _require_capable_engine(self) -> None:
        super()._require_capable_engine()
        remedy = "use the containerd image store, or --builder"
        if self._options.attest:
            raise UsageError("the engine's classic image store cannot keep attestations", remedy=remedy)
        if self._options.caches:
            message = "an engine with the classic image store cannot import or export caches"
            raise UsageError(message, remedy=remedy)

    def export_base_layers(
        self,
        base: str,  # noqa: ARG002
        sources: BuildSources,  # noqa: ARG002
        sibling_references: Collection[str],  # noqa: ARG002
    ) -> tuple[Path, ...]:
        """Return (): the layers of a base are in the engine."""
        return ()

    def add_early_labels(self, order: BuildRequest, promise: Callable[[], Mapping[str, str]]) -> BuildRequest:
        """Return the request with the labels that are promised: nothing can be added to the image."""
        return replace(order, labels=promise())

    @contextlib.contextmanager
    def make(self, order: BuildRequest, log: TextIO, on_step: Callable[[str], None]) -> Iterator[BuiltImage]:
        """Build an image into the store, with its labels but without its name."""
        if order.no_cache:
            raise BuildError("the engine's classic image store cannot verify that an image is reproducible")
        all_labels = {**dict.fromkeys(OCCASIONAL, ""), **order.labels}
        labels = [f"--label={key}={value}" for key, value in sorted(all_labels.items())]
        no_cache = ["--no-cache"] if self._options.no_cache else []
        options = [*UNATTESTED, *no_cache, *labels, "--output", "type=docker"]
        with self._take_solver() as solver:
            request = SolveRequest(solver, order.dockerfile, order.sources, log, on_step)
            if not self._options.no_cache:
                self._build_prefixes(order.shared_prefixes, request)
            digest, _ = solver.solve_image(request, options, "containerimage.config.digest")
        yield BuiltImage(digest=digest)
