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
from imagematrix.build.executor.solver import Solver
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


@dataclass(frozen=True, slots=True)
class _BuildLayout:
    """An OCI layout, the rewriter of its images, and its blobs, which other layouts may share."""

    folder: Path
    rewriter: Rewriter
    blobs: layout.Blobs

    @classmethod
    def of(cls, folder: Path, blobs: Path) -> _BuildLayout:
        names = blobs / "sha256"
        return cls(folder, Rewriter(names, int(identity.EPOCH)), layout.Blobs(names))


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
        earlier: BuildCache | None = None,
        no_cache: bool = False,
        caches: ExternalCaches | None = None,
    ) -> None:
        self._docker = docker
        self._builder = builder
        self._earlier = earlier
        self._attest = attest
        self._no_cache = no_cache
        self._caches = caches or ExternalCaches()
        self._imported = False  # whether an answer of `export`, for labels of images, may be from a cache
        self._require()
        self._solver = Solver(docker, builder, proxy=proxy)
        self._scratch = self._solver.folder
        blobs = Path(tempfile.mkdtemp(dir=self._scratch))
        self._shared = _BuildLayout.of(blobs, blobs)
        self._base_layers: SingleFlight[tuple[str, str | None, str, bool], tuple[Path, ...]] = SingleFlight()
        self._known_bases: SingleFlight[str, tuple[Path, ...]] = SingleFlight()
        self._begun: SingleFlight[tuple[object, ...], bool] = (
            SingleFlight()
        )  # beginnings, by name and sources
        self._kept = contextlib.ExitStack()  # layers that images need to the end
        self._unused: dict[str, contextlib.ExitStack] = {}  # layers of beginnings that no image uses yet
        self._idle: list[_BuildLayout] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._solver.stop()
        self._kept.close()
        self._solver.close()

    def _require(self) -> None:
        """Raise EngineError or UsageError if the engine cannot build what is wanted."""
        if self._builder is None:
            self._require_builds()
        if self._attest and not self.reproducible:
            remedy = "use the containerd image store, or --builder"
            raise UsageError("the engine's classic image store cannot keep attestations", remedy=remedy)
        if self._caches and not self.reproducible:
            remedy = "use the containerd image store, or --builder"
            message = "an engine with the classic image store cannot import or export caches"
            raise UsageError(message, remedy=remedy)

    def _require_builds(self) -> None:
        version = self._docker.version
        if version is None:
            remedy = "use Docker, or --builder; images can be selected, pulled and run with this engine"
            raise EngineError("the engine is Podman, which has no BuildKit for builds", remedy=remedy)
        if not releases.BUILDS.is_in(version):
            remedy = f"install {releases.BUILDS} or newer; images can be selected and run with this version"
            raise EngineError(f"Docker {version} is too old for builds", remedy=remedy)

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
        current = self._docker.digest(reference)
        if self._builder is None and current == digest:
            return None
        if self._solver.elsewhere and digest in self._solver.digests(reference):
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
        self, dockerfile: str, sources: BuildSources, first: Sequence[SharedPrefix] = ()
    ) -> dict[str, str]:
        """Build `dockerfile` and return the text files in its last stage, by name."""
        log, cache = io.StringIO(), format_cache_name("export", dockerfile)
        if not self._no_cache:
            self._imported |= self._build_prefixes(first, sources, log, lambda _: None)
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            options = ["--no-cache"] if self._no_cache else self._caches.format_import_options(cache)
            options += ["--output", format_attributes({"type": "local", "dest": folder})]
            self._imported |= self._solver.solve(options, dockerfile, sources, log, lambda _: None)
            self._write_cache(cache, dockerfile, sources, log, lambda _: None)
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
        return self._base_layers(
            key,
            lambda: (
                (not anew and self._find_known_base(base, sources, sibling_references))
                or self._export_base(base, sources)
            ),
        )

    def _find_known_base(
        self, base: str, sources: BuildSources, sibling_references: Collection[str]
    ) -> tuple[Path, ...]:
        """Return the layer files of `base`, without bytes, if an earlier command has read its layers."""
        name, earlier = self._find_immovable_name(base, sources), self._earlier
        if name is None or earlier is None:
            return ()
        layers = partial(earlier.find_base_layers, name, sources.images[base], sibling_references)
        return self._known_bases(name, lambda: tuple(map(self._shared.blobs.touch_layer, layers())))

    def _find_known_layers(self, order: BuildRequest) -> frozenset[str]:
        """Return the digests of layers that the store has from the last build of an order's cell.

        BuildKit does not send those of them that the image still has.
        """
        layers = self._earlier.find_cell_layers(order) if self._earlier else ()
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
        alone = SharedPrefix(base, f"FROM {base}\n")
        with self._open_layout() as own:
            image, _ = self._export_prefix(alone, own.folder, sources, io.StringIO(), lambda _: None)
        self._begun(_prefix_inputs(alone, sources), lambda: False)  # the export has built it
        name = self._find_immovable_name(base, sources)
        if self._earlier and name:
            self._earlier.note_base(name, image.layers)
        return tuple(map(image.blob, image.layers))

    @contextlib.contextmanager
    def make(self, order: BuildRequest, log: TextIO, step: Callable[[str], None]) -> Iterator[BuiltImage]:
        """Build an image into a layout (containerd store), or into the store (classic) without its name."""
        options = [f"--attest={spec}" for spec in self._attest] or ["--provenance=false"]
        no_cache = order.no_cache or self._no_cache
        options += ["--no-cache"] if no_cache else []
        first = () if no_cache else order.shared_prefixes
        if not self.reproducible:
            options += [f"--label={key}={value}" for key, value in sorted(order.labels.items())]
            self._build_prefixes(first, order.sources, log, step)
            options += ["--output", "type=docker"]
            made, _ = self._solver.metadata(options, order.dockerfile, order.sources, log, step)
            yield BuiltImage(digest=made["containerimage.config.digest"])
            return
        with contextlib.ExitStack() as stack:
            own = stack.enter_context(self._open_layout(unshared=order.unshared))
            base = find_last_base(order.dockerfile)
            if base and not order.unshared:
                step(f"exporting {base}")
                # BuildKit would send its layers with each image. If that fails, the build says so in its log.
                with contextlib.suppress(BuildError):
                    self.export_base_layers(base, order.sources, order.sibling_references)
            known = frozenset() if order.unshared else self._find_known_layers(order)
            image_name, _, tag = order.reference.rpartition(":")
            cache = format_cache_name(labels.get_cell(tag), image_name, labels.get_cell(tag))
            options += [] if no_cache else self._caches.format_import_options(cache)
            begun = self._build_prefixes(first, order.sources, log, step)
            digest, imported = self._export_image(
                options, own.folder, order.dockerfile, order.sources, log, step
            )
            if not order.no_cache:
                self._write_cache(cache, order.dockerfile, order.sources, log, step)
            # Docker's classic store needs every layer with every image, so they are kept to the end.
            users = stack if self._docker.has_manifests else self._kept
            layers = self._read_layers(own.folder, digest)
            users.enter_context(own.blobs.keep_layers(layers))
            for one in first:
                if unused := self._unused.pop(one.name, None):
                    unused.close()
            files = (
                self.export_base_layers(base, order.sources, order.sibling_references, anew=order.unshared)
                if base
                else ()
            )
            kept = frozenset(f"sha256:{file.name}" for file in files)
            if not order.unshared and not kept <= {*layers}:  # BuildKit has them in another form by now
                raise layout.MissingBlobError(base)
            if self._attest:
                image, attested = own.rewriter.index(digest, kept, order.compression)
            else:
                image, attested = own.rewriter.image(digest, kept, order.compression), None
            users.enter_context(own.blobs.keep_layers(layout.LayoutImage(own.folder, image).archives))
            if self._docker.find_pinned_digest(order.sources.images.get(base or "", "")):
                known |= kept
            yield BuiltImage(
                digest=image,
                layout=own.folder,
                stored_layers=known,
                attested=attested,
                imported=begun or imported or self._imported,
            )
            if self._earlier:
                rewritten = [layer for layer in layers if layer not in kept]
                self._earlier.note_cell(
                    order, [own.rewriter.layer(layer, order.compression) for layer in rewritten]
                )

    def _build_prefixes(
        self, first: Sequence[SharedPrefix], sources: BuildSources, log: TextIO, step: Callable[[str], None]
    ) -> bool:
        """Build beginnings that have not been built yet, several at a time.

        Returns whether results may be those of an imported cache.
        """

        def begin(last: SharedPrefix) -> bool:
            # Each comes after those that it needs.
            needed = [one for one in first if one.name in last.needs or one is last]
            imported = [self._begun(_prefix_inputs(one, sources), partial(build, one)) for one in needed]
            return any(imported)

        def build(one: SharedPrefix) -> bool:
            cache = format_cache_name("shared", one.name)
            options = self._caches.format_import_options(cache)
            own = io.StringIO()  # the outputs of several builds at a time could not be told apart
            try:
                if one.exported:
                    imported = self._export_shared(one, sources, own, step, options)
                else:
                    options += ["--provenance=false", "--output=type=cacheonly"]
                    imported = self._solver.solve(options, one.dockerfile, sources, own, step)
                self._write_cache(cache, one.dockerfile, sources, own, step)
            finally:
                log.write(own.getvalue())
            return imported

        if not first:
            return False
        step("building what images share")
        with ThreadPoolExecutor(len(first), thread_name_prefix="begin") as pool:
            return any(list(pool.map(begin, first)))

    def _write_cache(
        self,
        name: str,
        dockerfile: str,
        sources: BuildSources,
        log: TextIO,
        step: Callable[[str], None],
    ) -> None:
        """Write the results of steps that have just run to the caches; raise BuildError.

        It is a build of its own, in which no step runs, as its turn to write into a folder may come late.
        """
        with self._caches.format_export_options(name) as options:
            if options:
                step("writing the cache")
                options += ["--provenance=false", "--output=type=cacheonly"]
                self._solver.solve(options, dockerfile, sources, log, step)

    def _export_shared(
        self,
        one: SharedPrefix,
        sources: BuildSources,
        log: TextIO,
        step: Callable[[str], None],
        options: Sequence[str],
    ) -> bool:
        """Export layers that images share; their bytes are kept until an image uses them.

        Returns whether results may be those of an imported cache.
        """
        with self._open_layout() as own:
            image, imported = self._export_prefix(one, own.folder, sources, log, step, options)
            unused = self._kept.enter_context(contextlib.ExitStack())
            unused.enter_context(own.blobs.keep_layers(image.archives))
            self._unused[one.name] = unused
        return imported

    def parts(self, made: BuiltImage) -> tuple[SizedLayer, ...]:
        """Return the layers of a built image, the lowest first; see Builder."""
        if made.layout:
            return layout.LayoutImage(made.layout, made.digest).parts
        return self._docker.parts(made.digest) or ()

    def _read_layers(self, folder: Path, digest: str) -> list[str]:
        images = (
            layout.LayoutIndex(folder, digest).images
            if self._attest
            else (layout.LayoutImage(folder, digest),)
        )
        return [layer for image in images for layer in image.archives]

    def _export_prefix(
        self,
        one: SharedPrefix,
        folder: Path,
        sources: BuildSources,
        log: TextIO,
        step: Callable[[str], None],
        options: Sequence[str] = (),
    ) -> tuple[layout.LayoutImage, bool]:
        """Build the image of a beginning, without attestations, into the layout `folder`.

        Returns also whether results may be those of an imported cache.
        """
        options = ["--provenance=false", *options]
        digest, imported = self._export_image(options, folder, one.dockerfile, sources, log, step)
        return layout.LayoutImage(folder, digest), imported

    def _export_image(
        self,
        options: list[str],
        folder: Path,
        dockerfile: str,
        sources: BuildSources,
        log: TextIO,
        step: Callable[[str], None],
    ) -> tuple[str, bool]:
        """Build an image into the layout `folder`; return its digest, and as `Solver.solve` does.

        Its own layers stay uncompressed: they are compressed once, after their times are clamped.
        """
        output = {"type": "oci", "tar": "false", "dest": str(folder), "compression": "uncompressed"}
        options = [*options, "--output", format_attributes(output)]
        made, imported = self._solver.metadata(options, dockerfile, sources, log, step)
        return str(made["containerimage.digest"]), imported

    @contextlib.contextmanager
    def _open_layout(self, *, unshared: bool = False) -> Iterator[_BuildLayout]:
        """Yield a layout for exclusive use, because concurrent writes of the same blob make builds fail.

        Unless it is `unshared`, it shares its blobs with others.
        """
        if unshared:
            with tempfile.TemporaryDirectory(dir=self._scratch) as name:
                (blobs := Path(name, "blobs")).mkdir()
                yield _BuildLayout.of(Path(name), blobs)
            return
        with self._lock:
            layout = self._idle.pop() if self._idle else replace(self._shared, folder=self._make_layout())
        try:
            yield layout
        finally:
            with self._lock:
                self._idle.append(layout)

    def _make_layout(self) -> Path:
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        # Layouts share their blobs, so layers, above all those of the base, are sent and stored only once.
        (folder / "blobs").symlink_to(self._shared.folder)
        return folder

    def stop(self) -> None:
        """Stop all running builds; those that do not end soon are killed."""
        self._solver.stop()


def _prefix_inputs(beginning: SharedPrefix, sources: BuildSources) -> tuple[object, ...]:
    """Return what two orders have in common if they have one beginning in common."""
    text = beginning.dockerfile
    context = sources.context if re.search("copy|add|mount", text, re.IGNORECASE) else None
    named = [(name, value) for each in (sources.images, sources.args) for name, value in each.items()]
    return beginning.name, sources.platform, context, *sorted(one for one in named if one[0] in text)
