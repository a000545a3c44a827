"""Many clients of a service, each of which takes what it can get in its way.

Run as a program with a lower priority, as if they were on other machines. The argument is a Crowd as JSON.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import random
import resource
import ssl
import subprocess
import sys
import time
from pathlib import Path

NICENESS = 10
PAUSE_S = 0.1  # before a client that was dropped comes again
CHANCE = random.Random(0)  # noqa: S311 - no secret
HELLO = bytes.fromhex("160301020001")  # the beginning of a handshake of TLS
PIECE = bytes(1 << 16)


@dataclasses.dataclass(kw_only=True)
class Crowd:
    """`shared` clients from 127.0.0.1 and as many as `addresses` from one address each, for `seconds`.

    `kinds` are names of coroutines below. `long` is a path whose answer is long, `costly` are files with
    whole requests, each of which costs the service much.
    """

    host: str
    port: int
    tls: bool
    seconds: float
    kinds: list[str]
    long: str
    costly: list[str]
    shared: int = 1_000
    addresses: int = 1_000

    @contextlib.contextmanager
    def at_work(self):
        """Let it do its work in a process of its own, which ends with the block at the latest."""
        words = [sys.executable, __file__, json.dumps(dataclasses.asdict(self))]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield process
            finally:
                process.terminate()


class Client:
    """A client with an address of its own, or the one that many share."""

    def __init__(self, crowd, source, counts):
        self._crowd, self._source, self._counts = crowd, source, counts
        self.costly = itertools.cycle(CHANCE.sample(PIECES, len(PIECES)))
        self.long = f"GET {crowd.long} HTTP/1.1\r\nHost: x\r\n\r\n".encode()

    @contextlib.asynccontextmanager
    async def connected(self, *, secure=True, small=False):
        tls = CONTEXT if self._crowd.tls and secure else None
        reader, writer = await asyncio.open_connection(
            self._crowd.host,
            self._crowd.port,
            ssl=tls,
            local_addr=(self._source, 0),
            **({"limit": 1 << 12} if small else {}),
        )
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def come(self, kind, until):
        """Come again and again, whenever it was dropped or answered."""
        while time.monotonic() < until:
            with contextlib.suppress(
                OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError
            ):
                async with asyncio.timeout(until - time.monotonic()):
                    await KINDS[kind](self)
            self._counts[kind] = self._counts.get(kind, 0) + 1
            await asyncio.sleep(PAUSE_S * CHANCE.random() * 2)


async def idle(client):
    """Send nothing."""
    async with client.connected(secure=False) as (reader, _):
        await reader.read()


async def half(client):
    """Begin a handshake, or a head, and perhaps end the sending of anything more."""
    async with client.connected(secure=False) as (reader, writer):
        writer.write(HELLO if CROWD.tls else b"GET /v2/ HTTP/1.1\r\nHost:")
        if CHANCE.random() < 0.5:
            writer.write_eof()
        await reader.read()


async def slow(client):
    """Send a request byte by byte, or read a long answer in that way."""
    async with client.connected(small=True) as (reader, writer):
        if CHANCE.random() < 0.5:
            for byte in f"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n{' ' * 900}":
                writer.write(byte.encode())
                await asyncio.sleep(0.2)
        else:
            writer.write(client.long)
            while await reader.read(1 << 10):  # noqa: ASYNC110 - on purpose
                await asyncio.sleep(0.2)


async def huge(client):
    """Send almost all of a large body, or a large head, or ask for a long answer and read nothing."""
    async with client.connected(small=True) as (reader, writer):
        choice = CHANCE.randrange(3)
        if choice == 0:
            writer.write(b"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Length: 3000000\r\n\r\n")
            for _ in range(45):
                writer.write(PIECE)
                await writer.drain()
        elif choice == 1:
            writer.write(b"GET / HTTP/1.1\r\n")
            for number in range(2_000):
                writer.write(f"X-{number}: {'x' * 1_000}\r\n".encode())
                await writer.drain()
        else:
            writer.write(client.long)
            await asyncio.sleep(3_600)
        await reader.read()


async def costly(client):
    """Ask well-formed questions that cost much, and read the answers."""
    async with client.connected() as (reader, writer):
        while True:
            writer.write(next(client.costly))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            left = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
            while left:
                piece = await reader.read(min(left, 1 << 16))
                if not piece:
                    return
                left -= len(piece)


KINDS = {each.__name__: each for each in (idle, half, slow, huge, costly)}


async def main():
    until = time.monotonic() + CROWD.seconds
    counts: dict[str, int] = {}
    sources = ["127.0.0.1"] * CROWD.shared
    sources += [f"127.{1 + number // 250}.0.{1 + number % 250}" for number in range(CROWD.addresses)]
    kinds = itertools.cycle(CROWD.kinds)
    clients = (Client(CROWD, source, counts).come(next(kinds), until) for source in sources)
    with contextlib.suppress(TimeoutError):
        await asyncio.gather(*clients)
    sys.stdout.write(f"{json.dumps(counts)}\n")


if __name__ == "__main__":
    CROWD = Crowd(**json.loads(sys.argv[1]))
    PIECES = [Path(path).read_bytes() for path in CROWD.costly]
    CONTEXT = ssl.create_default_context()
    CONTEXT.check_hostname, CONTEXT.verify_mode = False, ssl.CERT_NONE
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of clients that were dropped
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(main())
