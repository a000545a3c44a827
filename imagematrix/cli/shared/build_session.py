"""Shared by commands that plan a matrix: stores, the lock, and shards."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cached_property, partial

from imagematrix.cli.shared.garbage import without_garbage_collection
from imagematrix.cli.shared.output import print_info, warn
from imagematrix.common.json_documents import parse_natural
from imagematrix.common.text import format_count, quote_word
from imagematrix.errors import EngineError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import ExitStack
    from pathlib import Path

    from imagematrix.audit.images.cache import Cache
    from imagematrix.audit.images.layers import Layers
    from imagematrix.build.executor.caches import ExternalCaches
    from imagematrix.build.plan.build_inputs import BuildInputs
    from imagematrix.build.plan.execution import BuilderPlatforms, Execution
    from imagematrix.build.plan.explanation import BuildMethod
    from imagematrix.build.plan.plan import Plan, PlanContext
    from imagematrix.build.plan.protocols import Builder
    from imagematrix.build.stores.engine import EngineStore
    from imagematrix.build.stores.registry import RegistryStore
    from imagematrix.cli.shared.host_filter import HostNeeds
    from imagematrix.cli.shared.image_tests import ContainerTester


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """How images are built, or with what they are compared.

    Images are for the engine, or with `push` for their registries. Each of `builders` is NAME, or NAME=JOBS
    for a number of builds other than `jobs`; without any, the engine builds. `inputs` are the secrets and
    arguments from the command line. Each image gets the attestations `attest`. To `verify` images, and with
    `no_cache`, nothing of earlier builds is used; with `caches`, results that they have of others are. With
    `retest`, images that are up to date are tested again.
    """

    push: bool
    jobs: int = 1
    builders: Sequence[str] = ()
    attest: Sequence[str] = ()
    inputs: BuildInputs | None = None
    verify: bool = False
    no_cache: bool = False
    caches: ExternalCaches | None = None
    retest: bool = False

    def parse_builders(self) -> list[tuple[str | None, int]]:
        """Return the name and the jobs of each builder, None for the engine's own; raise UsageError."""
        builders: list[tuple[str | None, int]] = []
        for text in self.builders:
            name, equals, number = text.partition("=")
            jobs = parse_natural(number) if equals else self.jobs
            if not name or not jobs:
                raise UsageError(
                    f"--builder {text}: expected NAME or NAME=JOBS", remedy="such as --builder big=8"
                )
            builders.append((name, jobs))
        return builders or [(None, self.jobs)]


