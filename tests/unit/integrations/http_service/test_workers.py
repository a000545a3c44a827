"""Work in processes: the smallest first, within limits."""

import asyncio
import gc
import os
import subprocess
import sys
import time
import weakref

import pytest
from system_calls import RESOURCES, filter_command

from imagematrix.errors import EngineError, ImagematrixError, UsageError
from imagematrix.integrations.http_service import workers as workers_module
from imagematrix.integrations.http_service.workers import SMALL, Workers


def added(first, second, held):
    return first + second + held


def process(held):
    return os.getpid(), id(held)


def refused(held):
    raise UsageError(f"no {held}", remedy="give another")


def slept(seconds, _):
    time.sleep(seconds)


def filled(held):
    return bytes(1 << 34) + held


def crashed(_):
    os._exit(1)


def appended(path, word, _):
    time.sleep(0.02)
    with path.open("a") as file:
        file.write(word)


def using(work, **options):
    """Run a function of Workers."""

    async def run():
        workers = Workers(__name__, **options)
        try:
            return await work(workers)
        finally:
            await workers.end()

    return asyncio.run(run())


def test_a_call_returns_or_raises_what_the_function_does():
    async def work(workers):
        assert await workers.call(added, [1], [2], cached=[3]) == [1, 2, 3]
        with pytest.raises(UsageError, match="no cake") as caught:
            await workers.call(refused, cached="cake")
        assert caught.value.remedy == "give another"

    using(work)


def test_what_is_held_is_sent_once():
    async def work(workers):
        held = [["one"] for _ in range(9)]
        one = await workers.call(process, cached=held[0])
        assert one[0] != os.getpid()
        assert await workers.call(process, cached=held[0]) == one
        for each in held:
            assert await workers.call(added, [], [], cached=each) == ["one"]
        assert (await workers.call(process, cached=held[0]))[0] == one[0]

    using(work, count=1)


@pytest.mark.parametrize(("function", "arguments"), [(slept, (60,)), (filled, ()), (crashed, ())])
def test_work_beyond_a_limit_ends_and_the_next_is_done(function, arguments):
    async def work(workers):
        for _ in range(2):
            with pytest.raises(EngineError, match=r"more than 3 s, or too much memory") as caught:
                await workers.call(function, *arguments, cached=b"")
            assert caught.value.remedy == "try again later"
            assert await workers.call(added, "a", "b", cached="c") == "abc"

    using(work, count=1, limit_s=3)


def test_the_smallest_work_goes_first(tmp_path):
    path = tmp_path / "order"

    async def work(workers):
        await workers.call(added, 1, 2, cached=3)  # it has started
        sizes = [0, 5, 9, 3, 1, 7, 3]
        calls = [workers.call(appended, path, f"{size} ", cached=None, size=size) for size in sizes]
        await asyncio.gather(*calls)

    using(work, count=1)
    assert path.read_text() == "0 1 3 3 5 7 9 "


def test_large_work_never_has_all_processes():
    async def work(workers):
        large = [asyncio.create_task(workers.call(slept, 60, cached=None, size=SMALL + 1)) for _ in range(3)]
        await asyncio.sleep(0.1)
        for _ in range(20):
            assert await workers.call(added, "a", "b", cached="c", size=SMALL) == "abc"
        assert not any(task.done() for task in large)
        for task in large:
            task.cancel()

    using(work, count=2, limit_s=30)


def test_of_too_much_large_work_the_largest_fails(monkeypatch):
    monkeypatch.setattr(workers_module, "WAITING", 2)

    async def work(workers):
        sizes = [0, *(SMALL + size for size in (5, 9, 3, 7))]
        calls = [workers.call(slept, 0.1, cached=None, size=size) for size in sizes]
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(each) for each in done] == [
            *("None", "None", "too much work is waiting", "None", "too much work is waiting")
        ]

    using(work, count=1)


class Large:
    """An argument that weak references can watch."""


def refused_for(_, held):
    raise UsageError(f"no {held}")


def test_nothing_keeps_the_arguments_of_a_call_that_is_refused(monkeypatch):
    """Not even until the next collection of garbage, which may be after hundreds of such calls."""
    monkeypatch.setattr(workers_module, "WAITING", 0)

    async def failing(workers, function, message, size=0):
        argument = Large()
        with pytest.raises(ImagematrixError, match=message):
            await workers.call(function, argument, cached="cake", size=size)
        return weakref.ref(argument)

    async def work(workers):
        calls = [
            failing(workers, refused_for, "no cake"),
            failing(workers, refused_for, "too much work is waiting", SMALL + 1),
        ]
        return await asyncio.gather(*calls)

    gc.collect()
    gc.disable()
    try:
        kept = using(work, count=1, limit_s=3)
        assert [reference() for reference in kept] == [None, None]
    finally:
        gc.enable()


def test_a_call_whose_caller_has_just_left_is_not_refused_as_well(monkeypatch):
    monkeypatch.setattr(workers_module, "WAITING", 1)

    async def work(workers):
        running = asyncio.create_task(workers.call(slept, 0.1, cached=None))
        leaving = asyncio.create_task(workers.call(slept, 0, cached=None, size=SMALL + 9))
        await asyncio.sleep(0.05)
        leaving.cancel()
        assert await workers.call(added, 1, 2, cached=3, size=SMALL + 5) == 6
        await running
        with pytest.raises(asyncio.CancelledError):
            await leaving

    using(work, count=1)


def test_a_caller_that_leaves_does_not_spoil_the_next_call():
    async def work(workers):
        pid, _ = await workers.call(process, cached=None)
        for _ in range(3):
            waiting = [asyncio.create_task(workers.call(slept, 0.2, cached=None)) for _ in range(3)]
            await asyncio.sleep(0.05)
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            assert await workers.call(added, 1, 2, cached=3) == 6
        assert (await workers.call(process, cached=None))[0] == pid

    using(work, count=1)


CALL = """
import asyncio, resource
from imagematrix.integrations.http_service.workers import Workers

async def run():
    workers = Workers(count=1)
    try:
        print(await workers.call({function}, cached={argument}))
    finally:
        await workers.end()

{before}
asyncio.run(run())
"""


def call_elsewhere(function, argument, *, prefix=(), before=""):
    """Return what a worker of another process prints for a call."""
    program = CALL.format(function=function, argument=argument, before=before)
    command = [*prefix, sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_service_that_may_not_change_its_priority_and_limits_has_workers():
    """As with SystemCallFilter=~@resources of a unit."""
    assert call_elsewhere("len", "'abc'", prefix=filter_command(denied=RESOURCES)) == "3"


def test_a_lower_limit_of_memory_stays():
    hard = 900 << 20
    before = f"resource.setrlimit(resource.RLIMIT_AS, ({hard}, {hard}))"
    said = call_elsewhere("resource.getrlimit", "resource.RLIMIT_AS", before=before)
    assert said == str((hard, hard))
