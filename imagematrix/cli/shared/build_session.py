"""Shared by commands that plan a matrix: stores, the lock, and shards."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import cached_property, partial

from imagematrix.cli.shared.output import print_info, warn
from imagematrix.common.json_documents import parse_natural
from imagematrix.common.text import quote_word
from imagematrix.errors import EngineError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import ExitStack
    from pathlib import Path

    from imagematrix.audit.images.layers import Layers
    from imagematrix.build.executor.build_cache import LayerHints
    from imagematrix.build.executor.caches import ExternalCaches
    from imagematrix.build.executor.pool import Pool
    from imagematrix.build.matrix.matrix import Matrix
    from imagematrix.build.plan.build_inputs import BuildInputs
    from imagematrix.build.plan.plan import Plan
    from imagematrix.build.plan.planner import PlanContext
    from imagematrix.build.plan.protocols import Builder
    from imagematrix.build.stores.engine import EngineStore
    from imagematrix.build.stores.registry import RegistryStore
    from imagematrix.cli.shared.host_filter import HostNeeds
    from imagematrix.cli.shared.image_tests import ContainerTester


class BuildSession:
    """The builders, which build `jobs` images at a time, the store of the images, and the layers read so far.

    The builders are started when they are first needed. They use the `notes` of earlier builds, if any, and
    with `no_cache` no result of one, and `caches` of other engines.
    """

    def __init__(
        self,
        wanted: Sequence[tuple[str | None, int]],
        attest: Sequence[str],
        given: BuildInputs | None,
        engine: EngineStore,
        remote: RegistryStore | None,
        layers: Layers,
        notes: LayerHints | None,
        stack: ExitStack,
        *,
        no_cache: bool,
        caches: ExternalCaches | None,
        tester: ContainerTester,
    ) -> None:
        self.jobs = sum(jobs for _, jobs in wanted)
        self.store = remote or engine
        self.layers = layers
        self.tester = tester
        self._notes = notes
        self._wanted = wanted
        self._attest = attest
        self._given = given
        self._engine = engine
        self._adopting = engine if remote else None
        self._stack = stack
        self._no_cache = no_cache
        self._caches = caches

    @cached_property
    def builder(self) -> Pool:
        """The pool of builders; raises EngineError, or UsageError if a builder is not found."""
        from imagematrix.build.executor.pool import Pool

        return Pool([(self._find_builder(name), jobs) for name, jobs in self._wanted])

    def pin_permanently(self, base: str, digest: str) -> str:
        """Return the source of a base image that stays the same for builds of other tools."""
        return self.builder.pin_by_digest(base, digest) or self._engine.pin_permanently(base, digest)

    def _find_builder(self, name: str | None) -> Builder:
        """Return the builder called `name`, or the engine's own if it is None."""
        from imagematrix.build.executor.build_cache import BuildCache
        from imagematrix.build.executor.buildx import Buildx

        proxy = bool(self._given and self._given.proxies)
        build_cache = None
        # Images that are built on an image of the engine need its bytes if another builder builds them.
        if self._notes and not (self.store is self._engine and name):
            build_cache = BuildCache(self._notes, self.store)
        return self._stack.enter_context(
            Buildx(
                self._engine,
                name,
                self._attest,
                proxy=proxy,
                build_cache=build_cache,
                no_cache=self._no_cache,
                caches=self._caches,
            )
        )

    @property
    def against(self) -> PlanContext:
        """The stores with which this session compares a matrix."""
        from imagematrix.build.plan.planner import PlanContext

        return PlanContext(
            resolve=self._engine.resolve,
            store=self.store,
            engine=self._adopting,
            build_inputs=self._given,
            # Attestations name the build of the image, and without a cache its steps are to run.
            adopts_earlier=not self._attest and not self._no_cache,
        )


@contextlib.contextmanager
def open_build_session(
    jobs: int = 1,
    *,
    push: bool,
    builders: Sequence[str] = (),
    attest: Sequence[str] = (),
    given: BuildInputs | None = None,
    verify: bool = False,
    no_cache: bool = False,
    caches: ExternalCaches | None = None,
    retest: bool = False,
) -> Iterator[BuildSession]:
    """Yield the session for images in the engine, or to be pushed; raise EngineError.

    Each of `builders` is NAME, or NAME=JOBS for a number of builds other than `jobs`; without any, the engine
    builds. Each image gets the attestations `attest`. To `verify` images, and with `no_cache`, nothing of
    earlier builds is used; with `caches`, what these have of others. With `retest`, images that are up to
    date are tested again.
    """
    if attest and not push:
        raise UsageError("attestations need a registry", remedy="add --push")
    from imagematrix.audit.binaries.cpu.scanners import Scanners
    from imagematrix.audit.images.cache import Cache
    from imagematrix.audit.images.layers import Layers
    from imagematrix.build.plan.build_inputs import BuildInputs
    from imagematrix.build.stores.engine import EngineStore
    from imagematrix.build.stores.registry import RegistryStore
    from imagematrix.cli.shared.image_tests import ContainerTester
    from imagematrix.common.files import get_cache_folder

    wanted = [_parse_builder(text, jobs) for text in builders] or [(None, jobs)]
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(EngineStore())
        cache = Cache(get_cache_folder("layers"))
        scanners = stack.enter_context(Scanners())
        layers = Layers(cache, start_scan=scanners.start_scan)
        remote = stack.enter_context(RegistryStore(engine, layers)) if push else None
        tester = ContainerTester(engine, cache, given or BuildInputs(), pushed=push, again=retest)
        notes = None if verify or no_cache else cache
        yield BuildSession(
            wanted,
            attest,
            given,
            engine,
            remote,
            layers,
            notes,
            stack,
            no_cache=no_cache,
            caches=caches,
            tester=tester,
        )


