"""The connections of a service: their number is limited, and idle ones give way to others."""

import asyncio
import contextlib
import gc
import socket
import ssl

import pytest
from aiohttp import ClientSession, web
from downloading import certify

from imagematrix.errors import UsageError
from imagematrix.integrations.http_service.connections import Connections, Limits
from imagematrix.integrations.http_service.http_server import Address, serve_http

LOCAL = Address("127.0.0.1", 0)


async def hang_up(writer):
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def test_idle_connections_give_way_to_other_clients():
    async def answer(_):
        return web.Response(text="ok")

    application = web.Application()
    application.router.add_get("/", answer)
    async with (
        serve_http(application, LOCAL, limits=Limits(clients=2, peer=2)) as bound,
        ClientSession() as session,
    ):
        silent, silent_writer = await asyncio.open_connection(bound.host, bound.port)
        half, half_writer = await asyncio.open_connection(bound.host, bound.port)
        half_writer.write(b"GET / HTTP/1.1\r\nHost:")
        for _ in range(5):
            async with asyncio.timeout(20), session.get(f"http://{bound}/") as got:
                assert await got.text() == "ok"
        left = [await asyncio.wait_for(one.read(), 20) for one in (silent, half)]
        for writer in (silent_writer, half_writer):
            await hang_up(writer)
        assert left == [b"", b""]


async def test_further_clients_wait_until_one_has_its_answer():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def slow(_):
        begun.set()
        await ended.wait()
        return web.Response(text="ok")

    application = web.Application()
    application.router.add_get("/", slow)
    async with (
        serve_http(application, LOCAL, limits=Limits(clients=1, peer=2)) as bound,
        ClientSession() as session,
    ):

        async def ask():
            async with asyncio.timeout(20), session.get(f"http://{bound}/") as answer:
                return await answer.text()

        first = asyncio.create_task(ask())
        await begun.wait()
        second = asyncio.create_task(ask())
        done, _ = await asyncio.wait([first, second], timeout=0.3)
        assert not done
        ended.set()
        assert await asyncio.gather(first, second) == ["ok", "ok"]


async def test_a_client_that_goes_away_ends_its_request():
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless(_):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    application = web.Application()
    application.router.add_get("/", endless)
    async with serve_http(application, LOCAL) as bound:
        _, writer = await asyncio.open_connection(bound.host, bound.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.wait_for(begun.wait(), 20)
        await hang_up(writer)
        await asyncio.wait_for(ended.wait(), 20)


def connected(bound):
    return socket.create_connection((bound.host, bound.port))


def encrypted(bound):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(connected(bound))


def reading_nothing(bound):
    client = encrypted(bound)
    client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    return client


@pytest.mark.parametrize("connect", [connected, encrypted, reading_nothing])
@pytest.mark.parametrize("pause", [0, 0.2])
def test_no_connection_outlives_the_service(tmp_path, connect, pause):
    """Whatever its client does: shake no hands, answer no closing of TLS, or read nothing."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certify(tmp_path, "x"))

    async def scenario():
        async def much(_):
            return web.Response(body=bytes(20_000_000))

        application = web.Application()
        application.router.add_get("/", much)
        async with serve_http(application, LOCAL, tls=context) as bound:
            client = await asyncio.to_thread(connect, bound)
            await asyncio.sleep(pause)
            return client

    with asyncio.run(scenario()) as client:
        gc.collect()  # a connection that is left warns, which is an error
        client.settimeout(20)
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while client.recv(1 << 20):
                pass


async def test_an_error_of_whoever_serves_is_raised_as_it_is():
    with pytest.raises(UsageError, match="another port is in use"):
        async with serve_http(web.Application(), Address("127.0.0.1", 0)):
            raise UsageError("another port is in use")


async def test_a_service_that_lets_nobody_in_any_more_ends(monkeypatch):
    async def fail(*_):
        raise RuntimeError("a mistake")

    monkeypatch.setattr(Connections, "serve", fail)
    with pytest.raises(RuntimeError, match="a mistake"):
        async with serve_http(web.Application(), Address("127.0.0.1", 0)):
            await asyncio.sleep(3_600)
