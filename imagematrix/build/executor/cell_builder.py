"""Making the image of one cell: build, audit, store. Work that cells share is done once."""

from __future__ import annotations

import contextlib
import tempfile
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Self

from imagematrix.audit import proven_facts
from imagematrix.audit import warnings as audit_warnings
from imagematrix.audit.contradictions import audit_layers, find_contradictions, suggest_remedy
from imagematrix.audit.images import device_code_entries
from imagematrix.audit.runtime_requirements import list_runtime_requires
from imagematrix.build.dockerfile.dockerfile import find_last_base
from imagematrix.build.dockerfile.steps import Recipe
from imagematrix.build.executor import labels
from imagematrix.build.executor.compiler import Compilers
from imagematrix.build.executor.image_difference import compare_with_stored, find_difference
from imagematrix.build.executor.image_rewriter import label_image
from imagematrix.build.executor.logs import open_log
from imagematrix.build.executor.result import ENGINE, BuildStage, BuildStatus, Result
from imagematrix.build.executor.shared_prefixes import find_shared_prefixes
from imagematrix.build.matrix import promised_variants
from imagematrix.build.plan import driver
from imagematrix.build.plan.driver import DriverFolder
from imagematrix.build.plan.plan import PlanStatus
from imagematrix.build.plan.protocols import BuildRequest, BuildSources, BuiltImage, StoppedError
from imagematrix.build.plan.remote_driver import RemoteDriver
from imagematrix.build.trim import program
from imagematrix.common import record
from imagematrix.common.single_flight import SingleFlight
from imagematrix.errors import AuditError, BuildError, ImagematrixError, UsageError
from imagematrix.images.catalog import labels as labels_of
from imagematrix.images.oci import layout
from imagematrix.images.oci.compression import get_libzstd_version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TextIO

    from imagematrix.audit.images.layer import Layer
    from imagematrix.audit.images.layers import Layers
    from imagematrix.build.executor.image_tester import ImageTester, ImageTestResult
    from imagematrix.build.plan.context import Snapshots
    from imagematrix.build.plan.plan import Plan, Planned
    from imagematrix.build.plan.protocols import Builder, Store
    from imagematrix.images.catalog.catalog import Variant


SHOWN = 3  # layers listed in a message
LONGEST = 60  # characters of an instruction


@dataclass(frozen=True, slots=True)
class BuildBackend:
    """What carries out a plan: the builder and the store of its images, and what audits and tests them.

    `layers` reads the layers of images, each once. Without a `tester`, nothing is tested.
    """

    builder: Builder
    store: Store
    layers: Layers
    tester: ImageTester | None = None


@dataclass(slots=True)
class CellRun:
    """The making of one image, with its `log` and the `stage` that it has reached, and who is told of it.

    `on_step` is told the current instruction, `on_output` what is written to the log, and `release_slot` that
    the next build may start.
    """

    item: Planned
    log: Path
    on_step: Callable[[str], None]
    on_output: Callable[[str], None]
    release_slot: Callable[[], None]
    stage: BuildStage = BuildStage.PROMISE


