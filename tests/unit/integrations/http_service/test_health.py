"""Health on a port of its own, in a thread of its own."""

import asyncio
import socket
import threading
import time

import pytest
from aiohttp import ClientSession
from coroutines import running

from imagematrix.errors import EngineError, UsageError
from imagematrix.integrations.http_service import health
from imagematrix.integrations.http_service.health import Health
from imagematrix.integrations.http_service.http_server import Address

LOCAL = Address("127.0.0.1", 0)


class Asked:
    """A service with a problem, and with answers that may fail."""

    def __init__(self):
        self.problem = None
        self.failure = None

    async def answer(self):
        if self.failure:
            raise EngineError(self.failure)

    def health(self):
        return Health(lambda: self.problem, self.answer)


async def told(address, path):
    async with ClientSession() as session, session.get(f"http://{address}{path}") as answer:
        return answer.status, await answer.text()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(health, "ASK_S", 0.02)
    monkeypatch.setattr(health, "FRESH_S", 0.5)


async def test_it_is_ready_after_an_answer_of_its_own():
    asked = Asked()
    checked = asked.health()
    async with checked.serve(LOCAL) as address:
        assert await told(address, "/readyz") == (503, "no answer was made yet\n")
        assert await told(address, "/healthz") == (200, "ok\n")
        async with running(checked.follow()):
            await asyncio.sleep(0.1)
            assert await told(address, "/readyz") == (200, "ok\n")
            asked.problem = "ending"
            assert await told(address, "/readyz") == (503, "ending\n")
            asked.problem, asked.failure = None, "the node cannot be read"
            assert await told(address, "/readyz") == (200, "ok\n")  # a failure may pass
            await asyncio.sleep(1)
            assert await told(address, "/readyz") == (503, "the node cannot be read\n")
            asked.failure = None
            await asyncio.sleep(0.2)
            assert await told(address, "/readyz") == (200, "ok\n")


def test_it_answers_while_the_service_does_not_and_says_so(monkeypatch):
    monkeypatch.setattr(health, "ALIVE_S", 0.5)
    seen = []

    async def run():
        checked = Asked().health()
        async with checked.serve(LOCAL) as address, running(checked.follow()):
            await asyncio.sleep(0.1)
            asking = asyncio.create_task(asyncio.to_thread(asked, address))
            await asyncio.sleep(0)
            time.sleep(2)  # noqa: ASYNC251 - the event loop of the service stands still
            seen.extend(await asking)

    def asked(address):
        time.sleep(1)
        return [asyncio.run(told(address, path)) for path in ("/healthz", "/readyz")]

    asyncio.run(run())
    assert seen == [(503, "nothing was done for 1 s\n"), (503, "no answer was made for 0.5 s\n")]


async def test_a_port_in_use_is_an_error():
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(UsageError, match="cannot listen on"),
    ):
        async with Asked().health().serve(Address("127.0.0.1", other.getsockname()[1])):
            pass


async def test_no_thread_is_left():
    async with Asked().health().serve(LOCAL):
        assert "health" in {thread.name for thread in threading.enumerate()}
    assert "health" not in {thread.name for thread in threading.enumerate()}
