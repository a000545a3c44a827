"""Running `docker buildx build`: one solve of BuildKit for each call."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imagematrix.build.executor import child_process
from imagematrix.build.executor.caches import CacheUse
from imagematrix.build.plan import identity
from imagematrix.build.plan.build_inputs import PROXIES, scrub_environment
from imagematrix.build.plan.execution import BuilderPlatforms
from imagematrix.build.plan.protocols import StoppedError
from imagematrix.common.files import name_file_in_errors
from imagematrix.common.temp_folder import make_full_disk_remedy
from imagematrix.common.text import make_headline
from imagematrix.errors import BuildError, EngineError, UsageError
from imagematrix.images.engine import endpoint, system

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TextIO

    from imagematrix.build.plan.protocols import BuildSources
    from imagematrix.build.stores.engine import EngineStore

STEP = re.compile(r"#\d+ \[(?!internal)([^]]+)\] (.+)")
ENGINE_DRIVER = re.compile(r"^Driver: +docker$", re.MULTILINE)
PLATFORMS = re.compile(r"^Platforms: +(\S.*)$", re.MULTILINE)  # of one machine of a builder
STATED = "*"  # follows a platform that the builder's configuration states
MACHINES = ("linux/amd64", "linux/arm64")  # an arm64 machine may also run programs of 32 bits
GRACE = 10  # seconds until a stopped build is killed
GONE = "code = Unavailable"  # gRPC's message for a lost server
UNRESOLVED = "failed to resolve source metadata"
FULL = "no space left on device"
# buildx's garbage collector by default takes a third of the processor time of an export. This is how much the
# heap may grow between collections, in percent; 150 MB of memory instead of 70.
GROWTH = "800"
TAIL = 20  # lines of a failed build's log in its error


@dataclass(frozen=True, slots=True)
class SolveRequest:
    """What the BuildKit behind a `solver` is to solve: a Dockerfile with its sources.

    `log` receives the output, `on_step` is called with the current instruction.
    """

    solver: Solver
    dockerfile: str
    sources: BuildSources
    log: TextIO = field(default_factory=io.StringIO)
    on_step: Callable[[str], None] = lambda _: None


class Solver:
    """Runs buildx with a `builder`, or with that of the engine `docker` if it is None; thread-safe.

    With `proxy` builds have the proxies of this process, and otherwise none. `folder` is for temporary files.
    """

    def __init__(self, docker: EngineStore, builder: str | None, folder: Path, *, proxy: bool) -> None:
        self._docker = docker
        self._builder = builder
        self._folder = folder
        self._environment = {"GOGC": GROWTH} | scrub_environment(os.environ)
        self._proxies: list[str] = []
        for name in PROXIES:
            value = (os.environ.get(name) or os.environ.get(name.lower())) if proxy else None
            # Both spellings get one value: BuildKit reads either, and docker's configuration adds the other.
            for case in (name, name.lower()):
                self._proxies.append(f"--build-arg={case}" + ("" if value else "="))
                if value:
                    self._environment[case] = value
        self._command = _find_buildx()
        self._is_elsewhere = self._is_in_context() and builder != endpoint.get_context()
        if self._is_elsewhere:
            # The default builder of an engine works only in the docker context of its name.
            self._environment.pop("DOCKER_HOST", None)
            self._environment["DOCKER_CONTEXT"] = str(builder)
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def _is_in_context(self) -> bool:
        """Whether the builder is the engine of a docker context."""
        if self._builder is None:
            return False
        return bool(ENGINE_DRIVER.search(_inspect_builder(self._command, self._builder)))

    def has_image(self, reference: str, digest: str) -> bool:
        """Whether a build finds the image with `digest` by its name, in an engine of its own."""
        if not self._is_elsewhere:
            return False
        inspect = ["image", "inspect", "--format", "{{.Id}} {{.RepoDigests}}", reference]
        command = [system.find_docker(), *inspect]
        process = subprocess.run(command, check=False, capture_output=True, text=True, env=self._environment)
        return digest in process.stdout

    def solve_image(
        self, request: SolveRequest, options: Sequence[str], key: str = "containerimage.digest"
    ) -> tuple[str, bool]:
        """Build an image; return its digest, which buildx writes under `key`, and as `solve` does."""
        with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".json") as metadata:
            imported = self.solve(request, [*options, f"--metadata-file={metadata.name}"])
            return str(json.loads(Path(metadata.name).read_text())[key]), imported

    def solve(self, request: SolveRequest, options: Sequence[str]) -> bool:
        """Build what is requested with further `options` of buildx; raise BuildError.

        Returns whether results may be those of an imported cache. Raises StoppedError after `stop`, and
        EngineError if the engine cannot be reached.
        """
        sources = request.sources
        tail: list[str] = []
        cache_use = CacheUse()
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            file = Path(folder, "Dockerfile")
            with name_file_in_errors(file):
                file.write_text(sources.pin_references(request.dockerfile), encoding="utf-8")
                # BuildKit would apply the context's .dockerignore, but excluded files are absent already.
                Path(folder, "Dockerfile.dockerignore").write_text("# nothing\n")
            command = [
                *(self._command, "build", f"--builder={self._builder or endpoint.get_context()}"),
                *("--progress=plain", f"--file={file}", f"--platform={sources.platform}"),
                f"--build-arg=SOURCE_DATE_EPOCH={identity.EPOCH}",
                *self._proxies,
                *(f"--build-arg={name}={value}" for name, value in sources.args.items()),
                *(f"--secret={spec}" for spec in sources.secrets),
                *(f"--ssh={spec}" for spec in sources.ssh),
                *(f"--build-context={name}={where}" for name, where in sources.contexts.items()),
                *options,
                str(sources.context),
            ]
            with self._lock:
                if self._stopped:
                    raise StoppedError("stopped")
                process = child_process.start_child(command, self._environment)
                self._running.add(process)
            assert process.stdout is not None  # noqa: S101 - a pipe; for the type checker
            try:
                for raw in process.stdout:
                    line = sources.restore_names(raw)
                    request.log.write(line)
                    cache_use.read_line(line)
                    tail = [*tail[1 - TAIL :], line.rstrip().expandtabs()]
                    match = STEP.match(line)
                    if match:
                        request.on_step(f"{match[1]}: {match[2]}")
            except BaseException:
                child_process.signal_child(process, signal.SIGKILL)
                raise
            finally:
                code = child_process.wait_for_child(process)
                with self._lock:
                    self._running.discard(process)
        if code:
            self._raise_failure(tail)
        return cache_use.has_imported

    def _raise_failure(self, tail: list[str]) -> None:
        if self._stopped:
            raise StoppedError("stopped")
        self._docker.require()
        output = "\n".join(tail)
        remedy = None
        if FULL in output:  # which may end the connection, too
            remedy = make_full_disk_remedy(self._folder)
        elif GONE in output:
            raise EngineError(
                "the Docker engine stopped during a build",
                remedy="images built so far are kept; run the same command again to continue",
            )
        elif UNRESOLVED in output and self._builder is not None:
            remedy = f"{self._builder} pulls base images from registries; push it to one that it can reach"
        raise BuildError(*tail or ["docker buildx failed without a message"], remedy=remedy)

    def stop(self) -> None:
        """Stop all running solves; those that do not end within GRACE seconds are killed."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            child_process.signal_child(process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        for process in running:
            try:
                process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child_process.signal_child(process, signal.SIGKILL)