class CellBuilder:
    """Makes the images of a plan; thread-safe. Use it as a context manager.

    With `verify` it makes each image twice, even up-to-date ones.
    """

    def __init__(
        self,
        items: Sequence[Planned],
        plan: Plan,
        snapshots: Snapshots,
        backend: BuildBackend,
        *,
        verify: bool,
    ) -> None:
        self._items = items
        self._needed_references = {need for item in items for need in item.needs}
        self._to_build = [item for item in items if verify or item.status is PlanStatus.BUILD]
        self._bases = plan.bases
        self._build_inputs = plan.build_inputs
        self._snapshots = snapshots
        self._builder = backend.builder
        self._store = backend.store
        self._layers = backend.layers
        self._tester = backend.tester
        self._verify = verify

        def export(dockerfile: str, sources: BuildSources) -> dict[str, str]:
            return self._builder.export(dockerfile, sources, self._shared_prefixes[dockerfile])

        self._compilers = Compilers(self._to_build, export)
        self._built_images: dict[str, BuiltImage] = {}
        self._sibling_references = frozenset(item.reference for item in items)
        self._shared_prefixes = find_shared_prefixes(
            {item.reference: _make_recipe(item.dockerfile, item) for item in self._to_build},
            {text: _make_recipe(text, item) for text, item in self._compilers.dockerfiles.items()},
            parallelism=self._builder.parallel_exports,
        )
        self._kept_layouts = contextlib.ExitStack()  # layouts that other images build on
        self._pins: dict[str, str | None] = {}
        self._missing_bases: dict[str, UsageError] = {}  # bases that cannot be had
        self._program: Path | None = None  # the folder with the program for builds that trim
        self._drivers: SingleFlight[str, Path] = SingleFlight()  # the folders of drivers, by their digests

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kept_layouts.close()

    def stop(self) -> None:
        """Stop the builds, audits and tests that are running."""
        self._builder.stop()
        self._layers.stop()
        if self._tester:
            self._tester.stop()

    def prepare(self) -> None:
        """Pin the bases and copy the contexts; their cells report what is missing.

        All contexts, and drivers that are not downloaded, are copied at the start, because their files may be
        edited during the builds. Raises EngineError.
        """
        items = (item for item in self._items if self._verify or item.status is not PlanStatus.UP_TO_DATE)
        for name in dict.fromkeys(name for item in items for name in item.bases):
            try:
                self._pins[name] = self._builder.pin_by_immovable_name(name, self._bases[name])
            except UsageError as error:
                self._missing_bases[name] = error
        trims = any(item.trims for item in self._to_build)
        folder = self._snapshots.folder
        self._program = program.write_program(folder) if trims else None
        for item in self._to_build:
            if isinstance(item.driver, DriverFolder):
                with contextlib.suppress(ImagematrixError, OSError):  # reported by its cells
                    self._copy_driver(item.driver)
        for context in dict.fromkeys(item.cell.image.context for item in self._to_build):
            with contextlib.suppress(ImagematrixError, OSError):  # reported by its cells
                self._snapshots.take(context)

    def query_compilers(self) -> None:
        """Query the CPU flags while the first images are built; their builds report the errors."""
        for item in self._compilers.choose_representatives():
            with contextlib.suppress(ImagematrixError, OSError):
                self._compilers.get_flags(item, self._find_sources(item))

    def export_bases(self) -> None:
        """Export the bases of the images and read them; the builds report the errors.

        Images are thus built while the layers of their bases are read.
        """
        firsts: dict[tuple[str | None, str], Planned] = {}
        for item in self._to_build:
            firsts.setdefault((find_last_base(item.dockerfile), item.cell.platform), item)
        paths: list[Path] = []
        for (base, _), item in firsts.items():
            if base in item.bases:
                with contextlib.suppress(ImagematrixError, OSError):
                    paths += self._builder.export_base_layers(
                        base, self._find_sources(item), self._sibling_references
                    )
        with contextlib.suppress(ImagematrixError, OSError, layout.MissingBlobError):
            self._read_layers(paths)

    def make(self, run: CellRun) -> Result:
        """Make and store one image, or adopt it; raise ImagematrixError or OSError on failure."""
        item = run.item
        if item.status is PlanStatus.BUILD or self._verify:
            return self._build(run)
        with open_log(run.log, run.on_output) as log:
            if item.earlier:
                return self._reuse_earlier_version(run, item.earlier, log)
            run.stage = BuildStage.TEST
            test = self._test_stored(run, item.reference, item.labels, log)
            if item.status is PlanStatus.UP_TO_DATE:
                return Result(item=item, status=BuildStatus.TESTED, test=test)
            run.stage = BuildStage.STORE
            return replace(self._adopt(item), test=test)

    def _build(self, run: CellRun) -> Result:
        item = run.item
        order = BuildRequest(
            reference=item.reference,
            dockerfile=item.dockerfile,
            sources=self._find_sources(item, run.on_step),
            sibling_references=self._sibling_references,
            shared_prefixes=self._shared_prefixes[item.reference],
            compression=item.cell.image.compression,
        )
        if not self._compilers.is_querying(item):
            self._compilers.get_flags(item, order.sources)  # unknown flags are reported before the build
        with open_log(run.log, run.on_output) as log:
            try:
                return self._take_stages(run, order, log)
            except layout.MissingBlobError:  # the store lost a layer, or another store needs it
                return self._take_stages(run, replace(order, unshared=True), log)

    def _take_stages(self, run: CellRun, order: BuildRequest, log: TextIO) -> Result:
        """Build an image, audit, label, test and store it: the stages, in their order."""
        item = run.item
        promise = cache(partial(self._promise_variant, item, order))
        order = self._builder.add_early_labels(order, lambda: labels.compose_labels(item, promise()))
        with contextlib.ExitStack() as stack:
            run.stage = BuildStage.BUILD
            image = self._build_image(run, order, log, stack)
            run.stage = BuildStage.AUDIT
            self._require_within_budget(item, image)
            # The compiler, if there is one, has stated the flags meanwhile.
            entry, warnings = self._audit(item, image, promise())
            run.stage = BuildStage.LABEL
            if entry is not promise():
                order = replace(order, labels=labels.compose_labels(item, entry))
                image = label_image(image, order.labels)
            run.stage = BuildStage.TEST
            if self._verify:
                self._build_again(order, image, log)
            test = self._test_built(run, entry, order, image, log)
            run.stage = BuildStage.STORE
            result = self._store_image(item, order, image)
            if order.reference in self._needed_references:  # images built on it may take it from its layout
                self._kept_layouts.push(stack.pop_all())
        self._built_images[order.reference] = image
        keeps_layers = self._store.keeps_layers(image)
        return replace(
            result,
            reproducible=keeps_layers,
            warnings=(*warnings, *result.warnings),
            compression=str(order.compression) if keeps_layers else ENGINE,
            libzstd=get_libzstd_version() if keeps_layers and order.compression.type == "zstd" else None,
            labels=order.labels,
            imported_cache=image.imported,
            test=test,
        )

    def _promise_variant(self, item: Planned, order: BuildRequest) -> Variant:
        """Return the catalog entry that a cell promises; raise BuildError if its CPU flags are unknown.

        A compiler may state the flags, which takes a build, but only one.
        """
        flags = self._compilers.get_flags(item, order.sources)
        return promised_variants.make_variant(item.cell, flags, item.reference)

    def _reuse_earlier_version(self, run: CellRun, earlier: str, log: TextIO) -> Result:
        """Store the image of an earlier version under the labels of this one, over the same layers."""
        item = run.item
        with tempfile.TemporaryDirectory(dir=self._snapshots.folder) as name:
            folder = Path(name)
            earlier_image = self._store.load_without_layers(earlier, folder / "layout")
            image_labels = earlier_image.layout_image.configuration["config"]["Labels"]
            run.stage = BuildStage.AUDIT
            self._require_within_budget(item, earlier_image)
            run.stage = BuildStage.TEST
            test = self._test_stored(run, earlier, image_labels, log)
            run.stage = BuildStage.STORE
            entry = labels_of.read_variant(image_labels, reference=item.reference, digest=None, size=None)
            order = BuildRequest(
                reference=item.reference,
                dockerfile=item.dockerfile,
                sources=BuildSources(context=folder, platform=item.cell.platform),
                labels=labels.compose_labels(item, entry),
                sibling_references=self._sibling_references,
                compression=item.cell.image.compression,
            )
            digest = self._store.store(order, label_image(earlier_image, order.labels))
        return Result(item=item, status=BuildStatus.ADOPTED, digest=digest, labels=order.labels, test=test)

    def _build_image(
        self, run: CellRun, order: BuildRequest, log: TextIO, stack: contextlib.ExitStack
    ) -> BuiltImage:
        """Build an image, which may be removed when `stack` is closed; then the next build may start."""
        try:
            image = stack.enter_context(self._builder.make(order, log, run.on_step))
        except BuildError as error:
            raise self._compilers.explain_failure(run.item, error) from error
        self._snapshots.require_unchanged(run.item.cell.image.context)
        if not self._verify:
            run.release_slot()
        return image

    def _require_within_budget(self, item: Planned, image: BuiltImage) -> None:
        """Raise BuildError, which names the largest layers, if layers have more bytes than the budget.

        The classic image store has no compressed layers: their uncompressed sizes are compared.
        """
        budget = item.cell.image.budget
        parts = () if budget is None else self._builder.list_parts(image)
        total = sum(part.size for part in parts)
        if budget is None or total <= budget:
            return
        from rich.filesize import decimal

        largest = sorted(parts, key=lambda part: -part.size)[:SHOWN]
        words = [(part.size, part.made_by or part.digest) for part in largest]
        layers = "; ".join(
            f"{decimal(size, precision=2)} {text if len(text) <= LONGEST else f'{text[: LONGEST - 1]}…'}"
            for size, text in words
        )
        uncompressed = "uncompressed, as the classic image store has no compressed layers"
        kind = "compressed" if image.layout else uncompressed
        raise BuildError(
            f"the image has {decimal(total, precision=2)} ({kind}), "
            f"more than its budget of {decimal(budget, precision=2)}; largest layers: {layers}",
            remedy="make these layers smaller, or raise `budget` in matrix.yaml",
        )

    def _test_built(
        self, run: CellRun, entry: Variant, order: BuildRequest, image: BuiltImage, log: TextIO
    ) -> ImageTestResult | None:
        item = run.item
        if not self._tester or not item.cell.image.test or item.status is PlanStatus.UP_TO_DATE:
            return None
        run.on_step("testing")
        return self._tester.test_built(item, entry, order, image, log)

    def _test_stored(
        self, run: CellRun, reference: str, image_labels: Mapping[str, str], log: TextIO
    ) -> ImageTestResult | None:
        """Test an image that is stored under a reference, with its `image_labels` labels."""
        item = run.item
        if not self._tester or not item.cell.image.test:
            return None
        run.on_step("testing")
        # What this build takes over from the engine is not in the store yet.
        is_in_engine_only = item.status is PlanStatus.ADOPT and not item.earlier
        digest = None if is_in_engine_only else self._store.inspect_image(reference).digest
        entry = labels_of.read_variant(image_labels, reference=reference, digest=digest, size=None)
        return self._tester.test_stored(item, entry, log)

    def _adopt(self, item: Planned) -> Result:
        digest = self._store.adopt(item.reference)
        compression = None if self._store.keeps_layers(BuiltImage(digest=digest)) else ENGINE
        return Result(item=item, status=BuildStatus.ADOPTED, digest=digest, compression=compression)

    def _store_image(self, item: Planned, order: BuildRequest, image: BuiltImage) -> Result:
        """Store a built image, or compare it with the stored one if that is only verified.

        Raises BuildError if it differs from that.
        """
        if item.status is PlanStatus.UP_TO_DATE:
            warning = compare_with_stored(self._store.inspect_image(item.reference), image.layout_image)
            warnings = (warning,) if warning else ()
            return Result(item=item, status=BuildStatus.VERIFIED, digest=image.digest, warnings=warnings)
        if item.status is PlanStatus.ADOPT and not item.earlier:
            return self._adopt(item)
        return Result(item=item, status=BuildStatus.BUILT, digest=self._store.store(order, image))

    def _build_again(self, order: BuildRequest, image: BuiltImage, log: TextIO) -> None:
        """Raise BuildError if a second build of an image, without a cache, differs from it."""
        with self._builder.make(replace(order, no_cache=True), log, lambda _: None) as second_build:
            second_image = label_image(second_build, order.labels)
            difference = find_difference(image.layout_image, second_image.layout_image)
        if difference:
            raise BuildError(f"not reproducible: the second build differs: {difference}")

    def _find_sources(self, item: Planned, on_step: Callable[[str], None] = lambda _: None) -> BuildSources:
        for name in item.bases:
            if name in self._missing_bases:
                raise self._missing_bases[name]
        sources = {name: self._pins[name] for name in item.bases}
        for name in item.needs:
            built = self._built_images.get(name)
            sources[name] = self._store.find_source(name, local=self._builder.local) or (
                built.source if built else None
            )
            if sources[name] is None:
                # BuildKit would take somebody else's image of this name from Docker Hub.
                message = f"the image that it builds on is not built yet: {name}"
                raise BuildError(message, remedy="build it first, or in the same build")
        images = {name: source for name, source in sources.items() if source}
        if item.trims:
            images[program.CONTEXT] = str(self._program)
        if item.driver:
            images[driver.CONTEXT] = str(self._copy_driver(item.driver, on_step))
        context = self._snapshots.take(item.cell.image.context)
        return self._build_inputs.make_sources(item.cell, context, images)

    def _copy_driver(
        self, source: DriverFolder | RemoteDriver, on_step: Callable[[str], None] = lambda _: None
    ) -> Path:
        """Return the copy of a driver for builds, downloaded if needed; `on_step` is told of that."""

        def copy() -> Path:
            folder = source.fetch_folder(on_step) if isinstance(source, RemoteDriver) else source
            return driver.copy_driver(folder, self._snapshots.folder)

        return self._drivers(source.digest, copy)

    def _audit(
        self, item: Planned, image: BuiltImage, promised_entry: Variant
    ) -> tuple[Variant, tuple[str, ...]]:
        """Return the catalog entry of an image as its bytes prove it, and warnings.

        `promised_entry` is the entry that its cell promises, and all that is known of an image without a
        layout. Raises AuditError if the bytes contradict it, or if a march is doubtful and `strict_march` is
        set.
        """
        if image.layout is None:
            return promised_entry, ()
        layers = self._read_layers(image.layout_image.layer_files)
        audited = audit_layers(layers, promised_entry, item.cell.optional_code)
        device_code_entries.require_matches(audited.device_code, audited.unmatched)
        entry = proven_facts.with_signing(audited, promised_entry)
        entry = proven_facts.with_code(audited, entry, trimmed=item.trims)
        contradictions = find_contradictions(audited, entry)
        if contradictions:
            raise AuditError("; ".join(map(str, contradictions)), remedy=suggest_remedy(contradictions))
        warnings = audit_warnings.warn_of_march(audited, entry)
        if warnings and item.cell.image.strict_march:
            raise AuditError("; ".join(warnings))
        warnings += audit_warnings.warn_of_runtime(audited, entry)
        warnings += audit_warnings.warn_of_nvml(entry.driver, audited.versions)
        entry = proven_facts.with_flags(audited, entry)
        proven = record.replace(
            entry,
            facts=proven_facts.find_proven_facts(audited, entry),
            libraries=audited.versions,
            runtime_requires=list_runtime_requires(image.layout_image.environment),
        )
        return proven, tuple(warnings)

    def _read_layers(self, paths: Sequence[Path]) -> list[Layer]:
        """Return the layers in these files; raise StoppedError after `stop`."""
        # Largest first, so that the others are read meanwhile.
        files = {f"sha256:{path.name}": path for path in sorted(paths, key=lambda path: -path.stat().st_size)}
        try:
            layer_contents = self._layers.read_layers(
                tuple(files), lambda digest: layout.require_blob(files[digest]).open("rb")
            )
        except CancelledError as error:
            raise StoppedError("stopped") from error
        layers = dict(zip(files, layer_contents, strict=True))
        return [layers[f"sha256:{path.name}"] for path in paths]


def _make_recipe(dockerfile: str, item: Planned) -> Recipe:
    image = item.cell.image
    return Recipe(
        dockerfile=dockerfile,
        platform=item.cell.platform,
        context=str(image.context),
        arguments=str(image.build_args),
        images={driver.CONTEXT: item.driver.digest} if item.driver else {},
    )
