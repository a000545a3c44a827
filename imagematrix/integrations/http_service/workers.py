"""Processes for work that may take long: few of them, with limits of time and memory for each call.

The smallest work goes first, and large work never has all processes. What a client can make expensive is
large, so it delays only what is large, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import importlib
import itertools
import pickle  # between a process and its own child
import resource
import socket
import struct
import subprocess
import sys
from typing import TypeVar

from imagematrix.common.child_modules import make_child_command
from imagematrix.common.process_limits import raise_niceness_if_allowed, set_limit_if_allowed
from imagematrix.errors import EngineError, ImagematrixError

Result = TypeVar("Result")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Any

COUNT = 2
SMALL = 1 << 16  # the largest size of small work
LIMIT_S = 2.0
MEMORY = 1 << 30  # bytes of address space
WAITING = 32  # calls of large work; of more, the largest fails
NICENESS = 5  # more than that of the service, which goes first
CACHED = 8  # objects that a process keeps for later calls
REMEDY = "try again later"
SIZE = struct.Struct("!Q")  # before each message


class Workers:
    """At most `count` processes, which call functions of modules for at most `limit_s` seconds each.

    To be used in one event loop. Functions, which `modules` have, arguments and results must be picklable.
    """

    def __init__(self, *modules: str, count: int = COUNT, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._all = tuple(_Worker(modules) for _ in range(count))
        self._free = [*self._all]
        self._queue: list[tuple[int, int, asyncio.Future[_Worker]]] = []
        self._order = itertools.count()
        self._large = 0  # calls at hand
        self._tasks: set[asyncio.Task[Any]] = set()

    async def call(
        self, function: Callable[..., Result], *arguments: object, cached: object, size: int = 0
    ) -> Result:
        """Return what `function` returns for the arguments and `cached`, or raise its ImagematrixError.

        Calls with the smallest `size` go first. `cached`, which must not change, is sent to a process only
        once. Raises EngineError if the call takes more than the limits.
        """
        worker = await self._await_worker(size)
        # A client that leaves must not leave a process in the middle of a message.
        return await asyncio.shield(
            self._create_task(self._call_worker(worker, size, function, cached, arguments))
        )

    async def end(self) -> None:
        """End the processes; what they were doing fails."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self._all:
            worker.end()

    async def _call_worker(
        self,
        worker: _Worker,
        size: int,
        function: Callable[..., Result],
        cached: object,
        arguments: tuple[object, ...],
    ) -> Result:
        try:
            await worker.start()
            async with asyncio.timeout(self._limit_s):
                result: Result | ImagematrixError = await worker.call(function, cached, arguments)
        except (TimeoutError, EOFError, OSError) as error:
            worker.end()
            message = f"the work took more than {self._limit_s:g} s, or too much memory"
            raise EngineError(message, remedy=REMEDY) from error
        finally:
            self._create_task(self._release(worker, size))
        if isinstance(result, ImagematrixError):
            try:
                raise result
            finally:
                del result  # an error and the frame that raised it would keep each other, and the arguments
        return result

    async def _await_worker(self, size: int) -> _Worker:
        """Return a free process for a call, when it is the call's turn."""
        turn: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
        waiting = size, next(self._order), turn
        heapq.heappush(self._queue, waiting)
        self._assign_workers()
        self._refuse_largest()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._remove_waiting(waiting)
            elif not turn.exception():
                self._create_task(self._release(turn.result(), size))
            raise
        finally:
            del turn, waiting  # as above

    def _refuse_largest(self) -> None:
        """Let the largest call fail if too many large ones wait."""
        large = [waiting for waiting in self._queue if waiting[0] > SMALL and not waiting[2].done()]
        if len(large) > WAITING:
            largest = max(large)
            self._remove_waiting(largest)
            largest[2].set_exception(EngineError("too much work is waiting", remedy=REMEDY))

    def _remove_waiting(self, waiting: tuple[int, int, asyncio.Future[_Worker]]) -> None:
        if waiting in self._queue:  # or it was popped before its caller could leave
            self._queue.remove(waiting)
            heapq.heapify(self._queue)

    def _assign_workers(self) -> None:
        """Give free processes to the smallest calls that wait."""
        while self._queue and self._free:
            size, _, turn = self._queue[0]
            if size > SMALL and self._large and self._large >= len(self._all) - 1:
                return
            heapq.heappop(self._queue)
            if not turn.done():  # its caller may be leaving
                self._large += size > SMALL
                turn.set_result(self._free.pop())

    async def _release(self, worker: _Worker, size: int) -> None:
        with contextlib.suppress(OSError, EOFError):  # the next call tries again
            await worker.start()
        self._large -= size > SMALL
        self._free.append(worker)
        self._assign_workers()

    def _create_task(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_retrieve_error)
        return task


