"""Starting the container of a Selection through the engine's API."""

from __future__ import annotations

from imagematrix import endpoint, engine
from imagematrix.allocation import pods
from imagematrix.allocation.claim import claim
from imagematrix.allocation.survey import query_nvml, survey
from imagematrix.allocation.usage import combined
from imagematrix.errors import EngineError, UnknownImageError
from imagematrix.gpus.spec import candidates
from imagematrix.launcher.devices import nodes, require
from imagematrix.launcher.injection import through_cdi
from imagematrix.launcher.passed import passed_by
from imagematrix.launcher.plan import plan
from imagematrix.launcher.share import Share

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from docker import DockerClient
    from docker.models.containers import Container

    from imagematrix.allocation.claim import Attended, Claim
    from imagematrix.allocation.usage import Usage
    from imagematrix.gpus.spec import Wanted
    from imagematrix.launcher.plan import Launch
    from imagematrix.node.host import Gpu
    from imagematrix.selection.selection import Selection

__all__ = ["arguments", "launch"]


def launch(
    selection: Selection,
    command: Sequence[str] = (),
    *,
    gpus: Wanted = None,
    share: Share | None = None,
    wait: float = 0.0,
    client: DockerClient | None = None,
    **options: Any,
) -> Container:
    """Start the container of `selection`, made for this machine, and return it while it runs.

    `gpus` narrows the selection's GPUs: a count, a `--gpus` value, or GPUs. The container gets unused GPUs,
    or the `share` of each; if too few are free, this waits up to `wait` seconds. `options` are those of
    docker-py's `containers.create`; `devices`, `environment` and `labels` are added to the launch's own, and
    GPUs that they pass are claimed too. An image that the engine lacks is pulled by digest from its registry.
    Raises GpusBusyError if GPUs are not free, DevicesError if a device node cannot be used, UnknownImageError
    if neither engine nor registry has the image, and EngineError if the engine refuses or does not respond.
    """
    from docker.errors import DockerException, NotFound
    from requests.exceptions import RequestException

    try:
        docker = client or engine.client()
        reference = str(selection.selected)
        held = engine.digests_of(docker, reference) if "/" in reference else None

        def planned(spec: Wanted, part: Share | None = None) -> Launch:
            launch = plan(selection, command, gpus=spec, share=part, held=held)
            require(launch.devices)
            return launch

        first = planned(gpus)
        if "@" in first.reference:
            docker.images.pull(first.reference)
        passed = passed_by(options, selection.host.gpus, docker.info)
        if not (first.gpus or passed):
            return _start(docker, first, options)
        spec = gpus if first.gpus else "none"
        # Once the container runs, its own devices show that it uses these GPUs.
        with _claim(docker, selection, spec, passed, share or Share(), wait) as claimed:
            second = planned(claimed.gpus or gpus, share).with_labels(claimed.labels)
            if options.get("privileged"):  # its list of devices shows other launches which GPUs it uses
                second = second.with_devices(nodes(selection.host, passed))
            if second.injected:
                second = through_cdi(second, docker.info().get("CDISpecDirs") or ())
            return _start(docker, second, options)
    except NotFound as error:
        name = str(selection.selected)
        raise UnknownImageError(
            f"image not found in the engine: {name}", remedy=f"docker pull {name}"
        ) from error
    except (DockerException, RequestException) as error:
        raise EngineError(f"cannot start {selection.selected}: {error}") from error


def _claim(
    client: DockerClient,
    selection: Selection,
    gpus: Wanted,
    passed: tuple[Gpu, ...],
    share: Share,
    wait: float,
) -> Claim:
    def current_usage(attended: Attended) -> Usage:
        def containers() -> list[dict[str, Any]]:
            return engine.running_or_starting_of(client, attended)

        local = selection.host.gpus
        return combined(pods.usage(local), survey(local, containers, query_nvml))

    return claim(
        candidates(selection.chosen_gpus, gpus),
        current_usage,
        also=passed,
        vram_mib=share.vram_mib,
        mps=share.mps is not None,
        wait_s=wait,
        group=endpoint.group(),
    )


def arguments(launch: Launch, options: Mapping[str, Any]) -> dict[str, Any]:
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
        "environment": {**launch.environment, **_mapping(options.get("environment"))},
        "labels": {**_mapping(options.get("labels")), **launch.labels},
    }
    if launch.mounts:
        mounts = [Mount(path, path, type="bind") for path in launch.mounts]
        merged["mounts"] = mounts + list(options.get("mounts") or ())
    return defaults | dict(options) | merged


def _start(client: DockerClient, launch: Launch, options: Mapping[str, Any]) -> Container:
    container = client.containers.create(**arguments(launch, options))
    try:
        container.start()
    except BaseException:
        container.remove(force=True)  # it never ran, and the caller has no handle of it
        raise
    return container


def _mapping(pairs: Mapping[str, str] | Sequence[str] | None) -> dict[str, str]:
    """Return a mapping; docker-py also takes a list of NAME=VALUE."""
    if isinstance(pairs, dict):
        return pairs
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs or ())}
