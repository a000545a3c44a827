"""Publishing a node's devices: its ResourceSlices at the API server are kept as they should be.

Others remove them too: kubelet does when it starts, and once the driver has been gone for a while.
"""

from __future__ import annotations

import asyncio
import contextlib

from imagematrix.errors import EngineError, UsageError
from imagematrix.integrations.kubernetes.client.api import (
    Collection,
    ConflictError,
    NotFoundError,
    send_request,
    watch_collection,
)
from imagematrix.integrations.kubernetes.dra import slices
from imagematrix.integrations.kubernetes.dra.slices import SLICES, StoredSlice

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from imagematrix.integrations.kubernetes.client.api import ApiServer
    from imagematrix.integrations.kubernetes.dra.slices import Device

PAUSE_S, LONGEST_S = 1.0, 30.0  # before a retry; each pause is twice as long as the last


class SlicePublisher:
    """The devices of a node, as they should be and as the API server has them.

    `on_line` gets a line about each change, and `on_state` the reason why the API server has other devices,
    or None once it has these.
    """

    def __init__(
        self,
        api: ApiServer,
        node: str,
        on_line: Callable[[str], None],
        on_state: Callable[[str | None], None],
    ) -> None:
        self._api = api
        self._node = node
        self._on_line = on_line
        self._on_state = on_state
        self._wanted: tuple[tuple[Device, ...], ...] | None = None
        self._observed: dict[str, StoredSlice] | None = None  # until they are listed
        # What the API server has made of slices. It may leave out what it does not know, and writes
        # quantities in its own way: they would differ forever.
        self._stored: dict[str, tuple[tuple[Device, ...], tuple[Any, ...]]] = {}
        self._changed = asyncio.Event()

    def set_devices(self, devices: tuple[Device, ...]) -> None:
        """Replace the devices to publish."""
        wanted = slices.split_devices(devices)
        if wanted != self._wanted:
            self._wanted = wanted
            self._changed.set()

    async def follow(self) -> None:
        """Publish the devices whenever they, or the slices of the API server, change, until cancelled."""
        collection = Collection(SLICES, "slices", StoredSlice.parse, query=slices.make_query(self._node))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                watch_collection(
                    self._api,
                    collection,
                    self._observe,
                    self._on_line,
                    lambda error: self._on_state(f"slices cannot be read: {error}"),
                )
            )
            tasks.create_task(self._publish_changes())

    def _observe(self, observed: Mapping[str, StoredSlice]) -> None:
        self._observed = dict(observed)
        self._changed.set()

    async def _publish_changes(self) -> None:
        pause = PAUSE_S
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._publish()
            except ConflictError as error:
                if pause > PAUSE_S:  # the watch has not reported what has changed
                    self._on_state(f"devices cannot be published: {error}")
            except (EngineError, UsageError) as error:
                self._on_state(f"devices cannot be published: {error}")
            else:
                pause = PAUSE_S
                continue
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_S)
            self._changed.set()

    async def _publish(self) -> None:
        observed = self._observed
        if self._wanted is None or observed is None:
            return
        wanted = self._wanted
        names = [slices.make_slice_name(self._node, index) for index in range(len(wanted))]
        stored = [self._stored.get(name) for name in names]
        accepted = [
            pair[1] if pair and pair[0] == devices else devices
            for devices, pair in zip(wanted, stored, strict=True)
        ]
        plan = slices.plan_requests(accepted, observed, self._node)
        if plan.is_empty:
            self._on_state(None)
            return
        # Each time: a Node that was deleted, with its slices, and registered again has another.
        uid = await self._read_node_uid()
        for name in plan.remove:
            with contextlib.suppress(NotFoundError):
                await send_request(self._api, "DELETE", f"{SLICES}/{name}")
        for index in (*plan.update, *plan.create):
            name, devices = names[index], wanted[index]
            document = slices.make_slice(
                self._node, uid, index, count=len(wanted), generation=plan.generation, devices=devices
            )
            if index in plan.update:
                document["metadata"]["resourceVersion"] = observed[name].version
                answer = await send_request(self._api, "PUT", f"{SLICES}/{name}", document)
            else:
                answer = await send_request(self._api, "POST", SLICES, document)
            # What is observed comes from the watch alone: the slice may have been removed again by now.
            self._stored[name] = devices, StoredSlice.parse(answer).devices
        self._on_state(None)
        self._on_line(f"published {sum(map(len, wanted))} devices, generation {plan.generation}")

    async def _read_node_uid(self) -> str:
        node = await send_request(self._api, "GET", f"/api/v1/nodes/{self._node}")
        metadata = node.get_object_or_none("metadata")
        if metadata is None:
            raise node.fail("metadata", "is missing (expected an object)")
        return metadata.get_text("uid")
