"""Running the resolver until a signal stops it."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from imagematrix.errors import ImagematrixError, UsageError
from imagematrix.listening import Address, listening
from imagematrix.resolver.answer import Nodes
from imagematrix.resolver.journal import Journal
from imagematrix.resolver.policy import Policy
from imagematrix.resolver.server import Resolver
from imagematrix.resolver.state import State
from imagematrix.resolver.tag import CLASS_NAME
from imagematrix.resolver.upstream import LAYOUT, open_upstream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from imagematrix.node.host import Host
    from imagematrix.resolver.node import Node

__all__ = ["Settings", "serve"]

WATCH_S = 10.0  # between checks whether the node has changed
GRACE_S = 10.0  # for pulls in progress, after a signal


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The options of `imagematrix resolver`.

    `listen` is ADDRESS:PORT. The file `changed` is touched at the start, and after each change of the node.
    `policy` is a file, `state` a folder.
    """

    upstream: str
    listen: str
    node: Node
    classes: Mapping[str, Node]
    token: str | None
    changed: Path | None = None
    policy: Path | None = None
    state: Path | None = None

    def address(self) -> Address:
        """Return the address to listen on; raise UsageError if it is invalid, or needs a token."""
        address = Address.parse(self.listen)
        if not ipaddress.ip_address(address.host).is_loopback and not self.token:
            raise UsageError(
                f"other machines can reach {self.listen}, and would read images with this node's login",
                remedy="require a password with --token-file, or listen on 127.0.0.1",
            )
        return address


def serve(settings: Settings, note: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `note` is called with the address, the choices and the refusals.

    Raises UsageError for invalid settings, ImagematrixError if the node cannot be probed.
    """
    for name in settings.classes:
        if not CLASS_NAME.fullmatch(f"class.{name}"):
            raise UsageError(
                f"invalid class name: {name!r}; expected letters, digits, '.' and '_', as in a tag"
            )
    address = settings.address()
    policy = Policy.load(settings.policy) if settings.policy else Policy()
    for node in (settings.node, *settings.classes.values()):
        node.host()
    asyncio.run(_serve(settings, policy, address, note))


async def _serve(settings: Settings, policy: Policy, address: Address, note: Callable[[str], None]) -> None:
    upstream = open_upstream(settings.upstream)
    registry = "" if settings.upstream.startswith(LAYOUT) else settings.upstream.rstrip("/")
    resolver = Resolver(
        upstream=upstream,
        nodes=Nodes(here=settings.node, classes=settings.classes),
        journal=Journal(note),
        mirrors=registry.partition("/")[0] or None,
        token=settings.token,
        policy=policy.on(registry),
        state=State(settings.state, settings.upstream.rstrip("/"), note) if settings.state else None,
    )
    try:
        async with listening(resolver.application(), address, grace_s=GRACE_S) as bound:
            ended = asyncio.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, ended.set)
            for each in bound:
                note(f"serving {settings.upstream} on {each}")
            watch = asyncio.create_task(_watch(settings, note))
            await ended.wait()
            watch.cancel()
    finally:
        await upstream.close()


async def _watch(settings: Settings, note: Callable[[str], None]) -> None:
    """Report changes of the node, and touch the file `changed`.

    The file is touched at the start, too, because the node may have changed before.
    """
    seen: Host | None = None
    loop = asyncio.get_running_loop()
    own = ThreadPoolExecutor(1)  # asyncio's threads may all wait for an upstream that hangs
    while True:
        try:
            host = await loop.run_in_executor(own, settings.node.host)
        except ImagematrixError as error:
            note(str(error))
        else:
            if seen is not None and host != seen:
                note("the node has changed: new answers may differ from the images in the engine")
            if settings.changed and host != seen:
                try:
                    await loop.run_in_executor(own, settings.changed.touch)
                except OSError as error:
                    note(f"{settings.changed} cannot be touched: {error.strerror}")
            seen = host
        await asyncio.sleep(WATCH_S)
