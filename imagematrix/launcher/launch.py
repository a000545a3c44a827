"""Starting the container of a Selection through the engine's API."""

from __future__ import annotations

import os
import shlex
from functools import cache, partial

from imagematrix.common.record import replace
from imagematrix.errors import EngineError, UnknownImageError, UsageError
from imagematrix.hardware.gpu_request.spec import find_candidates, select_gpus
from imagematrix.images.engine import images, system, transport
from imagematrix.launcher.docker.options import RunArgs
from imagematrix.launcher.docker.plan import require_variant
from imagematrix.launcher.docker.pull import pull_unless_present
from imagematrix.launcher.docker.request import Engine, LaunchRequest
from imagematrix.launcher.docker.share import Share
from imagematrix.launcher.docker.user_gpu_options import find_gpus_in_api_options
from imagematrix.launcher.gpu_claims.gpu_claim import require_memory
from imagematrix.launcher.gpu_claims.survey import survey_node
from imagematrix.launcher.launch_session import LaunchSession, SignatureCheck, UnusedGpus
from imagematrix.selection.drivers import get_driver_mode
from imagematrix.selection.selection import Selection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike
    from typing import Any

    from docker import DockerClient
    from docker.models.containers import Container

    from imagematrix.hardware.gpu_request.spec import Wanted
    from imagematrix.hardware.host.host import Host
    from imagematrix.images.catalog.catalog import Variant
    from imagematrix.launcher.docker.plan import Launch
    from imagematrix.launcher.gpu_claims.gpu_claim import Claim

SOCKET = "http+docker://local"  # how docker-py calls a socket of this machine


def launch(
    selection: Selection,
    command: str | Sequence[str] = (),
    *,
    gpus: Wanted = None,
    share: Share | None = None,
    wait: float = 0.0,
    policy: str | PathLike[str] | None = None,
    client: DockerClient | None = None,
    **options: Any,
) -> Container:
    """Start the container of `selection`, made for this machine, and return it while it runs.

    `gpus` narrows the selection's GPUs: a count, a `--gpus` value, or GPUs. The container gets unused GPUs,
    or the `share` of each; if too few are free, this waits up to `wait` seconds. `options` are those of
    docker-py's `containers.create`; `devices`, `environment` and `labels` are added to the launch's own, and
    GPUs that they pass are claimed too. An image that the engine lacks is pulled by digest from its registry.
    Before, its signatures are checked as the site's policy and the user's require: the file `policy`, or else
    the one that the environment names. Raises SignatureError if one is missing or wrong, GpusBusyError if
    GPUs are not free, DevicesError if a device node cannot be used, UnknownImageError if neither engine nor
    registry has the image, AuditError if its name now stands for an image built on it, and EngineError if the
    engine refuses or does not respond.
    """
    if not isinstance(selection, Selection):
        raise UsageError(f"{selection!r:.80} is not a Selection", remedy="launch what im.select returns")
    if not (share is None or isinstance(share, Share)):
        raise UsageError(f"{share!r:.80} is not a Share", remedy="write im.Share(vram_mib=4096)")
    if isinstance(wait, bool) or not isinstance(wait, int | float):
        raise UsageError(f"invalid time to wait: {wait!r:.80}", remedy="give seconds, such as 600.0")
    SignatureCheck(policy).require_signed(selection)
    if selection.warm:
        from imagematrix.launcher.docker.warm_start import allow_warm_image

        selection = allow_warm_image(selection, policy)
    return start_container(selection, command, gpus=gpus, share=share, wait=wait, client=client, **options)


def start_container(
    selection: Selection,
    command: str | Sequence[str] = (),
    *,
    gpus: Wanted = None,
    share: Share | None = None,
    wait: float = 0.0,
    client: DockerClient | None = None,
    **options: Any,
) -> Container:
    """Start a container as `launch` does, but without checking signatures of its image.

    Nobody can have signed it yet, or they were checked.
    """
    from docker.errors import DockerException, NotFound
    from requests.exceptions import RequestException

    if isinstance(command, str):  # as docker-py takes it
        command = shlex.split(command)
    args = RunArgs(
        options=(("--privileged",),) if options.get("privileged") else (),
        image=selection.selected,
        command=tuple(command),
        wait_s=wait,
    )
    try:
        docker = client or transport.open_client()
        request = _make_request(selection, args, gpus, share or Share(), docker, options)
        return LaunchSession(request=request, gpus=UnusedGpus()).run(DockerApi(docker, options))
    except NotFound as error:
        name = str(selection.selected)
        raise UnknownImageError(
            f"image not found in the engine: {name}", remedy=f"docker pull {name}"
        ) from error
    except (DockerException, RequestException) as error:
        raise EngineError(f"cannot start {selection.selected}: {error}") from error


