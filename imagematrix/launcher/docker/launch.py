"""Starting the container of a Selection through the engine's API."""

from __future__ import annotations

import shlex
from functools import cache, partial

from imagematrix.errors import EngineError, ProbeError, UnknownImageError, UsageError
from imagematrix.hardware.gpu_request.spec import find_candidates
from imagematrix.images.catalog.sources import require_signed
from imagematrix.images.engine import images, transport
from imagematrix.launcher.docker.devices import list_device_nodes, require_device_nodes
from imagematrix.launcher.docker.injection import inject_through_cdi
from imagematrix.launcher.docker.plan import find_engine_digests, plan_launch
from imagematrix.launcher.docker.pull import pull_unless_present
from imagematrix.launcher.docker.share import Share
from imagematrix.launcher.docker.user_gpu_options import find_gpus_in_api_options
from imagematrix.launcher.gpu_claims.gpu_claim import ClaimRequest, claim_gpus
from imagematrix.launcher.gpu_claims.survey import survey_node
from imagematrix.selection.selection import Selection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike
    from typing import Any

    from docker import DockerClient
    from docker.models.containers import Container

    from imagematrix.hardware.gpu_request.spec import Wanted
    from imagematrix.hardware.host.host import Gpu
    from imagematrix.launcher.docker.plan import Launch


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
    if selection.variant:
        require_signed(selection.variant, policy, version=selection.version)
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
    try:
        docker = client or transport.open_client()
        engine, info = transport.DockerPy(docker), cache(docker.info)
        digests = find_engine_digests(selection, partial(images.inspect_image, transport=engine))

        def plan_on(gpus: Wanted, share: Share | None = None) -> Launch:
            launch = plan_launch(selection, command, gpus=gpus, share=share, digests=digests)
            require_device_nodes(launch.devices)
            return launch

        # Before the claim: what cannot be started at all must not wait for GPUs.
        first = plan_on(gpus)
        if "@" in first.reference:
            # Before the claim, too: it may take minutes.
            pull_unless_present(first.reference, first.digest, first.platform, client=docker)
        passed = find_gpus_in_api_options(options, selection.host.gpus, info)
        if not (first.gpus or passed):
            return _create_and_start(docker, first, options)
        request = ClaimRequest(
            choices=[find_candidates(selection.chosen_gpus, gpus if first.gpus else "none")],
            extra_gpus=passed,
            vram_mib=share.vram_mib if share else None,
            mps=bool(share and share.mps),
        )
        survey = partial(survey_node, selection.host.gpus, over=engine)
        # Once the container runs, its own devices show that it uses these GPUs.
        with claim_gpus(request, survey, wait_s=wait, find_faults=partial(_find_faults, selection)) as claim:
            is_planned = share is None and claim.gpus == first.gpus
            second = first if is_planned else plan_on(claim.gpus or gpus, share)
            if options.get("privileged"):  # its list of devices shows other launches which GPUs it uses
                second = second.with_devices(list_device_nodes(selection.host, passed))
            if second.injected:
                second = inject_through_cdi(second, info().get("CDISpecDirs") or ())
            return _create_and_start(docker, second.with_labels(claim.labels), options)
    except NotFound as error:
        name = str(selection.selected)
        raise UnknownImageError(
            f"image not found in the engine: {name}", remedy=f"docker pull {name}"
        ) from error
    except (DockerException, RequestException) as error:
        raise EngineError(f"cannot start {selection.selected}: {error}") from error


def _find_faults(selection: Selection, gpus: tuple[Gpu, ...]) -> Mapping[Gpu, str]:
    """Return why device nodes of some of these GPUs cannot be passed now."""
    why = {}
    for gpu in gpus:
        try:
            require_device_nodes(plan_launch(selection, gpus=(gpu,)).devices)
        except ProbeError as error:
            why[gpu] = str(error)
    return why


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
