"""Building images into OCI layouts on disk, where times are clamped and labels are added after an audit.

The same inputs thus give the same image. The layouts keep a shared layer once.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from imagematrix.build.dockerfile.dockerfile import find_last_base
from imagematrix.build.executor.buildx import ENGINE_ALONE, UNATTESTED, Buildx, BuildxOptions, make_prefix_key
from imagematrix.build.executor.caches import format_attributes, format_cache_name
from imagematrix.build.executor.image_rewriter import Rewriter
from imagematrix.build.executor.solver import SolveRequest
from imagematrix.build.plan import identity
from imagematrix.build.plan.protocols import BuiltImage, SharedPrefix
from imagematrix.common.single_flight import SingleFlight
from imagematrix.errors import BuildError
from imagematrix.images.catalog import labels
from imagematrix.images.oci import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from typing import TextIO

    from imagematrix.build.executor.image_rewriter import RewrittenLayer
    from imagematrix.build.executor.solver import Solver
    from imagematrix.build.plan.protocols import BuildRequest, BuildSources
    from imagematrix.build.stores.engine import EngineStore


@dataclass(frozen=True, slots=True)
class _BuildLayout:
    """An OCI layout, the rewriter of its images, and its blobs, which other layouts may share."""

    folder: Path
    rewriter: Rewriter
    blobs: layout.Blobs

    @classmethod
    def from_folders(cls, folder: Path, blobs: Path) -> _BuildLayout:
        names = blobs / "sha256"
        return cls(folder, Rewriter(names, int(identity.EPOCH)), layout.Blobs(names))


class LayoutBuilder(Buildx):
    """The Builder that exports images into OCI layouts."""

    def __init__(
        self,
        docker: EngineStore,
        builders: Sequence[tuple[str | None, int]] = ENGINE_ALONE,
        options: BuildxOptions | None = None,
    ) -> None:
        super().__init__(docker, builders, options)
        self.parallel_exports = sum(slots for _, slots in builders)
        self._build_cache = self._options.build_cache
        blobs = Path(tempfile.mkdtemp(dir=self._folder))
        self._shared = _BuildLayout.from_folders(blobs, blobs)
        self._base_layers: SingleFlight[tuple[object, ...], tuple[Path, ...]] = SingleFlight()
        self._known_bases: SingleFlight[str, tuple[Path, ...]] = SingleFlight()
        # Layers that images need to the end, and those of prefixes that no image of the solver uses yet.
        self._kept_layers = self._open.enter_context(contextlib.ExitStack())
        self._unused_layers: dict[tuple[Solver, str], contextlib.ExitStack] = {}
        self._idle: list[_BuildLayout] = []
        self._lock = threading.Lock()

    def export_base_layers(
        self, base: str, sources: BuildSources, sibling_references: Collection[str]
    ) -> tuple[Path, ...]:
        """Return the layer files of `base` as images built on it have them.

        Later builds, those of `sibling_references`, reuse them instead of exporting them at the same time.
        The files are empty if the layers are known from an earlier command.
        """
        return self._find_base_layers(base, SolveRequest(self._solvers[0], "", sources), sibling_references)

    def add_early_labels(
        self,
        order: BuildRequest,
        promise: Callable[[], Mapping[str, str]],  # noqa: ARG002
    ) -> BuildRequest:
        """Return the request: labels are added after the audit, and the compiler is not waited for."""
        return order

    @contextlib.contextmanager
    def make(self, order: BuildRequest, log: TextIO, on_step: Callable[[str], None]) -> Iterator[BuiltImage]:
        """Build an image into a layout, and rewrite the layers above its base."""
        with contextlib.ExitStack() as stack:
            with self._take_solver() as solver:
                request = SolveRequest(solver, order.dockerfile, order.sources, log, on_step)
                image, rewritten_layers = self._build(order, request, stack)
            yield image
            if self._build_cache:
                self._build_cache.note_cell(order, rewritten_layers)

    def _build(
        self, order: BuildRequest, request: SolveRequest, stack: contextlib.ExitStack
    ) -> tuple[BuiltImage, list[RewrittenLayer]]:
        """Return an image, whose layout stays until `stack` is closed, and its layers above the base."""
        build_layout = stack.enter_context(self._open_layout(unshared=order.unshared))
        base = find_last_base(order.dockerfile)
        if base and not order.unshared:
            request.on_step(f"exporting {base}")
            # BuildKit would send its layers with each image. If that fails, the build says so in its log.
            with contextlib.suppress(BuildError):
                self._find_base_layers(base, request, order.sibling_references)
        known = frozenset() if order.unshared else self._find_known_layers(order)
        digest, imported = self._build_with_caches(request, build_layout.folder, order)

        # Docker's classic store needs every layer with every image, so they are kept to the end, except those
        # that no other image shares, which go with their layout.
        users = stack if self._docker.has_manifests or order.unshared else self._kept_layers
        kind = layout.LayoutIndex if self._options.attest else layout.LayoutImage
        exported = kind(build_layout.folder, digest).images
        layers = [layer for image in exported for layer in image.archives]
        users.enter_context(build_layout.blobs.keep_layers(layers))
        for prefix in order.shared_prefixes:
            if unused := self._unused_layers.pop((request.solver, prefix.name), None):
                unused.close()

        # The base's layers stay as they are; the others are rewritten.
        files: tuple[Path, ...] = ()
        if base:
            files = self._find_base_layers(base, request, order.sibling_references, anew=order.unshared)
        base_layers = frozenset(f"sha256:{file.name}" for file in files)
        if not order.unshared and not base_layers.issubset(layers):
            # BuildKit has another form of them by now.
            raise layout.MissingBlobError(base)
        rewriter = build_layout.rewriter
        digest, attested = rewriter.rewrite_image(digest, base_layers, order.compression)
        if self._docker.find_pinned_digest(order.sources.images.get(base or "", "")):
            known |= base_layers
        image = BuiltImage(
            digest=digest,
            layout=build_layout.folder,
            stored_layers=known,
            attested=attested,
            imported=imported or self._imported,
        )
        users.enter_context(build_layout.blobs.keep_layers(image.layout_image.archives))
        above = (layer for layer in layers if layer not in base_layers)
        return image, [rewriter.rewrite_layer(layer, order.compression) for layer in above]

    def _find_base_layers(
        self, base: str, request: SolveRequest, sibling_references: Collection[str], *, anew: bool = False
    ) -> tuple[Path, ...]:
        """Return the layer files of a base as `export_base_layers` does, or export them `anew`."""
        sources = request.sources
        key = request.solver, base, sources.images.get(base), sources.platform, anew

        def find_or_export() -> tuple[Path, ...]:
            name, build_cache = self._find_immovable_name(base, sources), self._build_cache
            files: tuple[Path, ...] = ()
            if not anew and name and build_cache:
                # Files without bytes, if an earlier command has read the layers.
                layers = partial(build_cache.find_base_layers, name, sources.images[base], sibling_references)
                files = self._known_bases(name, lambda: tuple(map(self._shared.blobs.touch_layer, layers())))
            return files or self._export_base(
                base, name, SolveRequest(request.solver, f"FROM {base}\n", sources)
            )

        return self._base_layers(key, find_or_export)

    def _find_known_layers(self, order: BuildRequest) -> frozenset[str]:
        """Return the digests of layers that the store has from the last build of an order's cell.

        BuildKit does not send those of them that the image still has.
        """
        layers = self._build_cache.find_cell_layers(order) if self._build_cache else ()
        for layer in layers:
            self._shared.blobs.touch_layer(layer.exported)
            self._shared.blobs.touch_layer(layer.digest)
            self._shared.rewriter.reuse_layer(layer, order.compression)
        return frozenset(layer.digest for layer in layers)

    def _find_immovable_name(self, base: str, sources: BuildSources) -> str | None:
        """Return a name for a base that never moves; None if the engine has it by its name only."""
        source = sources.images.get(base, "")
        digest = self._docker.find_pinned_digest(source) or source.partition("@")[2]
        return f"{digest} {sources.platform}" if digest else None

    def _export_base(self, base: str, name: str | None, request: SolveRequest) -> tuple[Path, ...]:
        """Return the exported layers of a base, and note them under its immovable name."""
        with self._open_layout() as build_layout:
            digest, _ = self._export_image(request, UNATTESTED, build_layout.folder)
            image = layout.LayoutImage(build_layout.folder, digest)
        prefix = SharedPrefix(base, request.dockerfile)
        self._prefixes_built(make_prefix_key(prefix, request), lambda: False)  # the export has built it
        if self._build_cache and name:
            self._build_cache.note_base(name, image.layers)
        return image.layer_files

    def _build_with_caches(
        self, request: SolveRequest, folder: Path, order: BuildRequest
    ) -> tuple[str, bool]:
        """Build an order's image, after its prefixes, into the layout `folder`.

        Its steps are read from the caches, and written to them. Returns as `_export_image` does.
        """
        image, _, tag = order.reference.rpartition(":")
        cache = format_cache_name(labels.get_cell(tag), image, labels.get_cell(tag))
        caches = self._options.caches
        options = [f"--attest={spec}" for spec in self._options.attest] or UNATTESTED
        prefixes_imported = False
        if order.no_cache or self._options.no_cache:
            options = [*options, "--no-cache"]
        else:
            options = [*options, *caches.format_import_options(cache)]
            prefixes_imported = self._build_prefixes(order.shared_prefixes, request)
        digest, imported = self._export_image(request, options, folder)
        if not order.no_cache:
            self._write_cache(cache, request)
        return digest, prefixes_imported or imported

    def _solve_prefix(self, prefix: SharedPrefix, request: SolveRequest, options: Sequence[str]) -> bool:
        """Solve the request for a prefix; keep the bytes of exported layers until an image uses them."""
        if not prefix.exported:
            return super()._solve_prefix(prefix, request, options)
        with self._open_layout() as build_layout:
            digest, imported = self._export_image(request, options, build_layout.folder)
            image = layout.LayoutImage(build_layout.folder, digest)
            unused = self._kept_layers.enter_context(contextlib.ExitStack())
            unused.enter_context(build_layout.blobs.keep_layers(image.archives))
            self._unused_layers[request.solver, prefix.name] = unused
        return imported

    def _export_image(self, request: SolveRequest, options: Sequence[str], folder: Path) -> tuple[str, bool]:
        """Build an image into the layout `folder`; return its digest, and as `Solver.solve` does.

        Its own layers stay uncompressed: they are compressed once, after their times are clamped.
        """
        output = {"type": "oci", "tar": "false", "dest": str(folder), "compression": "uncompressed"}
        return request.solver.solve_image(request, [*options, "--output", format_attributes(output)])

    @contextlib.contextmanager
    def _open_layout(self, *, unshared: bool = False) -> Iterator[_BuildLayout]:
        """Yield a layout for exclusive use, because concurrent writes of the same blob make builds fail.

        Unless it is `unshared`, it shares its blobs with others, so layers, above all those of the base, are
        sent and stored only once.
        """
        if unshared:
            with tempfile.TemporaryDirectory(dir=self._folder) as name:
                (blobs := Path(name, "blobs")).mkdir()
                yield _BuildLayout.from_folders(Path(name), blobs)
            return
        with self._lock:
            build_layout = self._idle.pop() if self._idle else None
        if build_layout is None:
            folder = Path(tempfile.mkdtemp(dir=self._folder))
            (folder / "blobs").symlink_to(self._shared.folder)
            build_layout = replace(self._shared, folder=folder)
        try:
            yield build_layout
        finally:
            with self._lock:
                self._idle.append(build_layout)
