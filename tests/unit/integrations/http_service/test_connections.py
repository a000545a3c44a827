"""Who is dropped when a service has no place or no room, in which order, and who is answered."""

import asyncio
import asyncio.sslproto
import contextlib
import contextvars
import gc
import socket
import ssl
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession, TCPConnector, web
from aiohttp.web_protocol import RequestHandler
from coroutines import until
from downloading import certify

from imagematrix.integrations.http_service import connections, http_server
from imagematrix.integrations.http_service.connections import Limits, read_body, reserve_memory
from imagematrix.integrations.http_service.http_server import Address, serve_http

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
PATIENCE_S = 20


def trusting_all():
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


@contextlib.contextmanager
def none_left_to_the_collector(kind):
    """Disable the collector of garbage; yield whether there are no more objects of a kind than before."""

    def count():
        return sum(isinstance(each, kind) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = count()
        yield lambda: count() <= before
    finally:
        gc.enable()


class Service:
    """A service that answers with the length of a body; `held` requests wait until they are let go."""

    def __init__(self, tmp_path, *, tls=False, **limits):
        self.limits = Limits(**{"body": 1 << 20, "slow_s": 600.0, **limits})
        self.begun = 0
        self.go = asyncio.Event()
        self.context = contextvars.Context()
        self.stack = contextlib.AsyncExitStack()
        self._tls = None
        if tls:
            self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._tls.load_cert_chain(*certify(tmp_path, "x"))

    async def _length(self, _):
        self.context = contextvars.copy_context()  # as timers keep it
        return web.Response(text=f"{len(read_body())}")

    async def _held(self, _):
        self.begun += 1
        await self.go.wait()
        return web.Response(text="held")

    async def _endless(self, request):
        reserve_memory(1_000)
        response = web.StreamResponse()
        await response.prepare(request)
        self.begun += 1
        while True:
            await response.write(bytes(1 << 16))

    async def __aenter__(self):
        application = web.Application()
        application.router.add_route("*", "/", self._length)
        application.router.add_get("/held", self._held)
        application.router.add_get("/endless", self._endless)
        serving = serve_http(application, Address("127.0.0.1", 0), tls=self._tls, limits=self.limits)
        self.address = await self.stack.enter_async_context(serving)
        return self

    async def __aexit__(self, *caught):
        await self.stack.aclose()

    async def connect(self, sent=b"", source="127.0.0.1"):
        """Return the reader of a new connection that has sent something; TLS only if it sends."""
        tls = trusting_all() if self._tls and sent else None
        reader, writer = await asyncio.open_connection(
            self.address.host, self.address.port, ssl=tls, local_addr=(source, 0)
        )
        self.stack.callback(writer.close)
        writer.write(sent)
        await asyncio.sleep(0.05)  # the order in which the service accepts
        return reader

    async def hold(self, count, source="127.0.0.1"):
        """Return the readers of new connections whose requests are held."""
        before = self.begun
        held = [await self.connect(b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n", source) for _ in range(count)]
        await until(lambda: self.begun == before + count)
        return held

    async def ask(self, **options):
        """Return the status and the text for a good client with a connection of its own."""
        connector = TCPConnector(ssl=False, force_close=True)
        scheme = "https" if self._tls else "http"
        async with (
            asyncio.timeout(PATIENCE_S),
            ClientSession(connector=connector) as session,
            session.post(f"{scheme}://{self.address}/", **options) as answer,
        ):
            return answer.status, await answer.text()


async def dropped(reader):
    """Wait until a connection is closed from the other end."""
    with contextlib.suppress(ConnectionError):
        while await asyncio.wait_for(reader.read(1 << 20), PATIENCE_S):
            pass


def is_open(reader):
    return not reader.at_eof() and reader.exception() is None


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nHost:", HEAD % 1_000_000 + b"x"])
async def test_the_oldest_without_a_whole_request_gives_way(tmp_path, sent, tls):
    async with Service(tmp_path, tls=tls, clients=3, peer=3) as service:
        opened = [await service.connect(sent) for _ in range(3)]
        for number in range(4):
            opened.append(await service.connect(sent))
            await dropped(opened[number])
            assert all(map(is_open, opened[number + 1 :]))
        assert await service.ask(data=b"good") == (200, "4")


@pytest.mark.parametrize("tls", [False, True])
async def test_one_that_has_sent_nothing_takes_no_place(tmp_path, tls):
    async with Service(tmp_path, tls=tls, clients=1, peer=1) as service:
        silent = [await service.connect() for _ in range(5)]
        half = await service.connect(HEAD % 4)
        assert all(map(is_open, [*silent, half]))
        assert await service.ask(data=b"good") == (200, "4")
        await dropped(half)
        assert all(map(is_open, silent))


async def test_one_that_is_dropped_as_its_handshake_ends_leaves_its_descriptor_to_the_next(
    tmp_path, monkeypatch
):
    clients: list[Any] = []
    start, made = connections.Connections.__init__, RequestHandler.connection_made

    def drop_first(handler, transport):
        made(handler, transport)
        if first := clients.pop() if clients else None:
            (connection,) = first._all.values()
            first._drop(connection)

    def remember(self, limits):
        start(self, limits)
        clients.append(self)

    monkeypatch.setattr(connections.Connections, "__init__", remember)
    monkeypatch.setattr(RequestHandler, "connection_made", drop_first)

    def shake_hands(address):
        client = socket.create_connection((address.host, address.port))
        return trusting_all().wrap_socket(client)  # which answers nothing afterwards

    async with Service(tmp_path, tls=True) as service:
        with await asyncio.to_thread(shake_hands, service.address):
            await until(lambda: not clients)
            await asyncio.sleep(0.05)
            for _ in range(3):
                assert await service.ask(data=b"good") == (200, "4")


async def test_a_client_that_leaves_in_its_handshake_leaves_nothing_to_the_collector(tmp_path):
    sent = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        trusting_all().wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    hello = sent.read()

    async with Service(tmp_path, tls=True) as service:
        with none_left_to_the_collector(asyncio.sslproto.SSLProtocol) as is_none_left:
            for _ in range(3):
                with socket.create_connection((service.address.host, service.address.port)) as client:
                    client.sendall(hello)
                    assert await asyncio.to_thread(client.recv, 1 << 10)
            await until(is_none_left)


@pytest.mark.parametrize("head", [HEAD % (2 << 20), b"GET /none HTTP/1.0\r\n\r\n"])
async def test_a_client_that_is_refused_leaves_nothing_to_the_collector(tmp_path, head):
    async with Service(tmp_path) as service:
        with none_left_to_the_collector(web.Request) as is_none_left:
            for _ in range(3):
                reader = await service.connect(head)
                assert (await reader.read()).split()[1] in (b"404", b"413")
            await until(is_none_left)


async def test_what_keeps_the_context_of_a_request_does_not_keep_its_body(tmp_path):
    async with Service(tmp_path) as service:
        assert await service.ask(data=b"good") == (200, "4")
        assert service.context.run(read_body) == b""


async def test_one_whose_request_is_whole_never_gives_way(tmp_path):
    async with Service(tmp_path, clients=3, peer=3) as service:
        held = await service.hold(2)
        for _ in range(10):
            assert await service.ask(data=b"good") == (200, "4")
        half = await service.connect(HEAD % 4)
        assert await service.ask(data=b"good") == (200, "4")
        await dropped(half)
        service.go.set()
        for one in held:
            assert b"held" in await asyncio.wait_for(one.readuntil(b"held"), PATIENCE_S)


async def test_an_address_takes_only_its_own_places(tmp_path):
    async with Service(tmp_path, clients=6, peer=2) as service:
        other = await service.connect(HEAD % 4, "127.0.0.1")
        first, second = [await service.connect(HEAD % 4, "127.0.0.2") for _ in range(2)]
        third = await service.connect(HEAD % 4, "127.0.0.2")
        await dropped(first)
        assert is_open(other)
        assert is_open(second)
        assert is_open(third)
        held = await service.hold(2, "127.0.0.3")
        waiting = await service.connect(HEAD % 4 + b"good", "127.0.0.3")  # all it has are whole
        assert await service.ask(data=b"good") == (200, "4")
        assert all(map(is_open, [*held, waiting]))
        service.go.set()
        assert b"200 OK" in await asyncio.wait_for(waiting.readline(), PATIENCE_S)


async def test_none_gives_way_that_is_young(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "YOUNG_S", 600.0)
    async with Service(tmp_path, clients=2, peer=2) as service:
        half = [await service.connect(HEAD % 4) for _ in range(2)]
        outside = [await service.connect(HEAD % 4 + b"good") for _ in range(3)]
        await asyncio.sleep(0.2)
        assert all(map(is_open, half + outside))
        monkeypatch.setattr(connections, "YOUNG_S", 0.1)
        for reader in outside:
            assert b"200 OK" in await asyncio.wait_for(reader.readline(), PATIENCE_S)


async def test_the_oldest_outside_are_refused_when_too_many_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "YOUNG_S", 600.0)
    monkeypatch.setattr(connections, "OUTSIDE", 2)
    async with Service(tmp_path, clients=1, peer=1) as service:
        half = await service.connect(HEAD % 4)
        outside = [await service.connect(HEAD % 4 + b"good") for _ in range(3)]
        await dropped(outside.pop(0))
        assert all(map(is_open, [half, *outside]))


async def test_the_oldest_that_asks_nothing_is_refused_before_one_that_asks(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "YOUNG_S", 600.0)
    monkeypatch.setattr(connections, "OUTSIDE", 2)
    async with Service(tmp_path, clients=1, peer=1) as service:
        half = await service.connect(HEAD % 4)
        asks = await service.connect(HEAD % 4 + b"good")
        silent, newer = await service.connect(), await service.connect()
        await dropped(silent)
        assert all(map(is_open, [half, asks, newer]))


async def test_half_of_the_files_that_may_be_open_are_for_others_than_those_outside(tmp_path, monkeypatch):
    few = SimpleNamespace(RLIMIT_NOFILE=0, getrlimit=lambda _: (4, 4))
    monkeypatch.setattr(connections, "resource", few)
    async with Service(tmp_path) as service:
        silent = [await service.connect() for _ in range(3)]
        await dropped(silent.pop(0))
        assert all(map(is_open, silent))


async def test_addresses_that_got_answers_come_before_strangers(tmp_path):
    """They come in turns, and of each the newest, but for each eighth place."""
    good = HEAD % 4 + b"good"
    async with Service(tmp_path, clients=1, peer=1) as service:
        for known in ("127.0.0.1", "127.0.0.3"):
            assert b"200 OK" in await (await service.connect(good, known)).readline()
        await service.hold(1)
        ended = []

        async def end(name, reader):
            await dropped(reader)  # with its answer, as others wait
            ended.append(name)

        ends = []
        for number in range(8):
            for name, source in (("stranger", "127.0.0.2"), (number, "127.0.0.1")):
                ends.append(asyncio.create_task(end(name, await service.connect(good, source))))
            if number < 2:
                ends.append(asyncio.create_task(end("ab"[number], await service.connect(good, "127.0.0.3"))))
        service.go.set()
        await until(lambda: len(ended) == 11)
        assert [name for name in ended if name != "stranger"][:6] == [7, "b", 6, "a", 5, 4]
        assert ended[:11].count("stranger") == 1
        for task in ends:
            task.cancel()


async def test_the_newest_stranger_comes_first(tmp_path):
    async with Service(tmp_path, clients=1, peer=1) as service:
        await service.hold(1)
        ended = []

        async def end(number, reader):
            await dropped(reader)  # with its answer, as others wait
            ended.append(number)

        outside = [await service.connect(HEAD % 4 + b"good") for _ in range(3)]
        ends = [asyncio.create_task(end(*each)) for each in enumerate(outside[1:], 1)]
        service.go.set()
        await asyncio.wait_for(asyncio.gather(*ends), PATIENCE_S)
        assert b"200 OK" in await asyncio.wait_for(outside[0].readline(), PATIENCE_S)
        assert ended == [2, 1]


async def test_one_with_a_part_of_a_handshake_begins_none(tmp_path, monkeypatch):
    """What is not TLS does not wait for the rest of it: the handshake fails."""
    begun = []

    async def shake_hands(_loop, _server, client, **_):
        begun.append(1)
        client.close()
        raise ConnectionResetError

    monkeypatch.setattr(asyncio.BaseEventLoop, "connect_accepted_socket", shake_hands)
    async with Service(tmp_path, tls=True) as service:

        async def send(raw):
            _, writer = await asyncio.open_connection(service.address.host, service.address.port)
            service.stack.callback(writer.close)
            writer.write(raw)
            return writer

        await send(b"\x16")
        almost = await send(bytes.fromhex("1603010200") + bytes(511))
        await asyncio.sleep(0.3)
        assert begun == []
        almost.write(bytes(1))
        await until(lambda: begun == [1])
        await send(b"GET / HTTP/1.1\r\n")
        await until(lambda: begun == [1, 1])


async def test_large_bodies_have_room_together(tmp_path):
    """The oldest that is not whole gives way; those of small bodies and those that are whole do not."""
    async with Service(tmp_path, bodies=300_000) as service:
        small = await service.connect(HEAD % 60_000 + b"x")
        first, second, third = [await service.connect(HEAD % 100_000 + b"x") for _ in range(3)]
        assert await service.ask(data=bytes(100_000)) == (200, "100000")
        await dropped(first)
        assert await service.ask(data=bytes(250_000)) == (200, "250000")
        await dropped(second)
        await dropped(third)
        assert is_open(small)


async def test_a_large_body_waits_for_those_that_are_whole(tmp_path):
    async with Service(tmp_path, bodies=150_000) as service:
        whole = HEAD.replace(b"POST /", b"GET /held") % 100_000 + bytes(100_000)
        held = await service.connect(whole)
        await until(lambda: service.begun == 1)
        waiting = asyncio.create_task(service.ask(data=bytes(100_000)))
        assert await service.ask(data=b"small") == (200, "5")
        assert not waiting.done()
        service.go.set()
        assert await waiting == (200, "100000")
        assert is_open(held)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_is_too_large_is_refused(tmp_path, chunked):
    async def pieces():
        for _ in range(40):
            yield bytes(1 << 15)

    async with Service(tmp_path) as service:
        data = pieces() if chunked else BytesIO(bytes(40 << 15))
        assert (await service.ask(data=data))[0] == 413
        assert await service.ask(data=b"good") == (200, "4")


@pytest.mark.parametrize("clients", [1, 100])
async def test_the_rest_of_a_refused_body_is_not_read_in_a_crowd(tmp_path, monkeypatch, clients):
    monkeypatch.setattr(http_server, "LINGER_S", 600.0)
    async with Service(tmp_path, clients=clients) as service:
        reader, writer = await asyncio.open_connection(service.address.host, service.address.port)
        service.stack.callback(writer.close)
        writer.write(HEAD % (40 << 20) + bytes(30 << 20))
        assert b" 413 " in await asyncio.wait_for(reader.readline(), PATIENCE_S)
        if clients == 1:
            await dropped(reader)
        else:
            await until(lambda: writer.transport.get_write_buffer_size() == 0)


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost:", HEAD % 1_000_000 + b"x"])
async def test_a_client_that_does_not_end_its_request_is_dropped(tmp_path, monkeypatch, sent, tls):
    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    async with Service(tmp_path, tls=tls, slow_s=0.3) as service:
        await dropped(await service.connect(sent))


async def test_a_client_that_reads_nothing_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    async with Service(tmp_path, slow_s=0.3) as service:
        loop = asyncio.get_running_loop()
        with socket.create_connection((service.address.host, service.address.port)) as client:
            client.setblocking(False)
            await loop.sock_sendall(client, b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(1)
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(PATIENCE_S):
                    while await loop.sock_recv(client, 1 << 20):
                        pass


async def test_a_connection_between_requests_is_not_slow(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    async with Service(tmp_path, slow_s=0.2) as service:
        whole = HEAD % 4 + b"good"
        reader, writer = await asyncio.open_connection(service.address.host, service.address.port)
        service.stack.callback(writer.close)
        for pause_s in (0.6, 0.0):
            writer.write(whole)
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n4"), PATIENCE_S)
            await asyncio.sleep(pause_s)
        writer.write(whole[:10])  # a request that does not end
        await dropped(reader)


async def test_one_that_waits_for_its_answer_is_not_slow_however_slow_its_request_was(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "LOOK_S", 0.1)
    async with Service(tmp_path, clients=1, peer=1) as service:
        host, port = service.address.host, service.address.port
        reader, writer = await asyncio.open_connection(host, port)
        service.stack.callback(writer.close)
        writer.write(b"GET /held HTTP/1.1\r\n")
        await asyncio.sleep(1.5)
        monkeypatch.setattr(connections, "LOOK_S", 600)
        await asyncio.sleep(0.2)
        writer.write(b"Host: x\r\n\r\n")
        await until(lambda: service.begun == 1)
        waiting = await service.connect(HEAD % 4 + b"good")
        await asyncio.sleep(0.2)
        assert is_open(reader)
        service.go.set()
        assert b"held" in await asyncio.wait_for(reader.readuntil(b"held"), PATIENCE_S)
        assert b"200 OK" in await asyncio.wait_for(waiting.readline(), PATIENCE_S)


async def test_only_a_slow_reader_gives_the_memory_of_its_answer_to_another(tmp_path, monkeypatch):
    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    monkeypatch.setattr(connections, "SHORT_S", 0.2)
    asked = b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n"
    async with Service(tmp_path, answers=1_999) as service:
        reader = await service.connect(asked)
        fast = True

        async def read():
            while fast:
                await reader.read(1 << 20)

        reading = asyncio.create_task(read())
        await until(lambda: service.begun == 1)
        refused = await service.connect(asked)
        assert b" 429 " in await asyncio.wait_for(refused.readline(), PATIENCE_S)
        fast = False
        await reading
        await asyncio.sleep(0.6)
        taken = await service.connect(asked)
        assert b" 200 " in await asyncio.wait_for(taken.readline(), PATIENCE_S)
        await dropped(reader)
