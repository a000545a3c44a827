"""What the builders of `docker buildx` have in common: sources, files for labels, shared prefixes, caches."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue
from typing import Self

from imagematrix.build.executor.caches import ExternalCaches, format_attributes, format_cache_name
from imagematrix.build.executor.solver import Solver, SolveRequest
from imagematrix.common.single_flight import SingleFlight
from imagematrix.common.temp_folder import make_scratch_folder
from imagematrix.errors import EngineError, UsageError
from imagematrix.images.engine import releases

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from imagematrix.build.executor.build_cache import BuildCache
    from imagematrix.build.plan.protocols import BuildSources, BuiltImage, SharedPrefix
    from imagematrix.build.stores.engine import EngineStore
    from imagematrix.images.oci.parts import SizedLayer

ENGINE_ALONE: tuple[tuple[str | None, int], ...] = ((None, 1),)
UNATTESTED = ["--provenance=false"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildxOptions:
    """How images are built.

    Each gets the attestations `attest`, in the syntax of `docker buildx build --attest`. With `proxy` builds
    have the proxies of this process, and otherwise none, whatever docker's configuration says. With
    `no_cache` every step of each image runs, also those that images share. Steps have the results that are in
    `caches`, and leave theirs there. Layers in `build_cache` that the store has are not exported: images lack
    their bytes.
    """

    attest: Sequence[str] = ()
    proxy: bool = False
    no_cache: bool = False
    caches: ExternalCaches = field(default_factory=ExternalCaches)
    build_cache: BuildCache | None = None


class Buildx:
    """The common part of the Builders of `docker buildx`. Use it as a context manager.

    `builders` has the names of builders of buildx, or of docker contexts, each with the number of images that
    it builds at a time; None is the engine `docker` itself, which builds alone.
    """

    def __init__(
        self,
        docker: EngineStore,
        builders: Sequence[tuple[str | None, int]] = ENGINE_ALONE,
        options: BuildxOptions | None = None,
    ) -> None:
        self._docker = docker
        self.local = None in dict(builders)
        self._options = options or BuildxOptions()
        self._imported = False  # whether an answer of `export`, for labels of images, may be from a cache
        self._require_capable_engine()
        with contextlib.ExitStack() as stack:
            self._folder = stack.enter_context(make_scratch_folder())
            proxy = self._options.proxy
            self._solvers = [Solver(docker, name, self._folder, proxy=proxy) for name, _ in builders]
            self._open = stack.pop_all()
        self._free: SimpleQueue[Solver] = SimpleQueue()
        # Round-robin, so that few builds are spread over all builders.
        for turn in zip_longest(
            *([solver] * slots for solver, (_, slots) in zip(self._solvers, builders, strict=True))
        ):
            for solver in filter(None, turn):
                self._free.put(solver)
        self._prefixes_built: SingleFlight[tuple[object, ...], bool] = SingleFlight()  # by name and sources

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._open.close()

    def _require_capable_engine(self) -> None:
        """Raise EngineError or UsageError if the engine cannot build what is wanted."""
        version = self._docker.version
        if self.local and version is None:
            remedy = "use Docker, or --builder; images can be selected, pulled and run with this engine"
            raise EngineError("the engine is Podman, which has no BuildKit for builds", remedy=remedy)
        if self.local and version and not releases.BUILDS.is_in(version):
            remedy = f"install {releases.BUILDS} or newer; images can be selected and run with this version"
            raise EngineError(f"Docker {version} is too old for builds", remedy=remedy)

    def pin_by_digest(self, reference: str, digest: str) -> str | None:
        """Return the source of a base image with `digest`; None if its name is enough."""
        current = self._docker.get_digest(reference)
        if self.local and current == digest:
            return None
        if all(solver.has_image(reference, digest) for solver in self._solvers):
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
        request = SolveRequest(self._solvers[0], dockerfile, sources)
        if not self._options.no_cache:
            self._imported |= self._build_prefixes(prefixes, request)
        cache = format_cache_name("export", dockerfile)
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            options = (
                ["--no-cache"]
                if self._options.no_cache
                else self._options.caches.format_import_options(cache)
            )
            options += ["--output", format_attributes({"type": "local", "dest": folder})]
            self._imported |= request.solver.solve(request, options)
            self._write_cache(cache, request)
            return {path.name: path.read_text() for path in Path(folder).iterdir()}

    def list_parts(self, image: BuiltImage) -> tuple[SizedLayer, ...]:
        """Return the layers of a built image, the lowest first; see Builder."""
        if image.layout:
            return image.layout_image.parts
        return self._docker.list_parts(image.digest) or ()

    def stop(self) -> None:
        """Stop all running builds; those that do not end soon are killed."""
        for solver in self._solvers:
            solver.stop()

    @contextlib.contextmanager
    def _take_solver(self) -> Iterator[Solver]:
        """Yield a solver with a free slot, for the build of an image."""
        solver = self._free.get()
        try:
            yield solver
        finally:
            self._free.put(solver)

    def _build_prefixes(self, prefixes: Sequence[SharedPrefix], request: SolveRequest) -> bool:
        """Build prefixes of a request that have not been built yet, several at a time.

        Returns whether results may be those of an imported cache.
        """

        def build_after_needs(last_prefix: SharedPrefix) -> bool:
            needed = [
                prefix for prefix in prefixes if prefix.name in last_prefix.needs or prefix is last_prefix
            ]
            imported = [
                self._prefixes_built(
                    make_prefix_key(prefix, request), partial(self._build_prefix, prefix, request)
                )
                for prefix in needed
            ]
            return any(imported)

        if not prefixes:
            return False
        request.on_step("building what images share")
        with ThreadPoolExecutor(len(prefixes), thread_name_prefix="begin") as pool:
            return any(list(pool.map(build_after_needs, prefixes)))

    def _build_prefix(self, prefix: SharedPrefix, whole: SolveRequest) -> bool:
        """Build a prefix of the request `whole`; return whether results may be from an imported cache."""
        cache = format_cache_name("shared", prefix.name)
        output = io.StringIO()  # the outputs of several builds at a time could not be told apart
        request = replace(whole, dockerfile=prefix.dockerfile, log=output)
        try:
            options = [*UNATTESTED, *self._options.caches.format_import_options(cache)]
            imported = self._solve_prefix(prefix, request, options)
            self._write_cache(cache, request)
        finally:
            whole.log.write(output.getvalue())
        return imported

    def _solve_prefix(self, prefix: SharedPrefix, request: SolveRequest, options: Sequence[str]) -> bool:  # noqa: ARG002
        """Solve the request for a prefix; its results stay in BuildKit."""
        return request.solver.solve(request, [*options, "--output=type=cacheonly"])

    def _write_cache(self, name: str, request: SolveRequest) -> None:
        """Write the results of steps that have just run to the caches; raise BuildError.

        It is a build of its own, in which no step runs, as its turn to write into a folder may come late.
        """
        with self._options.caches.format_export_options(name) as options:
            if options:
                request.on_step("writing the cache")
                request.solver.solve(request, [*options, *UNATTESTED, "--output=type=cacheonly"])


def make_prefix_key(prefix: SharedPrefix, request: SolveRequest) -> tuple[object, ...]:
    """Return a key for a prefix of a request: two requests with the same key share its build."""
    text, sources = prefix.dockerfile, request.sources
    context = sources.context if re.search("copy|add|mount", text, re.IGNORECASE) else None
    values = [*sources.images.items(), *sources.args.items()]
    return (
        request.solver,
        prefix.name,
        sources.platform,
        context,
        *sorted(item for item in values if item[0] in text),
    )