def _make_request(
    selection: Selection,
    args: RunArgs,
    gpus: Wanted,
    share: Share,
    client: DockerClient,
    options: Mapping[str, Any],
) -> LaunchRequest:
    """Return the request for a selection that is made already, on those of its GPUs that `gpus` names."""
    has_driver = get_driver_mode(require_variant(selection)) is not None
    choice = find_candidates(selection.chosen_gpus, gpus)
    docker_py, info = transport.DockerPy(client), cache(client.info)
    passed = find_gpus_in_api_options(options, selection.host.gpus, info)
    if has_driver and share.vram_mib is not None:
        _require_sufficient_share(require_variant(selection), share.vram_mib)
        require_memory(choice, share.vram_mib)
        choice = choice.with_memory(share.vram_mib)
    _require_local(client, info)
    engine = Engine(
        get_info=info,
        inspect_image=cache(partial(images.inspect_image, transport=docker_py)),
        survey=partial(survey_node, transport=docker_py),
        get_architecture=partial(system.get_architecture, docker_py),
    )

    def narrow_selection(_: Host, gpus: Wanted) -> Selection:
        return replace(selection, chosen_gpus=select_gpus(selection.chosen_gpus, gpus))

    return LaunchRequest(
        args=args,
        host=selection.host,
        choose=narrow_selection,
        # A container without GPUs shares none, and its label says so.
        share=share if passed or (has_driver and choice.count) else Share(),
        remote=None,
        choices=(choice,),
        gpus_spec=gpus,
        make_engine=lambda: engine,
        engine=engine,
        passed_gpus=passed,
    )


def _require_local(client: DockerClient, info: Callable[[], Mapping[str, Any]]) -> None:
    """Raise UsageError for an engine of another machine: GPUs of this one would be claimed for it."""
    address = str(client.api.base_url)
    name = "" if address.startswith(SOCKET) else str(info().get("Name") or address)
    if name and name != os.uname().nodename:
        raise UsageError(
            f"the engine runs on {name}, and GPUs are claimed on this machine",
            remedy=f"call it on {name}, or use `imagematrix run --host FILE IMAGE` with the Host of {name}",
        )


def _require_sufficient_share(variant: Variant, vram_mib: int) -> None:
    """Raise UsageError if a share is less than the memory that a variant needs: it was selected without."""
    needed = variant.gpu_memory_mib
    if needed is not None and vram_mib < needed:
        raise UsageError(
            f"{variant.reference} needs {needed} MiB of GPU memory, and the share has {vram_mib} MiB",
            remedy=f"select with vram_mib={vram_mib}, or launch with a larger share",
        )


class DockerApi:
    """The API of docker's engine; `options` are those of docker-py's `containers.create`.

    Its image is selected already, and stays whatever GPUs the container gets. So it is pulled before the
    claim, which other launches would wait for: a pull may take minutes.
    """

    def __init__(self, client: DockerClient, options: Mapping[str, Any]) -> None:
        self._client = client
        self._options = options

    def verify(self, _: Selection, launch: Launch) -> Launch:
        """Return the launch as it is: its request has checked the device nodes; see ContainerEngine."""
        return launch

    def find_warnings(self, *_: object) -> tuple[()]:
        """Return no warnings: the caller has those of the selection; see ContainerEngine."""
        return ()

    def prepare(self, launch: Launch) -> None:
        """Pull the image unless the engine has it; see ContainerEngine."""
        if "@" in launch.reference:
            pull_unless_present(launch.reference, launch.digest, launch.platform, client=self._client)

    def pull(self, *_: object) -> None:
        """Do nothing: the image is there; see ContainerEngine."""

    def start(self, _: Selection, launch: Launch, image: None, claim: Claim | None) -> Container:  # noqa: ARG002
        """Create and start the container, whose own devices then show other launches what it uses."""
        return _create_and_start(self._client, launch, self._options)


def make_create_arguments(launch: Launch, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of docker-py's `containers.create` for `launch`, with the caller's `options`."""
    from docker.types import DeviceRequest, Mount

    defaults: dict[str, Any] = {"image": launch.reference, "command": list(launch.command) or None}
    if launch.variant_platform:
        defaults["platform"] = launch.variant_platform
    if launch.injected:
        source = {"driver": "cdi"} if launch.cdi else {"capabilities": [["gpu"]]}
        defaults["device_requests"] = [DeviceRequest(device_ids=list(launch.injected), **source)]
    if launch.ipc:
        defaults["ipc_mode"] = launch.ipc
    merged: dict[str, Any] = {
        "devices": [f"{path}:{path}:rwm" for path in launch.devices] + list(options.get("devices") or ()),
        "environment": {**launch.environment, **_parse_mapping(options.get("environment"))},
        # Not overridden, unlike the variables: other launches read from them what the container holds.
        "labels": {**_parse_mapping(options.get("labels")), **launch.labels},
    }
    if launch.mounts:
        mounts = [Mount(path, path, type="bind") for path in launch.mounts]
        merged["mounts"] = mounts + list(options.get("mounts") or ())
    return defaults | dict(options) | merged


def _create_and_start(client: DockerClient, launch: Launch, options: Mapping[str, Any]) -> Container:
    container = client.containers.create(**make_create_arguments(launch, options))
    try:
        container.start()
    except BaseException:
        container.remove(force=True)  # it never ran, and the caller has no handle of it
        raise
    return container


def _parse_mapping(pairs: Mapping[str, str] | Sequence[str] | None) -> dict[str, str]:
    """Return a mapping; docker-py also takes a list of NAME=VALUE."""
    if isinstance(pairs, dict):
        return pairs
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs or ())}
