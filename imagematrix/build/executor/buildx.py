"""Building images with `docker buildx`: one BuildKit solve for each.

BuildKit writes images into OCI layouts on disk, which keep a shared layer once. With the classic image store,
which does not support OCI layouts, it puts the image into the engine's store, without rewritten
timestamps.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

from imagematrix.build.dockerfile.dockerfile import find_last_base
from imagematrix.build.executor.caches import ExternalCaches, format_attributes, format_cache_name
from imagematrix.build.executor.image_rewriter import Rewriter
from imagematrix.build.executor.solver import Solver, SolveRequest
from imagematrix.build.plan import identity
from imagematrix.build.plan.protocols import BuildRequest, BuiltImage, SharedPrefix
from imagematrix.common.single_flight import SingleFlight
from imagematrix.errors import BuildError, EngineError, UsageError
from imagematrix.images.catalog import labels
from imagematrix.images.engine import releases
from imagematrix.images.oci import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from typing import TextIO

    from imagematrix.build.executor.build_cache import BuildCache
    from imagematrix.build.plan.protocols import BuildSources
    from imagematrix.build.stores.engine import EngineStore
    from imagematrix.images.oci.parts import SizedLayer


UNATTESTED = ["--provenance=false"]


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

    def list_layers(self, digest: str, *, is_index: bool) -> list[str]:
        """Return the layers of an exported image, or of an index with attestations."""
        if not is_index:
            return list(layout.LayoutImage(self.folder, digest).archives)
        images = layout.LayoutIndex(self.folder, digest).images
        return [layer for image in images for layer in image.archives]


class Buildx:
    """The Builder of `docker buildx`. Use it as a context manager.

    `builder` is the name of a builder of buildx, or of a docker context. If it is None, images are built by
    the engine `docker` itself, whose image store then decides whether timestamps are rewritten. `attest` are
    the attestations of each image, in the syntax of `docker buildx build --attest`. With `proxy` builds have
    the proxies of this process, and otherwise none, whatever docker's configuration says. Layers of `earlier`
    builds that the store has are not exported: images lack their bytes. With `no_cache` every step of each
    image runs, also those that images share. Steps have the results that are in `caches`, and leave theirs
    there.
    """

    def __init__(
        self,
        docker: EngineStore,
        builder: str | None = None,
        attest: Sequence[str] = (),
        *,
        proxy: bool = False,
        build_cache: BuildCache | None = None,
        no_cache: bool = False,
        caches: ExternalCaches | None = None,
    ) -> None:
        self._docker = docker
        self._builder = builder
        self._build_cache = build_cache
        self._attest = attest
        self._no_cache = no_cache
        self._caches = caches or ExternalCaches()
        self._imported = False  # whether an answer of `export`, for labels of images, may be from a cache
        self._require_capable_engine()
        self._solver = Solver(docker, builder, proxy=proxy)
        self._scratch = self._solver.folder
        blobs = Path(tempfile.mkdtemp(dir=self._scratch))
        self._shared = _BuildLayout.from_folders(blobs, blobs)
        self._base_layers: SingleFlight[tuple[str, str | None, str, bool], tuple[Path, ...]] = SingleFlight()
        self._known_bases: SingleFlight[str, tuple[Path, ...]] = SingleFlight()
        self._prefixes_built: SingleFlight[tuple[object, ...], bool] = (
            SingleFlight()
        )  # beginnings, by name and sources
        self._kept_layers = contextlib.ExitStack()  # layers that images need to the end
        self._unused_layers: dict[
            str, contextlib.ExitStack
        ] = {}  # layers of beginnings that no image uses yet
        self._idle: list[_BuildLayout] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._solver.stop()
        self._kept_layers.close()
        self._solver.close()

    def _require_capable_engine(self) -> None:
        """Raise EngineError or UsageError if the engine cannot build what is wanted."""
        version = self._docker.version
        if self._builder is None and version is None:
            remedy = "use Docker, or --builder; images can be selected, pulled and run with this engine"
            raise EngineError("the engine is Podman, which has no BuildKit for builds", remedy=remedy)
        if self._builder is None and version and not releases.BUILDS.is_in(version):
            remedy = f"install {releases.BUILDS} or newer; images can be selected and run with this version"
            raise EngineError(f"Docker {version} is too old for builds", remedy=remedy)
        if self._attest and not self.reproducible:
            remedy = "use the containerd image store, or --builder"
            raise UsageError("the engine's classic image store cannot keep attestations", remedy=remedy)
        if self._caches and not self.reproducible:
            remedy = "use the containerd image store, or --builder"
            message = "an engine with the classic image store cannot import or export caches"
            raise UsageError(message, remedy=remedy)

    @property
    def reproducible(self) -> bool:
        """Whether images are built in OCI layouts, which rewriting timestamps requires."""
        return self._builder is not None or self._docker.has_manifests

    @property
    def local(self) -> bool:
        """Whether a build finds the images of the engine by their names."""
        return self._builder is None

    def pin_by_digest(self, reference: str, digest: str) -> str | None:
        """Return the source of a base image with `digest`; None if its name is enough."""
        current = self._docker.get_digest(reference)
        if self._builder is None and current == digest:
            return None
        if self._solver.is_elsewhere and digest in self._solver.list_digests(reference):
            return None
        if current not in (None, digest) and not self._docker.is_published(f"{reference}@{digest}"):
            raise UsageError(
                f"the lock has {reference} as {digest}, which no registry has; the engine has {current}",
                remedy="run `imagematrix lock --upgrade` to build on the engine's image",
            )
        return f"docker-image://{reference}@{digest}"

    def pin_by_immovable_name(self, reference: str, digest: str) -> str | None:
        """Return the source of a base image as `pin_by_digest` does, by a name that cannot move."""
        where = self.pin_by_digest(reference, digest)
        if where is None and self.local:
            where = self._docker.pin_by_digest(reference, digest)
            if where is None:
                raise UsageError(f"{reference} is now another image in the engine", remedy="build again")
        return where

    def export(
        self, dockerfile: str, sources: BuildSources, prefixes: Sequence[SharedPrefix] = ()
    ) -> dict[str, str]:
        """Build `dockerfile` and return the text files in its last stage, by name."""
        request = SolveRequest(dockerfile, sources)
        if not self._no_cache:
            self._imported |= self._build_prefixes(prefixes, request)
        cache = format_cache_name("export", dockerfile)
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            options = ["--no-cache"] if self._no_cache else self._caches.format_import_options(cache)
            options += ["--output", format_attributes({"type": "local", "dest": folder})]
            self._imported |= self._solver.solve(request, options)
            self._write_cache(cache, request)
            return {path.name: path.read_text() for path in Path(folder).iterdir()}

    def export_base_layers(
        self, base: str, sources: BuildSources, sibling_references: Collection[str], *, anew: bool = False
    ) -> tuple[Path, ...]:
        """Return the layer files of `base` as images built on it have them; none with the classic store.

        Later builds, those of `sibling_references`, reuse them instead of exporting them at the same time.
        The files are empty if the layers are known from an earlier command, unless they are to be exported
        `anew`.
        """
        if not self.reproducible:
            return ()
        key = base, sources.images.get(base), sources.platform, anew

        def find_or_export() -> tuple[Path, ...]:
            name, build_cache = self._find_immovable_name(base, sources), self._build_cache
            files: tuple[Path, ...] = ()
            if not anew and name and build_cache:
                # Files without bytes, if an earlier command has read the layers.
                layers = partial(build_cache.find_base_layers, name, sources.images[base], sibling_references)
                files = self._known_bases(name, lambda: tuple(map(self._shared.blobs.touch_layer, layers())))
            return files or self._export_base(base, sources)

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

    def _export_base(self, base: str, sources: BuildSources) -> tuple[Path, ...]:
        prefix = SharedPrefix(base, f"FROM {base}\n")
        with self._open_layout() as build_layout:
            digest, _ = self._export_image(
                SolveRequest(prefix.dockerfile, sources), UNATTESTED, build_layout.folder
            )
            image = layout.LayoutImage(build_layout.folder, digest)
        self._prefixes_built(_make_prefix_key(prefix, sources), lambda: False)  # the export has built it
        name = self._find_immovable_name(base, sources)
        if self._build_cache and name:
            self._build_cache.note_base(name, image.layers)
        return tuple(map(image.get_blob_path, image.layers))

    @contextlib.contextmanager
    def make(self, order: BuildRequest, log: TextIO, on_step: Callable[[str], None]) -> Iterator[BuiltImage]:
        """Build an image into a layout (containerd store), or into the store (classic) without its name."""
        request = SolveRequest(order.dockerfile, order.sources, log, on_step)
        options = [f"--attest={spec}" for spec in self._attest] or UNATTESTED
        no_cache = order.no_cache or self._no_cache
        options = [*options, "--no-cache"] if no_cache else options
        prefixes = () if no_cache else order.shared_prefixes
        if not self.reproducible:
            yield self._build_in_engine(request, options, order, prefixes)
            return
        with contextlib.ExitStack() as stack:
            build_layout = stack.enter_context(self._open_layout(unshared=order.unshared))
            base = find_last_base(order.dockerfile)
            if base and not order.unshared:
                on_step(f"exporting {base}")
                # BuildKit would send its layers with each image. If that fails, the build says so in its log.
                with contextlib.suppress(BuildError):
                    self.export_base_layers(base, order.sources, order.sibling_references)
            known = frozenset() if order.unshared else self._find_known_layers(order)
            digest, imported = self._build_with_caches(request, options, build_layout.folder, order, prefixes)

            # Docker's classic store needs every layer with every image, so they are kept to the end.
            users = stack if self._docker.has_manifests else self._kept_layers
            layers = build_layout.list_layers(digest, is_index=bool(self._attest))
            users.enter_context(build_layout.blobs.keep_layers(layers))
            for prefix in prefixes:
                if unused := self._unused_layers.pop(prefix.name, None):
                    unused.close()

            # The base's layers stay as they are; the others are rewritten.
            sources, siblings = order.sources, order.sibling_references
            files = self.export_base_layers(base, sources, siblings, anew=order.unshared) if base else ()
            base_layers = frozenset(f"sha256:{file.name}" for file in files)
            if not order.unshared and not base_layers <= {
                *layers
            }:  # BuildKit has another form of them by now
                raise layout.MissingBlobError(base)
            rewriter, attested = build_layout.rewriter, None
            if self._attest:
                image_digest, attested = rewriter.rewrite_index(digest, base_layers, order.compression)
            else:
                image_digest = rewriter.rewrite_image(digest, base_layers, order.compression)
            rewritten_image = layout.LayoutImage(build_layout.folder, image_digest)
            users.enter_context(build_layout.blobs.keep_layers(rewritten_image.archives))
            if self._docker.find_pinned_digest(order.sources.images.get(base or "", "")):
                known |= base_layers
            yield BuiltImage(
                digest=image_digest,
                layout=build_layout.folder,
                stored_layers=known,
                attested=attested,
                imported=imported or self._imported,
            )
            if self._build_cache:
                rewritten = [layer for layer in layers if layer not in base_layers]
                self._build_cache.note_cell(
                    order, [rewriter.rewrite_layer(layer, order.compression) for layer in rewritten]
                )

    def _build_in_engine(
        self,
        request: SolveRequest,
        options: Sequence[str],
        order: BuildRequest,
        prefixes: Sequence[SharedPrefix],
    ) -> BuiltImage:
        """Build an order's image into the classic image store, with its labels but without its name."""
        self._build_prefixes(prefixes, request)
        labelled = [f"--label={key}={value}" for key, value in sorted(order.labels.items())]
        options = [*options, *labelled, "--output", "type=docker"]
        digest, _ = self._solver.solve_image(request, options, "containerimage.config.digest")
        return BuiltImage(digest=digest)

    def _build_with_caches(
        self,
        request: SolveRequest,
        options: Sequence[str],
        folder: Path,
        order: BuildRequest,
        prefixes: Sequence[SharedPrefix],
    ) -> tuple[str, bool]:
        """Build an order's image, after the prefixes `prefixes`, into the layout `folder`.

        Its steps are read from the caches, and written to them. Returns as `_export_image` does.
        """
        image, _, tag = order.reference.rpartition(":")
        cache = format_cache_name(labels.get_cell(tag), image, labels.get_cell(tag))
        if not (order.no_cache or self._no_cache):
            options = [*options, *self._caches.format_import_options(cache)]
        prefixes_imported = self._build_prefixes(prefixes, request)
        digest, imported = self._export_image(request, options, folder)
        if not order.no_cache:
            self._write_cache(cache, request)
        return digest, prefixes_imported or imported

    def _build_prefixes(self, prefixes: Sequence[SharedPrefix], request: SolveRequest) -> bool:
        """Build prefixes of a request that have not been built yet, several at a time.

        Returns whether results may be those of an imported cache.
        """

        def begin(last_prefix: SharedPrefix) -> bool:
            # Each comes after those that it needs.
            needed = [
                prefix for prefix in prefixes if prefix.name in last_prefix.needs or prefix is last_prefix
            ]
            imported = [
                self._prefixes_built(
                    _make_prefix_key(prefix, request.sources), partial(self._build_prefix, prefix, request)
                )
                for prefix in needed
            ]
            return any(imported)

        if not prefixes:
            return False
        request.on_step("building what images share")
        with ThreadPoolExecutor(len(prefixes), thread_name_prefix="begin") as pool:
            return any(list(pool.map(begin, prefixes)))

    def _build_prefix(self, prefix: SharedPrefix, whole: SolveRequest) -> bool:
        """Build a prefix of the request `whole`; return whether results may be from an imported cache."""
        cache = format_cache_name("shared", prefix.name)
        options = [*UNATTESTED, *self._caches.format_import_options(cache)]
        output = io.StringIO()  # the outputs of several builds at a time could not be told apart
        request = SolveRequest(prefix.dockerfile, whole.sources, output, whole.on_step)
        try:
            if prefix.exported:
                with self._open_layout() as shared:
                    digest, imported = self._export_image(request, options, shared.folder)
                    # The bytes of its layers are kept until an image uses them.
                    unused = self._kept_layers.enter_context(contextlib.ExitStack())
                    image = layout.LayoutImage(shared.folder, digest)
                    unused.enter_context(shared.blobs.keep_layers(image.archives))
                    self._unused_layers[prefix.name] = unused
            else:
                imported = self._solver.solve(request, [*options, "--output=type=cacheonly"])
            self._write_cache(cache, request)
        finally:
            whole.log.write(output.getvalue())
        return imported

    def _write_cache(self, name: str, request: SolveRequest) -> None:
        """Write the results of steps that have just run to the caches; raise BuildError.

        It is a build of its own, in which no step runs, as its turn to write into a folder may come late.
        """
        with self._caches.format_export_options(name) as options:
            if options:
                request.on_step("writing the cache")
                self._solver.solve(request, [*options, *UNATTESTED, "--output=type=cacheonly"])

    def list_parts(self, image: BuiltImage) -> tuple[SizedLayer, ...]:
        """Return the layers of a built image, the lowest first; see Builder."""
        if image.layout:
            return layout.LayoutImage(image.layout, image.digest).parts
        return self._docker.list_parts(image.digest) or ()

    def _export_image(self, request: SolveRequest, options: Sequence[str], folder: Path) -> tuple[str, bool]:
        """Build an image into the layout `folder`; return its digest, and as `Solver.solve` does.

        Its own layers stay uncompressed: they are compressed once, after their times are clamped.
        """
        output = {"type": "oci", "tar": "false", "dest": str(folder), "compression": "uncompressed"}
        return self._solver.solve_image(request, [*options, "--output", format_attributes(output)])

    @contextlib.contextmanager
    def _open_layout(self, *, unshared: bool = False) -> Iterator[_BuildLayout]:
        """Yield a layout for exclusive use, because concurrent writes of the same blob make builds fail.

        Unless it is `unshared`, it shares its blobs with others.
        """
        if unshared:
            with tempfile.TemporaryDirectory(dir=self._scratch) as name:
                (blobs := Path(name, "blobs")).mkdir()
                yield _BuildLayout.from_folders(Path(name), blobs)
            return
        with self._lock:
            if self._idle:
                layout = self._idle.pop()
            else:
                folder = Path(tempfile.mkdtemp(dir=self._scratch))
                # Layouts share their blobs, so layers, above all those of the base, are sent and stored only
                # once.
                (folder / "blobs").symlink_to(self._shared.folder)
                layout = replace(self._shared, folder=folder)
        try:
            yield layout
        finally:
            with self._lock:
                self._idle.append(layout)

    def stop(self) -> None:
        """Stop all running builds; those that do not end soon are killed."""
        self._solver.stop()


def _make_prefix_key(prefix: SharedPrefix, sources: BuildSources) -> tuple[object, ...]:
    """Return a key for a prefix built from these sources: two orders with the same key share its build."""
    text = prefix.dockerfile
    context = sources.context if re.search("copy|add|mount", text, re.IGNORECASE) else None
    values = [*sources.images.items(), *sources.args.items()]
    return prefix.name, sources.platform, context, *sorted(item for item in values if item[0] in text)