class _ObjectCache(dict[int, object]):
    """The latest objects by number; both ends of a connection add the same, and so drop the same."""

    def add(self, number: int, value: object) -> None:
        self[number] = value
        if len(self) > CACHED:
            del self[next(iter(self))]


class _Worker:
    """A process, and the objects that it has in its cache, each with its number."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._cache = _ObjectCache()
        self._numbers = itertools.count()

    async def start(self) -> None:
        """Start the process, unless it runs, and wait until it is ready; raises OSError or EOFError."""
        if self._streams:
            return
        self.end()
        self._process, connection = _start_process(self._modules)
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            await reader.readexactly(SIZE.size)
        except BaseException:
            writer.close()
            raise
        self._streams = reader, writer

    async def call(
        self, function: Callable[..., object], cached: object, arguments: tuple[object, ...]
    ) -> Any:
        """Return the result of a call, or the ImagematrixError that it raised."""
        if self._streams is None:
            raise EOFError
        reader, writer = self._streams
        number = next((key for key, value in self._cache.items() if value is cached), None)
        new = number is None
        if number is None:
            number = next(self._numbers)
            self._cache.add(number, cached)
        message = pickle.dumps((function, number, cached if new else None, new, arguments))
        writer.write(SIZE.pack(len(message)))
        writer.write(message)
        await writer.drain()
        (size,) = SIZE.unpack(await reader.readexactly(SIZE.size))
        return pickle.loads(await reader.readexactly(size))  # noqa: S301 - from our own child

    def end(self) -> None:
        """Kill the process."""
        if self._streams:
            self._streams[1].close()
        if self._process:
            self._process.kill()
            self._process.wait()
        self._process, self._streams, self._cache = None, None, _ObjectCache()


def _start_process(modules: Sequence[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    parent, child = socket.socketpair()
    with child:
        command = [*make_child_command(__name__), str(child.fileno()), *modules]
        try:
            # In a session of its own, it gets no signal from a terminal.
            return subprocess.Popen(command, pass_fds=[child.fileno()], start_new_session=True), parent
        except OSError:
            parent.close()
            raise


def main() -> None:
    """Answer the calls of the process that started this one, until it ends.

    The arguments are the descriptor of a socket, and modules to import before the first call.
    """
    raise_niceness_if_allowed(NICENESS)
    set_limit_if_allowed(resource.RLIMIT_AS, MEMORY)
    descriptor, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    cache = _ObjectCache()
    with socket.socket(fileno=int(descriptor)) as connection, connection.makefile("rb") as calls:
        _send(connection, b"")
        while size := calls.read(SIZE.size):
            message = calls.read(SIZE.unpack(size)[0])
            function, number, value, new, arguments = pickle.loads(message)  # noqa: S301 - from our parent
            if new:
                cache.add(number, value)
            try:
                result = function(*arguments, cache[number])
            except ImagematrixError as error:
                result = error
            _send(connection, pickle.dumps(result))


def _send(connection: socket.socket, message: bytes) -> None:
    connection.sendall(SIZE.pack(len(message)) + message)


def _retrieve_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # or asyncio would warn if the client has left
