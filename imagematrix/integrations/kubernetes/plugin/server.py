"""The plugin as a process: a socket for each resource, registered with kubelet until a signal ends it.

When kubelet starts, it removes all sockets in its folder and creates its own again. The plugin watches
kubelet's socket, and registers again when it is new.

Launches outside of pods learn from kubelet which GPUs its pods have. Kubelet lists a GPU only after
`Allocate` has returned, so the plugin holds the locks of what it gives out until then.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from imagematrix.common.files import read_stamp
from imagematrix.errors import ImagematrixError
from imagematrix.integrations.kubernetes.nodes.node_monitor import MonitorTimes, NodeMonitor
from imagematrix.integrations.kubernetes.plugin import offer as offers
from imagematrix.launcher.gpu_claims.locks import release_locks
from imagematrix.launcher.gpu_claims.pods import VRAM, parse_uuids
from imagematrix.launcher.kubelet import sockets
from imagematrix.launcher.kubelet.grpc_server import (
    SOCKET_PATH,
    make_handler,
    run_periodically,
    run_together,
    run_until_signal,
    start_server,
)
from imagematrix.launcher.kubelet.messages import (
    DEVICE_PLUGIN,
    PODS,
    REGISTRATION,
    VERSION,
    load_message,
    make_call,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from typing import Any

    from imagematrix.hardware.host.host import Gpu, Host
    from imagematrix.integrations.kubernetes.nodes.node_view import NodeView
    from imagematrix.integrations.kubernetes.plugin.offer import DeviceOffer
    from imagematrix.launcher.gpu_claims.usage import Usage

HEALTH = {True: "Healthy", False: "Unhealthy"}
PERMISSIONS = "rw"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginTimes(MonitorTimes):
    """Intervals and limits in seconds.

    `watch` and `pods` are the intervals for reading kubelet's socket, and its pods.
    `answer` is the limit for an answer of kubelet. A unit that is not in kubelet's list stays held for
    `settle`, because an allocation may appear there late, and a kubelet that restarts lists no pods at first.
    `read` is the limit for reading the node before a unit is given out: kubelet starts no pod meanwhile.
    """

    watch: float = 1.0
    pods: float = 5.0
    answer: float = 5.0
    settle: float = 10.0
    read: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """The settings of the plugin: `offer` returns what a host offers, `folder` has device plugins' sockets.

    `kubelet` is kubelet's root directory, by default that of the kubelet that runs on this node.
    """

    view: NodeView
    offer: Callable[[Host], DeviceOffer] = offers.make_offer
    folder: Path = Path(sockets.DEVICE_PLUGINS)
    kubelet: Path | None = None
    times: PluginTimes = field(default_factory=PluginTimes)

    @property
    def registry(self) -> Path:
        """The socket at which kubelet registers device plugins."""
        return self.folder / sockets.SOCKET

    @property
    def pods(self) -> Path:
        """The socket at which kubelet lists the devices of its pods."""
        return Path(sockets.locate_pods_socket(str(self.kubelet or sockets.find_root_dir())))


def serve(settings: PluginSettings, on_line: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `on_line` gets lines about registrations, changes and failures.

    Raises ImagematrixError if the node cannot be probed at the start.
    """
    run_until_signal(Plugin(settings, on_line).run)


