"""One start of a program in a container of the engine: watched to its end, and what it left."""

from __future__ import annotations

import math
import os
import time

from imagematrix.common.record import replace
from imagematrix.errors import EngineError, EngineUnreachableError
from imagematrix.images.engine import container_files
from imagematrix.images.engine.removal import end_container, remove_container
from imagematrix.images.engine.transport import convert_errors
from imagematrix.images.oci.tar import open_tar
from imagematrix.images.warm.tools import ROOT
from imagematrix.launcher.launch import DockerApi
from imagematrix.launcher.warm_up.compilers import FOLDER, RECORD
from imagematrix.launcher.warm_up.folder_states import TooLargeError, read_states
from imagematrix.launcher.warm_up.leftovers import make_owner_label
from imagematrix.launcher.warm_up.program_run import (
    LARGEST_RECORD,
    LOOK_S,
    LOOKS,
    REMOVED,
    EndedRun,
    explain_code,
    explain_size,
    explain_timeout,
    list_outside,
    read_lines,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from docker import DockerClient

    from imagematrix.launcher.docker.plan import Launch
    from imagematrix.launcher.warm_up.folder_states import FileState
    from imagematrix.launcher.warm_up.program_run import StartWay, WarmUpStart
    from imagematrix.selection.selection import Selection

LOG = {"max-size": "256m"}  # of the engine's own files, whatever its setting is


class ContainerRuns:
    """Starts of a warm-up's program, each in a new container of `client`, which none of it outlives."""

    def __init__(self, client: DockerClient, start: WarmUpStart) -> None:
        self._client = client
        self._start = start

    def run(
        self,
        way: StartWay,
        read_line: Callable[[str], object],
        keep: Callable[[str], object] = lambda _: None,
        proved: int = 0,
    ) -> EndedRun:
        """Start the command, and return what it did; `read_line` gets each line of its output.

        `keep` gets the id of the ended container before it is removed, unless its caches are too large to be
        read. `proved` are the bytes of the layer whose proof this is, which do not count as written. Raises
        what a launch does, and EngineError.
        """
        most = self._start.warm_up.max_size + proved
        starter = _WarmStart(self._client, self._make_options(way), way.image)
        with convert_errors():
            container = self._start.make_session(way).run(starter).id or ""
        try:
            started = time.monotonic()
            why = self._watch(container, most)
            seconds = time.monotonic() - started
            end_container(self._client, container)
            with convert_errors():
                lines = read_lines(self._client.api.logs(container, stream=True, follow=False), read_line)
            written = self._list_written(container)
            with convert_errors():
                variables = self._client.api.inspect_container(container)["Config"]["Env"] or ()
            states = self._list_states(container, most)
            has_states = states is not None
            run = EndedRun(
                why=why if has_states else explain_size(self._start.warm_up),
                seconds=seconds,
                states=states or {},
                has_states=has_states,
                written=written,
                record=read_record(self._client, container) if way.image else b"",
                output=lines,
                variables=dict(str(text).partition("=")[::2] for text in variables),
            )
            if has_states:
                keep(container)
            return run
        finally:
            remove_container(self._client, container, running=True)

    def _make_options(self, way: StartWay) -> dict[str, object]:
        """Return the options of docker-py's `containers.create`."""
        from docker.types import LogConfig, Mount

        mounts = [Mount(target, folder, type="bind", read_only=True) for folder, target in self._start.mounts]
        options: dict[str, object] = {
            "entrypoint": list(self._start.warm_up.command),
            "environment": self._start.make_environment(way),
            "labels": make_owner_label(),
            "log_config": LogConfig(type=LogConfig.types.JSON, config=LOG),
            "read_only": way.read_only,
            "use_config_proxy": False,  # of who warms up, perhaps with a password; nodes have others
        }
        if way.image:  # a volume, so that it can also be written where the root file system cannot
            mounts.append(Mount(FOLDER, None, type="volume"))
        if way.user is not None:
            options["user"] = way.user
        if not self._start.has_network:
            options["network_mode"] = "none"
        if len(self._start.cpus) < (os.cpu_count() or 0):
            options["cpuset_cpus"] = ",".join(map(str, self._start.cpus))
        return {**options, "mounts": mounts}

    def _watch(self, container: str, most: int) -> str | None:
        """Wait for the end of a container; return why its program failed, None if it did not.

        It fails with more than `most` bytes of caches.
        """
        from requests.exceptions import ConnectionError as NoAnswerError
        from requests.exceptions import ReadTimeout

        warm_up = self._start.warm_up
        deadline, pause = time.monotonic() + warm_up.timeout_s, LOOK_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                with convert_errors(ReadTimeout, NoAnswerError):
                    code = self._client.api.wait(container, timeout=math.ceil(min(pause, left)))["StatusCode"]
            except (ReadTimeout, NoAnswerError):  # it is running, or the engine is gone, which a look finds
                before = time.monotonic()
                if self._is_too_large(container, most):
                    return explain_size(warm_up)
                pause = max(LOOK_S, LOOKS * (time.monotonic() - before))
            else:
                return explain_code(code)
        return explain_timeout(warm_up)

    def _is_too_large(self, container: str, most: int) -> bool:
        """Whether the caches have more than `most` bytes, and the container has written its `max_size`.

        Where files go while they are counted, engines give up; then only a later look can tell.
        """
        try:
            if container_files.measure_written(self._client, container) <= self._start.warm_up.max_size:
                return False
            return self._list_states(container, most) is None
        except EngineUnreachableError:
            raise
        except EngineError:
            return False

    def _list_states(self, container: str, most: int) -> dict[str, FileState] | None:
        """Return the states of a container's caches, None if they have more than `most` bytes."""
        try:
            return list_caches(self._client, container, most)
        except TooLargeError:
            return None

    def _list_written(self, container: str) -> tuple[str, ...]:
        """Return what a container wrote elsewhere than in the caches; mount points count as written, too."""
        written = container_files.list_written(self._client, container)
        return list_outside(written, dict(self._start.warm_up.inputs).values())


def read_record(client: DockerClient, container: str) -> bytes:
    """Return what the stubs in a container have recorded, at most LARGEST_RECORD bytes.

    A program that removes the record counts as one that calls compilers.
    """
    from docker.errors import NotFound

    try:
        with container_files.open_files(client, container, RECORD) as stream, open_tar(stream) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isreg() else None
                if file is not None:
                    return file.read(LARGEST_RECORD)
    except NotFound:
        pass
    return REMOVED


def list_caches(client: DockerClient, container: str, max_size: float = math.inf) -> dict[str, FileState]:
    """Return the states of the files in a container's caches, none if it has no such folder.

    Raises TooLargeError if they have more than `max_size` bytes.
    """
    from docker.errors import NotFound

    try:
        with container_files.open_files(client, container, ROOT) as stream:
            return read_states(stream, ROOT, max_size)
    except NotFound:
        return {}


class _WarmStart(DockerApi):
    """The API of docker's engine, which starts the variant by digest, or an image made from it by its id."""

    def __init__(self, client: DockerClient, options: Mapping[str, object], image: str | None) -> None:
        super().__init__(client, options)
        self._image = image

    def verify(self, _: Selection, launch: Launch) -> Launch:
        """Return the launch of the image; see ContainerEngine."""
        name = launch.reference.partition("@")[0]
        return replace(launch, reference=self._image or f"{name}@{launch.digest}")
