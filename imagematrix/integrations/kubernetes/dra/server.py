"""The driver as a process: it publishes devices, and prepares claims for kubelet until a signal ends it.

Kubelet finds the registration socket in its folder whenever it starts, and calls the driver's other socket.
Neither socket nor slices have to be made anew for a kubelet that starts again.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc

from imagematrix.errors import ImagematrixError, UsageError
from imagematrix.integrations.kubernetes.client.api import send_request
from imagematrix.integrations.kubernetes.dra import cdi, slices
from imagematrix.integrations.kubernetes.dra.ledger import ClaimLedger, find_used_units
from imagematrix.integrations.kubernetes.dra.resource_claims import (
    UID,
    ClaimError,
    ClaimReference,
    list_allocated_devices,
)
from imagematrix.integrations.kubernetes.dra.slice_publisher import SlicePublisher
from imagematrix.integrations.kubernetes.dra.slices import DRIVER
from imagematrix.integrations.kubernetes.nodes.node_monitor import MonitorTimes, NodeMonitor
from imagematrix.launcher.docker.devices import list_device_nodes
from imagematrix.launcher.gpu_claims.lock_folder import require_shared
from imagematrix.launcher.gpu_claims.locks import locate_locks
from imagematrix.launcher.gpu_claims.usage import merge_usages
from imagematrix.launcher.kubelet import sockets
from imagematrix.launcher.kubelet.grpc_server import (
    make_handler,
    run_periodically,
    run_together,
    run_until_signal,
    start_server,
)
from imagematrix.launcher.kubelet.messages import DRA_PLUGIN, PLUGIN_REGISTRATION, load_message

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from typing import Any

    from imagematrix.hardware.host.host import Gpu, Host
    from imagematrix.integrations.kubernetes.client.api import ApiServer
    from imagematrix.integrations.kubernetes.dra.resource_claims import AllocatedDevice
    from imagematrix.integrations.kubernetes.nodes.node_view import NodeView
    from imagematrix.launcher.gpu_claims.usage import Usage

    ClaimAnswer = Callable[[ClaimReference], Awaitable[Any]]

TYPE = "DRAPlugin"
# Kubelets that know only v1beta1 come with API servers without resource.k8s.io/v1.
SERVICES = ("v1.DRAPlugin",)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """The settings of the driver on the node named `node`.

    `kubelet` is kubelet's root directory, by default that of the kubelet that runs on this node. `cdi_root`
    is the folder of CDI specs.
    """

    node: str
    api: ApiServer
    view: NodeView
    kubelet: Path | None = None
    cdi_root: Path = cdi.FOLDER
    times: MonitorTimes = field(default_factory=MonitorTimes)


def serve(settings: DriverSettings, on_line: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `on_line` gets lines about devices, claims and failures.

    Raises ImagematrixError if the node cannot be probed at the start, or the sockets cannot be created.
    """
    run_until_signal(DraDriver(settings, on_line).run)