def _parse_builder(text: str, jobs: int) -> tuple[str | None, int]:
    name, equals, given_jobs = text.partition("=")
    count = parse_natural(given_jobs) if equals else jobs
    if not name or not count:
        raise UsageError(f"--builder {text}: expected NAME or NAME=JOBS", remedy="such as --builder big=8")
    return name, count


def plan_with_lock(
    file: Path,
    against: PlanContext,
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
    from imagematrix.build.plan import context, lock
    from imagematrix.build.plan.planner import plan
    from imagematrix.images.catalog.axis_conditions import ConditionError

    matrix = load_matrix(file, contexts=contexts)
    if against.build_inputs:
        against.build_inputs.require_known(matrix.images)
    if push:
        _require_pushable(matrix)
    locked, drivers = lock.read_lock(lock.locate_lock(file))
    against = replace(
        against,
        locked=locked,
        drivers=drivers,
        frozen=frozen,
        find_recorded=partial(context.load_listing, file.parent / context.STATE),
        on_progress=print_info,
    )
    try:
        made = plan(
            matrix,
            against,
            expression=only,
            platforms=[name for listed in platforms for name in listed.split(",")],
            find_skipped=needs.find_unneeded if needs else None,
        )
    except ConditionError as error:
        raise UsageError(f"--only: {error}") from error
    return replace(made, hosts=needs.to_json()) if needs else made


def lock_and_plan(
    file: Path,
    against: PlanContext,
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
            against,
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


def plan_and_compare(
    file: Path,
    only: str | None,
    *,
    platforms: Sequence[str] = (),
    push: bool = False,
    given: BuildInputs | None = None,
    contexts: Sequence[Path] = (),
    needs: HostNeeds | None = None,
) -> Plan:
    """Return the plan compared with the engine or the registries, or with nothing if no engine answers."""
    from imagematrix.build.plan.planner import PlanContext

    with contextlib.ExitStack() as stack:
        try:
            against = stack.enter_context(open_build_session(push=push, given=given)).against
        except EngineError as error:
            # A plan is also useful on machines that cannot build, such as a laptop.
            print_info(f"{error}; every feasible cell is shown as to build")
            against = PlanContext(build_inputs=given)
        return plan_with_lock(
            file, against, only, platforms=platforms, push=push, contexts=contexts, needs=needs
        )


def warn_of_lost(plan: Plan) -> None:
    """Report lost images that `plan` does not rebuild."""
    from imagematrix.images.catalog.labels import get_version

    for reference in plan.lost:
        image, _, tag = reference.rpartition(":")
        version = f"{image}:{get_version(tag)}"
        remedy = f"build it, or run `imagematrix publish --repair {quote_word(version)}`"
        print_info(f"the registry lost {reference}, which is not in this plan: {remedy}")


def warn_of_unseen(plan: Plan) -> None:
    """Report the marches whose images would fit no host."""
    from imagematrix.build.matrix.feasibility import find_unseen_flags
    from imagematrix.build.plan.plan import Planned

    kinds = {
        (item.cell.axes.get("march"), item.cell.properties.get("compiler")): item.cell
        for item in plan.items
        if isinstance(item, Planned)
    }
    unknown = {march: flags for (march, _), cell in kinds.items() if (flags := find_unseen_flags(cell))}
    for march, flags in unknown.items():
        warn(
            f"march {march} needs CPU flags that are seen on no host: {', '.join(sorted(flags))}",
            "check their names; kernels do not print them, and the probe does not read them from CPUID",
        )


def _require_pushable(matrix: Matrix) -> None:
    for image in matrix.images:
        if image.development:
            raise development_push_error(image.name, image.version)
        if "/" not in image.name:
            remedy = f"name it registry.example.com/ml/{image.name} in matrix.yaml"
            raise UsageError(f"the image {image.name} has no registry in its name", remedy=remedy)


def development_push_error(image: str, version: str) -> UsageError:
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