class BuildSession:
    """The builders, which build `jobs` images at a time, the store of the images, and the layers read so far.

    The builders are started when they are first needed. They use the `hints` of earlier builds, if any.
    """

    def __init__(
        self,
        options: BuildOptions,
        engine: EngineStore,
        remote: RegistryStore | None,
        layers: Layers,
        hints: Cache | None,
        stack: ExitStack,
        tester: ContainerTester,
    ) -> None:
        self._builders = options.parse_builders()
        self.jobs = sum(jobs for _, jobs in self._builders)
        self.store = remote or engine
        self.layers = layers
        self.tester = tester
        self._options = options
        self._hints = hints
        self._engine = engine
        self._adopted_from = engine if remote else None
        self._stack = stack

    @property
    def builds_in_classic_store(self) -> bool:
        """Whether the engine itself builds, and its image store is the classic one, without OCI layouts."""
        return not (self._options.builders or self._engine.has_manifests)

    def pin_permanently(self, base: str, digest: str) -> str:
        """Return the source of a base image that stays the same for builds of other tools."""
        return self.builder.pin_by_digest(base, digest) or self._engine.pin_permanently(base, digest)

    @cached_property
    def builder(self) -> Builder:
        """What builds the images; raises EngineError, or UsageError if a builder is not found."""
        from imagematrix.build.executor.build_cache import BuildCache
        from imagematrix.build.executor.buildx import BuildxOptions
        from imagematrix.build.executor.caches import ExternalCaches
        from imagematrix.build.executor.classic_builder import ClassicBuilder
        from imagematrix.build.executor.layout_builder import LayoutBuilder

        options = self._options
        build_cache = None
        # Images that are built on an image of the engine need its bytes if another builder builds them.
        if self._hints and not (self.store is self._engine and options.builders):
            build_cache = BuildCache(self._hints, self.store)
        kind: type[ClassicBuilder | LayoutBuilder] = (
            ClassicBuilder if self.builds_in_classic_store else LayoutBuilder
        )
        buildx_options = BuildxOptions(
            attest=options.attest,
            proxy=bool(options.inputs and options.inputs.proxies),
            no_cache=options.no_cache,
            caches=options.caches or ExternalCaches(),
            build_cache=build_cache,
        )
        builder = kind(self._engine, self._builders, buildx_options)
        self._stack.enter_context(builder)
        return builder

    def plan_executions(self, plan: Plan) -> Plan:
        """Return `plan` with how its builds would run; raise EngineError or UsageError."""
        from imagematrix.build.plan.builder_choice import with_executions

        return with_executions(plan, self._list_platforms(plan))

    def _list_platforms(self, plan: Plan) -> list[BuilderPlatforms]:
        """Return the platforms of the builders for the cells of `plan`.

        The engine tells that of its machine, so buildx is asked only if more may be needed.
        """
        from imagematrix.build.executor.solver import read_builder_platforms
        from imagematrix.build.plan.execution import BuilderPlatforms
        from imagematrix.build.plan.plan import PlanStatus
        from imagematrix.images.engine import endpoint

        to_build = plan.with_status(PlanStatus.BUILD)
        native = self._engine.platform
        if not self._options.builders and (not to_build or native is None):
            return []
        if not self._options.builders and all(
            item.cell.platform == native and "--platform" not in item.dockerfile for item in to_build
        ):
            return [BuilderPlatforms(name=endpoint.get_context(), native=str(native))]
        return [platforms for name, _ in self._builders for platforms in read_builder_platforms(name)]

    @property
    def plan_context(self) -> PlanContext:
        """The stores with which this session compares a matrix."""
        from imagematrix.build.plan.plan import PlanContext

        return PlanContext(
            resolve=self._engine.resolve,
            is_index=self._engine.is_index,
            store=self.store,
            engine=self._adopted_from,
            build_inputs=self._options.inputs,
            # Attestations name the build of the image, and without a cache its steps are to run.
            adopts_earlier=not self._options.attest and not self._options.no_cache,
        )


@contextlib.contextmanager
def open_build_session(options: BuildOptions) -> Iterator[BuildSession]:
    """Yield the session for images in the engine, or to be pushed; raise EngineError or UsageError."""
    if options.attest and not options.push:
        raise UsageError("attestations need a registry", remedy="add --push")
    from imagematrix.audit.binaries.cpu.scanners import Scanners
    from imagematrix.audit.images.cache import Cache
    from imagematrix.audit.images.layers import Layers
    from imagematrix.build.plan.build_inputs import BuildInputs
    from imagematrix.build.stores.engine import EngineStore
    from imagematrix.build.stores.registry import RegistryStore
    from imagematrix.cli.shared.image_tests import ContainerTester
    from imagematrix.common.files import get_cache_folder

    options.parse_builders()  # an invalid one is an error before the engine is opened
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(EngineStore())
        cache = Cache(get_cache_folder("layers"))
        scanners = stack.enter_context(Scanners())
        layers = Layers(cache, start_scan=scanners.start_scan)
        remote = stack.enter_context(RegistryStore(engine, layers)) if options.push else None
        inputs = options.inputs or BuildInputs()
        tester = ContainerTester(engine, cache, inputs, pushed=options.push, again=options.retest)
        hints = None if options.verify or options.no_cache else cache
        yield BuildSession(options, engine, remote, layers, hints, stack, tester)