class DraDriver:
    """The node as last probed, the usage of its GPUs, and the claims on disk."""

    def __init__(self, settings: DriverSettings, on_line: Callable[[str], None]) -> None:
        self._settings = settings
        self._log = on_line
        root = str(settings.kubelet or sockets.find_root_dir())
        self._socket = Path(sockets.locate_dra_socket(root, DRIVER))
        self._registration = Path(sockets.locate_registration_socket(root, DRIVER))
        self._monitor = NodeMonitor(
            probe=settings.view.probe,
            survey=lambda host: _survey_usage(settings.view, host),
            on_line=on_line,
            effect="no device is published",
        )
        self._ledger = ClaimLedger(settings.cdi_root)
        self._turn = asyncio.Lock()  # held while claims are prepared and unprepared
        self._publisher = SlicePublisher(
            settings.api, settings.node, on_line, partial(self._monitor.report_state, "slices")
        )

    async def run(self, ended: asyncio.Event) -> None:
        """Publish and serve until `ended` is set, then remove the sockets; the slices stay, as do claims."""
        times = self._settings.times
        await asyncio.to_thread(self._prepare_folders)
        await self._monitor.read_node()
        for line in await asyncio.to_thread(lambda: [*self._ledger.restore(self._monitor.node.gpus)]):
            self._log(line)
        await self._survey_usage()
        async with AsyncExitStack() as stack:
            # The registration last, because kubelet then calls the driver.
            await self._open_socket(stack, self._socket, self._make_driver_service())
            await self._open_socket(stack, self._registration, self._make_registration_service())
            await run_together(
                ended.wait(),
                self._publisher.follow(),
                run_periodically(times.probe, self._probe_node),
                run_periodically(times.usage, self._survey_usage),
            )

    def _prepare_folders(self) -> None:
        require_shared(locate_locks())
        for path in (self._socket.parent, self._registration.parent):
            try:
                path.mkdir(mode=0o750, parents=True, exist_ok=True)
            except OSError as error:
                raise UsageError(
                    f"{path}: {error.strerror}", remedy="run as root, with --kubelet if it has another root"
                ) from error

    async def _open_socket(self, stack: AsyncExitStack, path: Path, handler: Any) -> None:
        server = await start_server(path, handler)
        stack.callback(path.unlink, missing_ok=True)
        stack.push_async_callback(server.stop, self._settings.times.stop)

    async def _probe_node(self) -> None:
        await self._monitor.update_node()
        await self._publish_devices()

    async def _survey_usage(self) -> None:
        await self._monitor.update_usage()
        await self._publish_devices()

    async def _publish_devices(self) -> None:
        if self._monitor.usage is None:
            return
        claims = await asyncio.to_thread(self._ledger.list_claims)
        host = self._monitor.node
        users = find_used_units(slices.name_devices(host), self._monitor.usage, claims)
        self._monitor.report_users(users)
        self._publisher.set_devices(slices.make_devices(host, users))

    def _make_registration_service(self) -> Any:
        async def get_info(_request: Any, _context: Any) -> Any:
            return load_message("PluginInfo")(
                type=TYPE, name=DRIVER, endpoint=str(self._socket), supported_versions=SERVICES
            )

        async def log_status(status: Any, _context: Any) -> Any:
            self._log("registered" if status.plugin_registered else f"kubelet refused: {status.error}")
            return load_message("Empty")()

        unary = grpc.unary_unary_rpc_method_handler
        methods = {
            "GetInfo": make_handler(unary, get_info, "Empty"),
            "NotifyRegistrationStatus": make_handler(unary, log_status, "RegistrationStatus"),
        }
        return grpc.method_handlers_generic_handler(PLUGIN_REGISTRATION, methods)

    def _make_driver_service(self) -> Any:
        def make_method(method: str, entry: str, answer_claim: ClaimAnswer) -> Any:
            async def answer(request: Any, _context: Any) -> Any:
                answers = [
                    load_message(entry)(key=claim.uid, value=await answer_claim(_parse_reference(claim)))
                    for claim in request.claims
                ]
                return load_message(f"{method}Response")(claims=answers)

            return make_handler(grpc.unary_unary_rpc_method_handler, answer, f"{method}Request")

        prepare, unprepare = "NodePrepareResources", "NodeUnprepareResources"
        methods = {
            prepare: make_method(prepare, "PreparedClaim", self._answer_prepare),
            unprepare: make_method(unprepare, "UnpreparedClaim", self._answer_unprepare),
        }
        return grpc.method_handlers_generic_handler(DRA_PLUGIN, methods)

    async def _answer_prepare(self, reference: ClaimReference) -> Any:
        """Prepare a claim and return the answer to kubelet, with its devices or the error."""
        answer, uid = load_message("NodePrepareResourceResponse"), reference.uid
        try:
            if not reference.is_valid:
                raise ClaimError(f"invalid claim {str(reference)[:320]!r} with the UID {uid[:80]!r}")
            claim = await send_request(self._settings.api, "GET", reference.path)
            devices = list_allocated_devices(claim, reference, self._settings.node)
            async with self._turn:
                is_new = await asyncio.to_thread(self._prepare_devices, reference, devices)
        except ImagematrixError as error:
            # Kubelet asks again, every few seconds.
            self._monitor.report_state(uid, f"claim {reference}: refused: {error}")
            return answer(error=str(error))
        if is_new:
            self._log(f"claim {reference}: prepared {', '.join(device.name for device in devices)}")
        self._monitor.report_state(uid, None)
        return answer(devices=_format_devices(reference, self._settings.node, devices))

    def _prepare_devices(self, reference: ClaimReference, devices: tuple[AllocatedDevice, ...]) -> bool:
        """Record a claim's devices on this node; return whether they were not recorded before."""
        # Since the last probe a GPU may have failed, and another launch may have taken it.
        view = self._settings.view
        host = view.probe()
        units = slices.name_devices(host)
        requests: dict[str, tuple[Gpu, ...]] = {}
        for device in devices:
            unit = units.get(device.name)
            if unit is None:
                raise ClaimError(f"device {device.name[:80]!r} not found on this node")
            requests[device.request] = (*requests.get(device.request, ()), unit)

        def survey() -> Usage:
            for gpus in requests.values():
                view.require_nodes(list_device_nodes(host, gpus))
            return _survey_usage(view, host)

        return self._ledger.prepare(reference, host, requests, survey)

    async def _answer_unprepare(self, reference: ClaimReference) -> Any:
        answer = load_message("NodeUnprepareResourceResponse")
        if not UID.fullmatch(reference.uid):  # it was never prepared
            return answer()
        try:
            async with self._turn:
                existed = await asyncio.to_thread(self._ledger.unprepare, reference.uid)
        except ImagematrixError as error:
            self._monitor.report_state(reference.uid, f"claim {reference}: not unprepared: {error}")
            return answer(error=str(error))
        self._monitor.report_state(reference.uid, None)
        if existed:
            self._log(f"claim {reference}: unprepared")
        return answer()


def _survey_usage(view: NodeView, host: Host) -> Usage:
    """Return the usage of a host's GPUs by anything but claims and their pods."""
    return merge_usages(view.survey_plugin_usage(host.gpus), view.survey_usage(host.gpus))


def _parse_reference(claim: Any) -> ClaimReference:
    return ClaimReference(namespace=claim.namespace, name=claim.name, uid=claim.uid)


def _format_devices(reference: ClaimReference, node: str, devices: Sequence[AllocatedDevice]) -> list[Any]:
    """Return the devices as kubelet reads them; the first one of each request brings its CDI device."""
    requests = frozenset(device.request for device in devices)
    first = {device.request: device for device in reversed(devices)}
    return [
        load_message("PreparedDevice")(
            request_names=[device.request],
            pool_name=node,
            device_name=device.name,
            cdi_device_ids=[cdi.make_device_id(reference.uid, device.request, requests)]
            if first[device.request] is device
            else [],
            share_id=device.share,
        )
        for device in devices
    ]
