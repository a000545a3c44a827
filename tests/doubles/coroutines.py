"""Coroutines that run during a test."""

import asyncio
from contextlib import asynccontextmanager


@asynccontextmanager
async def running(*work):
    """Run coroutines during a test; if one of them ends or fails, the test fails."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in results), results


async def until(condition):
    """Wait until a condition holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not hold within 10 s")