def plan_with_lock(
    file: Path,
    context: PlanContext,
    only: str | None,
    *,
    platforms: Sequence[str] = (),
    push: bool = False,
    frozen: bool = False,
    contexts: Sequence[Path] = (),
    needs: HostNeeds | None = None,
) -> Plan:
    """Return the plan of the matrix in `file`, with the base images in its lock.

    Each of `platforms` is one, or several with commas between. Contexts may be in the matrix' folder and in
    the folders `contexts`. With `needs`, only cells that hosts need are planned. Raises UsageError if
    `--only` is invalid, or if an image to push has no registry.
    """
    from imagematrix.build.matrix.load import load_matrix
    from imagematrix.build.plan import context as build_contexts
    from imagematrix.build.plan import lock
    from imagematrix.build.plan.planner import plan
    from imagematrix.common.image_reference import names_registry, suggest_registry
    from imagematrix.images.catalog.axis_conditions import ConditionError

    matrix = load_matrix(file, contexts=contexts)
    if context.build_inputs:
        context.build_inputs.require_known(matrix.images)
    if push:
        for image in matrix.images:
            if image.development:
                raise make_development_push_error(image.name, image.version)
            if not names_registry(image.name):
                remedy = f"name it {suggest_registry(image.name)} in matrix.yaml"
                raise UsageError(f"the image {image.name} has no registry in its name", remedy=remedy)
    locked, drivers = lock.read_lock(lock.locate_lock(file))
    context = replace(
        context,
        locked=locked,
        drivers=drivers,
        frozen=frozen,
        find_recorded=partial(build_contexts.load_listing, file.parent / build_contexts.STATE),
        on_progress=print_info,
    )
    try:
        result = plan(
            matrix,
            context,
            expression=only,
            platforms=[name for names in platforms for name in names.split(",")],
            find_skipped=needs.find_unneeded if needs else None,
        )
    except ConditionError as error:
        raise UsageError(f"--only: {error}") from error
    return replace(result, hosts=needs.to_json()) if needs else result


def lock_and_plan(
    file: Path,
    context: PlanContext,
    only: str | None,
    *,
    platforms: Sequence[str] = (),
    push: bool,
    frozen: bool,
    contexts: Sequence[Path] = (),
    needs: HostNeeds | None = None,
) -> Plan:
    """Return the plan as `plan_with_lock` does, after adding missing base images to the lock."""
    from imagematrix.build.plan import lock

    while True:
        plan = plan_with_lock(
            file,
            context,
            only,
            platforms=platforms,
            push=push,
            frozen=frozen,
            contexts=contexts,
            needs=needs,
        )
        if lock.extend_lock(
            lock.locate_lock(file), plan.bases
        ):  # otherwise another build has locked another digest
            return plan


@without_garbage_collection()  # which would take a twentieth of the time
def plan_and_compare(
    file: Path,
    only: str | None,
    *,
    platforms: Sequence[str] = (),
    push: bool = False,
    inputs: BuildInputs | None = None,
    contexts: Sequence[Path] = (),
    needs: HostNeeds | None = None,
    builders: Sequence[str] = (),
) -> Plan:
    """Return the plan compared with the engine or the registries, or with nothing if no engine answers.

    It says how the missing images would be built on `builders`, without any by the engine.
    """
    from imagematrix.build.plan.plan import PlanContext

    with contextlib.ExitStack() as stack:
        session = None
        try:
            options = BuildOptions(push=push, inputs=inputs, builders=builders)
            session = stack.enter_context(open_build_session(options))
            context = session.plan_context
        except EngineError as error:
            # A plan is also useful on machines that cannot build, such as a laptop.
            print_info(f"{error}; every feasible cell is shown as to build")
            context = PlanContext(build_inputs=inputs)
        plan = plan_with_lock(
            file, context, only, platforms=platforms, push=push, contexts=contexts, needs=needs
        )
        try:
            return session.plan_executions(plan) if session else plan
        except EngineError as error:
            print_info(f"{error}; how the images would be built is not known")
            return plan


def find_build_method() -> BuildMethod:
    """Return how the engine builds images, or why it cannot."""
    from imagematrix.build.plan.explanation import BuildMethod

    try:
        with open_build_session(BuildOptions(push=False)) as session:
            session.builder  # noqa: B018 - an engine that cannot build is an error
            return BuildMethod(layouts=not session.builds_in_classic_store)
    except (EngineError, UsageError) as error:
        return BuildMethod(error=str(error))


