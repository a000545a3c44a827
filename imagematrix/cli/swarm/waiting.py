"""Waiting for a job: its output as it comes, changes of its tasks' states, and its exit code."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field

from imagematrix.cli.output import counted, info, warn
from imagematrix.errors import EngineError
from imagematrix.swarm.logs import Logs
from imagematrix.swarm.tasks import COMPLETE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from docker import DockerClient

    from imagematrix.swarm.manager import Manager
    from imagematrix.swarm.service import Service
    from imagematrix.swarm.tasks import Task

__all__ = ["Waiting"]


@dataclass(kw_only=True)
class Waiting:
    """The wait for a created job; with `remove`, the job is removed at the end or when interrupted."""

    manager: Manager
    service: Service
    identifier: str
    remove: bool
    _slots: dict[str, int] = field(default_factory=dict)

    def run(self, client: DockerClient) -> int:
        """Wait, and return the exit code: 0, or that of the first task that failed.

        Raises EngineError if a task could not be started. An interrupted wait leaves the job running, unless
        `remove` is set.
        """
        logs = Logs(client, self.identifier, self._write)
        logs.follow()
        try:
            tasks = self.manager.wait(self.identifier, self.service.replicas, info)
            self._finish(logs)
        except (KeyboardInterrupt, SystemExit):
            self._interrupted()
            raise
        if self.remove:
            self.manager.remove(self.identifier)
        return self._code(tasks)

    def _interrupted(self) -> None:
        name = self.service.name
        if self.remove:
            self.manager.remove(self.identifier)
            info(f"removed service {name}")
        else:
            info(f"service {name} continues without this command; `docker service rm {name}` ends it")

    def _finish(self, logs: Logs) -> None:
        from docker.errors import DockerException
        from requests.exceptions import RequestException

        try:
            logs.finish()
        except (DockerException, RequestException, OSError) as error:
            warn(f"output of {self.service.name} may be incomplete: {error}")

    def _code(self, tasks: list[Task]) -> int:
        failed = [task for task in tasks if task.state != COMPLETE]
        for task in failed:
            warn(f"task {self.service.name}.{task.slot} {task.state}: {task.reason}")
        if not failed:
            return 0
        for task in failed:
            if task.exit_code:
                return task.exit_code
        raise EngineError(f"{counted(len(failed), 'task')} of {self.service.name} could not be run")

    def _write(self, stream: str, task: str | None, line: bytes) -> None:
        """Print a line, prefixed with the name of its task if there are several.

        The last line of a task, and pieces of a very long line, may have no line break.
        """
        if task is None:
            info(line.decode(errors="replace").rstrip("\n"))
            return
        if self.service.replicas > 1:
            line = f"{self.service.name}.{self._slot(task)} | ".encode() + line.removesuffix(b"\n") + b"\n"
        target = sys.stdout if stream == "stdout" else sys.stderr
        with contextlib.suppress(BrokenPipeError):
            target.buffer.write(line)
            target.buffer.flush()

    def _slot(self, task: str) -> int:
        """Return the number of a task in the job."""
        if task not in self._slots:
            self._slots |= {one.id: one.slot for one in self.manager.tasks(self.identifier)}
        return self._slots.get(task, 0)
