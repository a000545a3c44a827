"""Making images with `docker buildx` in a Docker engine: one BuildKit solve for each.

BuildKit writes images into OCI layouts on disk, which keep a layer once however many images share it; what
the engine lacks of an image is then loaded. With the classic image store, which knows no OCI layout,
BuildKit puts the image into the store itself, without rewritten timestamps.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

from imagematrix import engine
from imagematrix.build import identity, layout
from imagematrix.build.backend import Made, Present
from imagematrix.catalog import labels
from imagematrix.errors import BuildError, EngineError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TextIO

    from imagematrix.build.backend import Order

__all__ = ["Buildx"]

OLDEST = 23  # the first engine whose BuildKit knows COPY --link, SOURCE_DATE_EPOCH and OCI layouts
STEP = re.compile(r"#\d+ \[(?!internal)([^]]+)\] (.+)")
GRACE = 10  # seconds that a build has to end by itself
TAIL = 20  # lines of a failed build's log that its error shows


class Buildx:
    """A Backend on the Docker engine that `engine.address` finds. Use it as a context manager."""

    def __init__(self) -> None:
        self._client = engine.client()
        self._info = self._client.info()
        self._require()
        self._scratch = Path(tempfile.mkdtemp(prefix="imagematrix-"))
        self._layouts: list[Path] = []
        self._loaded: set[str] = set()
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._client.close()

    def _require(self) -> None:
        version = str(self._info.get("ServerVersion", "0"))
        if int(version.partition(".")[0]) < OLDEST:
            remedy = f"install Docker {OLDEST} or newer; `select` and `run` work with this one"
            raise EngineError(f"Docker {version} is too old to build with", remedy=remedy)
        try:
            subprocess.run(["docker", "buildx", "version"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            remedy = "install it: the package is docker-buildx or docker-buildx-plugin"
            raise EngineError("docker buildx is not installed", remedy=remedy) from error

    @property
    def reproducible(self) -> bool:
        """Whether the engine has the containerd image store, without which timestamps can't be rewritten."""
        return ["driver-type", "io.containerd.snapshotter.v1"] in (self._info.get("DriverStatus") or [])

    def resolve(self, reference: str) -> str:
        """Return the digest that a base image's reference stands for."""
        import docker

        with self._reached():
            try:
                image = self._client.api.inspect_image(reference)
            except docker.errors.ImageNotFound:
                return self._resolve_remote(reference)
        repository = reference.partition("@")[0].rpartition(":")[0] or reference
        for name in image.get("RepoDigests") or ():
            if name.startswith(f"{repository}@"):
                return str(name).rpartition("@")[2]
        return str(image["Id"])

    def _resolve_remote(self, reference: str) -> str:
        import docker

        try:
            return str(self._client.api.inspect_distribution(reference)["Descriptor"]["digest"])
        except docker.errors.APIError as error:
            message = f"the base image {reference} is not in the engine, and no registry gives it"
            remedy = f"`docker pull {reference}`, or import one of that name"
            kind = EngineError if error.is_server_error() else UsageError
            raise kind(f"{message}: {error.explanation}", remedy=remedy) from error

    def present(self, image: str, version: str) -> list[Present]:
        """Return the images of `image`:`version` that the store has."""
        wanted = [f"{labels.IMAGE}={image}", f"{labels.VERSION}={version}"]
        with self._reached():
            found = self._client.api.images(filters={"label": wanted})
        return [item for entry in found for item in _present(entry, image)]

    def export(self, dockerfile: str, context: Path, platform: str, destination: Path) -> None:
        """Build `dockerfile` and write the files of its last stage to `destination`."""
        options = [f"--platform={platform}", "--output", f"type=local,dest={destination}"]
        self._solve(options, dockerfile, context, io.StringIO(), lambda _: None)

    @contextlib.contextmanager
    def make(self, order: Order, log: TextIO, step: Callable[[str], None]) -> Iterator[Made]:
        """Build an image into a layout (containerd store), or into the store (classic) without its name."""
        options = [
            f"--platform={order.platform}",
            "--provenance=false",
            f"--build-arg=SOURCE_DATE_EPOCH={identity.EPOCH}",
        ]
        options += [f"--label={key}={value}" for key, value in sorted(order.labels.items())]
        if not self.reproducible:
            made = self._measured([*options, "--output", "type=docker"], order, log, step)
            yield Made(digest=made["containerimage.config.digest"])
            return
        with self._layout() as folder:
            kind = f"type=oci,tar=false,dest={folder},rewrite-timestamp=true"
            digest = self._measured([*options, "--output", kind], order, log, step)["containerimage.digest"]
            yield Made(digest=digest, layout=folder)

    @contextlib.contextmanager
    def _layout(self) -> Iterator[Path]:
        """Lend a layout nobody else writes to: BuildKit fails where two builds write the same blob."""
        with self._lock:
            folder = self._layouts.pop() if self._layouts else Path(tempfile.mkdtemp(dir=self._scratch))
        try:
            yield folder
        finally:
            with self._lock:
                self._layouts.append(folder)

    def _measured(
        self, options: list[str], order: Order, log: TextIO, step: Callable[[str], None]
    ) -> dict[str, Any]:
        """Solve, and return what buildx says of the result."""
        with tempfile.NamedTemporaryFile(dir=self._scratch, suffix=".json") as metadata:
            options = [*options, f"--metadata-file={metadata.name}"]
            self._solve(options, order.dockerfile, order.context, log, step)
            found: dict[str, Any] = json.loads(Path(metadata.name).read_text())
        return found

    def _solve(
        self, options: list[str], dockerfile: str, context: Path, log: TextIO, step: Callable[[str], None]
    ) -> None:
        tail: list[str] = []
        with tempfile.TemporaryDirectory(dir=self._scratch) as folder:
            file = Path(folder, "Dockerfile")
            file.write_text(dockerfile, encoding="utf-8")
            # BuildKit takes this for the context's .dockerignore.
            Path(folder, "Dockerfile.dockerignore").write_text("\n".join(identity.ignored(context)))
            options = [f"--builder={engine.context()}", "--progress=plain", f"--file={file}", *options]
            process = self._start(["docker", "buildx", "build", *options, str(context)])
            try:
                assert process.stdout is not None  # noqa: S101 - it is a pipe; this tells the type checker
                for line in process.stdout:
                    log.write(line)
                    tail = [*tail[1 - TAIL :], line.rstrip()]
                    found = STEP.match(line)
                    if found:
                        step(f"{found[1]}: {found[2]}")
            except BaseException:
                _signal(process, signal.SIGKILL)
                raise
            finally:
                code = process.wait()
                with self._lock:
                    self._running.discard(process)
        if code:
            self._failed(tail)

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        environment = {**os.environ, "BUILDX_METADATA_PROVENANCE": "disabled"}
        with self._lock:
            if self._stopped:
                raise BuildError("stopped")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=environment,
                start_new_session=True,
            )
            self._running.add(process)
        return process

    def _failed(self, tail: list[str]) -> None:
        if self._stopped:
            raise BuildError("stopped")
        with self._reached():
            self._client.ping()
        raise BuildError("\n".join(tail) or "docker buildx failed without a word")

    def store(self, order: Order, made: Made) -> None:
        """Name the image; from a layout, load what the engine lacks of it first."""
        with self._reached():
            if made.layout is None:
                repository, _, tag = order.reference.rpartition(":")
                self._client.api.tag(made.digest, repository, tag)
                return
            image = layout.Image(made.layout, made.digest)
            with self._lock:
                missing = [digest for digest in image.layers if digest not in self._loaded]
            if not self._load(image, order.reference, missing):
                self._load(image, order.reference, image.layers)
            with self._lock:
                self._loaded.update(image.layers)
            found = self._client.api.inspect_image(order.reference)["Id"]
        if found != made.digest:
            raise EngineError(f"{order.reference} was stored as {found}, but {made.digest} was built")

    def _load(self, image: layout.Image, reference: str, layers: Sequence[str]) -> bool:
        """Load an image with some of its layers; return False where the engine misses others."""
        import docker

        with tempfile.TemporaryFile(dir=self._scratch) as archive:
            image.archive(archive, reference, layers)
            archive.seek(0)
            try:
                errors = [
                    answer["error"] for answer in self._client.api.load_image(archive) if "error" in answer
                ]
            except docker.errors.APIError as error:
                errors = [str(error.explanation or error)]
        if errors and "not found" in errors[0] and len(layers) < len(image.layers):
            return False
        if errors:
            raise EngineError(f"the Docker engine does not take {reference}: {errors[0]}")
        return True

    def remove(self, reference: str) -> None:
        """Take a reference out of the store."""
        import docker

        with self._reached(), contextlib.suppress(docker.errors.ImageNotFound):
            self._client.api.remove_image(reference, force=True)

    def stop(self) -> None:
        """End every build that runs; those that don't end by themselves when asked to are killed."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        for process in running:
            try:
                process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal(process, signal.SIGKILL)

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Turn what docker-py raises when the engine is gone into EngineError."""
        import docker
        import requests

        try:
            yield
        except (requests.ConnectionError, requests.Timeout, ConnectionError) as error:
            raise engine.unreachable(engine.address(), error) from error
        except docker.errors.APIError as error:
            raise EngineError(f"the Docker engine refused: {error.explanation or error}") from error


def _present(entry: dict[str, Any], image: str) -> Iterator[Present]:
    own = entry.get("Labels") or {}
    try:
        components = json.loads(own[labels.INPUTS])
        cell, digest = own[labels.CELL], own[labels.INPUT]
    except (KeyError, ValueError):
        return
    for reference in entry.get("RepoTags") or ():
        if reference.startswith(f"{image}:") and isinstance(components, dict):
            yield Present(reference=reference, cell=cell, input_digest=digest, components=components)


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    # docker's command starts buildx, so it is the group that is to end.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
