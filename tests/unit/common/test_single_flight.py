"""Work that several threads need is done once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from imagematrix.common.single_flight import SingleFlight
from imagematrix.errors import BuildError


def test_concurrent_callers_wait_for_the_result():
    calls, may = [], threading.Event()

    def work(argument):
        calls.append(argument)
        assert may.wait(10)
        return [argument]

    once: SingleFlight[str, list[str]] = SingleFlight()
    with ThreadPoolExecutor(4) as pool:
        result = [pool.submit(once, "a", partial(work, "a")) for _ in range(3)]
        other = pool.submit(once, "b", partial(work, "b"))
        may.set()
        assert len({id(one.result()) for one in result}) == 1
        assert other.result() == ["b"]
    assert sorted(calls) == ["a", "b"]
    assert once("a", partial(work, "a")) is result[0].result()


def test_error_is_raised_for_waiting_callers_but_not_cached():
    waiting, begun = threading.Event(), threading.Event()
    errors = [BuildError("the network")]

    def work(argument):
        begun.set()
        assert waiting.wait(10)
        if errors:
            raise errors.pop()
        return argument

    once: SingleFlight[str, list[str]] = SingleFlight()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(once, "a", partial(work, "a"))
        assert begun.wait(10)
        second = pool.submit(once, "a", partial(work, "a"))
        while not second.running():
            pass
        waiting.set()
        with pytest.raises(BuildError, match="the network"):
            first.result()
        assert second.exception() is None or "the network" in str(second.exception())
    assert once("a", partial(work, "a")) == "a"