def read_builder_platforms(builder: str | None) -> list[BuilderPlatforms]:
    """Return the platforms of the machines of a builder of buildx, that of the engine if it is None.

    Raises EngineError or UsageError.
    """
    name = builder or endpoint.get_context()
    text = _inspect_builder(_find_buildx(), name)
    # BuildKit in a container of its own has emulators, which its list leaves out.
    more = ENGINE_DRIVER.search(text) is None
    lists = PLATFORMS.findall(text)
    return [_parse_platforms(name, words.split(","), may_emulate_more=more) for words in lists]


def _parse_platforms(name: str, words: Sequence[str], *, may_emulate_more: bool) -> BuilderPlatforms:
    """Return the platforms of a machine.

    BuildKit lists that of the machine first, with its variants, but buildx puts those that the builder's
    configuration states before it. Stating one proves no emulator.
    """
    platforms = [word.strip() for word in words]
    found = [platform for platform in platforms if not platform.endswith(STATED)]
    names = ["/".join(platform.split("/")[:2]) for platform in found]
    native = next((one for one in names if one in MACHINES), platforms[0].rstrip(STATED))
    emulated = frozenset(found) - {native}
    return BuilderPlatforms(name=name, native=native, emulated=emulated, may_emulate_more=may_emulate_more)


def _inspect_builder(buildx: str, builder: str) -> str:
    """Return what buildx tells of a builder; raise UsageError if there is none of this name."""
    process = subprocess.run([buildx, "inspect", builder], check=False, capture_output=True, text=True)
    if "no builder" in process.stderr:
        raise UsageError(f"builder {builder!r} not found", remedy="see `docker buildx ls`")
    if process.returncode:
        raise _make_broken_engine_error(process.stderr)
    return process.stdout


def _find_buildx() -> str:
    """Return the path of buildx, because starting it through `docker buildx` takes 20 ms longer."""
    command = [system.find_docker(), "info", "--format", "{{json .ClientInfo.Plugins}}"]
    try:
        process = subprocess.run(command, check=True, capture_output=True, text=True)
        plugins: list[dict[str, Any]] = json.loads(process.stdout) or []
    except OSError as error:
        raise system.make_start_error(error) from error
    except subprocess.CalledProcessError as error:
        raise _make_broken_engine_error(error.stderr) from error
    buildx = next((plugin for plugin in plugins if plugin["Name"] == "buildx"), {})
    if "Err" in buildx or "Path" not in buildx:
        raise _make_broken_engine_error(str(buildx.get("Err", "docker has no such plugin")))
    return str(buildx["Path"])


def _make_broken_engine_error(output: str) -> EngineError:
    remedy = "install it: the package is docker-buildx or docker-buildx-plugin"
    return EngineError(f"docker buildx does not work: {make_headline(output)}", remedy=remedy)