def warn_of_lost(plan: Plan) -> None:
    """Report lost images that `plan` does not rebuild."""
    from imagematrix.images.catalog.labels import get_version

    for reference in plan.lost:
        image, _, tag = reference.rpartition(":")
        version = f"{image}:{get_version(tag)}"
        remedy = f"build it, or run `imagematrix publish --repair {quote_word(version)}`"
        print_info(f"the registry lost {reference}, which is not in this plan: {remedy}")


def warn_of_marches(plan: Plan) -> None:
    """Report marches whose images would fit no host, and those between which only names would choose."""
    from imagematrix.build.matrix.feasibility import find_equal_marches, find_unseen_flags
    from imagematrix.build.plan.plan import Planned

    cells = {
        (item.cell.axes.get("march"), item.cell.properties.get("compiler")): item.cell
        for item in plan.items
        if isinstance(item, Planned)
    }
    unseen = {march: flags for (march, _), cell in cells.items() if (flags := find_unseen_flags(cell))}
    for march, flags in unseen.items():
        warn(
            f"march {march} needs CPU flags that are seen on no host: {', '.join(sorted(flags))}",
            "check their names; kernels do not print them, and the probe does not read them from CPUID",
        )
    for names in find_equal_marches(cells.values()):
        warn(
            f"code for the marches {' and '.join(names)} needs the same CPU flags: "
            "hosts would get the image that is first by name",
            f"keep {names[0]} only",
        )


def warn_of_nvml(plan: Plan) -> None:
    """Report images with NCCL that are planned with cuda-compat, which has no NVML.

    NCCL is known to be in an image if a variant of it was built.
    """
    from imagematrix.audit import warnings
    from imagematrix.build.plan.plan import Planned
    from imagematrix.images.catalog import labels

    items = [item for item in plan.items if isinstance(item, Planned)]
    for item in {item.cell.image.name: item for item in items if item.cell.compat}.values():
        name = item.cell.image.name
        built = [other for other in items if other.cell.image.name == name and labels.VARIANT in other.labels]
        for other in built:
            entry = labels.read_variant(other.labels, reference=other.reference, digest=None, size=None)
            texts = [*warnings.warn_of_nvml(item.cell.compat, entry.libraries or ())]
            if texts:
                warn(f"{name}: {texts[0]}")
                break


def warn_of_missing_emulators(plan: Plan) -> None:
    """Report what no builder can run, so that builds would not start, and what one perhaps cannot run."""
    from imagematrix.build.plan.execution import describe_missing, suggest_emulator

    executions = _list_executions(plan)
    for execution in dict.fromkeys(one for one in executions if one.missing):
        cells = format_count(executions.count(execution), "cell")
        warn(f"{cells} cannot be built: {describe_missing(execution)}", suggest_emulator(execution.missing))
    warn_of_doubtful_emulators(plan)


def warn_of_doubtful_emulators(plan: Plan) -> None:
    """Report what a builder perhaps cannot run, in builds that start nevertheless."""
    from imagematrix.build.plan.execution import describe_doubt, suggest_proof

    executions = [one for one in _list_executions(plan) if one.doubtful and not one.missing]
    for execution in dict.fromkeys(executions):
        cells = format_count(executions.count(execution), "cell")
        warn(f"{cells} may fail: {describe_doubt(execution)}", suggest_proof(execution))


def _list_executions(plan: Plan) -> list[Execution]:
    from imagematrix.build.plan.plan import Planned

    return [item.execution for item in plan.items if isinstance(item, Planned) and item.execution]


def make_development_push_error(image: str, version: str) -> UsageError:
    """Return the error that refuses to push a version that may still change."""
    remedy = "remove `development` from matrix.yaml, and set a final version"
    return UsageError(f"{image}:{version} is a development version, which is never pushed", remedy=remedy)


def make_shard_filter(shard: str | None, durations: Sequence[Path] | None) -> Callable[[Plan], Plan]:
    """Return a function that narrows a plan to `--shard`; raise UsageError for invalid options."""
    if shard is None:
        if durations:
            raise UsageError("--durations needs --shard I/N")
        return lambda plan: plan
    from imagematrix.build.plan.shard import Shard, select_shard
    from imagematrix.build.reports import outcome

    part = Shard.parse(shard)
    seconds = outcome.compute_durations(map(outcome.load_report, durations or ()))
    return lambda plan: select_shard(plan, part, seconds)