class Plugin:
    """The current offer, the resource under which each unit is held, and a server for each resource."""

    def __init__(self, settings: PluginSettings, on_line: Callable[[str], None]) -> None:
        self._settings = settings
        self._log = on_line
        self._monitor = NodeMonitor(
            probe=lambda: settings.offer(settings.view.probe()),
            survey=lambda offer: _survey_others(settings.view, offer.host.gpus),
            on_line=on_line,
            effect="no device is offered",
        )
        self._holders: dict[str, str] = {}
        self._since: dict[str, float] = {}  # when units were last allocated or listed
        self._locks: dict[frozenset[str], tuple[int, ...]] = {}  # of units that kubelet may not list yet
        self._knows_pods = False
        self._changed = asyncio.Condition()
        self._reading = asyncio.Lock()  # held while the node, or the usage of its GPUs, is read
        self._is_stopping = False
        self._servers: dict[str, Any] = {}  # by resource
        # Identity of the socket at which the plugin is registered.
        self._kubelet: tuple[int, ...] | None = None

    @property
    def _offer(self) -> DeviceOffer:
        return self._monitor.node

    async def run(self, ended: asyncio.Event) -> None:
        """Offer the node's units until `ended` is set, then remove the sockets."""
        times = self._settings.times
        # Otherwise no pod would start later, and kubelet does not try again.
        await asyncio.to_thread(self._settings.view.lock_gpus, (), times.read)
        await self._monitor.read_node()
        if not self._offer.resources:
            self._log("no GPU to offer on this node")
        await self._read_pods()
        await self._survey_usage()
        try:
            await run_together(
                ended.wait(),
                run_periodically(times.probe, self._probe_node),
                run_periodically(times.pods, self._read_pods),
                run_periodically(times.usage, self._survey_usage),
                run_periodically(times.watch, self._register_resources, at_once=True),
            )
        finally:
            await self._stop_servers()
            for descriptors in self._locks.values():
                release_locks(descriptors)

    async def _probe_node(self) -> None:
        async with self._reading:
            await self._monitor.update_node()
        await self._notify()

    async def _survey_usage(self) -> None:
        async with self._reading:
            await self._monitor.update_usage()
            await self._report_users()

    async def _report_users(self) -> None:
        self._monitor.report_users(self._find_users())
        await self._notify()

    def _find_users(self) -> dict[str, str]:
        return offers.find_users(self._offer, self._monitor.usage or {}, self._holders)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _read_pods(self) -> None:
        """Read from kubelet which units its pods hold; while it does not answer, held units stay held."""
        started, path = time.monotonic(), self._settings.pods
        try:
            async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
                list_pods = make_call(channel, f"/{PODS}/List", "ListPodResourcesResponse")
                answer = await list_pods(load_message("Empty")(), timeout=self._settings.times.answer)
        except grpc.aio.AioRpcError as error:
            effect = "allocated devices stay allocated" if self._knows_pods else "no device is offered"
            self._monitor.report_state("pods", f"{path}: pods unknown, {effect}: {error.details()}")
            self._extend_holds()
            return
        self._monitor.report_state("pods", None)
        # A unit that the last probe missed has to be held when the next probe finds it.
        used = {
            unit: devices.resource_name
            for pod in answer.pod_resources
            for container in pod.containers
            for devices in container.devices
            for unit in parse_uuids(devices.device_ids)
        }
        last = {**self._since, **dict.fromkeys(used, started)}
        settle = self._settings.times.settle
        self._since = {unit: since for unit, since in last.items() if since > started - settle}
        self._holders = {unit: used.get(unit) or self._holders[unit] for unit in self._since}
        for units in list(self._locks):
            if all(unit in used or unit not in self._since for unit in units):
                release_locks(self._locks.pop(units))
        self._knows_pods = True
        await self._notify()

    def _extend_holds(self) -> None:
        """Keep held units for `settle` from now: kubelet is unavailable, or may not know its pods yet."""
        self._since = dict.fromkeys(self._since, time.monotonic())

    async def _register_resources(self) -> None:
        """Serve and register each resource that is not registered with the current kubelet."""
        identity = read_stamp(self._settings.registry)
        if identity is None:
            self._monitor.report_state("kubelet", f"{self._settings.registry} not found: waiting for kubelet")
            return
        self._monitor.report_state("kubelet", None)
        if not self._knows_pods:
            await self._read_pods()
        # Units that pods hold under one name would look free under the others; those in use would look free.
        if not self._knows_pods or self._monitor.usage is None:
            return
        if identity != self._kubelet:
            self._extend_holds()
            await self._stop_servers()
            self._kubelet = identity
        async with grpc.aio.insecure_channel(f"unix:{self._settings.registry}") as channel:
            for resource in self._offer.resources:
                if resource in self._servers:
                    continue
                try:
                    await self._start_server(resource, channel)
                except grpc.aio.AioRpcError as error:
                    message = f"kubelet did not register {resource}: {error.details()}"
                    self._monitor.report_state(resource, message)

    async def _start_server(self, resource: str, channel: Any) -> None:
        path = self._get_socket_path(resource)
        # Before the registration, because kubelet then connects to it.
        server = await start_server(path, self._make_service(resource))
        try:
            register = make_call(channel, f"/{REGISTRATION}/Register", "Empty")
            request = load_message("RegisterRequest")(
                version=VERSION, endpoint=path.name, resource_name=resource, options=_make_options(resource)
            )
            await register(request, timeout=self._settings.times.answer)
        except BaseException:
            await server.stop(None)
            path.unlink(missing_ok=True)
            raise
        self._servers[resource] = server
        self._monitor.report_state(resource, None)
        self._log(f"offering {len(self._list_devices(resource))} {resource}")

    async def _stop_servers(self) -> None:
        """End kubelet's streams, then remove the sockets.

        gRPC prints a traceback for a stream that it has to cancel.
        """
        self._is_stopping = True
        await self._notify()
        for resource, server in self._servers.items():
            await server.stop(self._settings.times.stop)
            self._get_socket_path(resource).unlink(missing_ok=True)
        self._servers, self._is_stopping = {}, False

    def _get_socket_path(self, resource: str) -> Path:
        path = self._settings.folder / f"{resource.replace('/', '-')}.sock"
        if len(bytes(path)) <= SOCKET_PATH:
            return path
        return path.with_name(f"imagematrix-{hashlib.sha256(resource.encode()).hexdigest()[:8]}.sock")

    def _make_service(self, resource: str) -> Any:
        """Return the service of one resource."""

        async def get_options(_request: Any, _context: Any) -> Any:
            return _make_options(resource)

        async def watch(_request: Any, _context: Any) -> AsyncIterator[Any]:
            sent: object = None
            while True:
                async with self._changed:
                    while (current := self._list_devices(resource)) == sent and not self._is_stopping:
                        await self._changed.wait()
                if self._is_stopping:
                    return
                sent = current
                devices = [
                    load_message("Device")(ID=name, health=HEALTH[healthy]) for name, healthy in current
                ]
                yield load_message("ListAndWatchResponse")(devices=devices)

        async def prefer(request: Any, _context: Any) -> Any:
            answers = []
            for container in request.container_requests:
                devices = offers.choose_preferred(
                    self._offer,
                    resource,
                    container.available_deviceIDs,
                    container.must_include_deviceIDs,
                    container.allocation_size,
                )
                answers.append(load_message("ContainerPreferredAllocationResponse")(deviceIDs=devices))
            return load_message("PreferredAllocationResponse")(container_responses=answers)

        async def allocate(request: Any, context: Any) -> Any:
            try:
                answers = await self._allocate(
                    resource, [container.devices_ids for container in request.container_requests]
                )
            except ImagematrixError as error:
                self._log(f"{resource}: {error}")
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
                raise
            await self._notify()
            return load_message("AllocateResponse")(container_responses=answers)

        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        methods = {
            "GetDevicePluginOptions": make_handler(unary, get_options, "Empty"),
            "ListAndWatch": make_handler(stream, watch, "Empty"),
            "GetPreferredAllocation": make_handler(unary, prefer, "PreferredAllocationRequest"),
            "Allocate": make_handler(unary, allocate, "AllocateRequest"),
        }
        return grpc.method_handlers_generic_handler(DEVICE_PLUGIN, methods)

    def _list_devices(self, resource: str) -> tuple[tuple[str, bool], ...]:
        return offers.list_devices(self._offer, resource, self._holders, self._find_users())

    async def _allocate(self, resource: str, containers: list[list[str]]) -> list[Any]:
        """Return what each container gets; raise ImagematrixError.

        Since the node was last read, a GPU may have failed, minors may have changed, and a launch outside of
        pods may have taken a unit.
        """
        limit = self._settings.times.read
        try:
            async with asyncio.timeout(limit), self._reading:
                await self._monitor.read_node()
                # Locks come before the survey: a launch has a lease until a survey can see its container.
                requested = [device for devices in containers for device in devices]
                units, descriptors = await self._lock_units(requested)
                try:
                    await self._read_usage()
                    await self._report_users()
                    answers = [self._allocate_devices(resource, devices) for devices in containers]
                except BaseException:
                    release_locks(descriptors)
                    raise
                self._locks[units] = descriptors
                return answers
        except TimeoutError as error:
            raise offers.AllocationError(
                f"the node could not be read within {limit:g} s",
                remedy="see whether `nvidia-smi` answers, and what the kernel's log says of the GPUs",
            ) from error

    async def _lock_units(self, devices: list[str]) -> tuple[frozenset[str], tuple[int, ...]]:
        """Lock the units of these devices; return those that were not locked before, and their locks."""
        offer, locked = self._offer, frozenset[str]().union(*self._locks)
        units = {
            name: unit
            for name in offers.find_held_units(offer, devices)
            if (unit := offer.units[name]).usable and unit.minor is not None and name not in locked
        }
        if not units:
            return frozenset(), ()
        settings = self._settings
        locking = asyncio.ensure_future(
            asyncio.to_thread(settings.view.lock_gpus, tuple(units.values()), settings.times.read)
        )
        try:
            return frozenset(units), await asyncio.shield(locking)
        except asyncio.CancelledError:
            locking.add_done_callback(_release_late_locks)  # the thread cannot be cancelled
            raise

    async def _read_usage(self) -> None:
        """Read the usage of GPUs outside of pods; raise AllocationError, because the last may be old."""
        try:
            await self._monitor.read_usage()
        except ImagematrixError as error:
            raise offers.AllocationError(
                f"usage of GPUs outside of pods unknown: {error}", remedy=error.remedy
            ) from error

    def _allocate_devices(self, resource: str, devices: list[str]) -> Any:
        # Without await, so that no other request takes a unit between the check and the note.
        allocation = offers.allocate_devices(
            self._offer, resource, devices, self._holders, self._find_users()
        )
        for unit in offers.find_held_units(self._offer, devices):
            self._holders[unit] = resource
            self._since[unit] = time.monotonic()
        return load_message("ContainerAllocateResponse")(
            envs=[
                load_message("Variable")(key=key, value=value)
                for key, value in allocation.environment.items()
            ],
            devices=[
                load_message("DeviceSpec")(container_path=path, host_path=path, permissions=PERMISSIONS)
                for path in allocation.devices
            ],
        )


def _make_options(resource: str) -> Any:
    return load_message("DevicePluginOptions")(get_preferred_allocation_available=resource == VRAM)


def _survey_others(view: NodeView, gpus: tuple[Gpu, ...]) -> Usage:
    """Return the usage of GPUs outside of pods, without the locks that the plugin itself has."""
    usage = view.survey_usage(gpus)
    return {
        key: tuple(one for one in consumers if (one.kind, one.pid) != ("lease", os.getpid()))
        for key, consumers in usage.items()
    }


def _release_late_locks(locking: asyncio.Future[tuple[int, ...]]) -> None:
    if not locking.cancelled() and locking.exception() is None:
        release_locks(locking.result())
